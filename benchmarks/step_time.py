"""Seconds per step of plans against what people write by hand, on eight virtual CPU devices, taken in turns.

    python -m benchmarks.step_time                 every model
    python -m benchmarks.step_time gpt unbalanced  some
    python -m benchmarks.step_time --rounds 15 --budget 60
    python -m benchmarks.step_time --finalists 1   takes the best plan as predicted; by default three are run first

Every contender is compiled once; then each round times some steps of each, so that a busy machine hits all alike. A
contender's figure is its median over that of the best one by hand. GPipe by hand is written for the GPT, whose blocks
make equal stages. google-parallax (`pip install google-parallax`) lays out the linen models of this repository.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap
from benchmarks import by_hand
from benchmarks.by_hand import ByHand, peak_bytes, time_in_turns
from benchmarks.gpipe import gpipe as pipeline_by_hand
from benchmarks.markdown import head, made_on, row, say
from uniap_jax import demo_gpt
from uniap_jax.core.errors import UniapError
from uniap_jax.runtime.stage_memory import stage_peaks

SCRIPTS = Path(__file__).parent.parent / "tests" / "models" / "scripts"
Built = tuple[Any, Callable[..., Any], Any]


def _script(name: str, size: int, **sizes: Any) -> Built:
    """A model of `tests/models/scripts` at another size, with a batch of `size` examples."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    state, train_step, _ = module.build(**sizes)
    return state, train_step, module.make_batch(size)


class Unbalanced(nn.Module):
    """A table of 32,768 rows under a light body: what one layer needs is no use for the others."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, sequence] to logits [batch, sequence, vocabulary]."""
        table = nn.Embed(32768, 128, name="embed")
        x = table(tokens)
        for _ in range(2):
            x = x + nn.Dense(128, name=None)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return table.attend(x)


def unbalanced() -> Built:
    """A huge tied embedding and two small blocks."""
    model = Unbalanced()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32768, (8, 17)), jnp.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    params = model.init(jax.random.key(0), batch["tokens"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return state, train_step, batch


MODELS: dict[str, Callable[[], Built]] = {
    "gpt": lambda: demo_gpt.build(),
    "vit": lambda: _script(
        "hf_vit", 16, hidden_size=192, num_hidden_layers=6, num_attention_heads=4, intermediate_size=768
    ),
    "t5": lambda: _script("hf_t5", 16, d_model=192, d_kv=48, d_ff=768, num_layers=4, num_heads=4),
    "resnet": lambda: _script("hf_resnet", 16, embedding_size=32, hidden_sizes=[32, 64, 128, 256]),
    "moe": lambda: _script("pypi_nano_moe", 32),
    "unbalanced": unbalanced,
    "gpt, memory tight": lambda: demo_gpt.build(),
}
TIGHT = 0.9
"""Memory allowed in the tight case, as a share of what the leanest contender by hand needs."""


LINEN: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "gpt": lambda batch: (demo_gpt.GPT(replace(demo_gpt.FULL, dropout=0.0)), (batch["tokens"],)),
    "moe": lambda batch: (_nano_moe(), (batch["x"],)),
    "unbalanced": lambda batch: (Unbalanced(), (batch["tokens"],)),
}
"""Modules and their inputs, from which google-parallax derives a layout; it takes none with dropout."""


def _nano_moe() -> Any:
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    sizes = {"vocab_size": 128, "n_layers": 2, "n_heads": 4, "d_model": 32, "d_ff": 64, "block_size": 16}
    return NanoMoE(NanoMoEConfig(n_experts=4, top_k=2, **sizes))


def contenders(name: str, built: Built, devices: Sequence[jax.Device]) -> dict[str, ByHand | str]:
    """Contenders by hand, or why one does not run."""
    state, train_step, batch = built
    kind = name.partition(",")[0]

    def parallax() -> ByHand:
        if kind not in LINEN:
            raise ValueError("no linen module at hand")
        model, inputs = LINEN[kind](batch)
        return by_hand.parallax(train_step, state, batch, devices, model=model, inputs=inputs)

    def gpipe() -> ByHand:
        if kind != "gpt":
            raise ValueError("written for the GPT")
        return pipeline_by_hand(state, batch, devices, pieces=4)

    makers: dict[str, Callable[[], ByHand]] = {
        "data": lambda: by_hand.data_parallel(train_step, state, batch, devices),
        "fsdp": lambda: by_hand.fsdp(train_step, state, batch, devices),
        "tensor 2": lambda: by_hand.tensor(train_step, state, batch, devices, ways=2),
        "tensor 8": lambda: by_hand.tensor(train_step, state, batch, devices, ways=len(devices)),
        "gpipe": gpipe,
        "parallax": parallax,
    }
    found: dict[str, ByHand | str] = {}
    for contender, make in makers.items():
        try:
            made = make()
            jax.block_until_ready(made.step.lower(made.state, made.batch).compile())
            found[contender] = made
        except (ValueError, ModuleNotFoundError) as error:
            found[contender] = str(error).splitlines()[0][:80]
        except AssertionError as error:  # google-parallax's way to say that it does not know an operation
            found[contender] = f"does not run: AssertionError, {str(error).partition('[')[0].split(' ')[-1]}"
    return found


def planned(built: Built, memory_limit: str | int, budget_s: float, finalists: int) -> tuple[Any, ByHand]:
    """The plan's step in place, from a profile of now: a virtual machine may have been a slower one yesterday."""
    state, train_step, batch = built
    with TemporaryDirectory() as cache:
        step = uniap.parallelize(
            train_step, budget_s=budget_s, memory_limit=memory_limit, finalists=finalists, cache_dir=cache
        )
        placed = step.place(jax.tree.map(jnp.copy, state), batch)
    leaves, tree = jax.tree.flatten(batch)
    rows = jax.tree.unflatten(tree, jax.device_put(leaves, list(step.batch_shardings)))
    return step.plan, ByHand(step=step, state=placed, batch=rows)


def compare(name: str, options: argparse.Namespace) -> float | None:
    """One row of the table; the plan's median over the best one by hand."""
    built = MODELS[name]()
    hands = contenders(name, built, jax.devices())
    running = {n: made for n, made in hands.items() if isinstance(made, ByHand)}
    peaks = {n: peak_bytes(made) for n, made in running.items()}
    limit: str | int = "90%"
    if "tight" in name:
        limit = int(TIGHT * min(peaks.values()))
        running = {}
    try:
        plan, made = planned(built, limit, options.budget, options.finalists)
    except UniapError as error:
        row(name, *(["-"] * 7), f"no plan: {str(error)[:80]}", "")
        return None
    medians = time_in_turns({**running, "plan": made}, options.rounds)
    best = min((medians[n] for n in running), default=None)
    cells = [f"{medians[n] * 1e3:.0f}" if n in medians else _why_not(n, hands, peaks, limit) for n in hands]
    strategies = sorted({str(layer.strategy) for layer in plan.layers})
    text = f"P={plan.num_stages}, c={plan.num_microbatches}: {'; '.join(strategies)}"
    if isinstance(limit, int):
        text += f"; compiled peak {max(stage_peaks(made.step)) / 2**20:.0f} of {limit / 2**20:.0f} MiB"
    ratio = None if best is None else medians["plan"] / best
    row(name, *cells, f"{medians['plan'] * 1e3:.0f}", "-" if ratio is None else f"{ratio:.2f}", text)
    return ratio


def _why_not(name: str, hands: dict[str, ByHand | str], peaks: dict[str, int], limit: str | int) -> str:
    made = hands[name]
    if isinstance(made, str):
        return made
    return f"does not fit: {peaks[name] / 2**20:.0f} of {int(limit) / 2**20:.0f} MiB"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of profiling per model")
    parser.add_argument("--finalists", type=int, default=3, help="plans that are run before one is chosen")
    options = parser.parse_args(argv)
    say(f"{made_on(('jax', 'flax', 'numpy'))} Medians of {options.rounds} rounds, ms per step.")
    head(
        "model", "data", "fsdp", "tensor 2", "tensor 8", "gpipe", "parallax", "plan", "plan / best by hand",
        "what the plan is",
    )  # fmt: skip
    ratios = [r for r in (compare(name, options) for name in options.models) if r is not None]
    if ratios:
        mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
        say(f"\nGeometric mean of plan / best by hand: {mean:.3f}, worst {max(ratios):.3f}.")


if __name__ == "__main__":
    main()
