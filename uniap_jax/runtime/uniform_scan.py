"""A loop over layers (`nn.scan`, `nnx.scan`, `lax.scan` over stacked parameters) as a run of equal layers.

The layer that holds the loop is cut into what comes before it, the loop, and what comes after it; each turn of the
loop is one layer of the run. Stacked parameters keep the user's layout, [layers, ...], and are split over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uniap_jax.core.equal_stages import cut_loop
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.uniform_run import Run
from uniap_jax.runtime.uniform_scan_run import scan_run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanParts:
    """A graph in which one loop is a layer of its own.

    Attributes:
        graph: with the layer cut in up to three.
        first: layers before this one come before the loop.
        last: layers from this one on come after it.
        origin: for each layer, the layer of the original graph it is part of.
        run: the loop.
    """

    graph: LayerGraph
    first: int
    last: int
    origin: tuple[int, ...]
    run: Run


def split_scan(graph: LayerGraph, index: int, strategy: Strategy, num_stages: int) -> ScanParts:
    """Cuts a layer around its heaviest loop, whose turns are split over the stages.

    Raises:
        StrategyError: the loop runs backwards, or over values that come from the batch.
    """
    cut = cut_loop(graph, index)
    before, inside, after = cut.layers()
    pieces = [piece for piece in (before, inside, after) if piece is not None]
    later = [*pieces, *graph.layers[index + 1 :]]
    early = _read_by(graph.layers[:index], later, graph.results)
    origin = [*early, *([index] * len(pieces)), *range(index + 1, len(graph.layers))]
    layers = [*(graph.layers[i] for i in early), *later]
    numbered = tuple(replace(piece, index=i) for i, piece in enumerate(layers))
    whole = replace(graph, layers=numbered, values=(*graph.values, *cut.new_values))
    first = len(early) + (before is not None)
    return ScanParts(
        graph=whole,
        first=first,
        last=first + 1,
        origin=tuple(origin),
        run=scan_run(whole, numbered[first], cut, strategy, num_stages),
    )


def _read_by(early: Sequence[Layer], later: Sequence[Layer], results: Sequence[int]) -> list[int]:
    """Early layers that somebody still reads."""
    wanted, kept = {*results, *(v for layer in later for v in layer.reads)}, []
    for layer in reversed(early):
        if wanted & set(layer.writes):
            kept.append(layer.index)
            wanted |= set(layer.reads)
    return kept[::-1]
