"""One candidate at a time: tables in, answer out; what the command `solve` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uniap_jax.core.costs import Assignment, CostTables, Evaluation
from uniap_jax.planner.answer import gap_of
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.engines import EXACT, engine_named
from uniap_jax.planner.files import MS, load_tables
from uniap_jax.planner.search import PROOF_GAP, Progress
from uniap_jax.planner.solve import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesResult:
    """What an engine did with one candidate.

    Attributes:
        status: "optimal", "feasible", "infeasible" or "no_plan_in_time".
        assignment: the plan, or None.
        evaluation: its price by the referee.
        bound_s: no plan is faster; infinite where none exists.
        gap: (step time - bound) / step time; 1 without a plan.
        engine: what solved it.
        seconds: wall time.
        notes: one sentence each.
    """

    status: str
    assignment: Assignment | None
    evaluation: Evaluation | None
    bound_s: float
    gap: float
    engine: str
    seconds: float
    notes: tuple[str, ...] = ()


def solve_tables(
    tables: CostTables,
    *,
    engine: str = "interval",
    solver: str = "cbc",
    time_limit_s: float = 60.0,
    confirm: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> TablesResult:
    """Solves one candidate.

    Args:
        tables: of the candidate.
        engine: by name, as in `solve`.
        solver: "cbc" or "highs", for engines that ask one.
        time_limit_s: wall time.
        confirm: also have the solver solve the master of the interval engine.
        progress: called after every step.

    Raises:
        OptionError: unknown engine or solver, or a brute force over too much.
    """
    clock = Clock(limit_s=time_limit_s)
    devices = tables.candidate.num_stages * (tables.strategies[0].num_devices if tables.strategies else 1)
    run = Run(
        lambda _: tables, (tables.candidate,), engine, clock, num_devices=devices, progress=progress, solver=solver
    )
    result = run.search()
    if confirm:
        run.confirm(result)
    best = run.incumbent.best
    if best is None:
        proved = result.complete and engine in EXACT
        return TablesResult(
            status="infeasible" if proved else "no_plan_in_time",
            assignment=None,
            evaluation=None,
            bound_s=math.inf if proved else result.bound_s,
            gap=1.0,
            engine=run.label,
            seconds=clock.spent(),
            notes=tuple(run.notes),
        )
    gap, bound = gap_of(best.value, result.bound_s)
    return TablesResult(
        status="optimal" if gap <= PROOF_GAP else "feasible",
        assignment=best.assignment,
        evaluation=best.evaluation,
        bound_s=bound,
        gap=gap,
        engine=run.label,
        seconds=clock.spent(),
        notes=tuple(run.notes),
    )


def solve_file(
    path: str | Path, *, engine: str = "interval", solver: str = "cbc", time_limit_s: float = 60.0
) -> dict[str, Any]:
    """Solves the tables of a file; the answer is ready for JSON.

    Returns:
        `status`, `step_time_ms`, `bound_ms`, `gap`, `stage`, `strategy`, `engine`, `seconds`, `notes`; None where there
        is no number (no plan, no bound).

    Raises:
        ProfileError: the file is not such tables; names the field.
        OptionError: unknown engine or solver.
    """
    engine_named(engine, solver)
    result = solve_tables(load_tables(path), engine=engine, solver=solver, time_limit_s=time_limit_s)
    plan, price = result.assignment, result.evaluation
    return {
        "status": result.status,
        "step_time_ms": None if price is None else price.step_time_s / MS,
        "bound_ms": result.bound_s / MS if math.isfinite(result.bound_s) else None,
        "gap": None if price is None else result.gap,
        "stage": None if plan is None else list(plan.stage),
        "strategy": None if plan is None else list(plan.strategy),
        "engine": result.engine,
        "seconds": result.seconds,
        "notes": list(result.notes),
    }
