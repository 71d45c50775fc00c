"""The outer search: every candidate, best bound first, until the incumbent is proved or time is up.

The order of work is by bound, so the bound of the whole search is the least bound still open. Ties between plans are
broken by fewer stages, then fewer micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from uniap_jax.core.costs import Assignment, Candidate, CostTables, Evaluation, evaluate
from uniap_jax.planner.bounds import quick_bound, with_unlimited_memory
from uniap_jax.planner.clock import Clock

PROOF_GAP = 1e-7
"""Relative difference between plan and bound below which the plan counts as proved."""

TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands; given to the `progress` callback after every step.

    Attributes:
        seconds: since the start.
        step_time_s: of the best plan so far, infinite before the first.
        bound_s: no plan is faster.
        gap: (step_time - bound) / step_time, 1 before the first plan.
        open_candidates: still to be decided.
    """

    seconds: float
    step_time_s: float
    bound_s: float
    gap: float
    open_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An assignment of a candidate with the referee's price."""

    candidate: Candidate
    assignment: Assignment
    evaluation: Evaluation
    engine: str

    @property
    def value(self) -> float:
        """Step time in seconds."""
        return self.evaluation.step_time_s


class Refinement(Protocol):
    """What the search asks of an engine's progress on one candidate."""

    lower: float
    plan: Assignment | None
    done: bool
    stuck: bool
    notes: list[str]

    def step(self, *, upper: float, clock: Clock) -> None:
        """Works a little; raises `lower`, may set `plan`, sets `done` when nothing below `upper` is left."""
        ...

    def widen(self) -> bool:
        """Takes more room after getting stuck, for use of time that is left; False where there is no more."""
        ...


@dataclass(slots=True)
class Incumbent:
    """The best plan so far; only the referee's price counts."""

    best: Priced | None = None

    @property
    def value(self) -> float:
        """Its step time, infinite before the first plan."""
        return math.inf if self.best is None else self.best.value

    def offer(self, tables: CostTables, assignment: Assignment, engine: str) -> bool:
        """Takes the assignment if the referee finds it possible and better (or equal and simpler)."""
        evaluation = evaluate(tables, assignment)
        if not evaluation.feasible or not math.isfinite(evaluation.step_time_s):
            return False
        if evaluation.step_time_s > self.limit(tables.candidate):
            return False
        self.best = Priced(candidate=tables.candidate, assignment=assignment, evaluation=evaluation, engine=engine)
        return True

    def take(self, other: Priced) -> None:
        """Takes another incumbent's plan if it is better (or equal and simpler)."""
        if other.value <= self.limit(other.candidate):
            self.best = other

    def worse(self, tables: CostTables, assignment: Assignment) -> bool:
        """Whether the assignment is impossible or dearer than the best by more than rounding."""
        evaluation = evaluate(tables, assignment)
        return not evaluation.feasible or evaluation.step_time_s > self.value * (1 + 1e-7)

    def limit(self, candidate: Candidate) -> float:
        """A plan of the candidate is taken up to here: a little above the incumbent where it would be simpler."""
        if self.best is None:
            return math.inf
        own, other = ((c.num_stages, c.num_microbatches) for c in (candidate, self.best.candidate))
        return self.value * (1 + TIE if own < other else 1 - TIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search over candidates ends with.

    Attributes:
        best: the plan, or None.
        bound_s: no plan is faster; infinite where no plan exists.
        seconds: wall time.
        complete: every candidate was decided.
        interrupted: by Ctrl-C.
    """

    best: Priced | None
    bound_s: float
    seconds: float
    complete: bool
    interrupted: bool = False


@dataclass(slots=True, eq=False, order=False)
class _Open:
    candidate: Candidate
    lower: float
    work: Refinement | None = None


@dataclass(slots=True, eq=False)
class Search:
    """One run over candidates.

    Attributes:
        tables: builds the tables of a candidate.
        refine: starts an engine on them.
        engine: its name.
        clock: when to stop.
        incumbent: best plan so far; may hold one from elsewhere.
        bounds: per candidate, best bound so far; may hold some from elsewhere.
        free_bounds: the same were memory unlimited.
        refusal: why a candidate is impossible after all; asked before it is worked on.
        notes: what solvers did wrong, each once.
        progress: called after every step.
    """

    tables: Callable[[Candidate], CostTables]
    refine: Callable[[CostTables], Refinement]
    engine: str
    clock: Clock
    incumbent: Incumbent = field(default_factory=Incumbent)
    bounds: dict[Candidate, float] = field(default_factory=dict)
    free_bounds: dict[Candidate, float] = field(default_factory=dict)
    refusal: Callable[[Candidate], str] = lambda _: ""
    notes: dict[str, None] = field(default_factory=dict)
    progress: Callable[[Progress], None] | None = None

    def run(self, candidates: Sequence[Candidate]) -> SearchResult:
        """Works on the candidate of least bound until all are decided or time is up."""
        heap: list[tuple[float, Candidate, _Open]] = []
        stuck: list[_Open] = []
        interrupted = False
        try:
            for candidate in sorted(candidates):
                lower = self._first_bound(candidate)
                if math.isfinite(lower):
                    heapq.heappush(heap, (lower, candidate, _Open(candidate, lower)))
            while (heap or self._widened(heap, stuck)) and not self.clock.expired():
                lower, candidate, entry = heapq.heappop(heap)
                limit, value = self.incumbent.limit(candidate), self.incumbent.value
                if lower >= limit:
                    continue
                if entry.work is None and self.refusal(candidate):
                    self.bounds[candidate] = self.free_bounds[candidate] = math.inf
                    continue
                try:
                    self._work(entry, limit)
                except KeyboardInterrupt:
                    heapq.heappush(heap, (lower, candidate, entry))
                    raise
                if entry.work is not None and entry.work.stuck:
                    stuck.append(entry)
                elif entry.work is not None and not entry.work.done:
                    heapq.heappush(heap, (entry.lower, candidate, entry))
                if self.incumbent.value < value:
                    # what the new plan rules out is let go at once: its tables take room
                    heap = [h for h in heap if h[0] < self.incumbent.limit(h[1])]
                    heapq.heapify(heap)
                self._report(min([math.inf, *(e.lower for e in stuck), *(h[0] for h in heap[:1])]), len(heap))
        except KeyboardInterrupt:
            if self.incumbent.best is None:
                raise
            interrupted = True
        left = [(e.lower, e.candidate) for e in stuck] + [(lower, c) for lower, c, _ in heap]
        open_bound = min((lower for lower, c in left if lower < self.incumbent.limit(c)), default=math.inf)
        return SearchResult(
            best=self.incumbent.best,
            bound_s=min(open_bound, self.incumbent.value),
            seconds=self.clock.spent(),
            complete=math.isinf(open_bound) and not interrupted,
            interrupted=interrupted,
        )

    def _widened(self, heap: list[tuple[float, Candidate, _Open]], stuck: list[_Open]) -> bool:
        """Puts the stuck candidate of least bound back to work, if it still matters and has more room to take."""
        for entry in sorted(stuck, key=lambda e: e.lower):
            if entry.lower >= self.incumbent.limit(entry.candidate):
                continue
            if entry.work is None or not entry.work.widen():
                return False
            stuck.remove(entry)
            heapq.heappush(heap, (entry.lower, entry.candidate, entry))
            return True
        return False

    def _first_bound(self, candidate: Candidate) -> float:
        if candidate not in self.bounds:
            tables = self.tables(candidate)
            self.bounds[candidate] = quick_bound(tables)
            self.free_bounds[candidate] = quick_bound(with_unlimited_memory(tables))
        return self.bounds[candidate]

    def _work(self, entry: _Open, limit: float) -> None:
        if entry.work is None:
            entry.work = self.refine(self.tables(entry.candidate))
        before = entry.work.plan
        entry.work.step(upper=limit, clock=self.clock)
        self.notes |= dict.fromkeys(entry.work.notes)
        entry.lower = self.bounds[entry.candidate] = max(entry.lower, entry.work.lower)
        if entry.work.plan is not None and entry.work.plan is not before:
            self.incumbent.offer(self.tables(entry.candidate), entry.work.plan, self.engine)

    def _report(self, lower: float, open_candidates: int) -> None:
        if self.progress is None:
            return
        value = self.incumbent.value
        bound = min(lower, value)
        self.progress(
            Progress(
                seconds=self.clock.spent(),
                step_time_s=value,
                bound_s=bound,
                gap=1.0 if math.isinf(value) else max(0.0, (value - bound) / value),
                open_candidates=open_candidates,
            )
        )
