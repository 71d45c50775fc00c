"""The tables a plan is chosen from, and the referee that prices any choice. Imports no JAX.

The cost model fills one `CostTables` per candidate, every engine of the planner returns an `Assignment`, and
`evaluate` is the only function that says what an assignment costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.plan import SCHEDULES, Plan
from uniap_jax.core.strategy import Strategy

if TYPE_CHECKING:  # that module imports this one
    from uniap_jax.core.equal_costs import EqualTables

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

ANY_STAGE = -1

FORBIDDEN = 8.0
"""Capacities that a layer seems to need on a stage where it must not lie, so that nothing puts it there."""

MEMORY_TOLERANCE = 1e-9
"""Relative slack on capacities: sums of floats in another order must not turn a full stage into an overfull one."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One combination of the outer search.

    Attributes:
        num_stages: pipeline stages P.
        num_microbatches: micro-batches per step c.
        schedule: "gpipe" or "one_f_one_b"; of no effect with one stage.
        storage: how layers that were unfolded from loops store what is theirs, for their parameters are one array: as
            of `core.strategy.storage`; "" where there are none, or where it is left open.
    """

    num_stages: int
    num_microbatches: int
    schedule: str = "gpipe"
    storage: str = ""

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"candidate with {self.num_stages} stages, {self.num_microbatches} micro-batches: both are at least 1"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")

    @classmethod
    def of(cls, plan: Plan) -> Candidate:
        """The one that a plan was found in."""
        return cls(num_stages=plan.num_stages, num_microbatches=plan.num_microbatches, schedule=plan.schedule)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTables:
    """Everything the planner knows about one candidate: seconds and bytes, nothing else.

    Axes: layers in trace order, stages, strategies (the same list for every layer; `allowed` says which a layer may
    take). Arrays may be broadcast views. An edge that carries the same tensor as another one is told by `edge_tensor`.

    Attributes:
        candidate: stages, micro-batches, schedule.
        time_s: [layers, stages, strategies] forward + backward of one micro-batch.
        iteration_time_s: [layers, stages, strategies] once per step: gradient synchronisation and update.
        memory_bytes: [layers, stages, strategies] share of one device, with the micro-batches in flight there.
        capacity_bytes: [stages] memory of one device.
        allowed: [layers, strategies] whether the layer may take the strategy.
        edges: (writer, reader) in trace order, writer < reader.
        reshard_s: [edges, writer's strategy, reader's strategy] both in one stage: forward + backward of one
            micro-batch, part of the stage's time.
        cross_stage_s: [edges, writer's strategy, reader's strategy] reader on a later stage: paid at the boundary
            before the reader's stage.
        relay_s: [edges, writer's strategy] paid at every earlier boundary that the tensor passes.
        strategies: of the strategies axis, in order; empty where the tables come from a file.
        edge_tensor: per edge, id of the tensor it carries, or None where each edge carries its own. Edges with one
            id share the writer; the tensor crosses a boundary once, at the price of the dearest of them.
        layer_names: for people; may be empty.
        stage_of: the stage that a layer must lie on, ANY_STAGE where it may lie on any; () where all may. Their
            memory elsewhere is FORBIDDEN, see `kept_on`.
    """

    candidate: Candidate
    time_s: FloatArray
    iteration_time_s: FloatArray
    memory_bytes: FloatArray
    capacity_bytes: FloatArray
    allowed: BoolArray
    edges: tuple[tuple[int, int], ...]
    reshard_s: FloatArray
    cross_stage_s: FloatArray
    relay_s: FloatArray
    strategies: tuple[Strategy, ...] = ()
    edge_tensor: tuple[int, ...] | None = None
    layer_names: tuple[str, ...] = ()
    stage_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = (self.num_layers, self.candidate.num_stages, self.num_strategies)
        num_edges, k = len(self.edges), self.num_strategies
        expected: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("time_s", shape),
            ("iteration_time_s", shape),
            ("memory_bytes", shape),
            ("capacity_bytes", (self.candidate.num_stages,)),
            ("allowed", (self.num_layers, k)),
            ("reshard_s", (num_edges, k, k)),
            ("cross_stage_s", (num_edges, k, k)),
            ("relay_s", (num_edges, k)),
        )
        for name, want in expected:
            got = getattr(self, name).shape
            if got != want:
                raise ValueError(f"{name} has shape {got}, expected {want} (layers, stages, strategies = {shape})")
        if self.strategies and len(self.strategies) != k:
            raise ValueError(f"{len(self.strategies)} strategies are named but the arrays have {k}")
        for u, v in self.edges:
            if not 0 <= u < v < self.num_layers:
                raise ValueError(f"edge ({u}, {v}) does not go forward among {self.num_layers} layers")
        self._check_tensors()

    def _check_tensors(self) -> None:
        if self.edge_tensor is None:
            return
        if len(self.edge_tensor) != len(self.edges):
            raise ValueError(f"edge_tensor has {len(self.edge_tensor)} entries for {len(self.edges)} edges")
        writer: dict[int, int] = {}
        for tensor, (u, _) in zip(self.edge_tensor, self.edges, strict=True):
            if writer.setdefault(tensor, u) != u:
                raise ValueError(f"tensor {tensor} is written by layer {writer[tensor]} and by layer {u}")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.time_s.shape[0])

    @property
    def num_strategies(self) -> int:
        """Strategies of the third axis."""
        return int(self.time_s.shape[2])

    @property
    def is_chain(self) -> bool:
        """Whether the edges are exactly 0 → 1 → 2 ..., each once."""
        return sorted(self.edges) == [(u, u + 1) for u in range(self.num_layers - 1)]

    @property
    def tensors(self) -> tuple[tuple[int, ...], ...]:
        """Edges grouped by the tensor they carry."""
        if self.edge_tensor is None:
            return tuple((e,) for e in range(len(self.edges)))
        groups: dict[int, list[int]] = {}
        for e, tensor in enumerate(self.edge_tensor):
            groups.setdefault(tensor, []).append(e)
        return tuple(tuple(g) for g in groups.values())


def kept_on(tables: CostTables, stage_of: Sequence[int]) -> CostTables:
    """The tables with layers that must lie on a stage: elsewhere they seem to need more memory than there is.

    Args:
        tables: of a candidate.
        stage_of: per layer, ANY_STAGE where it may lie on any.
    """
    wanted, stages = np.asarray(stage_of)[:, None], np.arange(tables.candidate.num_stages)[None, :]
    elsewhere = (wanted != ANY_STAGE) & (wanted != stages)
    too_much = FORBIDDEN * tables.capacity_bytes[None, :, None]
    memory = np.where(elsewhere[:, :, None], too_much, tables.memory_bytes)
    return replace(tables, memory_bytes=memory, stage_of=tuple(stage_of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an engine decides for one candidate.

    Attributes:
        stage: of each layer.
        strategy: of each layer, a position on the strategies axis.
    """

    stage: tuple[int, ...]
    strategy: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The price of an assignment.

    Attributes:
        step_time_s: sum of stages and links + (c - 1) × the slowest of them + the slowest once-per-step part.
        stage_time_s: per stage, one micro-batch.
        link_time_s: per boundary, one micro-batch.
        iteration_time_s: per stage, once per step.
        stage_memory_bytes: per stage, one device.
        violations: what makes it impossible, one sentence each; empty where it is possible.
    """

    step_time_s: float
    stage_time_s: tuple[float, ...]
    link_time_s: tuple[float, ...]
    iteration_time_s: tuple[float, ...]
    stage_memory_bytes: tuple[float, ...]
    violations: tuple[str, ...] = field(default=())

    @property
    def feasible(self) -> bool:
        """Whether the assignment respects order, legality and memory."""
        return not self.violations


def step_time(
    stage_time_s: FloatArray,
    link_time_s: FloatArray,
    iteration_time_s: FloatArray,
    num_microbatches: int,
) -> float:
    """Seconds per step of a synchronous pipeline (UniAP's TPI, with the once-per-step part apart).

    TPI = sum_i p_i + sum_j o_j + (c - 1) max({p_i}, {o_j}) + max_i g_i.

    Args:
        stage_time_s: [stages] p, seconds per micro-batch.
        link_time_s: [stages - 1] o, seconds per micro-batch.
        iteration_time_s: [stages] g, seconds per step.
        num_microbatches: c.
    """
    slowest = max(float(stage_time_s.max()), float(link_time_s.max(initial=0.0)))
    return float(
        stage_time_s.sum() + link_time_s.sum() + (num_microbatches - 1) * slowest + iteration_time_s.max(initial=0.0)
    )


def evaluate(tables: CostTables, assignment: Assignment) -> Evaluation:
    """Prices an assignment from the definition, independently of every engine.

    Args:
        tables: of one candidate.
        assignment: a stage and a strategy per layer, in range.

    Returns:
        times in seconds, memory in bytes per device, and what is violated.

    Raises:
        ValueError: the assignment does not have one entry in range per layer.
    """
    num_layers, num_stages, num_strategies = tables.time_s.shape
    _check_range("stage", assignment.stage, num_layers, num_stages)
    _check_range("strategy", assignment.strategy, num_layers, num_strategies)
    stage, strategy = np.asarray(assignment.stage), np.asarray(assignment.strategy)
    rows = np.arange(num_layers)
    stage_time, iteration, memory = (
        np.bincount(stage, weights=table[rows, stage, strategy], minlength=num_stages).astype(np.float64)
        for table in (tables.time_s, tables.iteration_time_s, tables.memory_bytes)
    )
    link = np.zeros(num_stages - 1)
    for group in tables.tensors:
        crossing = np.zeros(num_stages - 1)
        for e in group:
            u, v = tables.edges[e]
            i, j, k, m = stage[u], stage[v], strategy[u], strategy[v]
            if i == j:
                stage_time[i] += tables.reshard_s[e, k, m]
            elif i < j:
                crossing[i : j - 1] = np.maximum(crossing[i : j - 1], tables.relay_s[e, k])
                crossing[j - 1] = max(crossing[j - 1], tables.cross_stage_s[e, k, m])
        link += crossing
    return Evaluation(
        step_time_s=step_time(stage_time, link, iteration, tables.candidate.num_microbatches),
        stage_time_s=tuple(stage_time.tolist()),
        link_time_s=tuple(link.tolist()),
        iteration_time_s=tuple(iteration.tolist()),
        stage_memory_bytes=tuple(memory.tolist()),
        violations=_violations(tables, stage, strategy, memory),
    )


def _check_range(name: str, values: tuple[int, ...], length: int, limit: int) -> None:
    if len(values) != length or not all(0 <= x < limit for x in values):
        raise ValueError(f"{name} has {len(values)} entries {values[:8]}...; expected {length}, each in [0, {limit})")


def _violations(tables: CostTables, stage: np.ndarray, strategy: np.ndarray, memory: FloatArray) -> tuple[str, ...]:
    found = [f"stage {i} is empty" for i in sorted(set(range(len(memory))) - set(stage.tolist()))]
    legal = tables.allowed[np.arange(len(stage)), strategy]
    found += [f"layer {u} may not take strategy {strategy[u]}" for u in np.flatnonzero(~legal)]
    found += [
        f"layer {u} lies on stage {stage[u]} and must lie on {wanted}"
        for u, wanted in enumerate(tables.stage_of)
        if wanted not in (ANY_STAGE, stage[u])
    ]
    found += [
        f"layer {v} on stage {stage[v]} reads from layer {u} on the later stage {stage[u]}"
        for u, v in tables.edges
        if stage[u] > stage[v]
    ]
    over = memory > tables.capacity_bytes * (1 + MEMORY_TOLERANCE)
    found += [
        f"stage {i} needs {memory[i]:.0f} bytes per device of {tables.capacity_bytes[i]:.0f}"
        for i in np.flatnonzero(over)
    ]
    return tuple(found)


class CostModel(Protocol):
    """What the planner asks of a cost model; nothing else crosses this door."""

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        ...

    @property
    def batch_size(self) -> int:
        """Global batch."""
        ...

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names in trace order, for people."""
        ...

    @property
    def graph_fingerprint(self) -> str:
        """Of the LayerGraph."""
        ...

    @property
    def device_kind(self) -> str:
        """Of the cluster, for example "cpu"."""
        ...

    @property
    def source(self) -> str:
        """One of "measured", "compiled", "described"."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the model wants people to know, one sentence each."""
        ...

    @property
    def split_reason(self) -> str:
        """Why the batch must not be split into micro-batches; "" where it may."""
        ...

    def candidates(self) -> tuple[Candidate, ...]:
        """Every legal candidate: P divides the devices, c divides the batch."""
        ...

    def tables(self, candidate: Candidate) -> CostTables:
        """The tables of one candidate, built when asked for."""
        ...

    def equal_candidates(self) -> tuple[Candidate, ...]:
        """Candidates of one program for all stages; () where the model has no equal stages."""
        ...

    def equal_tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one of them; raises StrategyError where the stages do not divide a run of equal layers."""
        ...

    def refusal(self, candidate: Candidate) -> str:
        """Why a candidate is impossible after all, where that takes long to find out; "" where it is possible.

        Asked only of candidates that the search is about to work on, under either executor.
        """
        ...

    def stage_devices(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Per stage, indices of its devices in mesh order."""
        ...

    def with_strategy(self, strategy: Strategy) -> CostModel:
        """The same model with tables that list a pinned strategy too; itself where it can price no other."""
        ...
