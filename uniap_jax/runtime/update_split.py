"""Splits the optimizer step by data flow: what touches one stage's arrays runs there, what joins stages runs once.

Phases alternate: every stage runs its part, the join runs on what the stages sent, the stages go on with what the
join found. Clipping by the global norm takes two: squares per stage, their sum, the clipped update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uniap_jax.core.errors import ExecutionError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import variables
from uniap_jax.core.plan import Plan
from uniap_jax.core.sources import source_line
from uniap_jax.runtime.flow import Flow
from uniap_jax.runtime.homes import LeafHome, ParamHome, result_stages
from uniap_jax.runtime.programs import aval_shape

ANYWHERE, JOIN = -1, -2
"""Places besides the stages: computed wherever it is needed; computed once, from several stages."""

JOINED_LIMIT_BYTES = 16 * 2**20
"""Most bytes that stages may send to the join per step: norms and flags, not parameters."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where and when a variable is known.

    Attributes:
        place: a stage, ANYWHERE or JOIN.
        ready: the first phase whose stage programs may read it.
    """

    place: int
    ready: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """One program of the update.

    Attributes:
        phase: from 0.
        place: a stage or JOIN.
        jaxpr: of `inputs` to `outputs`.
        inputs: variables: sources of the flow, or what earlier pieces computed, or constants.
        outputs: variables, then the atoms of step outputs in the order of `positions`.
        sent: how many of `outputs` other pieces read.
        positions: step outputs that this piece computes.
    """

    phase: int
    place: int
    jaxpr: ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Any, ...]
    sent: int
    positions: tuple[int, ...]


def split_update(
    graph: LayerGraph, plan: Plan, flow: Flow, params: Sequence[ParamHome], leaves: Sequence[LeafHome]
) -> tuple[Piece, ...]:
    """Pieces in an order in which they can run.

    Raises:
        ExecutionError: an equation joins large arrays of several stages; names it and its source line.
    """
    spots = _source_spots(graph, plan, flow, params, leaves)
    _place_eqns(flow, spots)
    homes = [None if leaf is None else leaves[leaf].stage for leaf in graph.step.output_leaf]
    last = max((s.ready for s in spots.values() if s.place != JOIN), default=0)
    return _cut(flow, spots, homes, last, plan.num_stages)


def _source_spots(
    graph: LayerGraph, plan: Plan, flow: Flow, params: Sequence[ParamHome], leaves: Sequence[LeafHome]
) -> dict[Var, Spot]:
    results = result_stages(graph, plan)

    def place(kind: str, i: int) -> int:
        if kind == "grad":
            return params[i].stage
        if kind == "result":
            return results[i]
        stage = leaves[i].stage if kind == "state" else None
        return ANYWHERE if stage is None else stage

    spots = {var: Spot(place(kind, i), 0) for var, (kind, i) in flow.sources.items()}
    spots.update(dict.fromkeys(flow.consts, Spot(ANYWHERE, 0)))
    return spots


def _size(atom: Any) -> int:
    return int(np.prod(getattr(atom.aval, "shape", ()), dtype=np.int64))


def _place_eqns(flow: Flow, spots: dict[Var, Spot]) -> None:
    """Adds the spot of every equation's outputs, in order."""
    joined = 0
    for eqn in flow.eqns:
        spot = _spot(eqn, spots)
        spots.update(dict.fromkeys(eqn.outvars, spot))
        if spot.place == JOIN:
            sent = sum(_size(v) * aval_shape(v).dtype.itemsize for v in variables(eqn.invars) if _size(v) > 1)
            joined += sent
            if joined > JOINED_LIMIT_BYTES:
                raise ExecutionError(
                    f"the optimizer update joins large arrays of several stages: {eqn.primitive.name} at "
                    f"{source_line(eqn) or 'an unknown line'} reads {sent / 2**20:.1f} MiB ({joined / 2**20:.1f} MiB "
                    f"in all, the limit is {JOINED_LIMIT_BYTES / 2**20:.0f} MiB), which would gather parameters on one "
                    "stage; use num_stages=1, or an optimizer that treats parameters one by one",
                    equation=eqn.primitive.name,
                    source=source_line(eqn),
                    joined_bytes=joined,
                )


def _spot(eqn: JaxprEqn, spots: dict[Var, Spot]) -> Spot:
    inputs = [(v, spots[v]) for v in variables(eqn.invars)]
    stages = {s.place for _, s in inputs if s.place >= 0}
    ready = max((s.ready for _, s in inputs), default=0)
    small = all(_size(v) <= 1 for v, s in inputs if s.place != ANYWHERE) and all(_size(v) <= 1 for v in eqn.outvars)
    if len(stages) > 1 or (stages and ready and small and any(s.place < 0 and s.ready for _, s in inputs)):
        # a scalar that meets something joined stays with the join: a sum over stages is one join, not one per term
        phase = max([s.ready for _, s in inputs if s.place >= 0] + [s.ready - 1 for _, s in inputs])
        return Spot(JOIN, phase + 1)
    if stages:
        return Spot(stages.pop(), ready)
    if any(s.place == JOIN and _size(v) > 1 for v, s in inputs):
        return Spot(JOIN, ready)
    return Spot(ANYWHERE, ready)


def _cut(
    flow: Flow, spots: dict[Var, Spot], homes: Sequence[int | None], last: int, num_stages: int
) -> tuple[Piece, ...]:
    """Pieces, found backwards from the step's outputs: each is the cone of what later ones need of its place."""
    final: dict[int, list[int]] = {}
    for position, atom in enumerate(flow.outvars):
        spot = Spot(ANYWHERE, 0) if isinstance(atom, Literal) else spots[atom]
        home = homes[position]
        place = spot.place if spot.place >= 0 else home if home is not None and spot.ready <= last else JOIN
        if spot.place == JOIN:
            place = JOIN
        final.setdefault(place, []).append(position)
    wanted: dict[tuple[int, int], dict[Var, None]] = {}
    pieces: list[Piece] = []
    for phase in reversed(range(last + 1)):
        for place in (JOIN, *reversed(range(num_stages))):
            sent = list(wanted.get((phase, place), {}))
            positions = final.get(place, []) if phase == last else []
            if not sent and not positions:
                continue
            piece = _piece(flow, spots, phase, place, sent, positions)
            for var in piece.inputs:
                spot = spots[var]
                if place == JOIN and spot.place >= 0:
                    wanted.setdefault((phase, spot.place), {})[var] = None
                elif spot.place == JOIN:
                    wanted.setdefault((spot.ready - 1, JOIN), {})[var] = None
            pieces.append(piece)
    return tuple(reversed(pieces))


def _piece(
    flow: Flow, spots: dict[Var, Spot], phase: int, place: int, sent: Sequence[Var], positions: Sequence[int]
) -> Piece:
    def mine(eqn: JaxprEqn) -> bool:
        spot = spots[eqn.outvars[0]]
        if spot.place == JOIN:
            return place == JOIN and spot.ready == phase + 1
        return spot.place in (place, ANYWHERE)

    outputs = [*sent, *(flow.outvars[p] for p in positions)]
    jaxpr, inputs = flow.cone(outputs, [e for e in flow.eqns if e.outvars and mine(e)])
    return Piece(
        phase=phase,
        place=place,
        jaxpr=jaxpr,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sent=len(sent),
        positions=tuple(positions),
    )
