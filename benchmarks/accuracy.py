"""How right the predictions are: many plans per model, predicted beside measured times and compiled memory.

    python -m benchmarks.accuracy                          measured profiles, plans run on eight virtual CPU devices
    python -m benchmarks.accuracy gpt                      one model
    python -m benchmarks.accuracy --topology v5e:4x4 middle_gpt
                                                           compiled profiles, plans compiled for chips that are not here
    python -m benchmarks.accuracy --topology h100:1x8 wide_gpt
    python -m benchmarks.accuracy --plans 20 --budget 120
    python -m benchmarks.accuracy --rounds 0               compiles the plans and runs none: memory alone

Runs are interleaved: every round times some steps of each plan, after others of it, as in training. Virtual devices
share this machine's cores, so times say how right the model is of such a machine, not of accelerators.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import uniap_jax as uniap
from benchmarks.markdown import made_on, say
from uniap_jax import demo_gpt
from uniap_jax.accuracy import absent_accuracy, accuracy, diverse_plans, report_lines
from uniap_jax.core.profile import Key
from uniap_jax.cost_model import TableModel, estimate
from uniap_jax.planning import informed
from uniap_jax.profiler import MEMORY_SHARE

GPT = demo_gpt.Size(num_layers=4, width=128, num_heads=4, sequence=64, batch=32)
MIDDLE = demo_gpt.Size(num_layers=6, width=256, num_heads=4, sequence=256, batch=64)
"""What the TPU compiler does not keep in its cores' own memory altogether, and compiles in half a minute."""
WIDE = demo_gpt.Size(num_layers=4, width=1024, num_heads=16, sequence=512, batch=64)
"""What an accelerator would be given: nothing of it runs here, so only its state has to fit this host."""
EXAMPLES = Path(__file__).parent.parent / "examples"


def mlp() -> tuple[Any, Callable[..., Any], Any]:
    """Eight equal residual blocks, and SGD with momentum."""
    rng = np.random.default_rng(0)
    blocks = [
        {
            name: rng.normal(size=size).astype(np.float32) * 0.05
            for name, size in (("a", (256, 1024)), ("b", (1024, 256)))
        }
        for _ in range(8)
    ]
    tx = optax.sgd(1e-2, momentum=0.9)

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            for p in params:
                x = x + jax.nn.gelu(x @ p["a"]) @ p["b"]
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    batch = {name: rng.normal(size=(512, 256)).astype(np.float32) for name in ("x", "y")}
    return {"params": blocks, "opt": tx.init(blocks)}, train_step, batch


def example(name: str, **sizes: Any) -> tuple[Any, Callable[..., Any], Any]:
    """State, step and batch of a script in `examples`."""
    built: tuple[Any, Callable[..., Any], Any] = run_path(str(EXAMPLES / f"{name}.py"))["build"](**sizes)
    return built


SMALL: dict[str, Callable[[], tuple[Any, Callable[..., Any], Any]]] = {
    "gpt": lambda: demo_gpt.build(size=GPT),
    "mlp": mlp,
    "vit": lambda: example("vit", depth=4, width=128, heads=4, patch=8, pixels=64, classes=100, size=32),
    "resnet": lambda: example("resnet", depths=(2, 2, 2), filters=32, size=64),
}
MODELS = {
    **SMALL,
    "middle_gpt": lambda: demo_gpt.build(size=MIDDLE),
    "wide_gpt": lambda: demo_gpt.build(size=WIDE),
}


def main() -> None:
    """Prints a table per model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all but middle_gpt and wide_gpt by default")
    parser.add_argument("--topology", help="compile for devices that are not here, for example v5e:4x4")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of profiling")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each plan; 0 compiles them only")
    options = parser.parse_args()
    say(made_on(("jax", "numpy")))
    for name in options.models or SMALL:
        compare(name, options)


def compare(name: str, options: argparse.Namespace) -> None:
    """Prints one table."""
    started = time.perf_counter()
    state, train_step, batch = MODELS[name]()
    graph = uniap.trace(train_step, state, batch)
    cluster = uniap.load_cluster(options.topology) if options.topology else uniap.local_cluster()
    source = "compiled" if options.topology else "measured"
    share = MEMORY_SHARE if options.rounds and not options.topology else 1.0  # where nothing runs, memory is all

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        found = uniap.profile(graph, cluster, source=source, budget_s=seconds, only=only, memory_share=share)
        return estimate(graph, cluster, found)

    costs, _ = informed(price, lambda model: diverse_plans(model, options.plans), options.budget)
    profiled = time.perf_counter() - started
    if options.topology:
        report = absent_accuracy(graph, costs, cluster, num_plans=options.plans)
    else:
        report = accuracy(graph, costs, (state, batch), num_plans=options.plans, rounds=options.rounds)
    say(f"\n## {name} on {cluster.name}\n")
    say(f"{profiled:.0f} s of profiling and searching, then {time.perf_counter() - started - profiled:.0f} s.\n")
    say(f"{costs.notes[0]}\n")
    for line in report_lines(report):
        say(line)


if __name__ == "__main__":
    main()
