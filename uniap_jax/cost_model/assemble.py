"""The tables of one candidate: every layer under every strategy, every edge between any two strategies."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import Candidate, CostTables
from uniap_jax.core.described import Describer, batch_bytes, cut_batch, divisors
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.machine import Cluster
from uniap_jax.core.plan import SCHEDULES
from uniap_jax.core.profile import Footprint, Key, LayerCost, Links, Profile, Rates
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.searched import StrategySpace
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.weights import ParamBytes
from uniap_jax.cost_model.credible import credible
from uniap_jax.cost_model.equal_model import EqualModel
from uniap_jax.cost_model.memory import Held, beside_state
from uniap_jax.cost_model.pipeline import busy_factor, flights, holds_as_one, turns_at_once, working_share
from uniap_jax.cost_model.reshard import bundles, edge_tables
from uniap_jax.cost_model.state import Shares, charged_to, layer_shares, state_bytes

FloatArray = NDArray[np.float64]
MEMORY = tuple(f.name for f in fields(Footprint))


class TableModel:
    """A `core.costs.CostModel` of one graph on one cluster.

    Args:
        graph: from the frontend.
        cluster: the devices.
        profile: measured numbers; what it lacks is described.
        keeps: what strategies may keep for the backward pass.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        profile: Profile | None,
        *,
        keeps: tuple[str, ...] = ("all", "inputs"),
    ) -> None:
        self.cluster, self.profile, self.keeps = cluster, profile, keeps
        self.links = Links(cluster, profile.links if profile else ())
        self._rates = profile.rates if profile else Rates()
        if self._rates.overlap_slowdown:
            cluster = replace(cluster, overlap_slowdown=self._rates.overlap_slowdown)
        self._describer = Describer(graph, cluster, self.links)
        self._entries, self._refused = credible(profile.table() if profile else {}, self._describer)
        self.graph = self._describer.graph
        self.state = state_bytes(self.graph)
        self.bundles = bundles(self.graph)
        self._unique = {s: self.graph.layers[group[0]] for s, group in self.graph.unique.items()}
        self._users: dict[int, list[int]] = {}
        for layer in self.graph.layers:
            for p in layer.params:
                self._users.setdefault(p, []).append(layer.index)
        self._cut: dict[int, LayerGraph] = {}
        self._reasons: dict[tuple[str, Strategy, int], str] = {}
        self._costs: dict[tuple[str, Strategy, int, bool], LayerCost] = {}
        self._shares: dict[tuple[str, Strategy], Shares] = {}
        self._once: dict[tuple[str, Strategy], bool] = {}
        self._updates: dict[tuple[int, Strategy], float] = {}
        self._space = StrategySpace(self.graph, keeps)
        self._equal = EqualModel(self)

    # ---- what the planner asks -----------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.cluster.num_devices

    @property
    def batch_size(self) -> int:
        """Global batch."""
        return self.graph.batch_size

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names in trace order."""
        return tuple(layer.name for layer in self.graph.layers)

    @property
    def graph_fingerprint(self) -> str:
        """Of the LayerGraph."""
        return self.graph.fingerprint

    @property
    def device_kind(self) -> str:
        """Of the cluster."""
        return self.cluster.kind

    @property
    def source(self) -> str:
        """Where the numbers come from: "measured", "compiled" or "described"."""
        return self.profile.source if self.profile else "described"

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the numbers come from and what the tables leave out."""
        origin = f"Numbers are {self.source}."
        if self.profile:
            counts = ", ".join(f"{n} {k}" for k, n in self.profile.counts().items())
            origin = f"Layer costs: {counts}; what is missing is described from {self.cluster.name}."
        others = self.profile.notes if self.profile else self.cluster.notes
        told = (origin, self._space.note(self.num_devices), *self._refused, *self._describer.notes, *others)
        return tuple(dict.fromkeys(told))

    @property
    def split_reason(self) -> str:
        """Why the batch must not be split into micro-batches; "" where it may."""
        return self.graph.split_reason

    def candidates(self) -> tuple[Candidate, ...]:
        """Every P that divides the devices and every c that divides the batch.

        1F1B takes as long as GPipe under these tables and holds less: of the two the search takes it unless asked
        otherwise.
        """
        found = []
        for stages in divisors(self.num_devices):
            if stages > len(self.graph.layers):
                continue
            for pieces in self._describer.untried_splits:
                wanted = SCHEDULES if stages > 1 else ("gpipe",)
                found += [Candidate(num_stages=stages, num_microbatches=pieces, schedule=s) for s in wanted]
        return tuple(found)

    def refusal(self, candidate: Candidate) -> str:
        """Why the batch cannot be cut so after all; "" where it can."""
        pieces = candidate.num_microbatches
        if pieces < self._describer.untried_splits[-1] or pieces in self._describer.splits:
            return ""
        return f"{pieces} micro-batches are not possible; see the notes on micro-batches of one example"

    def stage_devices(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Neighbouring devices form a stage."""
        size = self.num_devices // num_stages
        return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(num_stages))

    def strategies(self, num_stages: int) -> tuple[Strategy, ...]:
        """The strategies axis of the tables with `num_stages` stages."""
        return self._space.strategies(self.num_devices // num_stages)

    def with_strategy(self, strategy: Strategy) -> TableModel:
        """The same model, whose tables also list strategies of this one's ZeRO stage and of what it keeps."""
        wider = copy.copy(self)
        wider._space = self._space.asking(strategy)
        wider._equal = EqualModel(wider)
        return wider

    def reason(self, layer: int, strategy: Strategy, *, num_microbatches: int = 1) -> str:
        """Why a layer may not take a strategy; "" where it may."""
        return self._reason(self.graph.layers[layer], strategy, num_microbatches)

    def layer_cost(self, layer: int, strategy: Strategy, *, num_microbatches: int = 1) -> LayerCost:
        """What one micro-batch of a layer costs, and where the number comes from."""
        fused = strategy.num_devices == self.num_devices
        return self._cost(self.graph.layers[layer], strategy, self.batch_size // num_microbatches, fused)

    def stage_cost(self, layer: int, strategy: Strategy, candidate: Candidate, stage: int) -> LayerCost:
        """What one micro-batch of a layer costs on a stage: its memory may be that of one program for both ways."""
        plain = self.layer_cost(layer, strategy, num_microbatches=candidate.num_microbatches)
        if not holds_as_one(candidate, stage, strategy, plain):
            return plain
        turned: Footprint | LayerCost | None = plain.turned
        if turned is None:
            samples = self.batch_size // candidate.num_microbatches
            turned = self._describer.cost(self.graph.layers[layer], strategy, samples=samples, fused=True)
        return replace(plain, **{name: getattr(turned, name) for name in MEMORY})

    def tables(self, candidate: Candidate) -> CostTables:
        """The tables of one candidate.

        Raises:
            ValueError: the stages do not divide the devices or exceed the layers, or the micro-batches do not divide
                the batch.
        """
        self._check(candidate)
        stages, pieces = candidate.num_stages, candidate.num_microbatches
        strategies, layers = self.strategies(stages), self.graph.layers
        shape = (len(layers), len(strategies))
        allowed = np.zeros(shape, dtype=np.bool_)
        time, iteration, fixed, kept, transient = (np.zeros(shape) for _ in range(5))
        last, last_transient = np.zeros(shape), np.zeros(shape)  # of a last stage that turns at once
        turning = turns_at_once(candidate, stages - 1)
        for group in self._alike(stages):
            layer = layers[group[0]]
            for k, strategy in enumerate(strategies):
                if self._reason(layer, strategy, pieces):
                    continue
                cost = self._cost(layer, strategy, self.batch_size // pieces, stages == 1)
                allowed[group, k] = cost.origin != "does_not_fit"
                time[group, k], iteration[group, k] = self._seconds(layer, strategy, cost, candidate)
                held = self._held(layer, strategy, candidate)
                always, each = beside_state(cost, held, candidate, self.cluster.platform)
                fixed[group, k], kept[group, k] = held.state + always, each
                transient[group, k] = cost.working_bytes
                if turning:
                    ending = self.stage_cost(layer.index, strategy, candidate, stages - 1)
                    turned = holds_as_one(candidate, stages - 1, strategy, ending)
                    beside = beside_state(ending, held, candidate, self.cluster.platform, turned=turned)
                    last[group, k] = held.state + sum(beside)
                    last_transient[group, k] = ending.working_bytes
        fixed += working_share(transient, self.graph, candidate)
        in_flight = np.array([flights(candidate, i) for i in range(stages)], dtype=np.float64)
        edges, tensor, reshard, cross, relay = edge_tables(
            self.bundles, strategies, candidate, self.num_devices // stages, self.links
        )
        full = (len(layers), stages, len(strategies))
        memory = fixed[:, None, :] + kept[:, None, :] * in_flight[None, :, None]
        if turning:
            memory[:, -1] = last + working_share(last_transient, self.graph, candidate)
        return CostTables(
            candidate=candidate,
            time_s=np.broadcast_to(time[:, None, :], full),
            iteration_time_s=np.broadcast_to(iteration[:, None, :], full),
            memory_bytes=memory,
            capacity_bytes=np.full(stages, float(self.cluster.capacity_bytes)),
            allowed=allowed,
            edges=edges,
            reshard_s=reshard,
            cross_stage_s=cross,
            relay_s=relay,
            strategies=strategies,
            edge_tensor=tensor,
            layer_names=self.layer_names,
        )

    def equal_candidates(self) -> tuple[Candidate, ...]:
        """Every P that divides the devices and a run of equal layers, every c that divides the batch."""
        return self._equal.candidates(self._describer.untried_splits)

    def equal_tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one candidate under one program for all stages."""
        return self._equal.tables(candidate)

    def _alike(self, stages: int) -> list[list[int]]:
        """Layers whose rows of the tables are equal: same kind, same bytes of state, same shared parameters."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for layer in self.graph.layers:
            key = (
                layer.signature,
                layer.index == 0,
                tuple((self.state.param[p], self.state.work[p], self.state.optimizer[p]) for p in layer.params),
                tuple(self._counts_here(layer.index, p, stages) for p in layer.params),
            )
            groups.setdefault(key, []).append(layer.index)
        return list(groups.values())

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _check(self, candidate: Candidate) -> None:
        stages, pieces = candidate.num_stages, candidate.num_microbatches
        if self.num_devices % stages or stages > len(self.graph.layers):
            raise ValueError(
                f"{stages} stages: they must divide the {self.num_devices} devices and be at most the "
                f"{len(self.graph.layers)} layers; use one of "
                f"{[d for d in divisors(self.num_devices) if d <= len(self.graph.layers)]}"
            )
        if pieces not in self._describer.untried_splits:
            why = self.graph.split_reason or f"it must divide the batch of {self.batch_size}"
            raise ValueError(f"{pieces} micro-batches: {why}; use one of {list(self._describer.untried_splits)}")

    def _reason(self, layer: Layer, strategy: Strategy, pieces: int) -> str:
        key = (layer.signature, strategy, pieces)
        if key not in self._reasons:
            if pieces not in self._cut:
                self._cut[pieces] = cut_batch(self.graph, pieces)
            try:
                layer_sharding(self._cut[pieces], layer, strategy)
                self._reasons[key] = ""
            except StrategyError as error:
                self._reasons[key] = str(error)
        return self._reasons[key]

    def entry(self, layer: Layer, strategy: Strategy, samples: int) -> Key:
        """Where a profile has the cost of a layer."""
        return Key(signature=layer.signature, strategy=str(self._space.twin(layer, strategy)), samples=samples)

    def _cost(self, layer: Layer, strategy: Strategy, samples: int, fused: bool) -> LayerCost:
        key = (layer.signature, strategy, samples, fused)
        if key not in self._costs:
            known = self._entries.get(self.entry(layer, strategy, samples))
            self._costs[key] = known or self._describer.cost(layer, strategy, samples=samples, fused=fused)
        return self._costs[key]

    def _seconds(self, layer: Layer, strategy: Strategy, cost: LayerCost, candidate: Candidate) -> tuple[float, float]:
        """Per micro-batch and per step."""
        stages = candidate.num_stages
        per_piece, per_step = (t * busy_factor(candidate, self._slowdown(stages)) for t in (cost.time_s, cost.sync_s))
        if candidate.num_microbatches == 1 or not self._syncs_once(layer, strategy):
            per_piece, per_step = per_piece + per_step, 0.0
        update = per_step + self.update_s(layer, strategy)
        if stages > 1:
            # a stage's programs are started by one host for all stages: forward and backward of each micro-batch, what
            # comes before the loss and the update once per step, which on CPUs nothing else runs beside
            each = 2.0 * self.dispatch_s * stages / len(self.graph.layers)
            per_piece += each
            update += each * (stages if self.cluster.platform == "cpu" else 1)
        if stages == 1 and layer.index == 0:
            update += self.dispatch_s
        return per_piece, update

    def _syncs_once(self, layer: Layer, strategy: Strategy) -> bool:
        """Whether gradients meet once per step; where fsdp ways split them too, a part meets with every micro-batch."""
        if strategy.fsdp > 1:
            return False
        key = (layer.signature, strategy)
        if key not in self._once:
            self._once[key] = reduces_once(self.graph, layer, strategy)
        return self._once[key]

    @property
    def dispatch_s(self) -> float:
        """Of starting one program."""
        return self._rates.dispatch_s or self.cluster.dispatch_s

    def _slowdown(self, stages: int) -> float:
        """How much slower a stage is when all are busy; described times are those of busy devices."""
        known = self._rates.slowdown(stages)
        return known if known > 1.0 else float(min(stages, self.cluster.devices_per_host_cores))

    def update_s(self, layer: Layer, strategy: Strategy) -> float:
        """Optimizer update: parameter and state read and written, gradient read; ZeRO 1 and 2 gather afterwards."""
        key = (layer.index, replace(strategy, keep="all"))
        if key not in self._updates:
            self._updates[key] = self._described_update_s(layer, key[1])
        return self._updates[key]

    @property
    def update_bytes_per_s(self) -> float:
        """Of the optimizer update."""
        return self._rates.update_bytes_per_s or self.cluster.streamed_bytes_per_s

    def _described_update_s(self, layer: Layer, strategy: Strategy) -> float:
        shares = self.shares(layer, strategy)
        moved = 0.0
        for i, p in enumerate(layer.params):
            own = self.state.param[p] * shares.optimizer[i]
            moved += 2.0 * own + self.state.work[p] * shares.optimizer[i]
            moved += 2.0 * self.state.optimizer[p] * shares.optimizer[i]
        leaf_s = self._rates.update_leaf_s or self.cluster.op_overhead_s
        seconds = moved / self.update_bytes_per_s + len(layer.params) * leaf_s
        if strategy.fsdp > 1 and strategy.zero < 3:
            weights = self.weights(layer, strategy)
            seconds += self.links.time_s("all_gather", weights.used, strategy.fsdp, strategy.tensor)
        return seconds

    def weights(self, layer: Layer, strategy: Strategy) -> ParamBytes:
        """Bytes of a layer's parameters on a device."""
        return self._describer.weights(layer, strategy)

    def shares(self, layer: Layer, strategy: Strategy) -> Shares:
        """What a device holds of a layer's parameters, whatever is kept."""
        plain = replace(strategy, keep="all")
        key = (layer.signature, plain)
        if key not in self._shares:
            self._shares[key] = layer_shares(self.graph, layer, plain)
        return self._shares[key]

    def _held(self, layer: Layer, strategy: Strategy, candidate: Candidate) -> Held:
        """State and gradients of one layer on one device."""
        shares = self.shares(layer, strategy)
        state = grads = full = 0.0
        for i, p in enumerate(layer.params):
            if not self._counts_here(layer.index, p, candidate.num_stages):
                continue
            work, stored = self.state.work[p], self.state.param[p]
            cast = work if not stored else 0.0
            state += (stored + cast) * shares.stored[i] + self.state.optimizer[p] * shares.optimizer[i]
            grads += work * shares.grads[i]
            full += work * shares.used[i]
        if layer.index == 0:
            state += self.state.other + batch_bytes(self.graph.step.batch, strategy.batch_ways)
        return Held(state=state, grads=grads, full_grads=full)

    def _counts_here(self, layer: int, param: int, stages: int) -> bool:
        """Whether a shared parameter is charged to this layer."""
        return charged_to(layer, self._users[param], len(self.graph.layers) // stages)
