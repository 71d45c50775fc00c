"""What the compiler's program predicts of a layer against a clock, and a planned step against plain jit, on one GPU.

    python -m benchmarks.gpu                 on a card that uniap_jax/profiles describes, H100 and H200 among them
    python -m benchmarks.gpu --rounds 30

Layers are forward and backward of one repeated layer in bfloat16, compiled for the card: their HLO is priced by the
card's described rates, as `--source compiled` prices it where there is no card, and the same program is timed. Where
there is no GPU one line says what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import uniap_jax as uniap
from benchmarks.by_hand import ByHand, time_in_turns
from benchmarks.markdown import head, made_on, row, say
from benchmarks.paper_models import Case, alone, decoder
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster
from uniap_jax.core.profile import Links
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import Strategy
from uniap_jax.profiler import programs
from uniap_jax.profiler.compiled import program_seconds
from uniap_jax.profiler.hlo import read_program
from uniap_jax.profiler.timing import Timing, time_in_a_row

MOST = 1.02
"""What a planned step of one stage may take, over plain jit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the layers are.

    Attributes:
        layers: equal ones in a stack.
        hidden: features.
        heads: of attention.
        sequence: tokens, and places of an image.
        vocabulary: of the GPT.
        batch: examples.
    """

    layers: int = 4
    hidden: int = 2048
    heads: int = 16
    sequence: int = 1024
    vocabulary: int = 32000
    batch: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One kind of layer.

    Attributes:
        name: of the stack.
        predicted_s: of forward and backward, from the program and described rates.
        measured: the same program by the clock.
    """

    name: str
    predicted_s: float
    measured: Timing


def gpt(sizes: Sizes) -> Case:
    """A decoder in bfloat16."""
    return decoder(
        layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads, wide=4 * sizes.hidden, sequence=sizes.sequence,
        vocabulary=sizes.vocabulary, batch=sizes.batch, gated=False, causal=True, dtype=jnp.bfloat16,
    )  # fmt: skip


def cases(sizes: Sizes) -> dict[str, Case]:
    """Stacks whose repeated layer is timed."""
    alike = {
        kind: alone(
            kind, layers=sizes.layers, hidden=hidden, heads=sizes.heads, sequence=sizes.sequence, batch=sizes.batch,
            dtype=jnp.bfloat16,
        )
        for kind, hidden in (("mlp", sizes.hidden), ("attention", sizes.hidden), ("conv", sizes.hidden // 4))
    }  # fmt: skip
    return {"gpt block": gpt(sizes), **alike}


def layer_times(name: str, case: Case, cluster: Cluster, device: jax.Device) -> Iterator[LayerTime]:
    """Every repeated kind of layer of a model, compiled for and timed on one device."""
    state, train_step, batch = case
    graph = uniap.trace(train_step, state, batch)
    for group in (g for g in graph.unique.values() if len(g) > 1):
        layer = graph.layers[group[0]]
        where = programs.Case(graph=graph, layer=layer, strategy=Strategy(), mesh=make_mesh([device]))
        (both,) = programs.compile_fused(where, programs.Arrays())
        seconds = program_seconds(read_program(both.compiled.as_text()), cluster, Links(cluster), 0.0)
        yield LayerTime(
            name=name,
            predicted_s=seconds.kernels_s + seconds.collectives_s,
            measured=time_in_a_row(both, jax.block_until_ready, max_rows=50),
        )


def step_times(case: Case, device: jax.Device, rounds: int) -> dict[str, float]:
    """Median seconds per step, in turns: plain jit with its state given up, and the plan of one stage."""
    shapes, train_step, batch_shapes = case

    def arrays(tree: Any) -> Any:
        return jax.device_put(jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), tree), device)

    planned = uniap.parallelize(
        train_step, devices=[device], source="described", num_stages=1, num_microbatches=1, strategy="data=1"
    )
    batch = arrays(batch_shapes)
    runs = {
        "jit": ByHand(step=jax.jit(train_step, donate_argnums=0), state=arrays(shapes), batch=batch),
        "plan": ByHand(step=planned, state=planned.place(arrays(shapes), batch), batch=batch),
    }
    return time_in_turns(runs, rounds)


def missing(devices: Sequence[jax.Device]) -> str:
    """What keeps these devices from being measured; empty where there is a GPU that is described."""
    cards = [d for d in devices if d.platform == "gpu"]
    if not cards:
        seen = ", ".join(sorted({f"{d.platform} {d.device_kind}" for d in devices}))
        return (
            f"Nothing measured: JAX sees no GPU here, only {len(devices)} × {seen}. "
            "It takes an NVIDIA card and pip install 'uniap-jax[cuda]'."
        )
    try:
        uniap.local_cluster(cards[:1])
    except ProfileError as error:
        return f"Nothing measured: {error}"
    return ""


def compare(device: jax.Device, sizes: Sizes, rounds: int) -> None:
    """Prints both tables."""
    cluster = uniap.local_cluster([device])
    say(f"{device.device_kind}; {made_on(('jax', 'jaxlib', 'numpy'))}")
    head("layer, forward and backward", "predicted, ms", "measured, ms", "spread", "predicted / measured")
    for name, case in cases(sizes).items():
        for found in layer_times(name, case, cluster, device):
            measured = found.measured.median_s
            row(
                found.name, f"{found.predicted_s * 1e3:.3f}", f"{measured * 1e3:.3f}", f"{found.measured.spread:.0%}",
                f"{found.predicted_s / measured:.2f}",
            )  # fmt: skip
    times = step_times(gpt(sizes), device, rounds)
    ratio = times["plan"] / times["jit"]
    head("step of the GPT", "plain jit, ms", "plan, ms", "plan / jit", f"at most {MOST}")
    row(f"{rounds} rounds", f"{times['jit'] * 1e3:.2f}", f"{times['plan'] * 1e3:.2f}", f"{ratio:.3f}",
        "yes" if ratio <= MOST else "no")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables, or what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(argv)
    devices = jax.devices()
    lacking = missing(devices)
    if lacking:
        say(lacking)
        return
    compare(next(d for d in devices if d.platform == "gpu"), Sizes(), options.rounds)


if __name__ == "__main__":
    main()
