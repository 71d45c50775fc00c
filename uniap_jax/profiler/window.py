"""What a layer adds to the memory of a stage: compiled with the layer and without it, as neighbours in the graph lie.

Peak memory is nearly affine in the layers of a stage, and what a layer adds is not the sum of what it keeps and of its
gradients: the compiler's order of work decides how much of both is alive at once. A window is a few consecutive layers
as the programs that a stage of them alone would run, without its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh, NamedSharding

from uniap_jax.core.equal_body import EqualBody
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Footprint, LayerCost
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.weights import ParamBytes
from uniap_jax.profiler.piece import Piece, Placed, compile_loop, compile_split, compile_turned, piece_of
from uniap_jax.profiler.programs import Case, Direction
from uniap_jax.profiler.ticks import compile_ticks

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
        consumed: each gradient is used up as soon as it is known, by the update in the same program.
        mapped: the runtime maps its layers over replicas, so that gradients meet once a step.
        depth: equal layers of a stage of one program for all stages; 0 where every stage has programs of its own.
        ticks: of a pass of that program.
    """

    strategy: Strategy
    samples: int
    turned: bool
    only: bool
    summed: bool
    mapped: bool = False
    consumed: bool = False
    depth: int = 0
    ticks: int = 0

    @property
    def looped(self) -> bool:
        """Whether that is a loop."""
        return self.only and self.summed

    @property
    def local(self) -> float:
        """Samples on a device."""
        return self.samples / (self.strategy.batch_ways * self.strategy.context)


Run = tuple[int, ...]
"""Indices of consecutive layers."""


def compiled_as(way: Way) -> Way:
    """What is the same for all that compile alike: without a loop the only stage is one that turns round at once.

    A gradient that an update uses up leaves no more than one that is added to a sum.
    """
    return way if way.looped else replace(way, only=False, summed=way.summed or way.consumed, consumed=False)


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
        grown: layers that a stage has, and those with the layer as the last; () where it lies behind no other.
        led: layers that a stage has, and those with the layer as the first; () where that is not asked.
    """

    alone: Run
    grown: tuple[Run, Run] | tuple[()] = ()
    led: tuple[Run, Run] | tuple[()] = ()

    @property
    def windows(self) -> tuple[Run, ...]:
        """Each once; the dearest last."""
        return tuple(sorted({self.alone, *self.grown, *self.led}, key=lambda run: (len(run), run)))


def neighbourhood(graph: LayerGraph, layer: int, strategy: Strategy) -> Neighbourhood:
    """Layers of a kind behind equal ones where there are such, else behind or before what one of them lies beside.

    One more layer adds the same to a stage of one as to a stage of many, unless layers compute their forward again:
    the first of a stage can do so before its turn, for it reads nothing that has to be computed again, and then is
    alive beside all others. There a stage of two tells what a layer adds, and what it adds as the first is told apart.

    Args:
        graph: of the layer.
        layer: any of its kind.
        strategy: of all of them.
    """
    layers, kind = graph.layers, graph.unique[graph.layers[layer].signature]

    def legal(run: Run) -> bool:
        """Whether layers lie one beside the other and may all take the strategy."""
        if run[0] < 0 or run[-1] >= len(layers):
            return False
        if not all(set(layers[i].writes) & set(layers[i + 1].reads) for i in run[:-1]):
            return False
        try:
            for i in run:
                layer_sharding(graph, layers[i], strategy)
        except StrategyError:
            return False
        return True

    def first(*offsets: int) -> Run | None:
        """Of equal layers where there are such."""
        runs = (tuple(i + d for d in offsets) for i in kind)
        ordered = sorted(runs, key=lambda run: not all(i in kind for i in run))
        return next(filter(legal, ordered), None)

    again = strategy.keep != "all"
    behind = (first(-2, -1, 0) if again else None) or first(-1, 0)
    before = first(0, 1) if again or not behind else None
    return Neighbourhood(
        alone=behind[-1:] if behind else before[:1] if before else (layer,),
        grown=(behind[:-1], behind) if behind else (),
        led=(before[1:], before) if before else (),
    )


def window_piece(graph: LayerGraph, layers: Run, way: Way, mesh: Mesh) -> Piece:
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


def ticks_need(body: EqualBody, way: Way, mesh: Mesh) -> Need | None:
    """What the compiler says of all ticks of a stage; None where it says nothing."""
    memory = compile_ticks(body, way.strategy, mesh, layers=way.depth, ticks=way.ticks).memory
    return Need(held=0.0, own=memory["temporaries"], read=0.0, returned=0.0) if memory else None


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
    need: Callable[[Run], Need | None],
    told: LayerCost,
    weights: ParamBytes,
    *,
    meeting: bool = True,
) -> Footprint | None:
    """What a layer adds to a stage, from windows with it and without it; None where the compiler says nothing.

    Args:
        around: which windows.
        way: how the stage is run.
        need: of a window.
        told: the described cost, for what the compiler does not tell apart.
        weights: of the layer's parameters.
        meeting: whether the update needs all gradients before it uses one up.
    """
    needs = {run: found for run in around.windows if (found := need(run)) is not None}
    if len(needs) < len(around.windows):
        return None
    if way.depth:
        each = needs[around.alone].own / (way.depth * way.ticks)
        return Footprint(kept_bytes=each, transient_bytes=0.0, memory_origin="compiled")
    alone, grown, led = needs[around.alone], [needs[r] for r in around.grown], [needs[r] for r in around.led]
    first = _more(led)
    more = _more(grown) if grown else first
    if more is None:
        return _described(alone, way, told, weights)
    if way.turned:
        kept = told.kept_bytes
    else:  # what lies between two layers is kept for the second
        kept = max(0.0, grown[1].held - grown[0].held) if grown else alone.held + alone.read
    sums = 0.0 if way.only or not way.summed else weights.grads
    if way.consumed and meeting:
        more = max(more, weights.grads)
    returned = 0.0 if way.only else alone.returned  # of a stage's first layer alone
    return Footprint(
        kept_bytes=kept,
        transient_bytes=max(0.0, alone.own - more),
        marginal_bytes=sums + more,
        leading_bytes=returned + (max(0.0, first - more) if grown and first is not None else 0.0),
        alone_bytes=sums + alone.own + returned,
        memory_origin="compiled",
    )


def _more(pair: Sequence[Need]) -> float | None:
    """What the larger window needs beyond the smaller, at least a byte: 0 says that nothing was asked."""
    return max(1.0, pair[1].own - pair[0].own) if pair else None


def _described(alone: Need, way: Way, told: LayerCost, weights: ParamBytes) -> Footprint:
    """Of a layer that lies beside no other: gradients and what is kept are known or described, the rest works."""
    if not way.turned:
        working = max(0.0, alone.own - (weights.full_grads if way.summed else weights.grads))
        return Footprint(
            kept_bytes=alone.held + alone.read, transient_bytes=working + alone.returned, memory_origin="compiled"
        )
    grads = 0.0 if way.consumed else weights.full_grads
    rest = max(0.0, alone.own - grads - (weights.grads if way.looped else 0.0))
    kept = min(told.kept_bytes, rest)
    returned = 0.0 if way.only else alone.returned
    return Footprint(kept_bytes=kept, transient_bytes=rest - kept + returned, memory_origin="compiled")


def window_facts(graph: LayerGraph, layers: Run, way: Way) -> dict[str, Any]:
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
        "programs": 3,
        "layers": told,
        "batch": graph.batch_size,
        "strategy": str(way.strategy),
        "samples": way.samples,
        "turned": way.turned,
        "looped": way.looped,
        "summed": way.summed,
        **({"depth": way.depth, "ticks": way.ticks} if way.depth else {}),
    }
