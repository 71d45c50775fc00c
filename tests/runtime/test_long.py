"""Long runs: training stays with one device, and plans that are dropped leave nothing behind."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime_support import make_plan
from uniap_jax import api, demo_gpt, frontend, runtime
from uniap_jax.core.cluster import local_cluster

LOSS_RTOL_LONG = 2e-3
"""Losses over hundreds of steps: Adam divides by what is rounding at first, and training amplifies it."""

OBJECTS_PER_CYCLE = 10
"""With JAX's caches emptied; they keep about 130 of a program that is gone. One that stayed would be thousands."""


def linear_step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def cycle(number: int) -> weakref.ref[Any]:
    """Traces, plans, compiles, runs and drops a step of its own."""

    def train_step(params: Any, batch: Any) -> Any:
        new, loss = linear_step(params, batch)
        return new, loss * (1.0 + number)

    params, batch = {"a": jnp.full((6, 5), 0.1), "b": jnp.full((5, 4), 0.2)}, np.ones((8, 6), np.float32)
    graph = frontend.trace(train_step, params, batch)
    step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=2))
    jax.block_until_ready(step(step.place(params, batch), batch))
    return weakref.ref(step)


def left_over() -> tuple[int, int, int]:
    jax.clear_caches()
    gc.collect()
    return len(jax.live_arrays()), threading.active_count(), len(gc.get_objects())


def check_cycles(count: int, *, warm: int) -> None:
    for number in range(warm):
        cycle(number)
    before = left_over()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dropped = [cycle(warm + number) for number in range(count)]
    after = left_over()
    assert all(step() is None for step in dropped)
    assert after[:2] == before[:2]
    assert after[2] - before[2] <= OBJECTS_PER_CYCLE * count
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown <= 100 * 1024 + 100 * count, f"{grown} KiB more at the peak after {count} cycles"


def test_a_dropped_plan_leaves_nothing() -> None:
    check_cycles(6, warm=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_dropped_plans_leave_nothing() -> None:
    check_cycles(1000, warm=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_steps_under_the_demos_plan_are_those_of_one_device() -> None:
    size, steps = demo_gpt.TINY, 500
    state = demo_gpt.create_state(size=size)
    batches = [demo_gpt.make_batch(seed, size=size) for seed in range(steps)]
    graph = api.trace(demo_gpt.train_step, state, batches[0])
    plan = api.solve(api.estimate(graph, local_cluster()), num_stages=2, num_microbatches=2, baselines=False)
    step = api.compile_plan(graph, plan)
    plain = jax.jit(demo_gpt.train_step)
    ours, theirs = step.place(state, batches[0]), state
    losses = []
    for batch in batches:
        ours, metrics = step(ours, batch)
        theirs, expected = plain(theirs, batch)
        losses.append((float(metrics["loss"]), float(expected["loss"])))
    planned, single = np.asarray(losses).T
    np.testing.assert_allclose(planned[:50], single[:50], rtol=1e-4)
    np.testing.assert_allclose(planned, single, rtol=LOSS_RTOL_LONG)
    assert single[-50:].mean() < 0.5 * single[:10].mean()
