"""How far described layers are from compiled ones: the same entries of transformers, priced by both.

    python -m benchmarks.described                                for TPU v5e:4x4 (extra tpu)
    python -m benchmarks.described --topology h100:1x8            for eight H100 (extra cuda)
    python -m benchmarks.described gpt --budget 120

A described layer is priced from its operations and bytes and from published rates, without a compiler. A ratio is
its time over that of the same layer as the real compiler lays it out: forward, backward and gradient synchronisation.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import uniap_jax as uniap
from benchmarks.markdown import head, made_on, row, say
from benchmarks.paper_models import decoder
from uniap_jax.core.described import Describer
from uniap_jax.core.strategy import parse_strategy


def gpt() -> Any:
    """Six blocks of GPT-2 small in bfloat16."""
    return decoder(
        layers=6, hidden=768, heads=12, wide=3072, sequence=1024, vocabulary=32000, batch=64, gated=False,
        causal=True, dtype=jnp.bfloat16,
    )  # fmt: skip


def llama() -> Any:
    """Four blocks of 2048 with gated feed-forward layers in bfloat16."""
    return decoder(
        layers=4, hidden=2048, heads=16, wide=5504, sequence=2048, vocabulary=32000, batch=64, gated=True,
        causal=True, dtype=jnp.bfloat16,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {"gpt": gpt, "llama": llama}


def compare(name: str, topology: str, budget_s: float) -> list[float]:
    """Prints one row an entry that was compiled; the ratios."""
    state, train_step, batch = MODELS[name]()
    graph, cluster = uniap.trace(train_step, state, batch), uniap.load_cluster(topology)
    found = uniap.profile(graph, cluster, source="compiled", budget_s=budget_s, memory_share=0.0, num_stages=(1, 2))
    describer = Describer(graph, cluster)
    layers = {signature: graph.layers[group[0]] for signature, group in graph.unique.items()}
    ratios = []
    for key, cost in found.entries:
        if cost.origin != "compiled":
            continue
        strategy = parse_strategy(key.strategy)
        fused = strategy.num_devices == cluster.num_devices
        told = describer.cost(layers[key.signature], strategy, samples=key.samples, fused=fused)
        seconds = (told.time_s + told.sync_s, cost.time_s + cost.sync_s)
        ratios.append(seconds[0] / seconds[1])
        told_ms, compiled_ms = (f"{1e3 * s:.2f}" for s in seconds)
        row(name, layers[key.signature].name, key.strategy, key.samples, told_ms, compiled_ms, f"{ratios[-1]:.2f}")
    return ratios


def summary(ratios: Sequence[float]) -> str:
    """Geometric mean, mean distance from 1 and how many lie within a quarter."""
    errors = [abs(r - 1.0) for r in ratios]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    within = sum(e <= 0.25 for e in errors)
    return (
        f"{len(ratios)} entries: described / compiled {mean:.2f} in the geometric mean, off by "
        f"{100 * statistics.fmean(errors):.0f} % on average and {100 * max(errors):.0f} % at worst; "
        f"{within} within 25 %."
    )


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of compiling for each model")
    options = parser.parse_args()
    say(made_on(("jax", "numpy")))
    head("model", "layer", "strategy", "samples", "described, ms", "compiled, ms", "ratio")
    ratios = [r for name in options.models or MODELS for r in compare(name, options.topology, options.budget)]
    say(f"\n{summary(ratios)}" if ratios else "\nNothing was compiled within the budget.")


if __name__ == "__main__":
    main()
