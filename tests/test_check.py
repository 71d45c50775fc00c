"""`check` tells a fault of a plan from rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runtime_support import make_plan
from uniap_jax import check as room
from uniap_jax.api import compile_plan
from uniap_jax.check import LOW_PRECISION, TOLERANCE, check_plan, is_low_precision, leaf_differences, tolerance_of
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.reference import with_gradients
from uniap_jax.core.wide import widened
from uniap_jax.frontend import trace

PARAMS = [np.random.RandomState(i).randn(16, 16).astype(np.float32) / 4 for i in range(4)]
BATCH = np.random.RandomState(9).randn(8, 16).astype(np.float32)


def step(params: Any, batch: Any, fault: float = 0.0) -> Any:
    def loss_of(params: Any) -> Any:
        x = batch.astype(jnp.bfloat16)
        for w in params:
            x = jax.nn.relu(jax.nn.softmax(10 * (x @ w.astype(jnp.bfloat16))) * 16) + x  # rounded in many places
        x = (1 + fault) * x - fault * jax.lax.stop_gradient(x)  # the same value, another gradient
        return jnp.mean(x.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


@lru_cache(maxsize=2)
def traced(fault: float = 0.0) -> LayerGraph:
    return trace(lambda params, batch: step(params, batch, fault), PARAMS, BATCH)


def test_narrow_steps_have_their_own_tolerance() -> None:
    graph = traced()
    assert tolerance_of(graph) is LOW_PRECISION
    report = check_plan(graph, make_plan(graph, strategies="data=4"), (PARAMS, BATCH), steps=1)
    assert report.ok
    assert report.tolerance == (LOW_PRECISION["loss"], LOW_PRECISION["grad"])
    assert report.narrow_grad_rel_diff is None


def test_a_gradient_that_is_all_rounding_is_no_fault() -> None:
    """A few units in the last place of the largest gradient pass; a small leaf that is a hundredth off does not."""
    largest, nothing, small = np.ones(3, np.float32), np.zeros(3, np.float32), np.full(3, 1e-2, np.float32)
    rounded = np.full(3, 4 * np.finfo(np.float32).eps, np.float32)
    apart = leaf_differences([largest, nothing, small], [largest, rounded, 1.01 * small])
    assert max(apart[:2]) <= TOLERANCE["grad"] < apart[2]


def test_rounding_alone_is_told_by_the_step_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOW_PRECISION", {"loss": 2e-2, "grad": 1e-4})  # so that this little rounding is too much
    graph = traced()
    plan = make_plan(graph, strategies="data=4", microbatches=2)  # each micro-batch's gradient is rounded
    report = check_plan(graph, plan, (PARAMS, BATCH), steps=1)
    assert report.narrow_grad_rel_diff is not None
    assert report.narrow_grad_rel_diff > 1e-4
    assert report.grad_rel_diff <= TOLERANCE["grad"]
    assert report.ok
    assert report.tolerance == (2e-2, TOLERANCE["grad"])
    assert f"{report.narrow_grad_rel_diff:.1e}" in report.notes[-1]


def test_a_fault_is_not_called_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, other = traced(), traced(0.3)

    def faulty(built: LayerGraph, plan: Any, **options: Any) -> Any:
        wrong = with_gradients(other if is_low_precision(built) else widened(other))
        return compile_plan(wrong, replace(plan, graph_fingerprint=other.fingerprint), **options)

    monkeypatch.setattr(room, "compile_plan", faulty)
    report = check_plan(graph, make_plan(graph, strategies="data=4"), (PARAMS, BATCH), steps=1)
    assert report.loss_rel_diff <= LOW_PRECISION["loss"]
    assert report.grad_rel_diff == pytest.approx(0.3, abs=0.05)
    assert report.narrow_grad_rel_diff is None
    assert not report.ok
    assert "in 32 bits the same plan differs by 2" in report.notes[-1]
