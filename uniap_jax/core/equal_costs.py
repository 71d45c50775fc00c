"""The tables of one program for all stages, and the referee that prices a choice on them. Imports no JAX.

All stages tick together, and every device does the same work in every tick: its stage's share of the run, and the
hand-over. Layers outside the run are on all devices. So the step time is linear in the choices:

    sum of rows + reshardings between them + once,

where the run's rows hold c + P - 1 ticks of a forward and a backward pass, bubbles included. Memory adds up over the
rows but for what is alive inside one of them, of which the largest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, BoolArray, Candidate, Evaluation, FloatArray
from uniap_jax.core.strategy import Strategy


def num_ticks(candidate: Candidate) -> int:
    """Ticks of a forward and a backward pass per step, under either schedule: c + P - 1."""
    return candidate.num_microbatches + candidate.num_stages - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualTables:
    """Everything the planner knows about one candidate under one program.

    Rows are what takes a strategy of its own: each layer outside the run, and each slot of a stage: the layers at the
    same place of every stage, or the loop.

    Attributes:
        candidate: stages, micro-batches, schedule.
        rows: per layer of the graph, its row.
        stage: per layer of the graph, its stage in the plan.
        time_s: [rows, strategies] of a step, forward + backward; that of the first slot holds the hand-over.
        iteration_time_s: [rows, strategies] once per step.
        memory_bytes: [rows, strategies] of one device for the whole step.
        transient_bytes: [rows, strategies] of one device while the row runs.
        pass_s: [strategies] of the first slot, what the hand-over takes in one tick.
        run: row of the first slot.
        slots: of a stage.
        base_bytes: of one device, whatever is chosen.
        base_s: once per step, whatever is chosen.
        capacity_bytes: of one device.
        allowed: [rows, strategies] whether the row may take the strategy.
        edges: (row, later row) between which values pass.
        reshard_s: [edges, strategy of the first, of the second] of a step.
        strategies: of the strategies axis, on the sub-mesh of a stage.
    """

    candidate: Candidate
    rows: tuple[int, ...]
    stage: tuple[int, ...]
    time_s: FloatArray
    iteration_time_s: FloatArray
    memory_bytes: FloatArray
    transient_bytes: FloatArray
    pass_s: FloatArray
    run: int
    slots: int
    base_bytes: float
    base_s: float
    capacity_bytes: float
    allowed: BoolArray
    edges: tuple[tuple[int, int], ...]
    reshard_s: FloatArray
    strategies: tuple[Strategy, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows."""
        return int(self.time_s.shape[0])


def evaluate_equal(tables: EqualTables, choice: tuple[int, ...]) -> Evaluation:
    """Prices a strategy for every row, from the definition.

    Args:
        tables: of one candidate.
        choice: of each row, a position on the strategies axis.

    Raises:
        ValueError: the choice does not have one entry per row.
    """
    if len(choice) != tables.num_rows:
        raise ValueError(f"{len(choice)} choices for {tables.num_rows} rows")
    stages, ticks, picked = tables.candidate.num_stages, num_ticks(tables.candidate), list(enumerate(choice))
    rows = sum(float(tables.time_s[r, k]) for r, k in picked)
    edges = sum(float(tables.reshard_s[e, choice[u], choice[v]]) for e, (u, v) in enumerate(tables.edges))
    once = sum(float(tables.iteration_time_s[r, k]) for r, k in picked) + tables.base_s
    handed = float(tables.pass_s[choice[tables.run]])
    memory = tables.base_bytes + sum(float(tables.memory_bytes[r, k]) for r, k in picked)
    memory += max(float(tables.transient_bytes[r, k]) for r, k in picked)
    wrong = [f"row {r} may not take strategy {k}" for r, k in picked if not tables.allowed[r, k]]
    if memory > tables.capacity_bytes * (1 + MEMORY_TOLERANCE):
        wrong.append(f"a device needs {memory:.0f} bytes of {tables.capacity_bytes:.0f}")
    return Evaluation(
        step_time_s=rows + edges + once,
        stage_time_s=((rows + edges) / ticks - handed,) * stages,
        link_time_s=(handed,) * (stages - 1),
        iteration_time_s=(once,) * stages,
        stage_memory_bytes=(memory,) * stages,
        violations=tuple(wrong),
    )


def quick_bound(tables: EqualTables) -> float:
    """No choice is faster: every row at its fastest, without reshardings; infinite where a row has no strategy."""
    whole = np.where(tables.allowed, tables.time_s + tables.iteration_time_s, np.inf)
    return float(whole.min(axis=1).sum()) + tables.base_s
