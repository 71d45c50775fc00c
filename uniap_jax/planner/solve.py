"""The planner's verb: from a cost model to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.errors import NoPlanInTimeError, UniapError
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner.candidates import Auto, Pinned, filled, restrict, select_candidates
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.engines import BASELINES, EXACT, engine_named
from uniap_jax.planner.infeasible import explain
from uniap_jax.planner.interval import confirm_by_master
from uniap_jax.planner.joint import solver_notes
from uniap_jax.planner.search import PROOF_GAP, Incumbent, Priced, Progress, Search, SearchResult

UNIFORM = ("data_parallel", "fsdp", "tensor")
"""Baselines that cost nothing and give the search its first incumbent."""

OTHERS = ("pipeline_only", "intra_only", "inter_then_intra", "layerwise_dp")
"""Baselines that are run after the search, for the certificate."""

BASELINE_TIME_S = 10.0


@dataclass(slots=True, eq=False)
class Run:
    """One call of the planner.

    Attributes:
        tables_of: builds the tables of a candidate.
        candidates: to choose from.
        engine: by name.
        clock: of the whole call.
        num_devices: of the cluster.
        progress: callback of the search.
        solver: of the engines that ask one.
        incumbent: best plan of anyone.
        bounds: best bound per candidate.
        notes: one sentence each.
        table: baselines run so far with their step times.
        label: the engine, with the solver where one was of use.
    """

    tables_of: Callable[[Candidate], CostTables]
    candidates: tuple[Candidate, ...]
    engine: str
    clock: Clock
    num_devices: int = 0
    progress: Callable[[Progress], None] | None = None
    solver: str = "cbc"
    incumbent: Incumbent = field(default_factory=Incumbent)
    bounds: dict[Candidate, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    table: dict[str, float | None] = field(default_factory=dict)
    label: str = ""

    def search(self) -> SearchResult:
        """The engine over its candidates, with the incumbent that the baselines left."""
        self.label = self.engine
        candidates = restrict(self.candidates, self.engine, self.num_devices)
        search = Search(
            tables=self.tables_of,
            refine=engine_named(self.engine, self.solver),
            engine=self.engine,
            clock=self.clock,
            incumbent=self.incumbent,
            bounds=self.bounds,
            progress=self.progress,
        )
        result = search.run(candidates)
        self.notes += solver_notes(search.works)
        if result.interrupted:
            self.notes.append("interrupted; the best plan so far is returned")
        return result

    def confirm(self, result: SearchResult) -> None:
        """Has the winner's master solved by a MIP solver as well, where the interval engine found it on a chain."""
        best = result.best
        if best is None or best.engine != "interval" or best.candidate.num_stages == 1 or result.interrupted:
            return
        tables = self.tables_of(best.candidate)
        if not tables.is_chain or self.clock.expired():
            return
        plan, solver, note = confirm_by_master(
            tables, value=best.value, time_limit_s=self.clock.left(), solver=self.solver
        )
        if note:
            self.notes.append(note)
        if plan is None:
            return
        self.label = f"{self.engine}+{solver}"
        if self.incumbent.offer(tables, plan, self.engine):
            self.notes.append("the solver's master found a better plan than the path search; please report this")
        elif Incumbent(best).worse(tables, plan):
            self.notes.append("the solver's answer to the master is worse than the path search's, which stands")
            self.label = self.engine

    def run_baselines(self, names: tuple[str, ...], *, limit_s: float) -> None:
        """Best plan of each baseline over all candidates; better ones become the incumbent."""
        clock = Clock(limit_s=min(limit_s, self.clock.left()))
        for name in names:
            if clock.expired():
                self.notes.append(f"baseline {name} was not run for lack of time")
                continue
            try:
                candidates = restrict(self.candidates, name, self.num_devices)
            except UniapError:
                # for example one device per stage where there are fewer layers than devices
                self.table[name] = None
                continue
            search = Search(
                tables=self.tables_of, refine=engine_named(name), engine=name, clock=clock, bounds=dict(self.bounds)
            )
            result = search.run(candidates)
            if result.best is None:
                self.table[name] = None
                continue
            self.table[name] = result.best.value
            self.incumbent.take(result.best)


def solve(
    costs: CostModel,
    *,
    time_limit_s: float = 60.0,
    engine: str = "interval",
    solver: str = "cbc",
    num_stages: int | Auto = "auto",
    num_microbatches: int | Auto = "auto",
    schedule: str = "auto",
    strategy: Strategy | None = None,
    baselines: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The fastest plan under a cost model, with its proof.

    Args:
        costs: tables of every candidate.
        time_limit_s: wall time of the search; the best plan so far is returned with its gap.
        engine: "interval" (default; "hybrid" where edges skip layers), "hybrid", "miqp", "literal", "brute_force", or
            the name of a baseline.
        solver: "cbc" or "highs", for the engines that ask one; what one proves for graphs that are no chain, the other
            checks.
        num_stages: fixes P.
        num_microbatches: fixes c.
        schedule: fixes the schedule; "auto" is 1F1B with several stages.
        strategy: fixes the strategy of every layer that may take it; elsewhere the nearest legal one.
        baselines: also run the baselines, for the certificate and as a safety net.
        progress: called after every step of the search.

    Returns:
        a plan never predicted slower than a baseline that was run.

    Raises:
        OptionError: a fixed value that no candidate has, or an unknown engine; names what exists.
        InfeasibleError: no plan exists, proved.
        NoPlanInTimeError: the time passed before any plan was found.
    """
    clock = Clock(limit_s=time_limit_s)
    engine_named(engine, solver)
    candidates = select_candidates(costs, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)
    tables_of: Callable[[Candidate], CostTables] = costs.tables
    if strategy is not None:
        costs = costs.with_strategy(strategy)
        tables_of = Pinned(strategy=strategy, num_devices=costs.num_devices, inner=costs.tables)
    run = Run(tables_of, candidates, engine, clock, num_devices=costs.num_devices, progress=progress, solver=solver)
    compare = baselines and strategy is None and engine in EXACT
    if compare:
        run.run_baselines(UNIFORM, limit_s=BASELINE_TIME_S)
    result = run.search()
    run.confirm(result)
    if compare and run.incumbent.best is not None:
        run.run_baselines(OTHERS, limit_s=BASELINE_TIME_S)
    if run.incumbent.best is None:
        raise _no_plan(run, costs, result)
    if strategy is not None:
        run.notes += _pin_notes(costs, run.incumbent.best, strategy)
    return _plan(costs, run, run.incumbent.best, result)


def _no_plan(run: Run, costs: CostModel, result: SearchResult) -> UniapError:
    if result.complete and run.engine in EXACT:
        return explain(run.tables_of, run.candidates, num_devices=costs.num_devices, batch_size=costs.batch_size)
    seconds = run.clock.spent()
    if run.engine in BASELINES:
        return NoPlanInTimeError(
            f"the baseline {run.engine} found no plan among {len(run.candidates)} candidates in {seconds:.2f} s; it "
            f"does not prove that none exists. Use the engine 'interval'.",
            seconds=seconds,
            engine=run.engine,
        )
    return NoPlanInTimeError(
        f"no plan found in {seconds:.2f} s by {run.engine} (limit {run.clock.limit_s:g} s, "
        f"{len(run.candidates)} candidates); "
        f"one may exist. Raise the time limit, or fix num_stages or num_microbatches.",
        seconds=seconds,
        engine=run.engine,
        limit_s=run.clock.limit_s,
    )


def _pin_notes(costs: CostModel, best: Priced, strategy: Strategy) -> list[str]:
    chosen = costs.tables(best.candidate).strategies
    wanted = filled(strategy, costs.num_devices // best.candidate.num_stages)
    others: dict[Strategy, list[str]] = {}
    for name, k in zip(costs.layer_names, best.assignment.strategy, strict=True):
        if chosen[k] != wanted:
            others.setdefault(chosen[k], []).append(name)
    notes = [f"the strategy is pinned to {wanted}; optimal means over what is left"]
    notes += [
        f"{len(names)} of {len(costs.layer_names)} layers may not take it and run {other}: "
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for other, names in others.items()
    ]
    return notes


def _plan(costs: CostModel, run: Run, best: Priced, result: SearchResult) -> Plan:
    tables = costs.tables(best.candidate)
    price = best.evaluation
    gap, bound = gap_of(best.value, result.bound_s)
    if best.engine != run.engine:
        run.notes.append(f"the plan is that of the baseline {best.engine}")
    return Plan(
        num_stages=best.candidate.num_stages,
        num_microbatches=best.candidate.num_microbatches,
        schedule=best.candidate.schedule,
        batch_size=costs.batch_size,
        stage_devices=costs.stage_devices(best.candidate.num_stages),
        layers=tuple(
            LayerPlan(name=name, stage=i, strategy=tables.strategies[k])
            for name, i, k in zip(costs.layer_names, best.assignment.stage, best.assignment.strategy, strict=True)
        ),
        prediction=Prediction(
            step_time_s=best.value,
            stage_time_s=price.stage_time_s,
            link_time_s=price.link_time_s,
            iteration_time_s=price.iteration_time_s,
            peak_bytes=price.stage_memory_bytes,
            capacity_bytes=tuple(tables.capacity_bytes.tolist()),
            source=costs.source,
        ),
        certificate=Certificate(
            status="optimal" if gap <= PROOF_GAP else "feasible",
            bound_s=bound,
            gap=gap,
            engine=run.label,
            seconds=run.clock.spent(),
            candidates=len(run.candidates),
            baselines=tuple(run.table.items()),
            notes=(*costs.notes, *run.notes),
        ),
        graph_fingerprint=costs.graph_fingerprint,
        device_kind=costs.device_kind,
    )


def gap_of(value: float, bound: float) -> tuple[float, float]:
    """Relative gap and bound, with rounding below PROOF_GAP taken as proved."""
    bound = min(bound, value)
    gap = (value - bound) / value if value > 0 else 0.0
    return (0.0, value) if gap <= PROOF_GAP or math.isnan(gap) else (gap, bound)
