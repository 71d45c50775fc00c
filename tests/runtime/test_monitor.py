"""Stages that become slow are seen without a stop, reported once, and left for a better plan when that pays."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runtime_support import decoder_state, decoder_step, make_plan, token_batch, worst
from uniap_jax import api, frontend, runtime
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Prediction
from uniap_jax.core.schedule import make_schedule
from uniap_jax.core.slowed import price, slowed
from uniap_jax.runtime.monitor import Monitor, Proposal, expected_times, replanner
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.stopwatch import Reading, Stopwatch, passes, stage_times

TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(decoder_step, decoder_state(TX), token_batch())


def two_stages(graph: LayerGraph, **prediction: Any) -> runtime.ParallelStep:
    plan = make_plan(graph, stages=2, microbatches=4)
    return runtime.compile(graph, dataclasses.replace(plan, prediction=Prediction(step_time_s=1.0, **prediction)))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_times_of_stages_come_from_moments_alone(name: str) -> None:
    schedule = make_schedule(name, 3, 5)
    forward, backward, links = (1.0, 2.0, 1.5), (2.0, 5.0, 3.0), (0.0, 0.0)
    events = schedule.simulate(forward, backward, links)
    ended = {(e.stage, e.task): e.end_s for e in events}
    issued = dict.fromkeys(ended, 0.0)
    found = passes(schedule, issued, ended, (0.0,) * 3)
    assert {(e.stage, e.task): e.end_s for e in found} == pytest.approx(ended)
    assert stage_times(found, 3) == pytest.approx((3.0, 7.0, 4.5))


def test_the_speed_of_a_machine_is_no_drift() -> None:
    assert expected_times((1.0, 2.0, 3.0), (2.0, 4.0, 6.0)) == (2.0, 4.0, 6.0)
    assert expected_times((1.0, 1.0), (3.0, 6.0)) == (3.0, 3.0)  # the second was slow from the start
    assert expected_times((), (3.0, 6.0)) == (3.0, 6.0)


def feed(monitor: Monitor, times: tuple[float, ...], count: int, noise: Callable[[], float] = lambda: 1.0) -> None:
    for i in range(count):
        monitor.observe(Reading(step=i, stage_time_s=tuple(t * noise() for t in times)))


def test_noise_is_no_drift_and_a_slow_stage_is_said_once(graph: LayerGraph, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(two_stages(graph, stage_time_s=(0.010, 0.020)))
    random = np.random.RandomState(0)
    with caplog.at_level(logging.INFO, logger="uniap_jax"):
        feed(monitor, (0.03, 0.06), 2000, lambda: random.uniform(0.9, 1.1))
        assert not caplog.records
        assert monitor.drifts == ()
        feed(monitor, (0.03, 0.12), 50, lambda: random.uniform(0.9, 1.1))
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "stage 1 takes" in caplog.records[0].getMessage()
        (drift,) = monitor.drifts
        assert drift.stage == 1
        assert drift.factor == pytest.approx(2.0, rel=0.15)
        feed(monitor, (0.03, 0.06 * 1.4), 50, lambda: random.uniform(0.97, 1.03))  # between the two bounds
        assert len(monitor.drifts) == 1
        feed(monitor, (0.03, 0.06), 50, lambda: random.uniform(0.9, 1.1))
        assert monitor.drifts == ()
        assert len(caplog.records) == 2


class Delayed:
    """A stage's forward whose devices take longer by a given time; nothing computes meanwhile."""

    def __init__(self, program: Any, seconds: float) -> None:
        self._program, self.seconds = program, seconds

    def __call__(self, *inputs: Any) -> Any:
        first, *rest = self._program(*inputs)
        if isinstance(first, list):  # a stage that turns at once: results and cotangents are of one program
            totals, back = rest
            late = self._late(first[0], back[0])
            return [[late[0], *first[1:]], totals, [late[1], *back[1:]]]
        return [*self._late(first), *rest]

    def _late(self, *arrays: Any) -> Any:
        def hold(*held: Any) -> Any:
            time.sleep(self.seconds)
            return held

        shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
        return jax.jit(lambda *held: jax.pure_callback(hold, shapes, *held))(*arrays)


def test_a_stage_that_becomes_twice_as_slow_is_found(graph: LayerGraph) -> None:
    step, batch = two_stages(graph), token_batch()
    pipeline = step.executor
    assert isinstance(pipeline, Pipeline)
    stages = pipeline.built.stages
    late = [Delayed(s.forward, 0.1) for s in stages]
    stages[:] = [dataclasses.replace(s, forward=d) for s, d in zip(stages, late, strict=True)]
    monitor = Monitor(step, every=1, window=3)
    state = step.place(decoder_state(TX), batch)
    for _ in range(4):
        state, _ = step(state, batch)
    monitor.wait()
    assert len(monitor.readings) == 3
    assert monitor.drifts == ()
    late[1].seconds = 0.3
    for _ in range(3):
        state, _ = step(state, batch)
    monitor.wait()
    (drift,) = monitor.drifts
    assert drift.stage == 1
    assert drift.factor > 1.5
    monitor.close()
    assert pipeline.observe() is None


class Gated:
    """An array that is not ready before its gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.waiters: list[str] = []

    def block_until_ready(self) -> None:
        self.waiters.append(threading.current_thread().name)
        assert self.gate.wait(30.0)


def test_the_loop_waits_for_nothing() -> None:
    schedule, array, done = make_schedule("one_f_one_b", 2, 3), Gated(), SimpleQueue[Reading]()
    first = Stopwatch(0, schedule, done.put)
    second = Stopwatch(1, schedule, done.put, previous=first)
    for stopwatch in (first, second):
        for stage, task in ((e.stage, e.task) for e in schedule.simulate()):
            stopwatch(stage, task, array)
        stopwatch.finish()
    assert done.empty()
    array.gate.set()
    readings = sorted((done.get(timeout=30.0) for _ in range(2)), key=lambda r: r.step)
    assert [len(r.stage_time_s) for r in readings] == [2, 2]
    assert set(array.waiters) == {"uniap_stopwatch"}


@pytest.mark.parametrize("remaining", [1, 1000])
def test_state_after_a_switch_is_that_of_no_switch(graph: LayerGraph, remaining: int) -> None:
    batch = token_batch()
    better = make_plan(graph, stages=2, strategies="data=2", microbatches=2)
    adopted: list[Any] = []
    asked: list[tuple[float, ...]] = []

    def replan(_: Any, factors: tuple[float, ...]) -> Proposal:
        asked.append(factors)
        return Proposal(plan=better, now_s=0.4, then_s=0.2)

    step = two_stages(graph, stage_time_s=(0.01, 0.01))
    monitor = Monitor(step, replan=replan, compile=lambda p: runtime.compile(graph, p), adopt=adopted.append)
    state = step.place(decoder_state(TX), batch)
    state, _ = step(state, batch)
    assert monitor.at_checkpoint(1000, state, batch) is None  # nothing drifts
    feed(monitor, (0.02, 0.02), 5)
    feed(monitor, (0.02, 0.05), 5)
    moved = monitor.at_checkpoint(remaining, state, batch, switch_cost_s=10.0)
    assert asked == [(1.0, 2.5)]
    assert (moved is not None) is (remaining * 0.2 > 10.0)
    plain, plain_state = step, jax.tree.map(jnp.copy, state)
    if moved is not None:
        step, state = moved
        assert adopted == [step] == [monitor.step]
        assert worst(state, plain_state) == 0.0
    state, metrics = step(state, batch)
    expected, expected_metrics = plain(plain_state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-5)
    assert worst(state, expected) <= 2e-6


def test_small_gains_are_not_proposed(graph: LayerGraph) -> None:
    step = two_stages(graph, stage_time_s=(0.01, 0.01))
    monitor = Monitor(step, replan=lambda *_: Proposal(plan=step.plan, now_s=0.4, then_s=0.39))
    feed(monitor, (0.02, 0.02), 5)
    feed(monitor, (0.02, 0.05), 5)
    assert monitor.propose() is None


def test_a_slow_device_in_the_tables(graph: LayerGraph) -> None:
    model = api.estimate(graph, local_cluster(jax.devices()[:2]))
    plan = api.solve(model, num_stages=2, num_microbatches=2, schedule="one_f_one_b", baselines=False)
    plain, slow = price(model, plan), price(slowed(model, (1.0, 3.0)), plan)
    assert plain == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    assert slow is not None
    assert plain is not None
    assert plain < slow < 3 * plain
    replan = replanner(lambda: model, lambda m: api.solve(m, num_stages=2, num_microbatches=2, baselines=False))
    found = replan(plan, (1.0, 3.0))
    assert found is not None
    assert found.now_s == pytest.approx(slow)
    assert found.gain_s >= 0
    assert len(found.plan.stage_layers(1)) <= len(plan.stage_layers(1))


def test_a_parallelized_step_has_a_monitor() -> None:
    step = api.parallelize(decoder_step, devices=jax.devices()[:2], source="described", num_stages=2)
    batch = token_batch()
    state = step.place(decoder_state(TX), batch)
    monitor = step.monitor(every=1, window=2)
    before = step.plan
    feed(monitor, (0.02, 0.02), 2)
    feed(monitor, (0.02, 0.2), 2)
    proposal = monitor.propose()
    if proposal is None:  # the split that is best for slow devices too
        proposal = Proposal(plan=dataclasses.replace(before, schedule="gpipe"), now_s=2.0, then_s=1.0)
    _, state = monitor.switch(proposal, state, batch)
    assert step.plan is proposal.plan
    state, metrics = step(state, batch)
    assert np.isfinite(float(metrics["loss"]))
