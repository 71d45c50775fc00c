"""Which layers of a graph can fill the stages of one program evenly: a run of equal layers, or a loop over them.

The cost model prices this run and the runtime executes it, so that both mean the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jaxprs import eqn_flops, open_jaxpr
from uniap_jax.core.literals import NotEqual, lift_literals
from uniap_jax.core.loop_cut import ScanCut
from uniap_jax.core.static_reads import with_static_reads


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRun:
    """Layers that fill the stages evenly.

    Attributes:
        first: index of the first of them.
        last: index after the last; `first + 1` for a loop, which is one layer of the graph.
        count: equal layers: turns of the loop, or `last - first`. A multiple of the stages.
        is_loop: whether they are the turns of a loop.
    """

    first: int
    last: int
    count: int
    is_loop: bool

    def slots(self, num_stages: int) -> int:
        """Layers of a stage that may have strategies of their own; a loop is one."""
        return 1 if self.is_loop else self.count // num_stages

    def row(self, layer: int, num_stages: int) -> int:
        """Which row of the tables a layer of the graph is: layers at the same place of different stages share one."""
        slots = self.slots(num_stages)
        if layer < self.first:
            return layer
        inside = layer < self.last
        return self.first + (layer - self.first) % slots if inside else layer - (self.last - self.first) + slots

    def stages(self, num_layers: int, num_stages: int) -> tuple[int, ...]:
        """Stage of every layer of the graph in a plan: those before the run on the first, those after it on the last.

        A loop stands on the first stage with what comes before it, though every stage runs its share.
        """
        share = self.count // num_stages

        def stage(layer: int) -> int:
            if layer >= self.last:
                return num_stages - 1
            return 0 if layer < self.first or self.is_loop else (layer - self.first) // share

        return tuple(map(stage, range(num_layers)))


def find_run(graph: LayerGraph, num_stages: int) -> EqualRun:
    """The heaviest run of equal layers that the stages divide, or the heaviest such loop.

    Of more equal layers than a multiple of the stages the first ones are left out of the run.

    Raises:
        StrategyError: there is none; says what comes nearest and why it does not do.
    """
    found: list[tuple[float, EqualRun]] = []
    refused: list[str] = []
    for first, last in _groups(graph):
        count = (last - first) // num_stages * num_stages
        if not count or last - first < 2:
            continue
        layers = graph.layers[last - count : last]
        try:
            check_equal(graph, layers)
        except StrategyError as error:
            refused.append(str(error))
            continue
        run = EqualRun(first=last - count, last=last, count=count, is_loop=False)
        found.append((sum(layer.flops for layer in layers), run))
    loop = loop_layer(graph, num_stages)
    if loop is not None:
        try:
            cut = cut_loop(graph, loop)
        except StrategyError as error:
            refused.append(str(error))
        else:
            run = EqualRun(first=loop, last=loop + 1, count=cut.length, is_loop=True)
            found.append((graph.layers[loop].flops, run))
    if not found:
        raise StrategyError(_none(graph, num_stages, refused), num_stages=num_stages, reasons=tuple(refused))
    return max(found, key=lambda pair: pair[0])[1]


def ticking_run(graph: LayerGraph, platform: str, num_stages: int) -> EqualRun | None:
    """The run of layers whose ticks, under one program for all stages, are compiled to learn what they keep.

    On TPUs, where that is laid out and placed as no program of a stage alone shows. None elsewhere and for one stage.
    """
    if platform != "tpu" or num_stages == 1:
        return None
    try:
        return find_run(graph, num_stages)
    except StrategyError:
        return None


def _groups(graph: LayerGraph) -> list[tuple[int, int]]:
    """[first, last) of neighbouring layers with one signature."""
    starts = [i for i, x in enumerate(graph.layers) if not i or graph.layers[i - 1].signature != x.signature]
    return list(pairwise([*starts, len(graph.layers)]))


def _none(graph: LayerGraph, num_stages: int, refused: Sequence[str]) -> str:
    if refused:
        return refused[0]
    first, last = max(_groups(graph), key=lambda g: g[1] - g[0])
    longest = f"layers {first} to {last - 1} ({graph.layers[first].name}, {last - first} of them)"
    if last - first == 1:
        longest = "no two neighbouring layers are equal"
    loops = sorted({length for _, _, length in _loops(graph)}, reverse=True)
    turns = f"; loops have {', '.join(map(str, loops))} turns" if loops else ", and there is no loop over layers"
    return (
        f"the model has no run of equal layers that {num_stages} stages divide, which one program for all stages "
        f"needs: the longest is {longest}{turns}. Use executor='stages', or a number of stages that divides the run"
    )


def _loops(graph: LayerGraph) -> list[tuple[float, int, int]]:
    """(operations, layer, length) of every loop over several turns."""
    return [
        (eqn_flops(e), layer.index, int(e.params["length"]))
        for layer in graph.layers
        for e in open_jaxpr(layer.jaxpr).eqns
        if e.primitive.name == "scan" and e.params["length"] > 1
    ]


def loop_layer(graph: LayerGraph, num_stages: int) -> int | None:
    """The layer whose loop can be split over the stages: the heaviest loop whose length they divide."""
    found = [(flops, -layer) for flops, layer, length in _loops(graph) if length % num_stages == 0]
    return -max(found)[1] if found else None


def cut_loop(graph: LayerGraph, layer: int) -> ScanCut:
    """A layer cut around its heaviest loop.

    Raises:
        StrategyError: the loop runs backwards, or over values that come from the batch.
    """
    cut = ScanCut(graph, with_static_reads(graph, graph.layers[layer]))
    cut.check()
    return cut


# ---- equal layers ----------------------------------------------------------------------------------------------


def chained_output(layers: Sequence[Layer], j: int) -> int | None:
    """Which output of the layer before is input j of every layer but the first."""
    if len(layers) == 1:
        return 0 if len(layers[0].writes) == 1 else None
    found = {a.writes.index(b.reads[j]) if b.reads[j] in a.writes else None for a, b in pairwise(layers)}
    return found.pop() if len(found) == 1 else None


def check_equal(graph: LayerGraph, layers: Sequence[Layer]) -> None:
    """Refuses layers of one signature that cannot share one body.

    Raises:
        StrategyError: they differ in a constant that cannot be an input, or are wired unequally.
    """
    first, last = layers[0], layers[-1]
    try:
        lift_literals([layer.jaxpr for layer in layers])
    except NotEqual as error:
        raise StrategyError(
            f"layers {first.name} to {last.name} cannot run as one program: {error}; use executor='stages'",
            layer=first.name,
        ) from None
    for j in range(len(first.operands)):
        leaves = dict.fromkeys(layer.operands[j] for layer in layers)
        names = [graph.operands[o].name for o in leaves]
        if len(leaves) > 1 and graph.operands[first.operands[j]].kind != "state":
            raise StrategyError(
                f"layers {first.name} and {last.name} read different leaves of the batch ({names[0]}, {names[-1]}), so "
                "they cannot run as one program; use executor='stages'",
                layer=first.name,
            )
    for j in range(len(first.reads)):
        if chained_output(layers, j) is None and len({layer.reads[j] for layer in layers}) > 1:
            raise StrategyError(
                f"layers {first.name} to {last.name} are wired unequally: their input number {j} does not come from "
                "the layer before in all of them, so they cannot run as one program; use executor='stages'",
                layer=first.name,
            )
