"""Engine `equal_stages`: the referee's optimum on random tables; what it says of plans that do not exist."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from uniap_jax.core.costs import Candidate
from uniap_jax.core.equal_costs import EqualTables, evaluate_equal, num_ticks, quick_bound
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.equal_stages import best_choice, search_equal


def brute_force_equal(tables: EqualTables) -> tuple[int, ...] | None:
    """Every choice, of up to two groups of slots, priced by the referee; the oracle of small instances."""
    choices: Iterable[tuple[int, ...]] = np.ndindex(*(len(tables.strategies or tables.pass_s),) * tables.num_rows)
    first, last = tables.run, tables.run + tables.slots
    changes = [(c, sum(a != b for a, b in pairwise(c[first:last]))) for c in choices]
    priced = [(evaluate_equal(tables, c), c) for c, count in changes if count < 2]
    possible = [(p.step_time_s, c) for p, c in priced if p.feasible and math.isfinite(p.step_time_s)]
    return min(possible, default=(0.0, None))[1]


def random_tables(seed: int, candidate: Candidate | None = None) -> EqualTables:
    """Rows with edges that skip some, strategies that are illegal for some, and memory that binds in half the cases."""
    rng = np.random.default_rng(seed)
    rows, k = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    run = int(rng.integers(rows))
    slots = int(rng.integers(1, rows - run + 1))
    every = [(u, v) for u in range(rows) for v in range(u + 1, rows)]
    edges = tuple(e for e in every if e[1] == e[0] + 1 or rng.random() < 0.3)
    allowed = rng.random((rows, k)) < 0.85
    memory, transient = rng.integers(1, 20, (rows, k)) * 1.0, rng.integers(0, 20, (rows, k)) * 1.0
    return EqualTables(
        candidate=candidate or Candidate(num_stages=int(rng.choice([2, 4])), num_microbatches=int(rng.integers(1, 9))),
        rows=tuple(range(rows)),
        stage=(0,) * rows,
        time_s=rng.integers(1, 30, (rows, k)) * 1.0,
        iteration_time_s=rng.integers(0, 30, (rows, k)) * 1.0,
        memory_bytes=memory,
        transient_bytes=transient,
        pass_s=rng.random(k),
        run=run,
        slots=slots,
        base_bytes=float(rng.integers(0, 5)),
        base_s=0.5,
        capacity_bytes=float(rng.uniform(6, 22)) * rows,
        allowed=allowed,
        edges=edges,
        reshard_s=rng.integers(0, 20, (len(edges), k, k)) * 1.0,
    )


@pytest.mark.parametrize("block", range(4))
def test_random_tables_are_solved_as_by_brute_force(block: int) -> None:
    possible = 0
    for seed in range(100 * block, 100 * block + 100):
        tables = random_tables(seed)
        ours, theirs = best_choice(tables).rows, brute_force_equal(tables)
        assert (ours is None) == (theirs is None), seed
        if ours is not None and theirs is not None:
            price = evaluate_equal(tables, ours)
            assert price.feasible, seed
            assert price.step_time_s == pytest.approx(evaluate_equal(tables, theirs).step_time_s, rel=1e-12), seed
            assert quick_bound(tables) <= price.step_time_s * (1 + 1e-12), seed
            possible += 1
    assert 20 < possible < 100  # both kinds occur


def alike(seed: int, *, slots: int, k: int) -> EqualTables:
    """Slots that cost the same, strategies that trade time for memory in two layouts, memory for half of the fast."""
    rng = np.random.default_rng(seed)
    layout = np.arange(k) % 2
    time = np.sort(rng.uniform(1, 10, k))
    memory = np.sort(rng.uniform(1, 10, k))[::-1]
    moved = np.where(layout[:, None] == layout[None, :], 0.0, 0.1)
    pairs = [(i, i + 1) for i in range(slots - 1)] + [(0, slots - 1)]
    rows = (slots, 1)
    return EqualTables(
        candidate=Candidate(num_stages=4, num_microbatches=4),
        rows=tuple(range(slots)),
        stage=(0,) * slots,
        time_s=np.tile(time, rows),
        iteration_time_s=np.zeros((slots, k)),
        memory_bytes=np.tile(memory, rows),
        transient_bytes=np.tile(rng.uniform(0, 2, k), rows),
        pass_s=np.zeros(k),
        run=0,
        slots=slots,
        base_bytes=0.0,
        base_s=0.0,
        capacity_bytes=float(slots * (memory[0] + memory[-1]) / 2),
        allowed=np.ones((slots, k), dtype=np.bool_),
        edges=tuple(pairs),
        reshard_s=np.stack([moved] * len(pairs)),
    )


def test_slots_of_a_stage_differ_where_memory_asks_for_it() -> None:
    for seed in range(20):
        tables = alike(seed, slots=3, k=5)
        ours, theirs = best_choice(tables).rows, brute_force_equal(tables)
        assert ours is not None
        assert theirs is not None
        value = evaluate_equal(tables, ours).step_time_s
        assert value == pytest.approx(evaluate_equal(tables, theirs).step_time_s, rel=1e-12)
    tables = alike(0, slots=24, k=12)
    found = best_choice(tables, clock=Clock(limit_s=60.0))
    assert found.exact
    assert found.rows is not None
    assert len(set(found.rows)) > 1
    same = [(k,) * 24 for k in range(12)]
    prices = [evaluate_equal(tables, c) for c in same]
    assert evaluate_equal(tables, found.rows).step_time_s < min(p.step_time_s for p in prices if p.feasible)


def test_the_search_takes_the_best_candidate_and_proves_it() -> None:
    candidates = [
        Candidate(num_stages=p, num_microbatches=c, schedule=s)
        for p in (2, 4)
        for c in (1, 2, 4)
        for s in ("gpipe", "one_f_one_b")
    ]

    def tables_of(candidate: Candidate) -> EqualTables:
        return random_tables(7, candidate)

    found = search_equal(tables_of, candidates, clock=Clock(limit_s=60.0))
    prices = []
    for c in candidates:
        choice = brute_force_equal(tables_of(c))
        assert choice is not None
        prices.append(evaluate_equal(tables_of(c), choice).step_time_s)
    assert found.value == pytest.approx(min(prices))
    assert found.bound_s == found.value
    assert found.tables is not None
    assert found.tables.candidate == Candidate(num_stages=2, num_microbatches=1, schedule="gpipe")
    nothing = search_equal(tables_of, candidates, clock=Clock(limit_s=60.0), upper=found.value)
    assert nothing.tables is None
    assert nothing.bound_s == found.value


def test_what_does_not_fit_says_how_much_would() -> None:
    tables = random_tables(7)
    small = EqualTables(**{**{f: getattr(tables, f) for f in EqualTables.__slots__}, "capacity_bytes": 1.0})
    found = search_equal(lambda _: small, [small.candidate], clock=Clock(limit_s=60.0))
    assert found.tables is None
    assert math.isinf(found.bound_s)
    assert found.least_bytes > 1.0


def test_ticks() -> None:
    assert num_ticks(Candidate(num_stages=4, num_microbatches=8, schedule="gpipe")) == 11
    assert num_ticks(Candidate(num_stages=4, num_microbatches=8, schedule="one_f_one_b")) == 11
