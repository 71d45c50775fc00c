"""Every exact engine against brute force on random candidates."""

import pytest

from oracles.random_tables import random_tables
from uniap_jax.core.costs import CostTables, evaluate
from uniap_jax.planner import solve_tables
from uniap_jax.planner.brute import brute_force


def assert_optimal(tables: CostTables, engine: str) -> None:
    truth = brute_force(tables)
    result = solve_tables(tables, engine=engine, time_limit_s=60.0, confirm=False)
    if truth is None:
        assert (result.status, result.assignment) == ("infeasible", None)
        return
    price = evaluate(tables, truth)
    assert price.feasible
    assert result.status == "optimal", (result, price.step_time_s)
    assert result.evaluation.step_time_s == pytest.approx(price.step_time_s, rel=1e-9)
    assert result.evaluation == evaluate(tables, result.assignment)
    assert result.bound_s == pytest.approx(price.step_time_s, rel=1e-6)


@pytest.mark.parametrize("block", range(10))
def test_interval_on_300_chains(block):
    for seed in range(30 * block, 30 * block + 30):
        assert_optimal(random_tables(seed, chain=True), "interval")


@pytest.mark.parametrize(("engine", "number"), [("interval", 10), ("hybrid", 10), ("miqp", 4), ("literal", 4)])
def test_on_a_few_graphs(engine, number):
    for seed in range(1000, 1000 + number):
        assert_optimal(random_tables(seed), engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("engine", ["interval", "hybrid", "miqp", "literal"])
def test_on_300_graphs(engine, block):
    for seed in range(30 * block, 30 * block + 30):
        assert_optimal(random_tables(seed), engine)
