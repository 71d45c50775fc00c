"""From a train step to a plan that is compiled: seconds of every part, for models and machines of several sizes.

    python -m benchmarks.end_to_end                      all cases that need nothing installed
    python -m benchmarks.end_to_end llama-7b llama-70b   some
    python -m benchmarks.end_to_end gpt2-v5e             with the TPU compiler (extra tpu)

gpt2-cpu: GPT-2 small (124 M), layers measured on eight virtual CPU devices within `--budget` seconds, cold and again
from the cache. gpt2-v5e: the same for v5e:4x4 with the real TPU compiler, and the plan compiled there. llama-7b and
llama-70b: described, for 64 H100 and 512 TPU v5p chips.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax.numpy as jnp

import uniap_jax as uniap
from benchmarks.markdown import head, made_on, row, say
from benchmarks.paper_models import decoder, llama_7b
from uniap_jax.core.absent import absent_devices
from uniap_jax.core.profile import Key, Profile
from uniap_jax.cost_model import TableModel, estimate
from uniap_jax.planning import informed
from uniap_jax.runtime.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is planned.

    Attributes:
        build: state, train step and batch, all shapes.
        topology: of devices that are not here; those here where None.
        source: of the profile.
        options: of the profile: stages and micro-batches to cover.
    """

    build: Callable[[], Any]
    topology: str | None
    source: str
    options: dict[str, Any]


def gpt2() -> Any:
    """GPT-2 small with a head of its own: 12 blocks of 768, 50,257 words, 1,024 positions."""
    return decoder(
        layers=12, hidden=768, heads=12, wide=3072, sequence=1024, vocabulary=50257, batch=16, gated=False,
        causal=True, dtype=jnp.float32,
    )  # fmt: skip


def llama_70b() -> Any:
    """80 blocks of 8192; every head has keys and values of its own."""
    return decoder(
        layers=80, hidden=8192, heads=64, wide=28672, sequence=4096, vocabulary=32000, batch=1024, gated=True,
        causal=True, dtype=jnp.bfloat16,
    )  # fmt: skip


CASES = {
    "gpt2-cpu": Case(build=gpt2, topology=None, source="measured", options={"num_microbatches": (1, 2, 4)}),
    "llama-7b": Case(build=lambda: llama_7b(512), topology="h100:8x8", source="described", options={}),
    "llama-70b": Case(build=llama_70b, topology="v5p:8x8x8", source="described", options={}),
    "gpt2-v5e": Case(build=gpt2, topology="v5e:4x4", source="compiled", options={}),
}


def measure(name: str, budget_s: float, cache: str) -> None:
    """One row: seconds of tracing, profiling (cold and warm), tables and search, compiling.

    As `plan` does: what the first plan rests on and is not known is found out next, and the search run again.
    """
    case, start, spent = CASES[name], time.perf_counter(), {"profile": 0.0, "search": 0.0}
    state, train_step, batch = case.build()
    graph = uniap.trace(train_step, state, batch)
    trace = time.perf_counter() - start
    cluster = uniap.load_cluster(case.topology) if case.topology else uniap.local_cluster()
    given = {"source": case.source, "cache_dir": cache, **case.options}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = work()
        spent[what] += time.perf_counter() - began
        return made

    def profiled(only: Sequence[Key] | None = None, seconds: float = 0.0) -> Profile | None:
        if case.source == "described":  # such numbers are made as the search asks for them
            return None
        return uniap.profile(graph, cluster, budget_s=seconds, only=only, **given)

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        found = timed("profile", lambda: profiled(only, seconds))
        return timed("search", lambda: estimate(graph, cluster, found))

    _, (plan,) = informed(price, lambda model: timed("search", lambda: [uniap.solve(model)]), budget_s)
    cold, search, spent["profile"] = spent["profile"], spent["search"], 0.0
    found = timed("profile", profiled)
    compiled = ""
    if case.source == "compiled":
        start = time.perf_counter()
        step = uniap.compile_plan(graph, plan, devices=absent_devices(cluster, plan.num_parts))
        stages = verify(step, full_copies=False).stages
        told, true = (max(getattr(s, which) for s in stages) / 2**20 for which in ("predicted_bytes", "compiled_bytes"))
        compiled = f"{time.perf_counter() - start:.1f} (peak {told:.0f} MiB predicted, {true:.0f} compiled)"
    counts = ", ".join(f"{n} {k}" for k, n in found.counts().items()) if found else "described"
    again = f"{spent['profile']:.1f}" if found else ""
    proof = plan.certificate
    row(
        name, cluster.name, len(graph.layers), f"{trace:.1f}", f"{cold:.1f}", again, counts, f"{search:.1f}",
        f"{proof.status}, gap {proof.gap:.1e}", f"{plan.num_stages}, {plan.num_microbatches}", compiled,
        f"{trace + cold + search:.1f}",
    )  # fmt: skip


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all but the last by default")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of measuring or compiling layers")
    options = parser.parse_args()
    say(made_on(("jax", "numpy", "mip")))
    head(
        "case", "machine", "layers", "trace, s", "profile, s", "from the cache, s", "entries", "tables and search, s",
        "proof", "P, c", "compile, s", "trace to plan, s",
    )  # fmt: skip
    for name in options.cases or list(CASES)[:-1]:
        with tempfile.TemporaryDirectory() as cache:
            measure(name, options.budget, cache)


if __name__ == "__main__":
    main()
