"""One stage's part of a tick, as every stage runs it at once: manual over the axis `stage`, automatic over the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from uniap_jax.runtime.loss import accumulator_dtype
from uniap_jax.runtime.programs import is_differentiable
from uniap_jax.runtime.uniform_arrays import add, add_at, choose, constrain, local, typed, wide
from uniap_jax.runtime.uniform_layer import LayerPass
from uniap_jax.runtime.uniform_pass import EVERYWHERE, ON_STAGE, STAGE, Passage, pin
from uniap_jax.runtime.uniform_run import Group, Run, Slot

Weights = tuple[list[list[Any]], list[Any]]
"""Stacked, group by group, and shared; inputs of the run, or gradients of those that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTicks:
    """Forward and backward of the run for one tick; all methods are called on whole arrays, inside a jit.

    Attributes:
        mesh: (stage, x0, x1, ...).
        run: the equal layers.
        layers: one of each group, differentiated.
        num_microbatches: c.
    """

    mesh: Mesh
    run: Run
    layers: tuple[LayerPass, ...]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """P."""
        return int(self.mesh.shape[STAGE])

    @property
    def _passage(self) -> Passage:
        return Passage(mesh=self.mesh, strategy=self.run.strategy)

    @property
    def moving(self) -> tuple[int, ...]:
        """Slots that have gradients."""
        return tuple(i for i, s in enumerate(self.run.slots) if is_differentiable(s.dtype))

    @property
    def relays(self) -> tuple[int, ...]:
        """Slots that the backward pass reads and that no layer changes."""
        inputs = {i for layer in self.layers for i in layer.reads_back}
        read = {self.run.sources[i][1] for i in inputs if self.run.sources[i][0] == "slot"}
        return tuple(i for i in sorted(read) if self.run.slots[i].kind == "relay")

    def forward(
        self,
        weights: Weights,
        rows: dict[int, Any],
        fed: list[Any],
        held: list[Any],
        tick: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Every stage runs its micro-batch through its layers and hands the result on.

        Args:
            weights: stacked [P, layers of a group, ...], group by group, and shared inputs of the run.
            rows: leaves of the batch, [c, B/c, ...].
            fed: slots of the micro-batch that enters stage 0.
            held: [P, ...] slots that the stage before handed on in the last tick.
            tick: stage s runs micro-batch tick - s.

        Returns:
            What is handed on, the slots that leave the last stage, and what the backward pass needs: [P, ...].
        """
        last = self.num_stages - 1

        def body(ids: Any, stacked: list[list[Any]], *rest: Any) -> Any:
            shared, rows, fed, held, tick = rest
            stage, slots = ids[0], choose(ids[0] == 0, fed, local(held))
            index = jnp.clip(tick - stage, 0, self.num_microbatches - 1)
            slots = [self._pin(x, s.spec) for x, s in zip(slots, self.run.slots, strict=True)]
            relays = [slots[i] for i in self.relays]
            slots, kept = self._layers_forward(stacked, shared, self._rows(rows, index), index, slots, stage)
            leaving = [self._passage.emit(x, s, last) for x, s in zip(slots, self.run.slots, strict=True)]
            return wide(self._passage.step(slots, 1)), leaving, wide([*kept, *relays])

        held, leaving, kept = self._everywhere(
            body,
            (ON_STAGE, ON_STAGE, EVERYWHERE, EVERYWHERE, EVERYWHERE, ON_STAGE, EVERYWHERE),
            (ON_STAGE, [self._passage.emitted_spec(s) for s in self.run.slots], ON_STAGE),
        )(*weights, rows, fed, held, tick)
        slots = zip(leaving, self.run.slots, strict=True)
        return (
            self.pin_held(held, range(len(held))),
            [self._passage.collect(x, s, last) for x, s in slots],
            kept,
        )

    def backward(
        self,
        weights: Weights,
        rows: dict[int, Any],
        kept: list[Any],
        fed: list[Any],
        held: list[Any],
        totals: Weights,
        tick: Any,
        index: Callable[[Any, Any], Any],
    ) -> tuple[list[Any], list[Any], Weights]:
        """Every stage pulls a gradient back through its layers and adds up those of its weights.

        Args:
            weights: as in `forward`.
            rows: as in `forward`.
            kept: [P, ...] what `forward` returned for the same micro-batches.
            fed: gradients of the moving slots that leave the last stage.
            held: [P, ...] gradients that the stage after handed back in the last tick.
            totals: gradients of trained weights so far: stacked as `weights` are, and shared [P, ...].
            tick: of the backward pass.
            index: `index(tick, stage)`: micro-batch of a stage; not one of 0 to c-1 in a bubble.

        Returns:
            What is handed back, the gradients of the slots that entered stage 0, and the totals.
        """
        slots = [self.run.slots[i] for i in self.moving]

        def body(ids: Any, stacked: list[list[Any]], *rest: Any) -> Any:
            shared, rows, kept, fed, held, totals, tick = rest
            stage, grads = ids[0], choose(ids[0] == self.num_stages - 1, fed, local(held))
            i = index(tick, stage)
            valid = (i >= 0) & (i < self.num_microbatches)
            i = jnp.clip(i, 0, self.num_microbatches - 1)
            grads, added = self._layers_backward(
                stacked, shared, self._rows(rows, i), i, local(kept), grads, stage, totals, valid
            )
            leaving = [self._passage.emit(x, s, 0) for x, s in zip(grads, slots, strict=True)]
            return wide(self._passage.step(grads, -1)), leaving, added

        held, leaving, totals = self._everywhere(
            body,
            (ON_STAGE, ON_STAGE, EVERYWHERE, EVERYWHERE, ON_STAGE, EVERYWHERE, ON_STAGE, ON_STAGE, EVERYWHERE),
            (ON_STAGE, [self._passage.emitted_spec(s) for s in slots], ON_STAGE),
        )(*weights, rows, kept, fed, held, totals, tick)
        entering = [self._passage.collect(x, s, 0) for x, s in zip(leaving, slots, strict=True)]
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
        self,
        stacked: list[list[Any]],
        shared: list[Any],
        rows: dict[int, Any],
        index: Any,
        slots: list[Any],
        stage: Any,
    ) -> tuple[list[Any], list[Any]]:
        kept: list[Any] = []
        for g, (group, numbers) in enumerate(self._numbered(stage)):
            slots = [self._pin(x, s) for x, s in zip(slots, group.slots, strict=True)]
            slots, found = self._group_forward(g, numbers, local(stacked[g]), shared, rows, index, slots)
            kept += found
        return [self._pin(x, s.spec) for x, s in zip(slots, self.run.slots, strict=True)], kept

    def _numbered(self, stage: Any) -> list[tuple[Group, Any]]:
        """Groups, and the numbers of their layers in the whole run."""
        starts = [sum(g.size for g in self.run.groups[:i]) for i in range(len(self.run.groups) + 1)]
        return [
            (group, stage * starts[-1] + jnp.arange(start, start + group.size, dtype=jnp.int32))
            for group, start in zip(self.run.groups, starts, strict=False)
        ]

    def _group_forward(
        self,
        g: int,
        numbers: Any,
        stacked: list[Any],
        shared: list[Any],
        rows: dict[int, Any],
        index: Any,
        slots: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        group, layer = self.run.groups[g], self.layers[g]

        def one(slots: list[Any], own: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            number, weights = own
            outs, kept = layer.forward(self._inputs(group, weights, shared, rows, index, slots))
            return self._advance(group, slots, outs, number), kept

        return lax.scan(one, slots, (numbers, stacked))

    def _layers_backward(
        self,
        stacked: list[list[Any]],
        shared: list[Any],
        rows: dict[int, Any],
        index: Any,
        kept: list[Any],
        grads: list[Any],
        stage: Any,
        totals: Weights,
        valid: Any,
    ) -> tuple[list[Any], Weights]:
        ends = [sum(len(layer.kept) for layer in self.layers[:g]) for g in range(len(self.layers) + 1)]
        relays = dict(zip(self.relays, kept[ends[-1] :], strict=True))
        common, own = local(totals[1]), list(totals[0])
        for g, (group, numbers) in reversed(list(enumerate(self._numbered(stage)))):
            slots = [self._pin(relays[i], s) if i in relays else None for i, s in enumerate(group.slots)]
            grads = [self._pin(x, group.slots[i]) for i, x in zip(self.moving, grads, strict=True)]
            inputs = (shared, rows, index, slots)
            xs = (local(stacked[g]), kept[ends[g] : ends[g + 1]])
            grads, own[g], common = self._group_backward(g, numbers, xs, inputs, grads, local(own[g]), common, valid)
        grads = [self._pin(x, self.run.slots[i].spec) for i, x in zip(self.moving, grads, strict=True)]
        return grads, ([wide(sums) for sums in own], wide(common))

    def _group_backward(
        self,
        g: int,
        numbers: Any,
        layers: tuple[list[Any], list[Any]],
        given: tuple[list[Any], dict[int, Any], Any, list[Any]],
        grads: list[Any],
        sums: list[Any],
        common: list[Any],
        valid: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """A group's layers, last one first; `sums` and `common` are the gradients of weights so far."""
        group, layer = self.run.groups[g], self.layers[g]

        def one(carry: tuple[list[Any], list[Any], list[Any]], own: tuple[Any, Any, list[Any], list[Any]]) -> Any:
            grads, sums, common = carry
            place, number, weights, kept = own
            inputs = self._inputs(group, weights, *given)
            found = layer.backward(inputs, kept, self._output_grads(grads, number))
            by_source = {source: x for source, x in zip(self.run.sources, found, strict=True) if x is not None}
            grads = self._retreat(group, grads, by_source)
            mine = [self._pin(by_source[("stacked", i)], group.stacked[i].grads) for i in self.trained_stacked]
            theirs = [by_source[("shared", i)] for i in self.trained_shared]
            sums = [add_at(t, place, x, valid) for t, x in zip(sums, mine, strict=True)]
            return (grads, sums, [add(t, x, valid) for t, x in zip(common, theirs, strict=True)]), None

        pins = [PartitionSpec(None, *group.stacked[i].grads) for i in self.trained_stacked]
        sums = [self._pin(t, spec) for t, spec in zip(sums, pins, strict=True)]
        places = jnp.arange(group.size, dtype=jnp.int32)
        carry, _ = lax.scan(one, (grads, sums, common), (places, numbers, *layers), reverse=True)
        return carry

    @property
    def trained_shared(self) -> tuple[int, ...]:
        """Shared weights that have gradients."""
        return tuple(i for i, w in enumerate(self.run.shared) if _trains(w))

    @property
    def trained_stacked(self) -> tuple[int, ...]:
        """Stacked weights that have gradients."""
        return tuple(i for i, w in enumerate(self.run.stacked) if _trains(w))

    def _inputs(
        self,
        group: Group,
        stacked: list[Any],
        shared: list[Any],
        rows: dict[int, Any],
        index: Any,
        slots: Sequence[Any],
    ) -> list[Any]:
        """Inputs of a layer's body, laid out as it computes with them; None where a slot is not there."""

        def one(kind: str, i: int) -> Any:
            if kind == "index":
                return index
            places: dict[str, Any] = {"stacked": stacked, "shared": shared, "batch": rows, "slot": slots}
            return places[kind][i]

        found = [one(*source) for source in self.run.sources]
        return [None if x is None else self._pin(x, s) for x, s in zip(found, group.specs, strict=True)]

    def _advance(self, group: Group, slots: list[Any], outs: list[Any], number: Any) -> list[Any]:
        """Slots after layer `number`."""

        def one(slot: Slot, spec: PartitionSpec, old: Any) -> Any:
            if slot.output is None:
                return old
            if slot.kind == "extra":
                return lax.dynamic_update_index_in_dim(old, outs[slot.output], number, 0)
            return self._pin(typed(outs[slot.output], slot.dtype), spec)

        return [one(*of) for of in zip(self.run.slots, group.slots, slots, strict=True)]

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

    def _retreat(self, group: Group, grads: list[Any], by_source: dict[tuple[str, int], Any]) -> list[Any]:
        """Gradients of the slots before a layer."""

        def one(i: int, after: Any) -> Any:
            slot, new = self.run.slots[i], by_source.get(("slot", i))
            if slot.kind == "extra" or (slot.kind == "relay" and new is None):
                return after
            return self._pin(new if slot.kind == "chain" else after + new, group.slots[i])

        return [one(i, g) for i, g in zip(self.moving, grads, strict=True)]

    def _rows(self, rows: dict[int, Any], index: Any) -> dict[int, Any]:
        return {leaf: lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for leaf, x in rows.items()}

    def _everywhere(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={STAGE}, check_vma=False
        )
        return lambda *args: mapped(jnp.arange(self.num_stages, dtype=jnp.int32), *args)

    def _pin(self, x: Any, spec: PartitionSpec) -> Any:
        return pin(self.mesh, x, spec)

    # ---- whole arrays ------------------------------------------------------------------------------------------

    def pin_held(self, held: Sequence[Any], slots: Sequence[int]) -> list[Any]:
        """Values between ticks: one a stage."""
        specs = [PartitionSpec(STAGE, *self.run.slots[i].spec) for i in slots]
        return [constrain(x, self.mesh, s) for x, s in zip(held, specs, strict=True)]

    def pin_totals(self, totals: Weights) -> Weights:
        """Sums of gradients: stacked ones where their layers are, shared ones one a stage."""

        def own(group: Group, sums: list[Any]) -> list[Any]:
            specs = [PartitionSpec(STAGE, None, *group.stacked[i].grads) for i in self.trained_stacked]
            return [constrain(x, self.mesh, s) for x, s in zip(sums, specs, strict=True)]

        stacked = [own(group, sums) for group, sums in zip(self.run.groups, totals[0], strict=True)]
        return stacked, [constrain(x, self.mesh, ON_STAGE) for x in totals[1]]

    def zero_totals(self) -> Weights:
        """Sums before the first micro-batch."""
        stages = self.num_stages
        own = [self.run.stacked[i] for i in self.trained_stacked]
        common = [self.run.shared[i] for i in self.trained_shared]
        return self.pin_totals(
            (
                [
                    [jnp.zeros((stages, group.size, *w.shape), accumulator_dtype(w.dtype)) for w in own]
                    for group in self.run.groups
                ],
                [jnp.zeros((stages, *w.shape), accumulator_dtype(w.dtype)) for w in common],
            )
        )

    def zero_held(self, slots: Sequence[int]) -> list[Any]:
        """What is handed on before the first tick."""
        chosen = [self.run.slots[i] for i in slots]
        return self.pin_held([jnp.zeros((self.num_stages, *s.shape), s.dtype) for s in chosen], slots)

    def zero_waiting(self, depth: int) -> list[Any]:
        """Room for what `depth` micro-batches keep: [P, depth, ...]."""
        free = PartitionSpec.UNCONSTRAINED
        groups = zip(self.run.groups, self.layers, strict=True)
        shapes = [((g.size, *a.shape), a.dtype) for g, layer in groups for a in layer.kept]
        shapes += [(self.run.slots[i].shape, self.run.slots[i].dtype) for i in self.relays]
        specs = [PartitionSpec(STAGE, *([free] * (len(shape) + 1))) for shape, _ in shapes]
        rooms = [jnp.zeros((self.num_stages, depth, *shape), dtype) for shape, dtype in shapes]
        return [constrain(x, self.mesh, s) for x, s in zip(rooms, specs, strict=True)]


def _trains(weight: Any) -> bool:
    return bool(weight.trained) and is_differentiable(weight.dtype)
