"""One stage's part of a tick, as every stage runs it at once: manual over the axis `stage`, automatic over the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.sharding import assign_axes
from uniap_jax.runtime.loss import accumulator_dtype
from uniap_jax.runtime.programs import is_differentiable, is_key
from uniap_jax.runtime.uniform_layer import LayerPass
from uniap_jax.runtime.uniform_run import Run, Slot

STAGE = "stage"
ON_STAGE = PartitionSpec(STAGE)
EVERYWHERE = PartitionSpec()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTicks:
    """Forward and backward of the run for one tick; all methods are called on whole arrays, inside a jit.

    Attributes:
        mesh: (stage, x0, x1, ...).
        run: the equal layers.
        layer: one of them, differentiated.
        num_microbatches: c.
    """

    mesh: Mesh
    run: Run
    layer: LayerPass
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """P."""
        return int(self.mesh.shape[STAGE])

    @property
    def moving(self) -> tuple[int, ...]:
        """Slots that have gradients."""
        return tuple(i for i, s in enumerate(self.run.slots) if is_differentiable(s.dtype))

    @property
    def relays(self) -> tuple[int, ...]:
        """Slots that the backward pass reads and that no layer changes."""
        read = {self.run.sources[i][1] for i in self.layer.reads_back if self.run.sources[i][0] == "slot"}
        return tuple(i for i in sorted(read) if self.run.slots[i].kind == "relay")

    def forward(
        self, weights: tuple[list[Any], list[Any]], rows: dict[int, Any], fed: list[Any], held: list[Any], tick: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Every stage runs its micro-batch through its layers and hands the result on.

        Args:
            weights: stacked [P, layers of a stage, ...] and shared inputs of the run.
            rows: leaves of the batch, [c, B/c, ...].
            fed: slots of the micro-batch that enters stage 0.
            held: [P, ...] slots that the stage before handed on in the last tick.
            tick: stage s runs micro-batch tick - s.

        Returns:
            What is handed on, the slots that leave the last stage, and what the backward pass needs: [P, ...].
        """

        def body(ids: Any, stacked: list[Any], *rest: Any) -> Any:
            shared, rows, fed, held, tick = rest
            stage, slots = ids[0], _choose(ids[0] == 0, fed, _local(held))
            index = jnp.clip(tick - stage, 0, self.num_microbatches - 1)
            slots = [self._pin(x, s.spec) for x, s in zip(slots, self.run.slots, strict=True)]
            relays = [slots[i] for i in self.relays]
            slots, kept = self._layers_forward(_local(stacked), shared, self._rows(rows, index), index, slots, stage)
            leaving = [self._emit(x, s, self.num_stages - 1) for x, s in zip(slots, self.run.slots, strict=True)]
            return _wide(self._pass(slots, 1)), leaving, _wide([*kept, *relays])

        held, leaving, kept = self._everywhere(
            body,
            (ON_STAGE, ON_STAGE, EVERYWHERE, EVERYWHERE, EVERYWHERE, ON_STAGE, EVERYWHERE),
            (ON_STAGE, [self._emitted_spec(s) for s in self.run.slots], ON_STAGE),
        )(*weights, rows, fed, held, tick)
        slots = zip(leaving, self.run.slots, strict=True)
        return self.pin_held(held, range(len(held))), [self._collect(x, s, self.num_stages - 1) for x, s in slots], kept

    def backward(
        self,
        weights: tuple[list[Any], list[Any]],
        rows: dict[int, Any],
        kept: list[Any],
        fed: list[Any],
        held: list[Any],
        totals: tuple[list[Any], list[Any]],
        tick: Any,
        index: Callable[[Any, Any], Any],
    ) -> tuple[list[Any], list[Any], tuple[list[Any], list[Any]]]:
        """Every stage pulls a gradient back through its layers and adds up those of its weights.

        Args:
            weights: as in `forward`.
            rows: as in `forward`.
            kept: [P, ...] what `forward` returned for the same micro-batches.
            fed: gradients of the moving slots that leave the last stage.
            held: [P, ...] gradients that the stage after handed back in the last tick.
            totals: gradients so far: stacked [P, layers of a stage, ...] and shared [P, ...]; of trained weights.
            tick: of the backward pass.
            index: `index(tick, stage)`: micro-batch of a stage; not one of 0 to c-1 in a bubble.

        Returns:
            What is handed back, the gradients of the slots that entered stage 0, and the totals.
        """
        slots = [self.run.slots[i] for i in self.moving]

        def body(ids: Any, stacked: list[Any], *rest: Any) -> Any:
            shared, rows, kept, fed, held, totals, tick = rest
            stage, grads = ids[0], _choose(ids[0] == self.num_stages - 1, fed, _local(held))
            i = index(tick, stage)
            valid = (i >= 0) & (i < self.num_microbatches)
            i = jnp.clip(i, 0, self.num_microbatches - 1)
            sums = (_local(totals[0]), _local(totals[1]))
            grads, added = self._layers_backward(
                _local(stacked), shared, self._rows(rows, i), i, _local(kept), grads, stage, sums, valid
            )
            leaving = [self._emit(x, s, 0) for x, s in zip(grads, slots, strict=True)]
            return _wide(self._pass(grads, -1)), leaving, (_wide(added[0]), _wide(added[1]))

        held, leaving, totals = self._everywhere(
            body,
            (ON_STAGE, ON_STAGE, EVERYWHERE, EVERYWHERE, ON_STAGE, EVERYWHERE, ON_STAGE, ON_STAGE, EVERYWHERE),
            (ON_STAGE, [self._emitted_spec(s) for s in slots], ON_STAGE),
        )(*weights, rows, kept, fed, held, totals, tick)
        entering = [self._collect(x, s, 0) for x, s in zip(leaving, slots, strict=True)]
        return self.pin_held(held, self.moving), entering, self.pin_totals(totals)

    def store(self, waiting: list[Any], kept: list[Any], places: Any) -> list[Any]:
        """Puts what each stage keeps of a micro-batch at that stage's place: [P, places, ...]."""

        def body(ids: Any, waiting: list[Any], kept: list[Any], place: Any) -> list[Any]:
            pairs = zip(waiting, kept, strict=True)
            return [lax.dynamic_update_index_in_dim(w, k, place[0], 1) for w, k in pairs]

        return self._everywhere(body, (ON_STAGE, ON_STAGE, ON_STAGE, ON_STAGE), ON_STAGE)(waiting, kept, places)  # type: ignore[no-any-return]

    def fetch(self, waiting: list[Any], places: Any) -> list[Any]:
        """What was stored at each stage's place."""

        def body(ids: Any, waiting: list[Any], place: Any) -> list[Any]:
            return [lax.dynamic_index_in_dim(w, place[0], 1, keepdims=False) for w in waiting]

        return self._everywhere(body, (ON_STAGE, ON_STAGE, ON_STAGE), ON_STAGE)(waiting, places)  # type: ignore[no-any-return]

    # ---- inside a stage ----------------------------------------------------------------------------------------

    def _layers_forward(
        self, stacked: list[Any], shared: list[Any], rows: dict[int, Any], index: Any, slots: list[Any], stage: Any
    ) -> tuple[list[Any], list[Any]]:
        per_stage = self.run.count // self.num_stages

        def one(slots: list[Any], own: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            number, weights = own
            outs, kept = self.layer.forward(self._inputs(weights, shared, rows, index, slots))
            return self._advance(slots, outs, stage * per_stage + number), kept

        return lax.scan(one, slots, (jnp.arange(per_stage, dtype=jnp.int32), stacked))

    def _layers_backward(
        self,
        stacked: list[Any],
        shared: list[Any],
        rows: dict[int, Any],
        index: Any,
        kept: list[Any],
        grads: list[Any],
        stage: Any,
        totals: tuple[list[Any], list[Any]],
        valid: Any,
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        run, per_stage = self.run, self.run.count // self.num_stages
        count = len(self.layer.kept)
        relays = dict(zip(self.relays, kept[count:], strict=True))
        slots = [relays.get(i) for i in range(len(run.slots))]

        def one(carry: tuple[list[Any], list[Any], list[Any]], own: tuple[Any, list[Any], list[Any]]) -> Any:
            grads, sums, common = carry
            number, weights, kept = own
            inputs = self._inputs(weights, shared, rows, index, slots)
            found = self.layer.backward(inputs, kept, self._output_grads(grads, stage * per_stage + number))
            by_source = {source: g for source, g in zip(run.sources, found, strict=True) if g is not None}
            grads = self._retreat(grads, by_source)
            mine = [self._pin(by_source[("stacked", i)], w.grads) for i, w in enumerate(run.stacked) if _trains(w)]
            theirs = [by_source[("shared", i)] for i in self.trained_shared]
            sums = [_add_at(t, number, g, valid) for t, g in zip(sums, mine, strict=True)]
            common = [_add(t, g, valid) for t, g in zip(common, theirs, strict=True)]
            return (grads, sums, common), None

        pins = [PartitionSpec(None, *run.stacked[i].grads) for i in self.trained_stacked]
        sums = [self._pin(t, spec) for t, spec in zip(totals[0], pins, strict=True)]
        xs = (jnp.arange(per_stage, dtype=jnp.int32), stacked, kept[:count])
        (grads, sums, common), _ = lax.scan(one, (grads, sums, totals[1]), xs, reverse=True)
        return grads, (sums, common)

    @property
    def trained_shared(self) -> tuple[int, ...]:
        """Shared weights that have gradients."""
        return tuple(i for i, w in enumerate(self.run.shared) if _trains(w))

    @property
    def trained_stacked(self) -> tuple[int, ...]:
        """Stacked weights that have gradients."""
        return tuple(i for i, w in enumerate(self.run.stacked) if _trains(w))

    def _inputs(
        self, stacked: list[Any], shared: list[Any], rows: dict[int, Any], index: Any, slots: Sequence[Any]
    ) -> list[Any]:
        """Inputs of a layer's body, laid out as it computes with them; None where a slot is not there."""

        def one(kind: str, i: int) -> Any:
            if kind == "index":
                return index
            places: dict[str, Any] = {"stacked": stacked, "shared": shared, "batch": rows, "slot": slots}
            return places[kind][i]

        found = [one(*source) for source in self.run.sources]
        return [None if x is None else self._pin(x, s) for x, s in zip(found, self.run.specs, strict=True)]

    def _advance(self, slots: list[Any], outs: list[Any], number: Any) -> list[Any]:
        """Slots after layer `number`."""

        def one(slot: Slot, old: Any) -> Any:
            if slot.output is None:
                return old
            if slot.kind == "extra":
                return lax.dynamic_update_index_in_dim(old, outs[slot.output], number, 0)
            return self._pin(_typed(outs[slot.output], slot.dtype), slot.spec)

        return [one(s, x) for s, x in zip(self.run.slots, slots, strict=True)]

    def _output_grads(self, grads: list[Any], number: Any) -> list[Any]:
        """Gradients of the outputs of layer `number` from those of the slots after it; None where there is none."""
        avals = self.run.body.out_avals
        found: list[Any] = [jnp.zeros(a.shape, a.dtype) if is_differentiable(a.dtype) else None for a in avals]
        for i, grad in zip(self.moving, grads, strict=True):
            slot = self.run.slots[i]
            if slot.output is not None:
                share = lax.dynamic_index_in_dim(grad, number, 0, keepdims=False) if slot.kind == "extra" else grad
                found[slot.output] = found[slot.output] + share
        return found

    def _retreat(self, grads: list[Any], by_source: dict[tuple[str, int], Any]) -> list[Any]:
        """Gradients of the slots before a layer."""

        def one(i: int, after: Any) -> Any:
            slot, new = self.run.slots[i], by_source.get(("slot", i))
            if slot.kind == "extra" or (slot.kind == "relay" and new is None):
                return after
            return self._pin(new if slot.kind == "chain" else after + new, slot.spec)

        return [one(i, g) for i, g in zip(self.moving, grads, strict=True)]

    def _rows(self, rows: dict[int, Any], index: Any) -> dict[int, Any]:
        return {leaf: lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for leaf, x in rows.items()}

    # ---- between stages ----------------------------------------------------------------------------------------

    def _pass(self, values: list[Any], step: int) -> list[Any]:
        """To the next stage (1) or the one before (-1); what arrives from nowhere is zero."""
        pairs = [(s, s + step) for s in range(self.num_stages) if 0 <= s + step < self.num_stages]
        return [lax.ppermute(x, STAGE, pairs) for x in values]

    def _splits(self, slot: Slot) -> bool:
        ways = self.run.strategy.batch_ways * self.num_stages
        return slot.batch_dim is not None and slot.shape[slot.batch_dim] % ways == 0

    def _emit(self, x: Any, slot: Slot, source: int) -> Any:
        """One stage's value on its way to all: rows spread over the stages where they divide.

        The rows of a device of the batch axes go to the devices of the same place on every stage: (batch axes, stage,
        row), so that coming back they meet where they were.
        """
        if not self._splits(slot):
            return x[None]
        assert slot.batch_dim is not None
        dim, ways = slot.batch_dim, self.run.strategy.batch_ways
        shape = (*x.shape[:dim], ways, self.num_stages, x.shape[dim] // ways // self.num_stages, *x.shape[dim + 1 :])
        pieces = self._pin(x.reshape(shape), slot.spec)
        met = lax.all_to_all(pieces, STAGE, dim + 1, dim + 1, tiled=True)
        return lax.slice_in_dim(met, source, source + 1, axis=dim + 1)

    def _emitted_spec(self, slot: Slot) -> PartitionSpec:
        if not self._splits(slot) or slot.batch_dim is None:
            return ON_STAGE
        return PartitionSpec(*([None] * (slot.batch_dim + 1)), STAGE)

    def _collect(self, x: Any, slot: Slot, source: int) -> Any:
        if not self._splits(slot) or slot.batch_dim is None:
            return x[source]
        axes = assign_axes(self.run.strategy, self.run.strategy.num_devices)
        spec = PartitionSpec(*([None] * slot.batch_dim), (*axes.batch, STAGE))
        return lax.with_sharding_constraint(x.reshape(slot.shape), NamedSharding(self.mesh, spec))

    def _everywhere(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False
        )
        return lambda *args: mapped(jnp.arange(self.num_stages, dtype=jnp.int32), *args)

    def _pin(self, x: Any, spec: PartitionSpec) -> Any:
        """A layout over the automatic axes."""
        if self.mesh.size == self.num_stages or not x.shape or is_key(x.dtype):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))

    # ---- whole arrays ------------------------------------------------------------------------------------------

    def pin_held(self, held: Sequence[Any], slots: Sequence[int]) -> list[Any]:
        """Values between ticks: one a stage."""
        specs = [PartitionSpec(STAGE, *self.run.slots[i].spec) for i in slots]
        return [_constrain(x, self.mesh, s) for x, s in zip(held, specs, strict=True)]

    def pin_totals(self, totals: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Sums of gradients: stacked ones where their layers are, shared ones one a stage."""
        own = [PartitionSpec(STAGE, None, *self.run.stacked[i].grads) for i in self.trained_stacked]
        return (
            [_constrain(x, self.mesh, s) for x, s in zip(totals[0], own, strict=True)],
            [_constrain(x, self.mesh, ON_STAGE) for x in totals[1]],
        )

    def zero_totals(self) -> tuple[list[Any], list[Any]]:
        """Sums before the first micro-batch."""
        per_stage = self.run.count // self.num_stages
        own = [self.run.stacked[i] for i in self.trained_stacked]
        common = [self.run.shared[i] for i in self.trained_shared]
        return self.pin_totals(
            (
                [jnp.zeros((self.num_stages, per_stage, *w.shape), accumulator_dtype(w.dtype)) for w in own],
                [jnp.zeros((self.num_stages, *w.shape), accumulator_dtype(w.dtype)) for w in common],
            )
        )

    def zero_held(self, slots: Sequence[int]) -> list[Any]:
        """What is handed on before the first tick."""
        chosen = [self.run.slots[i] for i in slots]
        return self.pin_held([jnp.zeros((self.num_stages, *s.shape), s.dtype) for s in chosen], slots)

    def zero_waiting(self, depth: int) -> list[Any]:
        """Room for what `depth` micro-batches keep: [P, depth, ...]."""
        per_stage, free = self.run.count // self.num_stages, PartitionSpec.UNCONSTRAINED
        shapes = [((per_stage, *a.shape), a.dtype) for a in self.layer.kept]
        shapes += [(self.run.slots[i].shape, self.run.slots[i].dtype) for i in self.relays]
        specs = [PartitionSpec(STAGE, *([free] * (len(shape) + 1))) for shape, _ in shapes]
        rooms = [jnp.zeros((self.num_stages, depth, *shape), dtype) for shape, dtype in shapes]
        return [_constrain(x, self.mesh, s) for x, s in zip(rooms, specs, strict=True)]


def _trains(weight: Any) -> bool:
    return bool(weight.trained) and is_differentiable(weight.dtype)


def _constrain(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return x if is_key(x.dtype) else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _typed(x: Any, dtype: Any) -> Any:
    """Strongly typed: what goes round a loop must not change its type."""
    return lax.convert_element_type(x, dtype)


def _local(values: Sequence[Any]) -> list[Any]:
    return [x[0] for x in values]


def _wide(values: Sequence[Any]) -> list[Any]:
    return [x[None] for x in values]


def _choose(condition: Any, yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    return [jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def _add_at(totals: Any, place: Any, new: Any, valid: Any) -> Any:
    """In the place of one layer: nothing else is read or written."""
    total = lax.dynamic_index_in_dim(totals, place, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(totals, _add(total, new, valid), place, 0)


def _add(total: Any, new: Any, valid: Any) -> Any:
    """A bubble's gradient may be anything, infinite too: it is left out, not multiplied by zero."""
    return total + jnp.where(valid, new, jnp.zeros_like(new)).astype(total.dtype)
