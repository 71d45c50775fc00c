"""Tables of one program for all stages: what its rows cost in every tick.

The run's layers cost what they cost on a pipeline stage, their gradients summed in every tick; bubbles cost as much as
work. Layers outside it run on all devices, the stages serving as more data ways, once a micro-batch; those before it
run forward twice, for the backward pass makes their outputs again, and under 1F1B in the bubbles too. Between run and
outside values are gathered over the stages on the way in and spread over them on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import Candidate
from uniap_jax.core.described import batch_bytes
from uniap_jax.core.equal_costs import EqualTables, num_ticks
from uniap_jax.core.equal_stages import EqualRun, find_run
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.vjp import is_float
from uniap_jax.core.weights import param_bytes
from uniap_jax.cost_model.hoisted import cast_shares
from uniap_jax.cost_model.memory import by_itself
from uniap_jax.cost_model.numbers import Numbers
from uniap_jax.cost_model.reshard import Bundle, reshard_seconds
from uniap_jax.cost_model.turns import TurnCosts

FloatArray = NDArray[np.float64]
Counted = Callable[[Layer, Strategy], tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Costs of one row under one strategy; see `EqualTables`."""

    time_s: float
    iteration_s: float
    memory_bytes: float
    transient_bytes: float
    pass_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Bytes of the whole batch that a stage hands to the next: with a gradient, and without."""

    moved_bytes: float
    still_bytes: float


def kept_microbatches(candidate: Candidate, *, in_place: bool) -> int:
    """Micro-batches whose kept values a device holds: GPipe one a tick, 1F1B those between their two passes.

    1F1B has min(2P - 1, c + 1) places. Under both, what the forward pass has just made stands beside what is stored,
    unless it is written in place.
    """
    stages, pieces = candidate.num_stages, candidate.num_microbatches
    places = pieces + stages - 1 if candidate.schedule == "gpipe" else min(2 * stages - 1, pieces + 1)
    return places if in_place else places + 1


def boundary(graph: LayerGraph, run: EqualRun, num_stages: int) -> Boundary:
    """What is alive between two stages."""
    cut = run.first if run.is_loop else run.first + run.count // num_stages
    producer = graph.producer
    late = [v for layer in graph.layers[cut:] for v in layer.reads] + list(graph.results)
    alive = [graph.values[v] for v in dict.fromkeys(late) if producer[v] < cut]

    def total(values: Sequence[Value]) -> float:
        return float(sum(v.nbytes for v in values))

    return Boundary(
        moved_bytes=total([v for v in alive if is_float(v)]), still_bytes=total([v for v in alive if not is_float(v)])
    )


class EqualStages:
    """Builds `EqualTables` with the numbers of a cost model.

    Args:
        model: of a graph on a cluster.
        num_stages: P.

    Raises:
        StrategyError: the model has no run of equal layers that the stages divide.
    """

    def __init__(self, model: Numbers, num_stages: int) -> None:
        self._model, self._stages = model, num_stages
        # the TPU compiler keeps values where they are stored, adds gradients where their sums lie, and reads parameters
        # where they lie; others copy first
        self._in_place = model.cluster.platform == "tpu"
        self.run = find_run(model.graph, num_stages)
        self._boundary = boundary(model.graph, self.run, num_stages)
        self._turn = TurnCosts(model, self.run.first) if self.run.is_loop else None
        self._slots = self.run.slots(num_stages)
        layers = range(len(model.graph.layers))
        self._row_of = tuple(self.run.row(i, num_stages) for i in layers)
        self._strategies = tuple(s for s in model.strategies(num_stages) if s.sequence_ways * s.expert * s.context == 1)
        self._held: dict[tuple[int, Strategy], tuple[float, float, float, float]] = {}

    def tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one candidate."""
        model, graph = self._model, self._model.graph
        count, k = self._row_of[-1] + 1, len(self._strategies)
        arrays = {name: np.zeros((count, k)) for name in ("time", "iteration", "memory", "transient")}
        allowed, handed = np.zeros((count, k), dtype=np.bool_), np.zeros(k)
        priced: dict[tuple[object, ...], int] = {}
        for layer in graph.layers:
            row = self._row_of[layer.index]
            if self._inside(layer.index) and layer.index >= self.run.first + self._slots:
                continue  # priced on the first stage
            same = priced.setdefault(self._kind(layer), row)
            if same != row:
                for table in (*arrays.values(), allowed):
                    table[row] = table[same]
                continue
            for i, strategy in enumerate(self._strategies):
                found = self._row(layer, strategy, candidate)
                if found is None:
                    continue
                allowed[row, i] = True
                arrays["time"][row, i], arrays["iteration"][row, i] = found.time_s, found.iteration_s
                arrays["memory"][row, i], arrays["transient"][row, i] = found.memory_bytes, found.transient_bytes
                handed[i] += found.pass_s
        edges, reshard = self._edges(candidate)
        return EqualTables(
            candidate=candidate,
            rows=self._row_of,
            stage=self.run.stages(len(graph.layers), candidate.num_stages),
            time_s=arrays["time"],
            iteration_time_s=arrays["iteration"],
            memory_bytes=arrays["memory"],
            transient_bytes=arrays["transient"],
            pass_s=handed,
            run=self.run.first,
            slots=self._slots,
            base_bytes=self._base_bytes(),
            base_s=model.dispatch_s,
            capacity_bytes=float(model.cluster.capacity_bytes),
            allowed=allowed,
            edges=edges,
            reshard_s=reshard,
            strategies=self._strategies,
        )

    def _inside(self, layer: int) -> bool:
        return self.run.first <= layer < self.run.last

    def _kind(self, layer: Layer) -> tuple[object, ...]:
        """Equal for slots that cost the same."""
        if not self.run.first < layer.index < self.run.last or not layer.signature:
            return (layer.index,)
        state = self._model.state
        return (layer.signature, tuple((state.param[p], state.work[p], state.optimizer[p]) for p in layer.params))

    def _row(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Row | None:
        if self._model.reason(layer.index, strategy, num_microbatches=candidate.num_microbatches):
            return None
        inside = self._inside(layer.index)
        return self._slot_row(layer, strategy, candidate) if inside else self._outside(layer, strategy, candidate)

    # ---- the run ------------------------------------------------------------------------------------------------

    def _slot_row(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Row | None:
        """One slot of a stage: a layer, or a share of the loop. The first slot pays for the hand-over."""
        model, pieces = self._model, candidate.num_microbatches
        cost = model.layer_cost(layer.index, strategy, num_microbatches=pieces)
        if cost.origin == "does_not_fit":
            return None
        share = 1.0 / self._stages if self.run.is_loop else 1.0
        state, grads, stacked, once = self._kept(layer, strategy, self._run_state)
        each, own = 1, cost
        if self._turn is not None:  # the loop is kept and recomputed turn by turn
            alone = self._turn.cost(strategy, samples=model.batch_size // pieces)
            if alone is None:
                return None
            each, own = self.run.count, replace(alone, ticking=cost.ticking)
            if cost.origin == "described":
                cost = replace(alone, sync_s=alone.sync_s * self.run.count)
                cost = replace(
                    cost, forward_s=cost.forward_s * self.run.count, backward_s=cost.backward_s * self.run.count
                )
        handed = self._pass_s(strategy, candidate) if layer.index == self.run.first else 0.0
        held = self._handed_bytes(strategy, candidate) if layer.index == self.run.first else 0.0
        kept = share * each * self._kept_bytes(own, layer, strategy)
        in_flight = kept_microbatches(candidate, in_place=self._in_place)
        return Row(
            time_s=num_ticks(candidate) * (share * (cost.time_s + cost.sync_s) + handed),
            iteration_s=share * model.update_s(layer, strategy),
            memory_bytes=share * (state + grads + stacked) + in_flight * kept + held,
            transient_bytes=self._working_bytes(own, layer, strategy, candidate, once),
            pass_s=handed,
        )

    def _kept_bytes(self, cost: LayerCost, layer: Layer, strategy: Strategy) -> float:
        """Of one micro-batch. A TPU pads what a program hands to another, and not what it keeps for itself.

        What one program keeps is told with the parameters that it gathered, which every tick gathers anew. Where the
        ticks of GPipe were compiled, all that they take is told as what each keeps.
        """
        if cost.ticking is not None:
            return cost.ticking.kept_bytes
        if not self._in_place or cost.turned is None:
            return cost.kept_bytes
        gathered = self._model.weights(layer, strategy).gathered
        return min(cost.kept_bytes, max(0.0, cost.turned.kept_bytes - gathered))

    def _working_bytes(
        self, cost: LayerCost, layer: Layer, strategy: Strategy, candidate: Candidate, once: float
    ) -> float:
        """While a tick runs one layer: nothing of another is alive in a loop over layers.

        So where a compiler was asked it is what the layer's backward takes alone, without the sums that it adds to and
        what it hands on, which are told apart.
        """
        if cost.ticking is not None and candidate.schedule == "gpipe":
            return 0.0
        if self._in_place or not cost.alone_bytes:
            return cost.transient_bytes + once
        pieces = candidate.num_microbatches
        sums = self._model.weights(layer, strategy).grads if pieces > 1 else 0.0
        moved = self._boundary.moved_bytes / pieces / strategy.batch_ways
        return max(0.0, cost.alone_bytes - sums - moved)

    def _handed_bytes(self, strategy: Strategy, candidate: Candidate) -> float:
        """What goes from stage to stage: four copies of it, and under GPipe what waits for the way back."""
        pieces, stages = candidate.num_microbatches, self._stages
        moved = self._boundary.moved_bytes / pieces / strategy.batch_ways
        held = 4.0 * (self._boundary.still_bytes / pieces / strategy.batch_ways + moved)
        if candidate.schedule == "gpipe":  # gradients that enter the last stage and leave the first, spread over stages
            held += (2 * pieces + stages - 1) * moved / stages
        return held

    def _run_state(self, layer: Layer, strategy: Strategy) -> tuple[float, float, float, float]:
        """Bytes of one layer (of the whole loop): state; sums of gradients and one tick's; copies that are stacked.

        Last, of one layer or turn, gradients before they are scattered and added to the sums.
        """
        state, turn = self._model.state, self._turn
        shares = turn.shares(strategy, len(layer.params)) if turn else self._model.shares(layer, strategy)
        casts = (turn.cast,) * len(layer.params) if turn else cast_shares(layer)
        kept = sums = grads = stacked = 0.0
        for i, p in enumerate(layer.params):
            work, stored = state.work[p], state.param[p]
            kept += stored * shares.stored[i] + state.optimizer[p] * shares.optimizer[i]
            sums += _summed(self._model.graph.params[p]) * shares.grads[i]
            grads += work * shares.grads[i]
            copy = casts[i]  # a loop runs over the user's own array unless it casts it first
            if not copy and not self._in_place and (not stored or not self.run.is_loop):
                copy = 1.0
            stacked += copy * work * shares.stored[i]
        if self._in_place:
            return kept, sums, stacked, 0.0
        alone = param_bytes(turn.graph, turn.layer, strategy) if turn else self._model.weights(layer, strategy)
        return kept, sums + grads, stacked, alone.full_grads

    def _pass_s(self, strategy: Strategy, candidate: Candidate) -> float:
        """One tick's hand-over: to the next stage and back, from the outside in and from the run out."""
        links, stages = self._model.links, self._stages
        size = self._model.num_devices // stages
        ways = strategy.batch_ways * candidate.num_microbatches
        moved, still = self._boundary.moved_bytes / ways, self._boundary.still_bytes / ways
        fit = links.fit("transfer", size)
        seconds = sum(fit.time_s(b) for b in (moved + still, moved) if b > 0)
        for nbytes in (moved + still, moved):
            seconds += links.time_s("all_gather", nbytes, stages, size) + links.time_s(
                "all_to_all", nbytes, stages, size
            )
        return seconds

    # ---- outside it ---------------------------------------------------------------------------------------------

    def _outside(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Row | None:
        """A layer on all devices; where its rows do not divide by the stages, every stage does the same work."""
        model, stages, pieces = self._model, self._stages, candidate.num_microbatches
        wide = replace(strategy, data=strategy.data * stages)
        divides = not model.reason(layer.index, wide, num_microbatches=pieces)
        cost = model.layer_cost(layer.index, wide if divides else strategy, num_microbatches=pieces)
        if cost.origin == "does_not_fit":
            return None
        again = cost.forward_s if layer.index < self.run.first else 0.0
        calls = self._calls(layer.index, candidate)
        state, used, grads, full = self._kept(layer, strategy, self._outer_state)
        gather = model.links.time_s("all_gather", used, stages, model.num_devices // stages)
        weights = model.weights(layer, wide if divides else strategy)
        kept, working = by_itself(cost, weights.full_grads + (weights.grads if pieces > 1 else 0.0))
        return Row(
            time_s=calls * (cost.time_s + cost.sync_s + again),
            iteration_s=model.update_s(layer, strategy) / stages + gather,
            memory_bytes=state + used + grads + kept,
            transient_bytes=working + full,
        )

    def _calls(self, layer: int, candidate: Candidate) -> int:
        """How often a layer runs in a step."""
        if self._inside(layer) or (layer < self.run.first and candidate.schedule != "gpipe"):
            return num_ticks(candidate)
        return candidate.num_microbatches

    def _outer_state(self, layer: Layer, strategy: Strategy) -> tuple[float, float, float, float]:
        """Bytes: state, split over the stages too; as it computes; sums of gradients; one tick's gradients, whole."""
        state, shares = self._model.state, self._model.shares(layer, strategy)
        kept = grads = 0.0
        for i, p in enumerate(layer.params):
            if not self._mine(layer, p):
                continue
            value = self._model.graph.params[p]
            split = self._stages if any(size % self._stages == 0 for size in value.shape) else 1
            kept += (state.param[p] * shares.stored[i] + state.optimizer[p] * shares.optimizer[i]) / split
            grads += _summed(value) * shares.grads[i] / split
        weights = self._model.weights(layer, strategy)
        return kept, weights.used, grads, weights.full_grads

    def _mine(self, layer: Layer, param: int) -> bool:
        """Whether a parameter is charged to this layer: the first outside the run that reads it."""
        outside = (x for x in self._model.graph.layers if not self.run.first <= x.index < self.run.last)
        return next(x.index for x in outside if param in x.params) == layer.index

    # ---- between rows -------------------------------------------------------------------------------------------

    def _edges(self, candidate: Candidate) -> tuple[tuple[tuple[int, int], ...], FloatArray]:
        """(row, later row) and seconds of a step by the strategies at both ends.

        What the last slot hands to the first of the next stage is an edge between the two, turned round.
        """
        model, k = self._model, len(self._strategies)
        size = model.num_devices // self._stages
        ways = [(s.batch_ways, s.sequence_ways) for s in self._strategies]
        found: dict[tuple[int, int], FloatArray] = {}
        for bundle in model.bundles:
            for reader in self._readers(bundle):
                rows = self._row_of[bundle.writer], self._row_of[reader]
                if rows[0] == rows[1]:
                    continue
                inside = self._inside(bundle.writer), self._inside(reader)
                calls = self._calls(bundle.writer if inside[1] else reader, candidate)
                share = 1.0 / candidate.num_microbatches / (1 if any(inside) else self._stages)
                seconds = calls * reshard_seconds(bundle, ways, size, model.links, share)
                if rows[0] > rows[1]:
                    rows, seconds = (rows[1], rows[0]), seconds.T
                found[rows] = found.get(rows, np.zeros((k, k))) + seconds
        return tuple(found), np.stack(list(found.values())) if found else np.zeros((0, k, k))

    def _readers(self, bundle: Bundle) -> list[int]:
        """Readers of a bundle, one a row; of what passes inside the run, what the first stage sees."""
        end = self.run.first + self._slots
        if self._inside(bundle.writer):
            end = end + 1 if bundle.writer < end else self.run.first
        rows = {self._row_of[r]: r for r in reversed(bundle.readers) if not self._inside(r) or r < end}
        return list(rows.values())

    def _kept(self, layer: Layer, strategy: Strategy, count: Counted) -> tuple[float, float, float, float]:
        """What does not depend on the candidate, counted once."""
        key = (layer.index, strategy)
        if key not in self._held:
            self._held[key] = count(layer, strategy)
        return self._held[key]

    def _base_bytes(self) -> float:
        """What every device holds: leaves of no parameter, its rows of the batch, and the batch cut up, whole."""
        model = self._model
        batch = model.graph.step.batch
        return model.state.other + batch_bytes(batch, model.num_devices) + batch_bytes(batch, 1)


def _summed(value: Value) -> float:
    """Bytes of the sum of a parameter's gradients: 32 bits or wider."""
    return float(value.size * max(4, getattr(value.dtype, "itemsize", 4)))
