"""Other plans than the best: the best ones of other stages and micro-batches, and without one of its strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner.search import Priced, SearchResult

MOST_STRATEGIES = 4
"""Strategies of the best plan that are taken away, each in turn, the most used first."""

TablesOf = Callable[[Candidate], CostTables]
SearchOf = Callable[[TablesOf, Sequence[Candidate]], SearchResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An alternative with what sets it apart."""

    what: str
    plan: Priced
    bound_s: float


def others(
    best: Priced, tables_of: TablesOf, candidates: Sequence[Candidate], search: SearchOf, *, number: int
) -> tuple[Other, ...]:
    """The `number` fastest alternatives, each the best plan of its description.

    Args:
        best: the plan they are alternatives to.
        tables_of: of the problem.
        candidates: of the problem.
        search: the engine over tables and candidates.
        number: at most so many.
    """
    if number < 1:
        return ()
    found = [*_other_candidates(best, tables_of, candidates, search, number)]
    found += _other_strategies(best, tables_of, candidates, search)
    unique: dict[tuple[Candidate, object], Other] = {}
    for other in sorted(found, key=lambda o: (o.plan.value, o.plan.candidate)):
        unique.setdefault((other.plan.candidate, other.plan.assignment), other)
    return tuple(unique.values())[:number]


def _other_candidates(
    best: Priced, tables_of: TablesOf, candidates: Sequence[Candidate], search: SearchOf, number: int
) -> Iterator[Other]:
    left = [c for c in candidates if c != best.candidate]
    for _ in range(min(number, len(left))):
        result = search(tables_of, left)
        if result.best is None:
            return
        c = result.best.candidate
        yield Other(what=_sizes(c), plan=result.best, bound_s=result.bound_s)
        left.remove(c)


def _sizes(c: Candidate) -> str:
    stages, pieces = c.num_stages, c.num_microbatches
    told = f"{stages} stage{'s' if stages > 1 else ''}, {pieces} micro-batch{'es' if pieces > 1 else ''}"
    return f"{told}, layers of loops {c.storage}" if c.storage else told


def _other_strategies(
    best: Priced, tables_of: TablesOf, candidates: Sequence[Candidate], search: SearchOf
) -> Iterator[Other]:
    strategies = tables_of(best.candidate).strategies
    used = Counter(best.assignment.strategy).most_common(MOST_STRATEGIES)
    for k, _ in used if strategies else ():
        banned = strategies[k]
        result = search(Without(banned, tables_of), candidates)
        if result.best is not None:
            yield Other(what=f"without {banned}", plan=result.best, bound_s=result.bound_s)


@dataclass(frozen=True, slots=True)
class Without:
    """Tables in which no layer may take one strategy."""

    strategy: Strategy
    inner: TablesOf

    def __call__(self, candidate: Candidate) -> CostTables:
        """The candidate's tables without the strategy."""
        tables = self.inner(candidate)
        keep = np.array([s != self.strategy for s in tables.strategies], dtype=np.bool_)
        return replace(tables, allowed=tables.allowed & keep)
