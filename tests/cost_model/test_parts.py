"""A predicted peak taken apart: by hand for a model of two matrices."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniap_jax as uniap
from uniap_jax import cost_model, planner
from uniap_jax.core.strategy import parse_strategy

WIDTH = 256
TX = optax.adam(1e-3)


def train_step(state: Any, batch: Any) -> Any:
    """Two layers and a mean; Adam."""

    def loss_fn(params: Any) -> jax.Array:
        return ((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def planned(strategy: str, **pins: Any) -> uniap.Plan:
    return priced(strategy, **pins)[1]


def priced(strategy: str, **pins: Any) -> tuple[Any, uniap.Plan]:
    params = {name: jnp.zeros((WIDTH, WIDTH)) for name in ("a", "b")}
    graph = uniap.trace(train_step, {"params": params, "opt": TX.init(params)}, np.ones((8, WIDTH), np.float32))
    costs = uniap.estimate(graph, uniap.local_cluster(jax.devices()[:4]))
    return costs, uniap.solve(costs, strategy=parse_strategy(strategy), **pins)


@pytest.mark.parametrize(
    ("strategy", "held", "split"),
    [("data=4", 1, 1), ("fsdp=4", 4, 4), ("fsdp=4,zero=1", 1, 4), ("tensor=4", 4, 4)],
)
def test_state_of_one_stage_by_hand(strategy: str, held: int, split: int) -> None:
    plan = planned(strategy, num_stages=1, num_microbatches=1)
    (parts,) = plan.prediction.memory
    whole = 2 * WIDTH * WIDTH * 4
    assert parts.parameters == whole / held
    assert parts.optimizer == 2 * whole / split  # Adam's two moments
    assert sum(astuple(parts)) == pytest.approx(plan.prediction.peak_bytes[0])
    assert min(astuple(parts)) >= 0


def test_a_peak_over_the_limit_is_told() -> None:
    """The search's sums may fit where the largest layer's working memory does not."""
    model, plan = priced("data=4", num_stages=1, num_microbatches=1)
    assert not any("working memory" in note for note in plan.certificate.notes)
    sums = planner.solve(model, strategy=parse_strategy("data=4"), num_stages=1, num_microbatches=1)
    limit = 0.9 * plan.prediction.peak_bytes[0]
    tight = replace(sums, prediction=replace(sums.prediction, capacity_bytes=(limit,)))
    assert any("working memory" in note for note in cost_model.with_memory_parts(model, tight).certificate.notes)


def test_stages_hold_their_own_layers() -> None:
    plan = planned("data=2", num_stages=2, num_microbatches=2, executor="stages")
    assert len(plan.prediction.memory) == 2
    for parts, peak in zip(plan.prediction.memory, plan.prediction.peak_bytes, strict=True):
        assert sum(astuple(parts)) == pytest.approx(peak)
    assert sum(p.parameters for p in plan.prediction.memory) == 2 * WIDTH * WIDTH * 4
    assert "activations: " in plan.to_html()
