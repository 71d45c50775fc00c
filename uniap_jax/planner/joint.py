"""Engines that hand the whole candidate to a MIP solver: hybrid (default where edges skip layers), miqp, literal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from uniap_jax.core.costs import Assignment, CostTables, evaluate
from uniap_jax.planner.chain import chain_of, has_spine
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.columns import grow_columns
from uniap_jax.planner.guide import guide
from uniap_jax.planner.infeasible import fits
from uniap_jax.planner.interval import ChainRefinement
from uniap_jax.planner.intervals import build_intervals
from uniap_jax.planner.literal import LiteralModel
from uniap_jax.planner.mcmc import polish
from uniap_jax.planner.mip_model import SOLVERS, MipAnswer, MipModel, other_solver, solve_mip
from uniap_jax.planner.miqp import add_intervals, joint_model, live_nodes

AGREE = 1e-6
"""Relative difference between the solver's objective and the referee's price that is still rounding."""

IMPOSSIBLE = "'s plan is impossible: "

MEMORY_MARGIN = 2e-6
"""Capacity given up when the solver overfilled a stage within its tolerance."""

MAX_INTERVAL_LABELS = 60_000

Reader = Callable[[tuple[float, ...]], Assignment | None]
Builder = Callable[[CostTables, float], tuple[MipModel, Reader]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A solver's answer after the referee.

    Attributes:
        plan: possible, or None.
        lower: bound in seconds that may be believed.
        proved: nothing below the asked limit is left.
        note: what went wrong, "" where nothing did.
    """

    plan: Assignment | None
    lower: float
    proved: bool
    note: str = ""


def judge(
    tables: CostTables,
    model: MipModel,
    answer: MipAnswer,
    read: Reader,
    *,
    upper: float,
    known: bool,
    name: str = "CBC",
) -> Judged:
    """Checks a solver's answer: the plan is re-priced, and a claim that contradicts the price is dropped.

    Args:
        tables: of the candidate.
        model: that was solved.
        answer: of the solver.
        read: makes an assignment of the answer's values.
        upper: seconds; the model asks for plans up to here.
        known: such a plan is known to exist, so that "infeasible" is false.
        name: of the solver, for people.
    """
    bound = max(answer.bound * 1e-3, 0.0) if math.isfinite(answer.bound) else 0.0
    if answer.status == "failed":
        return Judged(plan=None, lower=0.0, proved=False, note=f"{name} was of no help: {answer.reason}")
    if answer.status == "infeasible":
        if known:
            note = f"{name} called the model infeasible although a plan is known"
            return Judged(plan=None, lower=0.0, proved=False, note=note)
        return Judged(plan=None, lower=upper, proved=True)
    if answer.values is None:
        return Judged(plan=None, lower=bound, proved=False)
    plan = read(answer.values)
    if plan is None:
        note = f"{name} answered with something that is not an assignment"
        return Judged(plan=None, lower=0.0, proved=False, note=note)
    price = evaluate(tables, plan)
    if not price.feasible:
        note = f"{name}{IMPOSSIBLE}{price.violations[0]}"
        return Judged(plan=None, lower=bound, proved=False, note=note)
    claimed = model.cost_of(answer.values) * 1e-3
    honest = price.step_time_s <= claimed * (1 + AGREE) + 1e-12 and bound <= price.step_time_s * (1 + AGREE) + 1e-12
    if not honest:
        note = (
            f"{name} claimed {claimed * 1e3:.6g} ms for a plan of {price.step_time_s * 1e3:.6g} ms; "
            f"its bound is not used"
        )
        return Judged(plan=plan, lower=0.0, proved=False, note=note)
    proved = answer.status == "optimal" and bound >= claimed * (1 - 10 * AGREE)
    return Judged(plan=plan, lower=min(bound, price.step_time_s), proved=proved)


def _literal(tables: CostTables, upper: float) -> tuple[MipModel, Reader]:
    literal = LiteralModel(tables)
    return literal.model, literal.assignment


def _joint(tables: CostTables, upper: float) -> tuple[MipModel, Reader]:
    joint = joint_model(tables, live=live_nodes(tables), upper=upper)
    return joint.model, joint.assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One MIP to be solved, and checked by a second solver.

    Attributes:
        tables: of the candidate.
        build: the formulation.
        upper: seconds; plans above are of no interest.
        known: a plan at or below `upper` is known to exist.
        solver: the first to be asked.
        clock: of the whole search.
        check: a proof has to survive the second solver.
    """

    tables: CostTables
    build: Builder
    upper: float
    known: bool
    solver: str
    clock: Clock
    check: bool = True

    def answer(self) -> Judged:
        """The first solver's answer; where it proves something, the second one must not find a better plan."""
        model, read = self.build(self.tables, self.upper)
        first = self._ask(self.solver, model, read)
        if first.plan is None and IMPOSSIBLE in first.note:
            tight = replace(self.tables, capacity_bytes=self.tables.capacity_bytes * (1 - MEMORY_MARGIN))
            again = self._ask(self.solver, *self.build(tight, self.upper))
            first = replace(again, proved=False, lower=first.lower, note=again.note or first.note)
        if first.plan is None and not first.proved and first.lower == 0.0 and first.note:
            # crashed, hung or talked nonsense: the other one is asked in its place, and nobody is left to check it
            second = self._ask(other_solver(self.solver), model, read)
            note = f"{first.note}; {SOLVERS[other_solver(self.solver)]} was asked instead"
            return replace(second, note="; ".join(filter(None, (note, second.note))))
        return self._checked(first, model, read) if first.proved and self.check else first

    def _ask(self, solver: str, model: MipModel, read: Reader) -> Judged:
        answer = solve_mip(model, time_limit_s=self.clock.left(), solver=solver)
        return judge(self.tables, model, answer, read, upper=self.upper, known=self.known, name=SOLVERS[solver])

    def _checked(self, first: Judged, model: MipModel, read: Reader) -> Judged:
        """The proof after the other solver looked for a plan that the first one says does not exist."""
        solver = other_solver(self.solver)
        value = self.upper if first.plan is None else evaluate(self.tables, first.plan).step_time_s * (1 - 2 * AGREE)
        if math.isfinite(value):
            model.limit_cost(value * 1e3)
        answer = solve_mip(model, time_limit_s=self.clock.left(), solver=solver)
        if answer.status == "infeasible":
            return first
        mine, its = SOLVERS[self.solver], SOLVERS[solver]
        found = judge(self.tables, model, answer, read, upper=value, known=False, name=its)
        if found.plan is None or evaluate(self.tables, found.plan).step_time_s > value * (1 + AGREE):
            return replace(first, note=f"the bound is {mine}'s alone; {its} did not confirm it in the time left")
        return replace(found, note=f"{mine} claimed a proof, but {its} found a better plan; the better one is taken")


@dataclass(slots=True, eq=False)
class MipRefinement:
    """One candidate by one MIP.

    Attributes:
        tables: of the candidate.
        build: the formulation.
        solver: that is asked first.
        lower: proved bound in seconds.
        plan: best assignment so far, or None.
        done: no plan below the last `upper` is left.
        stuck: the solver gave up.
        notes: what the solver did wrong.
    """

    tables: CostTables
    build: Builder
    solver: str = "cbc"
    lower: float = -math.inf
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    notes: list[str] = field(default_factory=list)

    def step(self, *, upper: float, clock: Clock) -> None:
        """Solves the MIP in the time left."""
        spine = has_spine(self.tables)
        if spine and not fits(self.tables):
            self.lower, self.done = math.inf, True
            return
        known = spine and math.isinf(upper)
        question = Question(
            tables=self.tables, build=self.build, upper=upper, known=known, solver=self.solver, clock=clock
        )
        _take(self, question.answer(), upper)

    def widen(self) -> bool:
        """The solver had all the time there was."""
        return False


def _take(work: MipRefinement | HybridRefinement, judged: Judged, upper: float) -> None:
    if judged.note:
        work.notes.append(judged.note)
    if judged.plan is not None:
        work.plan = judged.plan
    work.lower = max(work.lower, judged.lower)
    if judged.proved:
        work.done = True
        if judged.plan is None:
            # nothing at or below the limit: everything of this candidate is dearer
            work.lower = max(work.lower, upper)
    else:
        work.stuck = True


def literal(tables: CostTables, solver: str = "cbc") -> MipRefinement:
    """F1, for reference."""
    return MipRefinement(tables, _literal, solver)


def miqp(tables: CostTables, solver: str = "cbc") -> MipRefinement:
    """F2, for any DAG."""
    return MipRefinement(tables, _joint, solver)


@dataclass(slots=True, eq=False)
class HybridRefinement:
    """One candidate with edges that skip layers: first its chain, which bounds it from below, then F4.

    Attributes as in `MipRefinement`.
    """

    tables: CostTables
    solver: str = "cbc"
    lower: float = -math.inf
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    notes: list[str] = field(default_factory=list)
    _chain: ChainRefinement | None = None

    def step(self, *, upper: float, clock: Clock) -> None:
        """Refines the chain; when that is solved, solves the MIP over what is left."""
        if not has_spine(self.tables):
            self._decide(_joint, upper, clock)
            return
        if self._chain is None:
            self._chain = ChainRefinement(self.tables)
        if self._chain.done or self._chain.stuck:
            self._decide(self._hybrid, upper, clock)
            return
        before = self._chain.plan
        self._chain.step(upper=upper, clock=clock)
        self.lower = max(self.lower, self._chain.lower)
        if self._chain.plan is not None and self._chain.plan is not before:
            self._offer(polish(self.tables, self._chain.plan))
        best = math.inf if self.plan is None else evaluate(self.tables, self.plan).step_time_s
        self.done = self.lower >= min(upper, best * (1 - 1e-9))

    def widen(self) -> bool:
        """The solver had all the time there was."""
        return False

    def _decide(self, build: Builder, upper: float, clock: Clock) -> None:
        """Has the MIP solved up to the limit, or up to the own plan's price where that is no more (but for a tie)."""
        own = math.inf if self.plan is None else evaluate(self.tables, self.plan).step_time_s
        near = own <= upper * (1 + AGREE)
        question = Question(
            tables=self.tables,
            build=build,
            upper=own if near else upper,
            known=near and (math.isfinite(own) or has_spine(self.tables)),
            solver=self.solver,
            clock=clock,
        )
        _take(self, question.answer(), upper)

    def _offer(self, plan: Assignment) -> None:
        price = evaluate(self.tables, plan)
        if price.feasible and (self.plan is None or price.step_time_s < evaluate(self.tables, self.plan).step_time_s):
            self.plan = plan

    def _hybrid(self, tables: CostTables, upper: float) -> tuple[MipModel, Reader]:
        """F4 over the places and intervals that the chain's potentials leave below the limit."""
        assert self._chain is not None
        chain, prices, stages = chain_of(tables), self._chain.prices, tables.candidate.num_stages
        width = tables.num_layers - stages + 1
        way = guide(chain, build_intervals(chain, prices, width=width), prices, upper=upper)
        live = live_nodes(tables)
        joint = joint_model(tables, live=live if way is None else live & way.live, upper=upper)
        if stages > 1 and way is not None:
            columns = grow_columns(chain, way, max_labels=MAX_INTERVAL_LABELS)
            if columns.complete:
                add_intervals(joint, tables, columns)
        return joint.model, joint.assignment
