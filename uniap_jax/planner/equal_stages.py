"""Engine `equal_stages`: the best strategies of one program for all stages, exactly.

Rows are taken in order. A label is a choice for the rows so far, told apart only by what later rows can tell of it: the
reshardings from rows that they read. Of labels that look alike, one that costs no less time, no less memory and no less
working memory than another is dropped, and so is one that cannot end below the best choice known, for any price of
memory. What is left at the end holds the optimum, for time and memory of the rest do not depend on what was dropped.

The slots of a stage take one strategy, or one up to some slot and another from there on: of equal slots under one limit
of memory, mixing two strategies is as good as mixing many, but for what a single slot more or less of memory would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Candidate, Evaluation
from uniap_jax.core.equal_costs import EqualTables, evaluate_equal, quick_bound
from uniap_jax.planner.clock import Clock


@dataclass(frozen=True, slots=True)
class _Label:
    time: float
    memory: float
    transient: float
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice for every row.

    Attributes:
        rows: of each row, a position on the strategies axis; None where nothing fits in less time than asked.
        exact: whether no other is faster; not known where the time ran out.
    """

    rows: tuple[int, ...] | None
    exact: bool = True


def best_choice(tables: EqualTables, *, upper: float = math.inf, clock: Clock | None = None) -> Choice:
    """The fastest choice that fits and takes less than `upper` seconds.

    Args:
        tables: of one candidate.
        upper: choices that take as long are of no interest.
        clock: when to stop.
    """
    best, value, slots = None, upper, tables.slots
    for first in range(slots):
        if clock is not None and clock.expired():
            return Choice(rows=best, exact=False)
        sizes = (first, slots - first) if first else (slots,)
        found = _best_labels(_grouped(tables, sizes), value)
        if found is not None:
            inner = [k for k, size in zip(found[tables.run :], sizes, strict=False) for _ in range(size)]
            best = (*found[: tables.run], *inner, *found[tables.run + len(sizes) :])
            value = evaluate_equal(tables, best).step_time_s
    return Choice(rows=best)


def _grouped(tables: EqualTables, sizes: tuple[int, ...]) -> EqualTables:
    """The same tables with one row for each group of so many neighbouring slots."""
    starts = [tables.run + sum(sizes[:i]) for i in range(len(sizes))]
    starts = [*range(tables.run), *starts, *range(tables.run + tables.slots, tables.num_rows)]
    row = [sum(r >= s for s in starts) - 1 for r in range(tables.num_rows)]
    edges: dict[tuple[int, int], np.ndarray] = {}
    time = np.add.reduceat(tables.time_s, starts)
    for (u, v), seconds in zip(tables.edges, tables.reshard_s, strict=True):
        pair = row[u], row[v]
        if pair[0] == pair[1]:
            time[pair[0]] += np.diagonal(seconds)
        else:
            edges[pair] = edges.get(pair, np.zeros_like(seconds)) + seconds
    return replace(
        tables,
        slots=len(sizes),
        time_s=time,
        iteration_time_s=np.add.reduceat(tables.iteration_time_s, starts),
        memory_bytes=np.add.reduceat(tables.memory_bytes, starts),
        transient_bytes=np.maximum.reduceat(tables.transient_bytes, starts),
        allowed=np.logical_and.reduceat(tables.allowed, starts),
        edges=tuple(edges),
        reshard_s=np.stack(list(edges.values())) if edges else np.zeros((0, *tables.reshard_s.shape[1:])),
    )


def _best_labels(tables: EqualTables, upper: float) -> tuple[int, ...] | None:
    limit = tables.capacity_bytes * (1 + MEMORY_TOLERANCE) - tables.base_bytes
    cost = np.where(tables.allowed, tables.time_s + tables.iteration_time_s, np.inf)
    memory = np.where(tables.allowed, tables.memory_bytes, np.inf)
    least_memory = _suffix(memory)
    least_time = _suffix(cost)
    price = _price(cost, memory, limit)
    priced = _suffix(np.where(tables.allowed, cost + price * tables.memory_bytes, np.inf))
    looks = _looks(tables)
    labels = [_Label(tables.base_s, 0.0, 0.0, ())]
    for row in range(tables.num_rows):
        into = [(tables.reshard_s[e], u) for e, (u, v) in enumerate(tables.edges) if v == row]
        alive = sorted({u for u, v in tables.edges if u <= row < v})
        groups: dict[tuple[int, ...], list[_Label]] = {}
        for k in _useful(tables, cost, looks, row):
            own, held, transient = float(cost[row, k]), float(memory[row, k]), float(tables.transient_bytes[row, k])
            for label in labels:
                time = label.time + own + sum(float(seconds[label.choice[u], k]) for seconds, u in into)
                grown = _Label(time, label.memory + held, max(label.transient, transient), (*label.choice, k))
                room = limit - grown.memory - grown.transient
                fits = least_memory[row + 1] <= room
                if fits and time + max(least_time[row + 1], priced[row + 1] - price * room) < upper:
                    groups.setdefault(tuple(looks[u][grown.choice[u]] for u in alive), []).append(grown)
        labels = [label for group in groups.values() for label in _undominated(group)]
    best = min(labels, key=lambda label: (label.time, label.choice), default=None)
    return None if best is None else best.choice


def _suffix(table: np.ndarray) -> list[float]:
    """[rows + 1] the least that rows from each on take."""
    least = table.min(axis=1)
    return [*np.cumsum(least[::-1])[::-1].tolist(), 0.0]


def _price(cost: np.ndarray, memory: np.ndarray, limit: float) -> float:
    """Seconds a byte at which the bound without reshardings is highest: a slope between two strategies of a row."""
    slopes = {0.0}
    for times, sizes in {(tuple(c), tuple(m)) for c, m in zip(cost.tolist(), memory.tolist(), strict=True)}:
        points = [(t, m) for t, m in zip(times, sizes, strict=True) if math.isfinite(t)]
        slopes |= {(b[0] - a[0]) / (a[1] - b[1]) for a in points for b in points if a[1] > b[1] and b[0] > a[0]}

    held = np.where(np.isfinite(cost), memory, 0.0)

    def bound(price: float) -> float:
        return float((cost + price * held).min(axis=1).sum()) - price * limit

    # a sum of minima of lines is concave: it rises up to its highest slope and falls from there on
    ordered = sorted(slopes)
    low, high = 0, len(ordered) - 1
    while low < high:
        middle = (low + high) // 2
        if bound(ordered[middle]) < bound(ordered[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return ordered[low]


def _looks(tables: EqualTables) -> list[list[int]]:
    """For each row and strategy, a number that strategies share whose reshardings to later rows are the same."""
    k = len(tables.pass_s)
    found = []
    for row in range(tables.num_rows):
        out = [tables.reshard_s[e] for e, (u, _) in enumerate(tables.edges) if u == row]
        table = np.concatenate(out, axis=1) if out else np.zeros((k, 0))
        known: dict[bytes, int] = {}
        found.append([known.setdefault(table[i].tobytes(), len(known)) for i in range(k)])
    return found


def _useful(tables: EqualTables, cost: np.ndarray, looks: list[list[int]], row: int) -> list[int]:
    """Strategies of a row that no other is as good as in everything."""
    into = [tables.reshard_s[e] for e, (_, v) in enumerate(tables.edges) if v == row]
    kept: list[int] = []
    memory, transient = tables.memory_bytes[row], tables.transient_bytes[row]
    for k in sorted(np.flatnonzero(tables.allowed[row]).tolist(), key=lambda k: (cost[row, k], memory[k], k)):
        if not any(
            looks[row][k] == looks[row][other]
            and memory[other] <= memory[k]
            and transient[other] <= transient[k]
            and all(np.array_equal(t[:, other], t[:, k]) for t in into)
            for other in kept
        ):
            kept.append(k)
    return sorted(kept)


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
    refusal: Callable[[Candidate], str] = lambda _: "",
) -> EqualResult:
    """The best candidate, by bound; of equally fast ones that with fewer stages, then fewer micro-batches.

    Args:
        tables_of: builds the tables of a candidate.
        candidates: with several stages each.
        clock: when to stop.
        upper: plans that take as long are of no interest.
        refusal: why a candidate is impossible after all; asked only of those that could be the best.
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
        if refusal(every[i][1]):
            continue
        choice = best_choice(tables, upper=value, clock=clock)
        if not choice.exact:
            left = min(left, bounds[i])
        if choice.rows is None:
            continue
        price = evaluate_equal(tables, choice.rows)
        if price.feasible and price.step_time_s < value:
            best, value = (tables, choice.rows, price), price.step_time_s
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
