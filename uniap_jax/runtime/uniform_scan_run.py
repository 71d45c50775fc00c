"""The turns of a loop as equal layers: their inputs, layouts, and what travels through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jax_compat import ClosedJaxpr, Literal, Var
from uniap_jax.core.jaxprs import close, live_eqns, open_jaxpr, variables
from uniap_jax.core.loop_cut import ScanCut
from uniap_jax.core.loop_turn import kinds_of, turn_of
from uniap_jax.core.sharding import LayerSharding, layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.uniform_pass import EVERYWHERE, STAGE
from uniap_jax.runtime.uniform_run import Group, Run, Slot, Weight


def scan_run(graph: LayerGraph, layer: Layer, cut: ScanCut, strategy: Strategy, num_stages: int) -> Run:
    """The loop as a run.

    Args:
        graph: in which the loop is a layer of its own.
        layer: that layer.
        cut: how it was made.
        strategy: of every turn.
        num_stages: that the turns are split over.
    """
    kinds = kinds_of(cut)
    sharding, layouts = _body_sharding(graph, cut, strategy)
    avals = [v.aval for v in open_jaxpr(cut.body).invars]
    stacked: list[Weight] = []
    shared: list[Weight] = []
    slots: list[Slot] = []
    sources: list[tuple[str, int]] = []
    statics: dict[str, list[Any]] = {"stacked": [], "shared": []}
    for position, (atom, kind, aval) in enumerate(zip(cut.eqn.invars, kinds, avals, strict=True)):
        layout = layouts[position]
        if kind in statics:
            into = stacked if kind == "stacked" else shared
            sources.append((kind, len(into)))
            statics[kind].append(atom)
            into.append(
                Weight(
                    shape=tuple(aval.shape),
                    dtype=aval.dtype,
                    trained=isinstance(atom, Var) and atom in cut.trained,
                    stored=layout.stored,
                    grads=layout.grads,
                )
            )
        elif kind == "slot":
            turn = position - cut.num_consts
            chained = turn >= 0
            number = cut.entering[turn] if chained or isinstance(atom, Literal) else cut.values[atom]
            sources.append(("slot", len(slots)))
            how: tuple[str, int | None] = ("chain", turn) if chained else ("relay", None)
            slots.append(_slot(graph, number, how[0], how[1], layout.compute))
        else:
            operand = graph.operands[cut.operands[atom]]
            sources.append((operand.kind, operand.leaf))
    after = {v for other in graph.layers[layer.index + 1 :] for v in other.reads} | set(graph.results)
    leaving: dict[int, tuple[int, int | None]] = {
        cut.final[s.output]: (i, None) for i, s in enumerate(slots) if s.kind == "chain" and s.output is not None
    }
    for i in range(cut.num_carry, len(cut.final)):
        if cut.final[i] in after:
            leaving[cut.final[i]] = (len(slots), None)
            slots.append(_slot(graph, cut.final[i], "extra", i, PartitionSpec(None, *sharding.writes[i])))
    for number in sorted(v for v in after if graph.producer[v] < layer.index):
        place = next((i for i, s in enumerate(slots) if s.kind == "relay" and s.value == number), len(slots))
        if place == len(slots):
            slots.append(_slot(graph, number, "relay", None, PartitionSpec()))
        leaving[number] = (place, None)
    params, prologue = _prologue(cut, statics["stacked"], statics["shared"])
    group = Group(
        size=cut.length // num_stages,
        strategy=strategy,
        specs=tuple(x.compute for x in layouts),
        slots=tuple(s.spec for s in slots),
        stacked=tuple(stacked),
    )
    return Run(
        count=cut.length,
        body=cut.body,
        sources=tuple(sources),
        groups=(group,),
        shared=tuple(shared),
        slots=tuple(slots),
        leaving=leaving,
        params=params,
        prologue=prologue,
        homes=_homes(cut, kinds, layouts),
    )


def _slot(graph: LayerGraph, number: int, kind: str, output: int | None, spec: PartitionSpec) -> Slot:
    value = graph.values[number]
    return Slot(
        kind=kind,
        value=None if kind == "extra" else number,
        output=output,
        shape=value.shape,
        dtype=value.dtype,
        batch_dim=value.batch_dim,
        spec=spec,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Layout of one input of a turn."""

    compute: PartitionSpec = EVERYWHERE
    stored: PartitionSpec = EVERYWHERE
    grads: PartitionSpec = EVERYWHERE
    optimizer: PartitionSpec = EVERYWHERE


def _body_sharding(graph: LayerGraph, cut: ScanCut, strategy: Strategy) -> tuple[LayerSharding, list[_Layout]]:
    """One turn of the loop as a layer under the strategy."""
    turn = turn_of(graph, cut)
    sharding = layer_sharding(turn.graph, turn.graph.layers[0], strategy)
    layouts = [_Layout() for _ in turn.kinds]
    for at, i in enumerate(turn.params):
        layouts[i] = _Layout(
            compute=sharding.gathered[at],
            stored=sharding.stored[at],
            grads=sharding.grads[at],
            optimizer=sharding.optimizer[at],
        )
    for specs, group in ((sharding.operands, turn.operands), (sharding.reads, turn.reads)):
        for spec, i in zip(specs, group, strict=True):
            layouts[i] = _Layout(compute=spec)
    return sharding, layouts


def _prologue(
    cut: ScanCut, stacked: list[Any], shared: list[Any]
) -> tuple[tuple[int, ...], Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]]:
    """Parameters that the loop reads, and the function that makes its inputs from them once per step."""
    outs = [*stacked, *shared]
    eqns, _ = live_eqns(cut.rest, outs)
    read = {v for e in eqns for v in variables(e.invars)} | set(variables(outs))
    params = [v for v in cut.params if v in read]
    operands = [v for v in cut.operands if v in read]
    program: ClosedJaxpr = close([*params, *operands], outs, eqns)
    leaves = [cut.graph.operands[cut.operands[v]].leaf for v in operands]

    def run(chosen: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = jax.core.eval_jaxpr(open_jaxpr(program), (), *chosen, *(state[i] for i in leaves))
        return list(made[: len(stacked)]), list(made[len(stacked) :])

    return tuple(cut.params[v] for v in params), run


def _homes(
    cut: ScanCut, kinds: Sequence[str], layouts: Sequence[_Layout]
) -> dict[int, tuple[PartitionSpec, PartitionSpec, bool]]:
    """Parameters that the loop runs over: as it reads them, their layers split over the stages."""
    homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]] = {}
    for atom, kind, layout in zip(cut.eqn.invars, kinds, layouts, strict=True):
        if isinstance(atom, Literal) or kind not in ("stacked", "shared"):
            continue
        for var in _behind(cut, atom):
            if kind == "stacked":
                home = (PartitionSpec(STAGE, *layout.stored), PartitionSpec(STAGE, *layout.optimizer), True)
            else:
                home = (layout.stored, layout.optimizer, False)
            homes.setdefault(cut.params[var], home)
    return homes


def _behind(cut: ScanCut, atom: Var) -> list[Var]:
    """Parameters of the same shape that a value is made from: itself, or what a cast reads."""
    if atom in cut.params:
        return [atom]
    _, free = live_eqns(cut.rest, [atom])
    shape = tuple(atom.aval.shape)  # type: ignore[attr-defined]
    return [v for v in cut.params if v in free and tuple(v.aval.shape) == shape]
