"""Tables of one program for all stages: what its rows cost in every tick.

The run's layers cost what they cost on a pipeline stage, their gradients summed in every tick. Layers outside it run
in every tick on all devices, the stages serving as more data ways; those before it run forward twice, for the backward
pass makes their outputs again. Between run and outside values are gathered over the stages on the way in and spread
over them on the way out. Bubbles cost as much as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import Candidate
from uniap_jax.core.described import Describer, batch_bytes, divisors, param_bytes
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.equal_stages import EqualRun, cut_loop, find_run
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.loop_turn import turn_of
from uniap_jax.core.plan import SCHEDULES
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.sharding import axis_sizes, layer_sharding, shard_bytes
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.vjp import is_float
from uniap_jax.cost_model.hoisted import cast_shares
from uniap_jax.cost_model.reshard import reshard_seconds

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from uniap_jax.cost_model.assemble import TableModel

FloatArray = NDArray[np.float64]


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


def kept_microbatches(candidate: Candidate) -> int:
    """Micro-batches whose kept values a device holds: GPipe one a tick, 1F1B those between their two passes.

    1F1B has min(2P - 1, c + 1) places. Under both, what the forward pass has just made stands beside what is stored.
    """
    stages, pieces = candidate.num_stages, candidate.num_microbatches
    return 1 + (pieces + stages - 1 if candidate.schedule == "gpipe" else min(2 * stages - 1, pieces + 1))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShares:
    """What each device holds of a turn's weights, as a share of the whole, said for each input of the loop."""

    stored: tuple[float, ...]
    grads: tuple[float, ...]
    optimizer: tuple[float, ...]


class TurnCosts:
    """One turn of a loop as a layer of its own, described.

    Args:
        model: whose cluster and links are used.
        layer: of the graph, that holds the loop.

    Attributes:
        graph: with the turn as its only layer.
        layer: the turn.
        cast: bytes of the weights' narrower copies over those of the weights.
    """

    def __init__(self, model: TableModel, layer: int) -> None:
        whole = model.graph

        def turn(graph: LayerGraph) -> LayerGraph:
            alone = turn_of(graph, cut_loop(graph, layer)).graph
            return replace(alone, microbatch=lambda count: turn(whole.microbatch(count)))

        self.graph = turn(whole)
        self.layer = self.graph.layers[0]
        self._describer = Describer(self.graph, model.cluster, model._links)
        sizes = [self.graph.params[p].nbytes for p in self.layer.params]
        copies = sum(share * n for share, n in zip(cast_shares(self.layer), sizes, strict=True))
        self.cast = copies / max(sum(sizes), 1)

    def cost(self, strategy: Strategy, *, samples: int) -> LayerCost | None:
        """Of one micro-batch; None where the strategy is illegal."""
        try:
            return self._describer.cost(self.layer, strategy, samples=samples, fused=False)
        except StrategyError:
            return None

    def shares(self, strategy: Strategy, count: int) -> TurnShares:
        """What a device holds of the weights, of all of them together, said for each of the loop's `count` inputs."""
        found, sizes = layer_sharding(self.graph, self.layer, strategy), dict(axis_sizes(strategy.num_devices))
        values = [self.graph.params[p] for p in self.layer.params]
        total = max(sum(v.nbytes for v in values), 1)

        def share(specs: Sequence[PartitionSpec]) -> tuple[float, ...]:
            return (sum(shard_bytes(v, s, sizes) for v, s in zip(values, specs, strict=True)) / total,) * count

        return TurnShares(stored=share(found.stored), grads=share(found.grads), optimizer=share(found.optimizer))


class EqualStages:
    """Builds `EqualTables` with the numbers of a `TableModel`.

    Args:
        model: of a graph on a cluster.
        num_stages: P.

    Raises:
        StrategyError: the model has no run of equal layers that the stages divide.
    """

    def __init__(self, model: TableModel, num_stages: int) -> None:
        self._model, self._stages = model, num_stages
        self.run = find_run(model.graph, num_stages)
        self._boundary = boundary(model.graph, self.run, num_stages)
        self._turn = TurnCosts(model, self.run.first) if self.run.is_loop else None
        first, last = self.run.first, self.run.last
        layers = range(len(model.graph.layers))
        self._row_of = tuple(i if i < first else first if i < last else i - (last - first) + 1 for i in layers)
        self._strategies = tuple(s for s in model.strategies(num_stages) if s.sequence_ways * s.expert * s.context == 1)

    def tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one candidate."""
        model, graph = self._model, self._model.graph
        count, k = self._row_of[-1] + 1, len(self._strategies)
        arrays = {name: np.zeros((count, k)) for name in ("time", "iteration", "memory", "transient")}
        allowed, handed = np.zeros((count, k), dtype=np.bool_), np.zeros(k)
        for layer in graph.layers:
            row = self._row_of[layer.index]
            if layer.index != self.run.first and row == self.run.first:
                continue
            for i, strategy in enumerate(self._strategies):
                found = self._row(layer, strategy, candidate)
                if found is None:
                    continue
                allowed[row, i] = True
                arrays["time"][row, i], arrays["iteration"][row, i] = found.time_s, found.iteration_s
                arrays["memory"][row, i], arrays["transient"][row, i] = found.memory_bytes, found.transient_bytes
                if row == self.run.first:
                    handed[i] = found.pass_s
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
            base_bytes=self._base_bytes(),
            base_s=model._dispatch_s,
            capacity_bytes=float(model.cluster.capacity_bytes),
            allowed=allowed,
            edges=edges,
            reshard_s=reshard,
            strategies=self._strategies,
        )

    def _row(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Row | None:
        if self._model.reason(layer.index, strategy, num_microbatches=candidate.num_microbatches):
            return None
        inside = layer.index == self.run.first
        return self._inside(layer, strategy, candidate) if inside else self._outside(layer, strategy, candidate)

    # ---- the run ------------------------------------------------------------------------------------------------

    def _inside(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Row | None:
        """One stage's share of the run: as many times its first layer, or a share of the loop."""
        model, pieces = self._model, candidate.num_microbatches
        cost = model.layer_cost(layer.index, strategy, num_microbatches=pieces)
        if cost.origin == "does_not_fit":
            return None
        share = 1.0 / self._stages if self.run.is_loop else float(self.run.count // self._stages)
        kept, transient = share * cost.kept_bytes, cost.transient_bytes
        if self._turn is not None:  # the loop is kept and recomputed turn by turn
            alone = self._turn.cost(strategy, samples=model.batch_size // pieces)
            if alone is None:
                return None
            kept, transient = share * self.run.count * alone.kept_bytes, alone.transient_bytes
            if cost.origin == "described":
                cost = replace(alone, sync_s=alone.sync_s * self.run.count)
                cost = replace(
                    cost, forward_s=cost.forward_s * self.run.count, backward_s=cost.backward_s * self.run.count
                )
        handed = self._pass_s(strategy, candidate)
        state, grads, stacked = self._run_state(layer, strategy)
        at_once = self._boundary.moved_bytes / pieces / strategy.batch_ways
        slots = (self._boundary.still_bytes / pieces / strategy.batch_ways) + at_once
        held = kept_microbatches(candidate) * kept + 4.0 * slots
        if candidate.schedule == "gpipe":  # gradients that entered the last stage wait for the way back
            held += (pieces + self._stages - 1) * at_once / self._stages
        return Row(
            time_s=share * (cost.time_s + cost.sync_s) + handed,
            iteration_s=share * model._update_s(layer, strategy),
            memory_bytes=share * (state + grads + stacked) + held,
            transient_bytes=transient + self._one_gradient(layer, strategy),
            pass_s=handed,
        )

    def _one_gradient(self, layer: Layer, strategy: Strategy) -> float:
        """Bytes of one layer's gradients before they are scattered and added to the sums."""
        graph, alone = (self._turn.graph, self._turn.layer) if self._turn else (self._model.graph, layer)
        return param_bytes(graph, alone, strategy).full_grads

    def _run_state(self, layer: Layer, strategy: Strategy) -> tuple[float, float, float]:
        """Bytes of one layer (of the whole loop): state; sums of gradients and one tick's; copies that are stacked."""
        state = self._model._state
        turn = self._turn
        shares = turn.shares(strategy, len(layer.params)) if turn else self._model._sharding(layer, strategy)
        casts = (turn.cast,) * len(layer.params) if turn else cast_shares(layer)
        kept = grads = stacked = 0.0
        for i, p in enumerate(layer.params):
            work, stored = state.work[p], state.param[p]
            kept += stored * shares.stored[i] + state.optimizer[p] * shares.optimizer[i]
            grads += (_summed(self._model.graph.params[p]) + work) * shares.grads[i]
            copy = casts[i]  # a loop runs over the user's own array unless it casts it first
            if not copy and (not stored or not self.run.is_loop):
                copy = 1.0
            stacked += copy * work * shares.stored[i]
        return kept, grads, stacked

    def _pass_s(self, strategy: Strategy, candidate: Candidate) -> float:
        """One tick's hand-over: to the next stage and back, from the outside in and from the run out."""
        links, stages = self._model._links, self._stages
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
        state, used, grads, full = self._outer_state(layer, strategy)
        gather = model._links.time_s("all_gather", used, stages, model.num_devices // stages)
        return Row(
            time_s=cost.time_s + cost.sync_s + again,
            iteration_s=model._update_s(layer, strategy) / stages + gather,
            memory_bytes=state + used + grads + cost.kept_bytes,
            transient_bytes=cost.transient_bytes + full,
        )

    def _outer_state(self, layer: Layer, strategy: Strategy) -> tuple[float, float, float, float]:
        """Bytes: state, split over the stages too; as it computes; sums of gradients; one tick's gradients, whole."""
        state, shares = self._model._state, self._model._sharding(layer, strategy)
        kept = grads = 0.0
        for i, p in enumerate(layer.params):
            if not self._mine(layer, p):
                continue
            value = self._model.graph.params[p]
            split = self._stages if any(size % self._stages == 0 for size in value.shape) else 1
            kept += (state.param[p] * shares.stored[i] + state.optimizer[p] * shares.optimizer[i]) / split
            grads += _summed(value) * shares.grads[i] / split
        weights = self._model._describer.weights(layer, strategy)
        return kept, weights.used, grads, weights.full_grads

    def _mine(self, layer: Layer, param: int) -> bool:
        """Whether a parameter is charged to this layer: the first outside the run that reads it."""
        outside = (x for x in self._model.graph.layers if not self.run.first <= x.index < self.run.last)
        return next(x.index for x in outside if param in x.params) == layer.index

    # ---- between rows -------------------------------------------------------------------------------------------

    def _edges(self, candidate: Candidate) -> tuple[tuple[tuple[int, int], ...], FloatArray]:
        """(row, later row) and seconds of one tick by the strategies at both ends."""
        model, k = self._model, len(self._strategies)
        size = model.num_devices // self._stages
        ways = [(s.batch_ways, s.sequence_ways) for s in self._strategies]
        found: dict[tuple[int, int], FloatArray] = {}
        for bundle in model._bundles:
            writer = self._row_of[bundle.writer]
            for reader in dict.fromkeys(self._row_of[r] for r in bundle.readers):
                if reader == writer:
                    continue
                outside = self.run.first not in (writer, reader)
                share = 1.0 / candidate.num_microbatches / (self._stages if outside else 1)
                seconds = reshard_seconds(bundle, ways, size, model._links, share)
                found[writer, reader] = found.get((writer, reader), np.zeros((k, k))) + seconds
        return tuple(found), np.stack(list(found.values())) if found else np.zeros((0, k, k))

    def _base_bytes(self) -> float:
        """What every device holds: leaves of no parameter, its rows of the batch, and the batch cut up, whole."""
        model = self._model
        batch = model.graph.step.batch
        return model._state.other + batch_bytes(batch, model.num_devices) + batch_bytes(batch, 1)


def _summed(value: Value) -> float:
    """Bytes of the sum of a parameter's gradients: 32 bits or wider."""
    return float(value.size * max(4, getattr(value.dtype, "itemsize", 4)))


class EqualModel:
    """What a `TableModel` says of one program for all stages, found as it is asked for.

    Args:
        model: whose numbers are used.
    """

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self._known: dict[int, EqualStages | StrategyError] = {}

    def candidates(self, splits: Sequence[int]) -> tuple[Candidate, ...]:
        """Every P over 1 that divides the devices and a run of equal layers, under either schedule.

        Args:
            splits: numbers of micro-batches.
        """
        degrees = [p for p in divisors(self._model.num_devices)[1:] if isinstance(self._stages(p), EqualStages)]
        return tuple(
            Candidate(num_stages=p, num_microbatches=c, schedule=s) for p in degrees for c in splits for s in SCHEDULES
        )

    def tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one candidate.

        Raises:
            StrategyError: the model has no run of equal layers that the stages divide.
        """
        found = self._stages(candidate.num_stages)
        if isinstance(found, StrategyError):
            raise found
        return found.tables(candidate)

    def _stages(self, num_stages: int) -> EqualStages | StrategyError:
        if num_stages not in self._known:
            try:
                self._known[num_stages] = EqualStages(self._model, num_stages)
            except StrategyError as error:
                self._known[num_stages] = error
        return self._known[num_stages]
