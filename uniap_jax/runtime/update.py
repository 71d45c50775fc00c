"""Runs the pieces of the optimizer step on their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from uniap_jax.core.jax_compat import Var
from uniap_jax.runtime.crossing import Crossing, Way, carried, programs_of, way_to
from uniap_jax.runtime.evaluate import spread
from uniap_jax.runtime.feed import Held, Leaves, whole_leaf
from uniap_jax.runtime.homes import REPLICATED, Layout
from uniap_jax.runtime.presence import absent, is_here
from uniap_jax.runtime.programs import Program, as_function, aval_shape, build, is_key, shape_of
from uniap_jax.runtime.update_split import JOIN, Piece

SMALL_METRIC_BYTES = 2**20
"""Metrics up to this size are copied to all devices, so that they can be used together whatever stage made them."""

JOIN_STAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ready:
    """A piece with its program.

    Attributes:
        piece: what it computes.
        stage: whose devices run it.
        program: `(donated leaves, parcels, other inputs) -> (*parcels, *step outputs)`.
        donated: leaves whose buffers the outputs take.
        parcels: that come in from other pieces.
        ways: of the parcels.
        inputs: variables of the other inputs.
        sends: parcels that go out.
    """

    piece: Piece
    stage: int
    program: Program
    donated: tuple[Var, ...]
    parcels: tuple[Parcel, ...]
    ways: tuple[Way, ...]
    inputs: tuple[Var, ...]
    sends: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leaving:
    """An output that moves after it is computed.

    Attributes:
        position: among the step's outputs.
        way: to the devices where it belongs.
        target: its layout there.
    """

    position: int
    way: Way
    target: NamedSharding


Parcel = tuple[Var, ...]
"""Variables that travel as one array: scalars of one type stacked, anything else alone."""


def _parcels(sent: Sequence[Var]) -> list[Parcel]:
    groups: dict[Any, list[Var]] = {}
    for var in sent:
        shape = aval_shape(var)
        alone = bool(shape.shape) or is_key(shape.dtype)
        groups.setdefault(var if alone else shape.dtype, []).append(var)
    return [tuple(g) for g in groups.values()]


def _packed(parcel: Parcel, known: Mapping[Var, Any]) -> Any:
    return known[parcel[0]] if len(parcel) == 1 else jnp.stack([known[v] for v in parcel])


def _unpacked(parcel: Parcel, array: Any) -> dict[Var, Any]:
    return {parcel[0]: array} if len(parcel) == 1 else {v: array[i] for i, v in enumerate(parcel)}


def _parcel_shape(parcel: Parcel, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    shape = aval_shape(parcel[0], sharding)
    if len(parcel) == 1:
        return shape
    return jax.ShapeDtypeStruct((len(parcel), *shape.shape), shape.dtype, sharding=sharding)


class Update:
    """The optimizer step of a pipeline.

    Args:
        layout: graph under its plan.
        pieces: from `split_update`.
        leaves: how to read the state.
        results: layout of each whole-batch result.
        grads: for each parameter the shapes of its gradient at home: one per stage that computes a part of it.
        donated: state leaves whose buffers are given up.
        pool: compiles in the background.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Piece],
        leaves: Leaves,
        results: Sequence[jax.ShapeDtypeStruct],
        grads: Sequence[Sequence[jax.ShapeDtypeStruct]],
        donated: Sequence[int],
        pool: Executor | None = None,
    ) -> None:
        self._layout, self._leaves = layout, leaves
        self._results, self._grads = tuple(results), tuple(tuple(g) for g in grads)
        self._sources = layout.update.sources
        self._sends = [_parcels(piece.outputs[: piece.sent]) for piece in pieces]
        self._carrier = {var: parcel for parcels in self._sends for parcel in parcels for var in parcel}
        self._sender = {
            parcel: _stage_of(piece) for piece, parcels in zip(pieces, self._sends, strict=True) for parcel in parcels
        }
        last = pieces[-1].phase if pieces else 0
        self._ready = [
            self._build(p, sends, frozenset(donated) if p.phase == last else frozenset(), pool)
            for p, sends in zip(pieces, self._sends, strict=True)
        ]
        self._leaving = self._output_ways(pool)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One per stage and phase, one per join, and those that take arrays to other processes."""
        ways = [*(w for r in self._ready for w in r.ways), *(leaving.way for leaving in self._leaving)]
        return (*(r.program for r in self._ready), *programs_of(ways))

    # ---- building ------------------------------------------------------------------------------------------------

    def _build(self, piece: Piece, sends: Sequence[Parcel], donated: frozenset[int], pool: Executor | None) -> _Ready:
        layout, flow = self._layout, self._layout.update
        stage = _stage_of(piece)
        given = self._given(piece, donated)
        order = [v for v in piece.inputs if v not in flow.consts]
        brought = [v for v in order if v in self._carrier and (piece.place == JOIN or v not in self._sources)]
        parcels = list(dict.fromkeys(self._carrier[v] for v in brought))
        rest = [v for v in order if v not in given and v not in brought]
        run = as_function(piece.jaxpr, piece.inputs, flow.consts)

        def function(donated_leaves: list[Any], arrived: list[Any], others: list[Any]) -> list[Any]:
            known = dict(zip(given, donated_leaves, strict=True))
            for parcel, array in zip(parcels, arrived, strict=True):
                known.update(_unpacked(parcel, array))
            known.update({v: self._summed(v, x) for v, x in zip(rest, others, strict=True)})
            made = run(*(known[v] for v in order))
            sent = dict(zip(piece.outputs[: piece.sent], made, strict=False))
            return [*(_packed(p, sent) for p in sends), *made[piece.sent :]]

        outputs = [layout.on(stage)] * len(sends) + [self._output_sharding(p, stage) for p in piece.positions]
        name = f"update_{piece.phase}_{'join' if piece.place == JOIN else f'stage_{stage}'}"
        shapes = [[self._shape(v, stage) for v in given], [_parcel_shape(p, layout.on(stage)) for p in parcels]]
        program = build(
            name,
            function,
            [*shapes, [self._shape(v, stage) for v in rest]],
            mesh=layout.meshes[stage],
            outputs=outputs,
            donate=(0,) if given else (),
            pool=pool,
        )
        return _Ready(
            piece=piece,
            stage=stage,
            program=program,
            donated=tuple(given),
            parcels=tuple(parcels),
            ways=tuple(self._parcel_way(name, p, stage, pool) for p in parcels),
            inputs=tuple(rest),
            sends=tuple(sends),
        )

    def _parcel_way(self, reader: str, parcel: Parcel, stage: int, pool: Executor | None) -> Way:
        sender, number = self._sender[parcel], list(self._sender).index(parcel)
        shape = _parcel_shape(parcel, self._layout.on(sender))
        return way_to(f"parcel_{number}_to_{reader}", shape, self._layout.on(stage), pool)

    def _given(self, piece: Piece, donated: frozenset[int]) -> list[Var]:
        """Leaves among a piece's inputs whose buffers its outputs take."""
        step = self._layout.graph.step
        replaced = {step.output_leaf[p] for p in piece.positions}
        found: list[Var] = []
        for var in piece.inputs:
            kind, i = self._sources.get(var, ("", 0))
            at_home = kind == "state" and self._layout.leaves[i].stage == piece.place
            if at_home and i in donated and i in replaced:
                found.append(var)
        return found

    def _shape(self, var: Var, stage: int) -> Any:
        layout = self._layout
        kind, i = self._sources[var]
        if kind == "state":
            return self._leaves.shape(i, stage)
        if kind == "batch":
            return shape_of(layout.graph.step.batch[i], layout.on(stage))
        return self._results[i] if kind == "result" else list(self._grads[i])

    def _summed(self, var: Var, value: Any) -> Any:
        """A parameter's gradient from the stages that compute parts of it, in the parameter's dtype."""
        kind, _ = self._sources.get(var, ("sent", 0))
        if kind != "grad" or not isinstance(value, list):
            return value
        if not value:
            shape = aval_shape(var)
            return jnp.zeros(shape.shape, shape.dtype)
        total = value[0]
        for part in value[1:]:
            total = total + part
        return total.astype(aval_shape(var).dtype)

    def _output_sharding(self, position: int, stage: int) -> NamedSharding | None:
        layout, step = self._layout, self._layout.graph.step
        leaf = step.output_leaf[position]
        if leaf is not None:
            home = layout.leaves[leaf]
            return layout.on(stage, home.spec) if home.stage == stage else layout.on(stage)
        if step.outputs[position].nbytes <= SMALL_METRIC_BYTES:
            return layout.on(stage)
        return None if jax.process_count() == 1 else spread(step.outputs[position].shape, layout.meshes[stage])

    def _output_ways(self, pool: Executor | None) -> tuple[_Leaving, ...]:
        """Outputs that have to move after they are computed, and how."""
        layout, step = self._layout, self._layout.graph.step
        found = []
        for ready in self._ready:
            for p in ready.piece.positions:
                leaf, value = step.output_leaf[p], step.outputs[p]
                if leaf is None and value.nbytes <= SMALL_METRIC_BYTES:
                    target = layout.on(None)
                elif leaf is not None and layout.leaves[leaf].stage != ready.stage:
                    target = layout.state_shardings[leaf]
                else:
                    continue
                whole = NamedSharding(target.mesh, REPLICATED)
                way = way_to(
                    f"output_{p}_from_stage_{ready.stage}", shape_of(value, layout.on(ready.stage)), whole, pool
                )
                if not isinstance(way, Crossing):  # within one process any layout is reached from any other
                    way = target if is_here(target.device_set) else None
                found.append(_Leaving(position=p, way=way, target=target))
        return tuple(found)

    def _missing(self, position: int, stage: int) -> jax.Array:
        """An output of which this process has no part."""
        layout, step = self._layout, self._layout.graph.step
        leaf, value = step.output_leaf[position], step.outputs[position]
        sharding = layout.state_shardings[leaf] if leaf is not None else self._output_sharding(position, stage)
        assert sharding is not None
        return absent(value.shape, value.dtype, sharding)

    # ---- running -------------------------------------------------------------------------------------------------

    def __call__(
        self,
        state: Sequence[Any],
        held: Held,
        batch: Sequence[Any],
        results: Sequence[Any],
        grads: Sequence[list[Any]],
    ) -> list[Any]:
        """Flat outputs of the step.

        Args:
            state: placed leaves.
            held: the same, as stages read them.
            batch: leaves of the whole batch.
            results: of the whole batch, each on the stage that computed it.
            grads: per parameter its parts, all at home.
        """
        sent: dict[Parcel, Any] = {}
        outputs: list[Any] = [None] * len(self._layout.graph.step.outputs)
        for ready in self._ready:
            given = [state[self._sources[v][1]] for v in ready.donated]
            arrived = self._brought(ready, sent)
            others = [self._fetch(v, ready.stage, held, batch, results, grads) for v in ready.inputs]
            made = ready.program(given, arrived, others)
            sent.update(zip(ready.sends, made, strict=False))
            for position, array in zip(ready.piece.positions, made[len(ready.sends) :], strict=True):
                outputs[position] = array
        away = self._leaving
        arrays = carried([outputs[leaving.position] for leaving in away], [leaving.way for leaving in away])
        for leaving, array in zip(away, arrays, strict=True):
            whole = isinstance(leaving.way, Crossing) and array is not None and leaving.target.spec != REPLICATED
            outputs[leaving.position] = jax.device_put(array, leaving.target) if whole else array
        for ready in self._ready:
            for position in ready.piece.positions:
                if outputs[position] is None:
                    outputs[position] = self._missing(position, ready.stage)
        return outputs

    def _brought(self, ready: _Ready, sent: Mapping[Parcel, Any]) -> list[Any]:
        """What other pieces computed for this one, on its devices, in one call."""
        return carried([sent[p] for p in ready.parcels], ready.ways)

    def _fetch(
        self,
        var: Var,
        stage: int,
        held: Held,
        batch: Sequence[Any],
        results: Sequence[Any],
        grads: Sequence[list[Any]],
    ) -> Any:
        kind, i = self._sources[var]
        if kind == "state":
            return held.fetch(i, stage)
        if kind == "batch":
            return whole_leaf(self._layout, i, batch[i], self._layout.on(stage))
        return results[i] if kind == "result" else grads[i]


def _stage_of(piece: Piece) -> int:
    return JOIN_STAGE if piece.place == JOIN else piece.place
