"""The planner's verb: from a cost model to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.errors import NoPlanInTimeError, OptionError, UniapError
from uniap_jax.core.plan import Binding, Certificate, Plan, WhatIf
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner.alternatives import Other, others
from uniap_jax.planner.answer import alternative_of, gap_of, plan_of, searched_of
from uniap_jax.planner.candidates import Auto, restrict, select_candidates
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.engines import BASELINES, EXACT, engine_named
from uniap_jax.planner.infeasible import explain
from uniap_jax.planner.interval import confirm_by_master
from uniap_jax.planner.pins import PinnedLayers, Pinning, explain_pins
from uniap_jax.planner.problem import Problem, TablesOf, fixed_notes, problem_of
from uniap_jax.planner.search import PROOF_GAP, Incumbent, Priced, Progress, Search, SearchResult
from uniap_jax.planner.why import bindings, first_incumbent, what_ifs

UNIFORM = ("data_parallel", "fsdp", "tensor")
"""Baselines that cost nothing and give the search its first incumbent."""

OTHERS = ("pipeline_only", "intra_only", "inter_then_intra", "layerwise_dp")
"""Baselines that are run after the search, for the certificate."""

BASELINE_TIME_S = 10.0

WHY_TIME_S = 5.0
"""For each of the searches behind `why`, and for each alternative."""

Bounds = Mapping[Candidate, float]


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
        free_bounds: the same were memory unlimited.
        refusal: why a candidate is impossible after all.
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
    free_bounds: dict[Candidate, float] = field(default_factory=dict)
    refusal: Callable[[Candidate], str] = lambda _: ""
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
            free_bounds=self.free_bounds,
            refusal=self.refusal,
            progress=self.progress,
        )
        result = search.run(candidates)
        self.notes += search.notes
        if result.interrupted:
            self.notes.append("interrupted; the best plan so far is returned")
        return result

    def search_again(
        self, tables_of: TablesOf, candidates: Sequence[Candidate], *, incumbent: Incumbent, bounds: Bounds
    ) -> SearchResult:
        """The engine over other tables, for a little while, from bounds that hold there."""
        search = Search(
            tables=tables_of,
            refine=engine_named(self.engine, self.solver),
            engine=self.engine,
            clock=Clock(limit_s=min(WHY_TIME_S, self.clock.left())),
            incumbent=incumbent,
            bounds=dict(bounds),
            refusal=self.refusal,
        )
        return search.run(restrict(tuple(candidates), self.engine, self.num_devices))

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
                tables=self.tables_of,
                refine=engine_named(name),
                engine=name,
                clock=clock,
                bounds=self.bounds.copy(),
                refusal=self.refusal,
            )
            result = search.run(candidates)
            if result.best is None and clock.expired():
                self.notes.append(f"baseline {name} found no plan in the time it had")
                continue
            self.table[name] = None if result.best is None else result.best.value
            if result.best is not None:
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
    pin: Pinning | None = None,
    top_k: int = 1,
    baselines: bool = True,
    why: bool = True,
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
        pin: fixes strategy or stage of layers by name, for example {"block_*": "tensor=2", "embed": 0}; the rest of the
            plan is completed. A stage may count from the end: -1 is the last.
        top_k: how many plans; the others are `certificate.alternatives`.
        baselines: also run the baselines, for the certificate and as a safety net.
        why: also find out what binds and what more memory would give, for the certificate.
        progress: called after every step of the search.

    Returns:
        a plan never predicted slower than a baseline that was run.

    Raises:
        OptionError: a fixed value that no candidate has, a pin that matches no layer or that no candidate can keep, or
            an unknown engine; names what exists.
        InfeasibleError: no plan exists, proved.
        NoPlanInTimeError: the time passed before any plan was found.
    """
    clock = Clock(limit_s=time_limit_s)
    engine_named(engine, solver)
    if top_k < 1:
        raise OptionError(f"top_k={top_k!r} is not possible; ask for at least one plan", top_k=top_k)
    candidates = select_candidates(costs, num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule)
    problem = problem_of(costs, candidates, strategy=strategy, pin=pin or {})
    run = Run(
        problem.tables_of(),
        candidates,
        engine,
        clock,
        num_devices=costs.num_devices,
        progress=progress,
        solver=solver,
        refusal=problem.costs.refusal,
    )
    # an engine over part of the candidates must not take a plan from the others
    compare = baselines and not problem.fixed and engine in EXACT and engine not in OTHERS
    if compare:
        run.run_baselines(UNIFORM, limit_s=BASELINE_TIME_S)
    result = run.search()
    run.confirm(result)
    if compare and run.incumbent.best is not None:
        run.run_baselines(OTHERS, limit_s=BASELINE_TIME_S)
    best = run.incumbent.best
    if best is None:
        raise _no_plan(run, problem, result)
    run.notes += fixed_notes(problem, best)
    extras = Extras()
    if engine in EXACT and not result.interrupted:
        extras = _extras(run, problem, best, number=top_k - 1, why=why)
    return plan_of(problem.costs, best, _certificate(run, problem, best, result, extras))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What the certificate says beyond the proof."""

    binding: tuple[Binding, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    others: tuple[Other, ...] = ()


def _extras(run: Run, problem: Problem, best: Priced, *, number: int, why: bool) -> Extras:
    """Alternatives first, for they were asked for; each search only as long as time is left."""

    def relaxed(change: Callable[[CostTables], CostTables]) -> SearchResult:
        tables_of = problem.tables_of(change)
        incumbent = first_incumbent(tables_of, best)
        return run.search_again(tables_of, run.candidates, incumbent=incumbent, bounds=run.free_bounds)

    def apart(tables_of: TablesOf, candidates: Sequence[Candidate]) -> SearchResult:
        return run.search_again(tables_of, candidates, incumbent=Incumbent(), bounds=run.bounds)

    found: tuple[Other, ...] = ()
    ifs: tuple[WhatIf, ...] = ()
    try:
        if number and not run.clock.expired():
            found = others(best, run.tables_of, run.candidates, apart, number=number)
        if why and not run.clock.expired():
            ifs = tuple(what_ifs(best, relaxed))
    except KeyboardInterrupt:
        run.notes.append("interrupted after the search; alternatives or reasons may be missing")
    if len(found) < number:
        run.notes.append(f"{len(found)} of {number} alternatives were found")
    tables, unlimited = run.tables_of(best.candidate), ifs[-1].step_time_s if ifs else None
    return Extras(binding=bindings(tables, best.evaluation, unlimited) if why else (), what_ifs=ifs, others=found)


def _no_plan(run: Run, problem: Problem, result: SearchResult) -> UniapError:
    costs = problem.costs
    if result.complete and run.engine in EXACT:
        pinned = explain_pins(run.tables_of, run.candidates) if isinstance(run.tables_of, PinnedLayers) else None
        return pinned or explain(
            run.tables_of, run.candidates, num_devices=costs.num_devices, batch_size=costs.batch_size
        )
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


def _certificate(run: Run, problem: Problem, best: Priced, result: SearchResult, extras: Extras) -> Certificate:
    gap, bound = gap_of(best.value, result.bound_s)
    if best.engine != run.engine:
        run.notes.append(f"the plan is that of the baseline {best.engine}")
    return Certificate(
        status="optimal" if gap <= PROOF_GAP else "feasible",
        bound_s=bound,
        gap=gap,
        engine=run.label,
        seconds=run.clock.spent(),
        candidates=len(run.candidates),
        baselines=tuple(run.table.items()),
        notes=(*problem.costs.notes, *run.notes),
        binding=extras.binding,
        what_ifs=extras.what_ifs,
        alternatives=tuple(alternative_of(problem.costs, other) for other in extras.others),
        searched=searched_of(run.bounds, best),
    )
