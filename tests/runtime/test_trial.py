"""Plans tried out: what they take, what they need, and that nothing of the caller's is touched."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cost_support
import uniap_jax as uniap
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.plan import Plan
from uniap_jax.runtime import trial
from uniap_jax.runtime.trial import Trial, try_out


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


@pytest.fixture(scope="module")
def plans(graph) -> list[Plan]:
    costs = uniap.estimate(graph)
    options = {"num_microbatches": 2, "executor": "stages", "baselines": False, "why": False}
    return [uniap.solve(costs, num_stages=p, **options) for p in (1, 2)]


def test_plans_that_fit_are_timed_and_the_callers_state_is_left_alone(graph, plans):
    state, _, batch = cost_support.build()
    state = uniap.compile_plan(graph, plans[0]).place(state, batch)  # as planned: a step would take its buffers
    before = jax.tree.map(np.array, state)
    leaves = graph.step.flatten(state, batch)
    tried = try_out(plans, lambda plan: uniap.compile_plan(graph, plan), leaves)
    assert [t.plan for t in tried] == plans
    assert all(t.seconds > 0 and not t.problem for t in tried)
    jax.tree.map(np.testing.assert_array_equal, before, state)


def test_shapes_do_where_there_are_no_arrays():
    """A typed key, whole numbers that pick rows, a step count."""

    def step(state, batch):
        def loss(w):
            noise = jax.random.normal(jax.random.fold_in(state["key"], state["count"]), w.shape)
            return jnp.mean((w + 1e-3 * noise)[batch["token"]] ** 2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        key, _ = jax.random.split(state["key"])
        return {"w": state["w"] - 0.1 * grad, "key": key, "count": state["count"] + 1}, value

    state = {"w": jnp.ones((16, 8)), "key": jax.random.key(0), "count": jnp.zeros((), jnp.int32)}
    shapes = jax.eval_shape(lambda: (state, {"token": jnp.zeros((8,), jnp.int32)}))
    graph = uniap.trace(step, *shapes)
    plan = uniap.solve(uniap.estimate(graph), num_stages=1, num_microbatches=1, baselines=False, why=False)
    assert Trial(uniap.compile_plan(graph, plan), *graph.step.flatten(*shapes)).seconds() > 0


def test_what_needs_more_than_there_is_does_not_run(graph, plans):
    state, _, batch = cost_support.build()
    tight = replace(plans[0].prediction, capacity_bytes=(1024.0,))
    small = replace(plans[0], prediction=tight)
    first, second = try_out(
        [small, plans[1]], lambda plan: uniap.compile_plan(graph, plan), graph.step.flatten(state, batch)
    )
    assert "of 1.00 KiB as compiled" in first.problem
    assert "stage 0" in str(first)
    assert first.seconds == second.seconds == 0.0  # one is left: there is nothing to tell apart
    assert str(second) == "P=2 c=2: fits"


def test_what_does_not_compile_or_run_says_so(graph, plans, monkeypatch):
    state, _, batch = cost_support.build()

    def compiled(plan: Plan):
        if plan.num_stages == 2:
            raise StrategyError("no such thing\nas this")
        return uniap.compile_plan(graph, plan)

    leaves = graph.step.flatten(state, batch)
    assert [t.problem for t in try_out(plans, compiled, leaves)] == ["", "no such thing"]

    def fails(self: Trial) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr(Trial, "seconds", fails)
    tried = try_out(plans, lambda plan: uniap.compile_plan(graph, plan), leaves)
    assert [t.problem for t in tried] == ["RESOURCE_EXHAUSTED: no room"] * 2


def test_a_long_trial_ends_after_a_round(graph, plans, monkeypatch):
    state, _, batch = cost_support.build()
    rows = []
    monkeypatch.setattr(trial, "ENOUGH_S", 0.0)
    monkeypatch.setattr(Trial, "seconds", lambda self: rows.append(1) or 2.0)
    tried = try_out(plans, lambda plan: uniap.compile_plan(graph, plan), graph.step.flatten(state, batch))
    assert [t.seconds for t in tried] == [2.0, 2.0]
    assert len(rows) == 2
