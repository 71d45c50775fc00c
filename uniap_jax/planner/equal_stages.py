"""Engine `equal_stages`: the best strategies of one program for all stages, exactly.

Rows are taken in order. A label is a choice for the rows so far, told apart only by the strategies of those rows that
later rows still read from; of labels that agree on these, one that costs no less time, no less memory and no less
working memory than another is dropped. What is left at the end holds the optimum, for time and memory of the rest do
not depend on what was dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Candidate, Evaluation
from uniap_jax.core.equal_costs import EqualTables, evaluate_equal, num_ticks, quick_bound
from uniap_jax.planner.clock import Clock


@dataclass(frozen=True, slots=True)
class _Label:
    time: float
    memory: float
    transient: float
    choice: tuple[int, ...]


def best_choice(tables: EqualTables, *, upper: float = math.inf) -> tuple[int, ...] | None:
    """The fastest choice that fits and takes less than `upper` seconds; None where there is none."""
    ticks, count = num_ticks(tables.candidate), tables.num_rows
    limit = tables.capacity_bytes * (1 + MEMORY_TOLERANCE) - tables.base_bytes
    cost = np.where(tables.allowed, ticks * tables.time_s + tables.iteration_time_s, np.inf)
    least_time = _suffix(cost)
    least_memory = _suffix(np.where(tables.allowed, tables.memory_bytes, np.inf))
    labels = [_Label(tables.base_s, 0.0, 0.0, ())]
    for row in range(count):
        into = [(e, u) for e, (u, v) in enumerate(tables.edges) if v == row]
        alive = sorted({u for u, v in tables.edges if u <= row < v})
        groups: dict[tuple[int, ...], list[_Label]] = {}
        for k in np.flatnonzero(tables.allowed[row]).tolist():
            own, memory = float(cost[row, k]), float(tables.memory_bytes[row, k])
            transient = float(tables.transient_bytes[row, k])
            for label in labels:
                time = label.time + own
                time += sum(ticks * float(tables.reshard_s[e, label.choice[u], k]) for e, u in into)
                grown = _Label(time, label.memory + memory, max(label.transient, transient), (*label.choice, k))
                fits = grown.memory + grown.transient + least_memory[row + 1] <= limit
                if fits and time + least_time[row + 1] < upper:
                    groups.setdefault(tuple(grown.choice[u] for u in alive), []).append(grown)
        labels = [label for group in groups.values() for label in _undominated(group)]
    best = min(labels, key=lambda label: (label.time, label.choice), default=None)
    return None if best is None else best.choice


def _suffix(table: np.ndarray) -> list[float]:
    """[rows + 1] the least that rows from each on take."""
    least = table.min(axis=1)
    return [*np.cumsum(least[::-1])[::-1].tolist(), 0.0]


def _undominated(labels: list[_Label]) -> list[_Label]:
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.time, x.memory, x.transient, x.choice)):
        if not any(k.memory <= label.memory and k.transient <= label.transient for k in kept):
            kept.append(label)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EqualResult:
    """What the engine found over several candidates.

    Attributes:
        tables: of the best candidate, None where nothing fits or time ran out before.
        choice: of each row.
        price: by the referee.
        bound_s: no plan is faster; infinite where none exists.
        candidates: looked at.
        least_bytes: memory of a device that the leanest choice of any candidate needs; infinite without candidates.
    """

    tables: EqualTables | None
    choice: tuple[int, ...]
    price: Evaluation | None
    bound_s: float
    candidates: int
    least_bytes: float

    @property
    def value(self) -> float:
        """Step time in seconds, infinite where there is no plan."""
        return math.inf if self.price is None else self.price.step_time_s


def search_equal(
    tables_of: Callable[[Candidate], EqualTables],
    candidates: Sequence[Candidate],
    *,
    clock: Clock,
    upper: float = math.inf,
) -> EqualResult:
    """The best candidate, by bound; of equally fast ones that with fewer stages, then fewer micro-batches.

    Args:
        tables_of: builds the tables of a candidate.
        candidates: with several stages each.
        clock: when to stop.
        upper: plans that take as long are of no interest.
    """
    every: list[tuple[EqualTables, Candidate]] = []
    value, left = upper, math.inf
    for candidate in sorted(candidates):
        if clock.expired():  # nothing is known of those that are left
            left = 0.0
            break
        every.append((tables_of(candidate), candidate))
    bounds = [quick_bound(t) for t, _ in every]
    order = sorted(range(len(every)), key=lambda i: (bounds[i], every[i][1]))
    best: tuple[EqualTables, tuple[int, ...], Evaluation] | None = None
    for position, i in enumerate(order):
        tables = every[i][0]
        if bounds[i] >= value:
            break
        if clock.expired():
            left = min(left, bounds[order[position]])
            break
        choice = best_choice(tables, upper=value)
        if choice is None:
            continue
        price = evaluate_equal(tables, choice)
        if price.feasible and price.step_time_s < value:
            best, value = (tables, choice, price), price.step_time_s
    found = best or (None, (), None)
    return EqualResult(
        tables=found[0],
        choice=found[1],
        price=found[2],
        bound_s=min(left, value),
        candidates=len(every),
        least_bytes=min((_leanest(t) for t, _ in every), default=math.inf),
    )


def _leanest(tables: EqualTables) -> float:
    """Bytes below which no choice fits: every row at its leanest, with the least working memory."""
    memory = np.where(tables.allowed, tables.memory_bytes, np.inf)
    transient = np.where(tables.allowed, tables.transient_bytes, np.inf)
    return tables.base_bytes + float(memory.min(axis=1).sum()) + float(transient.min(axis=1).max())
