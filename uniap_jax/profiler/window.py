"""What a layer adds to the memory of a stage: compiled with the layer and without it, as neighbours in the graph lie.

Peak memory is nearly affine in the layers of a stage, and what a layer adds is not the sum of what it keeps and of its
gradients: the compiler's order of work decides how much of both is alive at once. A window is a few consecutive layers
as the programs that a stage of them alone would run, without its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh, NamedSharding

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Footprint, LayerCost
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.weights import ParamBytes
from uniap_jax.profiler.piece import Piece, Placed, compile_loop, compile_split, compile_turned, piece_of
from uniap_jax.profiler.programs import Case, Direction

LOOPED = 2
"""Micro-batches of a window's loop: memory is the same with more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a stage is run, as far as its memory depends on it.

    Attributes:
        strategy: of its layers; without data ways where one replica can be compiled for itself.
        samples: of one replica and micro-batch.
        turned: forward and backward in one program.
        only: it is the only one, and runs all micro-batches in that program.
        summed: gradients of several micro-batches are added up.
        mapped: the runtime maps its layers over replicas, so that gradients meet once a step.
    """

    strategy: Strategy
    samples: int
    turned: bool
    only: bool
    summed: bool
    mapped: bool = False

    @property
    def looped(self) -> bool:
        """Whether that is a loop."""
        return self.only and self.summed

    @property
    def local(self) -> float:
        """Samples on a device."""
        return self.samples / (self.strategy.batch_ways * self.strategy.context)


def compiled_as(way: Way) -> Way:
    """What is the same for all that compile alike: without a loop the only stage is one that turns round at once."""
    return way if way.looped else replace(way, only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes per device of a window.

    Attributes:
        held: what the forward leaves for the backward; 0 where both are one program.
        own: what the larger of its programs needs beside all else here, its arguments and the sums of gradients.
        read: what it reads.
        returned: gradients of that.
    """

    held: float
    own: float
    read: float
    returned: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """The windows that tell what a layer adds; each a run of consecutive layers.

    Attributes:
        alone: the layer.
        without: its neighbour; () where it has none.
        both: the two.
        leads: whether the layer is the first of the two.
    """

    alone: tuple[int, ...]
    without: tuple[int, ...] = ()
    both: tuple[int, ...] = ()
    leads: bool = False

    @property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """Each once; the dearest last."""
        return tuple(dict.fromkeys(w for w in (self.alone, self.without, self.both) if w))


def neighbourhood(graph: LayerGraph, layer: int, strategy: Strategy) -> Neighbourhood:
    """A layer of the same kind beside an equal one where there is such, else behind or before what it lies beside.

    Args:
        graph: of the layer.
        layer: any of its kind.
        strategy: of both.
    """
    layers, kind = graph.layers, graph.unique[graph.layers[layer].signature]

    def beside(first: int) -> bool:
        if not 0 <= first < len(layers) - 1 or not set(layers[first].writes) & set(layers[first + 1].reads):
            return False
        try:
            for i in (first, first + 1):
                layer_sharding(graph, layers[i], strategy)
        except StrategyError:
            return False
        return True

    for i in kind:
        if i + 1 in kind and beside(i):
            return Neighbourhood(alone=(i,), without=(i,), both=(i, i + 1))
    for i in kind:
        if beside(i - 1):
            return Neighbourhood(alone=(i,), without=(i - 1,), both=(i - 1, i))
    for i in kind:
        if beside(i):
            return Neighbourhood(alone=(i,), without=(i + 1,), both=(i, i + 1), leads=True)
    return Neighbourhood(alone=(layer,))


def window_piece(graph: LayerGraph, layers: tuple[int, ...], way: Way, mesh: Mesh) -> Piece:
    """Consecutive layers as what is compiled.

    Args:
        graph: traced at the batch of one replica and micro-batch.
        layers: indices.
        way: how the stage is run.
        mesh: devices of one replica.
    """
    cases = [
        Case(graph=graph, layer=graph.layers[i], strategy=way.strategy, mesh=mesh, mapped=_mapped(graph, i, way))
        for i in layers
    ]
    return piece_of(cases, {graph.results[0], *(v for layer in graph.layers for v in layer.reads)})


def _mapped(graph: LayerGraph, layer: int, way: Way) -> bool:
    return way.mapped and reduces_once(graph, graph.layers[layer], replace(way.strategy, data=2))


def window_need(piece: Piece, way: Way) -> Need | None:
    """What the compiler says of a window; None where it says nothing."""
    read, returned, results = (_bytes(piece, x) for x in (piece.reads, piece.moving, piece.results))
    if not way.turned:
        forward, backward = compile_split(piece, None, summed=way.summed)
        if not forward.memory or not backward.memory:
            return None
        held = max(0.0, forward.memory["outputs"] - _bytes(piece, piece.writes) - results)
        own = max(_own(forward) - held, _own(backward) - returned)
        return Need(held=held, own=max(0.0, own), read=read, returned=returned)
    times = LOOPED if way.looped else 1
    program = compile_loop(piece, times) if way.looped else compile_turned(piece, summed=way.summed)
    if not program.memory:
        return None
    own = max(0.0, _own(program) - times * (returned + results))
    return Need(held=0.0, own=own, read=read, returned=returned)


def _own(program: Direction) -> float:
    """What a program needs beside its arguments."""
    memory = program.memory
    return memory["temporaries"] + memory["outputs"] - memory["aliased"]


def _bytes(piece: Piece, arrays: Iterable[Placed]) -> float:
    """Of one device."""
    parts = ((NamedSharding(piece.case.mesh, a.spec).shard_shape(a.shape.shape), a.shape.dtype) for a in arrays)
    return float(sum(math.prod(shape) * getattr(dtype, "itemsize", 4) for shape, dtype in parts))


def footprint(
    around: Neighbourhood,
    way: Way,
    need: Callable[[tuple[int, ...]], Need | None],
    told: LayerCost,
    weights: ParamBytes,
) -> Footprint | None:
    """What a layer adds to a stage, from windows with it and without it; None where nothing is known of them.

    Args:
        around: which windows.
        way: how the stage is run.
        need: of a window.
        told: the described cost, for what the compiler does not tell apart.
        weights: of the layer's parameters.
    """
    alone = need(around.alone)
    if alone is None:
        return None
    with_it, without = (need(around.both), need(around.without)) if around.both else (None, None)
    if with_it is None or without is None:
        return _described(alone, way, told, weights)
    more = max(1.0, with_it.own - without.own)  # at least a byte: 0 says that nothing was asked
    kept = told.kept_bytes if way.turned else max(0.0, with_it.held - without.held)
    if around.leads and not way.turned:
        kept = alone.held + alone.read  # what lies between the two is the other's
    return Footprint(
        kept_bytes=kept,
        transient_bytes=max(0.0, alone.own - more) + (0.0 if way.only else alone.returned),
        marginal_bytes=more + (0.0 if way.only or not way.summed else weights.grads),
    )


def _described(alone: Need, way: Way, told: LayerCost, weights: ParamBytes) -> Footprint:
    """Of a layer that lies beside no other: gradients and what is kept are known or described, the rest works."""
    if not way.turned:
        working = max(0.0, alone.own - (weights.full_grads if way.summed else weights.grads))
        return Footprint(kept_bytes=alone.held + alone.read, transient_bytes=working + alone.returned)
    rest = max(0.0, alone.own - weights.full_grads - (weights.grads if way.looped else 0.0))
    kept = min(told.kept_bytes, rest)
    returned = 0.0 if way.only else alone.returned
    return Footprint(kept_bytes=kept, transient_bytes=rest - kept + returned)


def window_facts(graph: LayerGraph, layers: tuple[int, ...], way: Way) -> dict[str, Any]:
    """What a window's memory depends on besides where it is compiled."""
    inside = set(layers)
    read = {v for layer in graph.layers if layer.index not in inside for v in layer.reads}
    names: dict[tuple[str, int], int] = {}

    def named(kind: str, positions: tuple[int, ...]) -> list[int]:
        return [names.setdefault((kind, p), len(names)) for p in positions]

    told = []
    for layer in (graph.layers[i] for i in layers):
        wiring = [named(k, getattr(layer, k)) for k in ("params", "operands")]
        wiring += [named("values", layer.reads), named("values", layer.writes)]
        ends = ["read" if v in read else "loss" if v == graph.results[0] else "" for v in layer.writes]
        avals = [f"{a.shape}{a.dtype}" for a in layer.jaxpr.in_avals]
        told.append([layer.signature, avals, wiring, ends, _mapped(graph, layer.index, way)])
    return {
        "what": "window",
        "layers": told,
        "batch": graph.batch_size,
        "strategy": str(way.strategy),
        "samples": way.samples,
        "turned": way.turned,
        "looped": way.looped,
        "summed": way.summed,
    }
