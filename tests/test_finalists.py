"""Plans of several numbers of stages are tried out before one is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import cost_support
import uniap_jax as uniap
from uniap_jax import planning
from uniap_jax.core.errors import InfeasibleError, OptionError
from uniap_jax.core.plan import Plan
from uniap_jax.planning import best_of, finalists
from uniap_jax.runtime.trial import Tried


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


@pytest.fixture(scope="module")
def costs(graph):
    return uniap.estimate(graph)


@pytest.fixture
def solve_for(costs):
    return lambda **pins: uniap.solve(costs, **{"baselines": False, "why": False, **pins})


def test_each_finalist_is_the_best_of_its_number_of_stages(costs, solve_for, monkeypatch):
    monkeypatch.setattr(planning, "FAR", float("inf"))
    found = finalists(solve_for, costs, 3)
    times = [p.prediction.step_time_s for p in found]
    assert len({p.num_stages for p in found}) == 3
    assert times == sorted(times)
    assert found[0].layers == solve_for().layers
    assert times[1] == solve_for(num_stages=found[1].num_stages).prediction.step_time_s
    assert [p.layers for p in finalists(solve_for, costs, 1)] == [found[0].layers]


def test_what_is_predicted_far_slower_is_not_tried(costs, solve_for, monkeypatch):
    monkeypatch.setattr(planning, "FAR", 1.0 - 1e-9)
    assert len(finalists(solve_for, costs, 4)) == 1


def test_with_fixed_stages_finalists_differ_in_their_microbatches(costs, solve_for, monkeypatch):
    monkeypatch.setattr(planning, "FAR", float("inf"))
    fixed: dict[str, Any] = {"num_stages": 2, "num_microbatches": "auto"}
    found = finalists(lambda **pins: solve_for(**{"num_stages": 2, **pins}), costs, 3, fixed=fixed)
    assert {p.num_stages for p in found} == {2}
    assert len({p.num_microbatches for p in found}) == 3
    both = {"num_stages": 2, "num_microbatches": 2}
    assert len(finalists(lambda **pins: solve_for(**{**both, **pins}), costs, 3, fixed=both)) == 1


def test_numbers_of_stages_of_which_nothing_fits_are_passed_over(costs, solve_for, monkeypatch):
    monkeypatch.setattr(planning, "FAR", float("inf"))
    best = solve_for()

    def only_one(**pins: Any) -> Plan:
        if pins.get("num_stages", best.num_stages) != best.num_stages:
            raise InfeasibleError("nothing fits", tight=())
        return solve_for(**pins)

    assert len(finalists(only_one, costs, 4)) == 1
    with pytest.raises(OptionError, match="finalists=0"):
        finalists(solve_for, costs, 0)


@pytest.fixture
def fates(costs, monkeypatch):
    """Two plans, and a trial that says what it is told to say."""
    plans = [uniap.solve(costs, num_stages=p, num_microbatches=1, executor="stages") for p in (1, 2)]
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(
        planning, "try_out", lambda plans, *_: tuple(Tried(plan=p, **f) for p, f in zip(plans, told, strict=True))
    )
    return plans, told


def test_the_fastest_that_fits_is_taken_with_what_was_proved(graph, fates):
    plans, told = fates
    compiled = lambda plan: uniap.compile_plan(graph, plan)  # noqa: E731
    told += [{"seconds": 0.2}, {"seconds": 0.1}]
    proof = best_of(plans, compiled, ([], [])).plan.certificate
    assert best_of(plans, compiled, ([], [])).plan.num_stages == 2
    assert (proof.status, proof.bound_s) == ("feasible", plans[0].certificate.bound_s)
    assert proof.gap == pytest.approx(1 - proof.bound_s / plans[1].prediction.step_time_s)
    assert proof.notes[-1].startswith("2 finalists were tried out: P=1 c=1: 200 ms")
    assert proof.notes[-1].endswith("(chosen)")

    told[:] = [{"seconds": 0.1}, {"seconds": 0.2}]
    first = best_of(plans, compiled, ([], [])).plan
    assert (first.num_stages, first.certificate.status) == (1, plans[0].certificate.status)

    told[:] = [{"problem": "needs too much"}, {}]
    assert best_of(plans, compiled, None).plan.num_stages == 2

    told[:] = [{"problem": "needs too much"}, {"problem": "needs more"}]
    last = best_of(plans, compiled, None).plan
    assert last.num_stages == 1
    assert "P=2 c=1: needs more" in last.certificate.notes[-1]


def test_a_step_with_finalists_trains_as_one_without(monkeypatch):
    monkeypatch.setattr(planning, "FAR", float("inf"))
    state, train_step, batch = cost_support.build()
    step = uniap.parallelize(train_step, source="described", finalists=2)
    ours, alone = step.place(state, batch), jax.tree.map(np.asarray, state)
    assert "2 finalists were tried out" in step.plan.certificate.notes[-1]
    for _ in range(3):
        ours, loss = step(ours, batch)
        alone, expected = train_step(alone, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), step.gather(ours), alone)


def test_one_process_tries_plans_out(graph):
    """Several would have to run them together."""

    class Lines:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    state, train_step, batch = cost_support.build()
    step = uniap.parallelize(train_step, source="described", finalists=2, processes=Lines())
    with pytest.raises(OptionError, match="finalists=2: plans are tried out by one process"):
        step.place(state, batch)
    with pytest.raises(OptionError, match="finalists=0"):
        uniap.parallelize(train_step, source="described", finalists=0).place(state, batch)


def test_programs_are_compiled_once(graph, costs):
    plan = uniap.solve(costs, num_stages=1, num_microbatches=1, baselines=False, why=False)
    step = uniap.compile_plan(graph, plan)
    programs = step.programs
    told = step.with_certificate(replace(plan.certificate, notes=("told",)))
    assert told.programs is programs or all(a is b for a, b in zip(told.programs, programs, strict=True))
    assert told.plan.certificate.notes == ("told",)
    assert step.plan == plan
