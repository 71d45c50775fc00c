"""Why a plan is what it is, and what else there was."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import LlamaChain
from oracles.random_tables import random_tables
from uniap_jax.core.costs import Assignment, evaluate
from uniap_jax.core.errors import OptionError
from uniap_jax.core.serialize import plan_from_json, plan_to_json
from uniap_jax.planner import solve, solve_tables
from uniap_jax.planner.why import bindings, with_more_memory, with_unlimited_memory

SMALL = LlamaChain(num_blocks=6, num_devices=8, batch_size=16, memory_gib=20.0)
FULL = replace(SMALL, memory_gib=6.0, max_strategies=9)


def best(costs, **options):
    return solve(costs, baselines=False, why=False, **options).prediction.step_time_s


def test_memory_binds_where_more_of_it_helps():
    proof = solve(FULL).certificate
    more, free = proof.what_ifs
    assert (more.what, free.what) == ("10 % more memory", "unlimited memory")
    assert more.step_time_s == pytest.approx(best(replace(FULL, memory_gib=6.6)), rel=1e-9)
    assert free.step_time_s == pytest.approx(best(replace(FULL, memory_gib=6e6)), rel=1e-9)
    assert free.step_time_s < more.step_time_s <= proof.bound_s
    memory = proof.binding[0]
    assert memory.kind == "memory"
    assert 0.5 < memory.share <= 1
    assert memory.seconds == pytest.approx(proof.bound_s - free.step_time_s)


def test_memory_does_not_bind_where_there_is_enough():
    plan = solve(replace(SMALL, memory_gib=200.0))
    assert {w.step_time_s for w in plan.certificate.what_ifs} == {plan.prediction.step_time_s}
    assert all(b.kind != "memory" for b in plan.certificate.binding)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_step(seed):
    tables = random_tables(seed)
    found = solve_tables(tables, engine="brute_force")
    if found.evaluation is None:
        return
    parts = bindings(tables, found.evaluation, None)
    assert sum(p.seconds for p in parts) == pytest.approx(found.evaluation.step_time_s, rel=1e-5)
    assert sum(p.share for p in parts) == pytest.approx(1.0, rel=1e-5)


def test_relaxed_tables():
    tables = random_tables(3)
    assert (with_more_memory(tables).capacity_bytes == tables.capacity_bytes * 1.1).all()
    assert not with_unlimited_memory(tables).memory_bytes.any()
    assert with_unlimited_memory(tables).time_s is tables.time_s


def test_alternatives_are_the_best_of_their_kind():
    plan = solve(FULL, top_k=5, why=False)
    found = plan.certificate.alternatives
    assert len(found) == 4
    times = [a.prediction.step_time_s for a in found]
    assert times == sorted(times)
    assert times[0] >= plan.prediction.step_time_s
    decisions = {(a.num_stages, a.num_microbatches, a.layers) for a in found}
    assert len(decisions | {(plan.num_stages, plan.num_microbatches, plan.layers)}) == 5
    for a in found:
        assert a.bound_s == pytest.approx(a.prediction.step_time_s, rel=1e-6)
        if not a.what.startswith("without"):
            sizes = {"num_stages": a.num_stages, "num_microbatches": a.num_microbatches}
            assert a.prediction.step_time_s == pytest.approx(best(FULL, **sizes), rel=1e-9)
        else:
            assert a.what.removeprefix("without ") not in {str(layer.strategy) for layer in a.layers}


def test_an_alternative_is_a_plan():
    plan = solve(FULL, top_k=2, why=False)
    other = plan.with_alternative(0)
    assert plan_from_json(plan_to_json(other)) == other
    assert plan_from_json(plan_to_json(plan)) == plan
    candidate = next(
        c for c in FULL.candidates() if (c.num_stages, c.num_microbatches) == (other.num_stages, other.num_microbatches)
    )
    tables = FULL.tables(candidate)
    choice = tuple(tables.strategies.index(layer.strategy) for layer in other.layers)
    price = evaluate(tables, Assignment(stage=tuple(layer.stage for layer in other.layers), strategy=choice))
    assert price.feasible
    assert price.step_time_s == pytest.approx(other.prediction.step_time_s, rel=1e-12)


def test_no_plan_is_no_number_of_plans():
    with pytest.raises(OptionError) as caught:
        solve(SMALL, top_k=0)
    assert caught.value.top_k == 0


def test_every_candidate_is_accounted_for():
    proof = solve(FULL, why=False).certificate
    assert len(proof.searched) == proof.candidates
    assert [s.outcome for s in proof.searched].count("chosen") == 1
    assert {s.outcome for s in proof.searched} <= {"chosen", "pruned", "no plan"}
    bounds = [np.inf if s.bound_s is None else s.bound_s for s in proof.searched]
    assert bounds == sorted(bounds)
    assert all((s.bound_s is None) == (s.outcome == "no plan") for s in proof.searched)


def test_out_of_time_nothing_more_is_searched():
    calls = []

    def count(progress):
        calls.append(progress)
        if progress.step_time_s < float("inf"):
            raise KeyboardInterrupt

    proof = solve(FULL, progress=count, baselines=False, top_k=3).certificate
    assert (proof.alternatives, proof.what_ifs) == ((), ())
