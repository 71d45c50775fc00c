"""What must hold whatever the costs are."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.random_tables import random_tables
from uniap_jax.core.costs import CostTables, evaluate
from uniap_jax.planner import solve_tables
from uniap_jax.planner.bounds import first_multipliers, lagrangian_bound, quick_bound
from uniap_jax.planner.chain import chain_of
from uniap_jax.planner.infeasible import least_memory
from uniap_jax.planner.intervals import build_intervals

seeds = st.integers(min_value=0, max_value=10**6)
quickly = settings(max_examples=40, deadline=None, derandomize=True)


def best(tables: CostTables) -> float:
    result = solve_tables(tables, confirm=False)
    assert result.status in ("optimal", "infeasible")
    return float("inf") if result.evaluation is None else result.evaluation.step_time_s


def chain(seed: int) -> CostTables:
    return random_tables(seed, chain=True, most_layers=8)


@quickly
@given(seeds, st.floats(1.0, 3.0))
def test_more_memory_is_never_slower(seed, factor):
    tables = chain(seed)
    assert best(replace(tables, capacity_bytes=tables.capacity_bytes * factor)) <= best(tables) * (1 + 1e-9)


@quickly
@given(seeds)
def test_more_strategies_are_never_slower(seed):
    tables = chain(seed)
    assert best(replace(tables, allowed=np.ones_like(tables.allowed))) <= best(tables) * (1 + 1e-9)


@quickly
@given(seeds, st.floats(0.0, 1.0))
def test_a_faster_link_is_never_slower(seed, factor):
    tables = chain(seed)
    faster = replace(tables, cross_stage_s=tables.cross_stage_s * factor, relay_s=tables.relay_s * factor)
    assert best(faster) <= best(tables) * (1 + 1e-9)


@quickly
@given(seeds)
def test_the_order_of_strategies_does_not_matter(seed):
    tables = chain(seed)
    order = np.random.default_rng(seed).permutation(tables.num_strategies)
    mixed = replace(
        tables,
        time_s=tables.time_s[:, :, order],
        iteration_time_s=tables.iteration_time_s[:, :, order],
        memory_bytes=tables.memory_bytes[:, :, order],
        allowed=tables.allowed[:, order],
        reshard_s=tables.reshard_s[:, order][:, :, order],
        cross_stage_s=tables.cross_stage_s[:, order][:, :, order],
        relay_s=tables.relay_s[:, order],
    )
    one, other = best(tables), best(mixed)
    assert one == other or abs(one - other) <= 1e-9 * one


@quickly
@given(seeds)
def test_equal_layers_may_change_places(seed):
    """Layers 1 and 2 made equal (edges too): swapping their rows is the same problem, and starts share labels."""
    tables = chain(seed)
    if tables.num_layers < 4:
        return
    rows = np.array([0, 1, 1, *range(3, tables.num_layers)])
    same = replace(
        tables,
        time_s=tables.time_s[rows],
        iteration_time_s=tables.iteration_time_s[rows],
        memory_bytes=tables.memory_bytes[rows],
        allowed=tables.allowed[rows],
    )
    assert best(same) == best(replace(same, time_s=same.time_s.copy()))


@quickly
@given(seeds)
def test_bounds_are_below_the_optimum(seed):
    tables = chain(seed)
    value = best(tables)
    if value == float("inf"):
        return
    line = chain_of(tables)
    bound = lagrangian_bound(line, upper=np.inf, iterations=30)
    width = tables.num_layers - tables.candidate.num_stages + 1
    intervals = build_intervals(line, bound.prices, width=width)
    assert quick_bound(tables) <= value * (1 + 1e-9)
    assert bound.lower <= value * (1 + 1e-9)
    assert intervals.bound(np.inf)[0] <= value * (1 + 1e-9)
    assert build_intervals(line, first_multipliers(line), width=width).bound(np.inf)[0] <= value * (1 + 1e-9)


@quickly
@given(seeds)
def test_memory_is_decided_without_a_search(seed):
    tables = chain(seed)
    assert (best(tables) < float("inf")) == least_memory(tables).fits


@quickly
@given(seeds)
def test_no_baseline_is_better(seed):
    tables = chain(seed)
    value = best(tables)
    for engine in ("inter_then_intra", "layerwise_dp", "mcmc"):
        result = solve_tables(tables, engine=engine)
        if result.assignment is not None:
            assert evaluate(tables, result.assignment).step_time_s >= value * (1 - 1e-9)
