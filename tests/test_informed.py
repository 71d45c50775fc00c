"""What a plan rests on is measured before the plan is taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniap_jax as uniap
from uniap_jax import cost_model, planning
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Key, Profile
from uniap_jax.cost_model import TableModel


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return uniap.trace(step, [jnp.zeros((64, 64))] * 2, np.ones((8, 64), np.float32))


@pytest.fixture(scope="module")
def described(graph: LayerGraph) -> Profile:
    return uniap.profile(graph, uniap.local_cluster(jax.devices()[:4]), source="described")


def found_out(profile: Profile, measured: Collection[Key]) -> Profile:
    """Everything takes four times as long as is thought before it is measured, but for what is kept in pieces."""

    def cost(key, thought):
        if key not in measured:
            return replace(thought, origin="scaled", memory_origin="scaled")
        times = {n: getattr(thought, n) * (1.0 if "fsdp" in key.strategy else 4.0) for n in ("forward_s", "backward_s")}
        return replace(thought, origin="measured", memory_origin="compiled", **times)

    entries = tuple((k, cost(k, c)) for k, c in profile.entries)
    return replace(profile, source="measured" if measured else "described", entries=entries, jax_version="0.10")


def solved(costs: TableModel) -> list[Plan]:
    return [uniap.solve(costs, num_stages=1, num_microbatches=1, baselines=False, why=False)]


def test_a_plan_that_rests_on_measured_numbers_is_the_best_under_all_of_them(graph, described, monkeypatch):
    """Numbers that are too low until they are measured mislead no one who measures what a plan rests on."""
    monkeypatch.setattr(planning, "ROUNDS", 200)
    cluster, measured, rounds = uniap.local_cluster(jax.devices()[:4]), set[Key](), list[float]()

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        assert not measured.intersection(only or ())
        measured.update(only or ())
        rounds.append(seconds)
        return cost_model.estimate(graph, cluster, found_out(described, measured))

    _, (plan,) = planning.informed(price, solved, 100.0)
    (best,) = solved(cost_model.estimate(graph, cluster, found_out(described, described.table())))
    assert plan.prediction.step_time_s == best.prediction.step_time_s
    assert 1 < len(rounds) < 100
    assert len(measured) < len(described.entries)


def test_the_budget_is_kept(graph, described, monkeypatch):
    """Every round finds out a little and takes what it is given; the search goes on for a few of them."""
    cluster, measured, rounds = uniap.local_cluster(jax.devices()[:4]), set[Key](), list[float]()
    clock = [0.0]
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        measured.update((only or ())[:1])
        rounds.append(seconds)
        clock[0] += seconds
        return cost_model.estimate(graph, cluster, found_out(described, measured))

    planning.informed(price, solved, 100.0)
    assert len(rounds) == 1 + planning.ROUNDS
    assert rounds[:3] == pytest.approx([60.0, 20.0, 10.0])
    assert clock[0] <= 100.0


def test_what_a_round_does_not_take_is_left_to_the_next(graph, described, monkeypatch):
    cluster, measured, rounds = uniap.local_cluster(jax.devices()[:4]), set[Key](), list[float]()
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        measured.update((only or ())[:1])
        rounds.append(seconds)
        return cost_model.estimate(graph, cluster, found_out(described, measured))

    planning.informed(price, solved, 100.0)
    assert rounds == pytest.approx([60.0] + [20.0] * planning.ROUNDS)


def test_what_cannot_be_measured_is_asked_for_with_half_of_the_time_and_then_with_all_of_it(
    graph, described, monkeypatch
):
    cluster, asked = uniap.local_cluster(jax.devices()[:4]), list[tuple[bool, float]]()
    monkeypatch.setattr(planning, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        asked.append((bool(only), round(seconds)))
        return cost_model.estimate(graph, cluster, found_out(described, ()))

    planning.informed(price, solved, 100.0)
    assert asked == [(False, 60), (True, 20), (True, 40)]


def test_memory_that_no_compiler_told_is_asked_for(graph, described):
    """Times may be in the cache from another day, and memory scaled from another layer's."""
    timed = found_out(described, described.table())
    scaled = replace(timed, entries=tuple((k, replace(c, memory_origin="scaled")) for k, c in timed.entries))
    cluster = uniap.local_cluster(jax.devices()[:4])
    for profile, known in ((timed, True), (scaled, False)):
        costs = cost_model.estimate(graph, cluster, profile)
        (plan,) = solved(costs)
        wanted = cost_model.unmeasured(costs, plan)
        assert {k.strategy for k in wanted} == (set() if known else {str(c.strategy) for c in plan.layers})


def test_described_numbers_are_not_to_be_measured(graph, described):
    costs = cost_model.estimate(graph, uniap.local_cluster(jax.devices()[:4]), described)
    assert cost_model.unmeasured(costs, solved(costs)[0]) == ()
