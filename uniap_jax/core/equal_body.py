"""One of a run's equal layers by itself: what stages of one program for all of them run once for each of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uniap_jax.core.equal_stages import EqualRun, chained_output, cut_loop
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.loop_turn import turn_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualBody:
    """A layer that stands for all of its run.

    Attributes:
        graph: that the layer is in.
        layer: one of the equal layers, or one turn of the loop.
        chain: for each value that it reads, each once, which of those that the layer before it wrote that is; None for
            what all of them read.
    """

    graph: LayerGraph
    layer: Layer
    chain: tuple[int | None, ...]


def body_of(graph: LayerGraph, run: EqualRun) -> EqualBody:
    """The layer of a run.

    Args:
        graph: that the run is in, as one micro-batch sees it.
        run: as `find_run` finds it in the graph or in the one that it is a micro-batch of.
    """
    if run.is_loop:
        cut = cut_loop(graph, run.first)
        turn, carried = turn_of(graph, cut), range(cut.num_consts, cut.num_consts + cut.num_carry)
        chain = tuple(i - carried.start if i in carried else None for i in turn.reads)
        return EqualBody(graph=turn.graph, layer=turn.graph.layers[0], chain=chain)
    layers = graph.layers[run.first : run.last]
    return EqualBody(graph=graph, layer=layers[0], chain=_chain(layers))


def turn_alone(graph: LayerGraph, layer: int) -> LayerGraph:
    """A graph with one turn of a layer's loop as its only layer, for any number of micro-batches.

    Raises:
        StrategyError: the loop cannot be cut.
    """
    alone = turn_of(graph, cut_loop(graph, layer)).graph
    return replace(alone, microbatch=lambda count: turn_alone(graph.microbatch(count), layer))


def _chain(layers: Sequence[Layer]) -> tuple[int | None, ...]:
    places = dict[int, int]()
    for j, v in enumerate(layers[0].reads):
        places.setdefault(v, j)
    return tuple(chained_output(layers, j) for j in places.values())
