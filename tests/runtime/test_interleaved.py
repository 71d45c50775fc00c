"""Interleaved stages, made from a plan that was solved for: priced, saved, run, and equal to one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import uniap_jax as uniap
from runtime_support import Decoder, decoder_state, decoder_step, numbers, run_steps, token_batch, worst
from uniap_jax.core.cluster import Cluster, Link
from uniap_jax.core.costs import CostModel
from uniap_jax.core.errors import InfeasibleError, PlanMismatchError
from uniap_jax.core.serialize import plan_from_json, plan_to_json
from uniap_jax.core.timeline import bubble_share, predicted_events, schedule_of
from uniap_jax.runtime.monitor import Monitor
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.stage_memory import stage_peaks

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
MODEL = Decoder(layers=6)
CLUSTER = Cluster(
    name="four",
    num_devices=4,
    kind="cpu",
    platform="cpu",
    memory_bytes=1 << 30,
    peak_flops=(("float32", 1e11),),
    memory_bandwidth_bytes_per_s=1e10,
    links=(Link(name="all", size=4, bandwidth_bytes_per_s=1e9, uplink_bytes_per_s=1e9, latency_s=1e-6),),
)


@pytest.fixture(scope="module")
def found() -> tuple[Any, CostModel, uniap.Plan]:
    graph = uniap.trace(decoder_step, decoder_state(TX, MODEL), token_batch())
    costs = uniap.estimate(graph, CLUSTER)
    plan = uniap.solve(costs, num_stages=2, num_microbatches=4, executor="stages", baselines=False)
    return graph, costs, plan


@pytest.fixture(scope="module")
def woven(found: tuple[Any, CostModel, uniap.Plan]) -> uniap.Plan:
    return uniap.interleave(found[2], found[1], num_chunks=2)


def test_what_is_predicted(found: tuple[Any, CostModel, uniap.Plan], woven: uniap.Plan) -> None:
    plan = found[2]
    assert (woven.num_stages, woven.num_devices, woven.device_sets) == (4, 4, plan.stage_devices)
    assert [layer.strategy for layer in woven.layers] == [layer.strategy for layer in plan.layers]
    events = predicted_events(woven)
    once = np.reshape(woven.prediction.iteration_time_s, (2, 2)).sum(axis=0).max()
    assert woven.prediction.step_time_s == pytest.approx(max(e.end_s for e in events) + once)
    plain = predicted_events(replace(plan, schedule="one_f_one_b"))
    assert bubble_share(events, num_places=2) < bubble_share(plain, num_places=2)
    assert max(woven.prediction.peak_bytes) > max(plan.prediction.peak_bytes)  # more micro-batches in flight
    assert plan_from_json(plan_to_json(woven)) == woven
    assert "interleaved 1F1B" in str(woven)
    assert "interleaved 1F1B" in woven.to_html()


def test_one_devices_numbers_and_what_is_in_flight(found: tuple[Any, CostModel, uniap.Plan], woven: uniap.Plan) -> None:
    graph, batch = found[0], token_batch()
    start = decoder_state(TX, MODEL)
    expected_state, expected = run_steps(jax.jit(lambda *a: decoder_step(*a)), start, batch, 3)
    step = uniap.compile_plan(graph, woven)
    run, peaks = step.executor, [0] * 4
    assert isinstance(run, Pipeline)

    def watch(stage: int, task: Any, live: int) -> None:
        peaks[stage] = max(peaks[stage], live)

    run.watch = watch
    monitor = Monitor(step, every=1, window=1)
    state, got = run_steps(step, step.place(start, batch), batch, 3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    assert worst(numbers(state), numbers(expected_state)) <= 2e-6
    assert tuple(peaks) == schedule_of(woven).in_flight == (4, 3, 2, 1)
    for value, sharding in zip(graph.step.state, step.in_shardings, strict=True):
        assert len(sharding.device_set) == (2 if value.shape else 4)
    assert stage_peaks(step)[0] == stage_peaks(step)[2] > stage_peaks(step)[1]
    monitor.wait()
    assert {e.stage for e in monitor.readings[-1].events} == {0, 1, 2, 3}
    monitor.close()


def test_what_cannot_be_interleaved(found: tuple[Any, CostModel, uniap.Plan], woven: uniap.Plan) -> None:
    _, costs, plan = found
    with pytest.raises(PlanMismatchError, match="too few for 16 stages"):
        uniap.interleave(plan, costs, num_chunks=8)
    with pytest.raises(PlanMismatchError, match="3 micro-batches are not in groups of 2"):
        uniap.interleave(replace(plan, num_microbatches=3), costs)
    with pytest.raises(PlanMismatchError, match="'stages' under 'interleaved'"):
        uniap.interleave(woven, costs)
    with pytest.raises(PlanMismatchError, match=r"take turns on 2 sets of devices in one order"):
        plan_from_json(plan_to_json(replace(woven, stage_devices=((0, 1), (0, 1), (2, 3), (2, 3)))))
    small = uniap.estimate(found[0], replace(CLUSTER, memory_bytes=int(min(woven.prediction.peak_bytes) / 0.9)))
    with pytest.raises(InfeasibleError) as caught:
        uniap.interleave(plan, small)
    assert caught.value.needed_bytes > caught.value.limit_bytes
