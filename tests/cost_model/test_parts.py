"""A predicted peak taken apart: by hand for a model of two matrices."""

from __future__ import annotations

from dataclasses import asdict, astuple, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniap_jax as uniap
from uniap_jax import cost_model, planner
from uniap_jax.core.profile import Footprint, Key, LayerCost, Profile
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.cost_model.memory import by_itself

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


def test_the_first_of_several_layers_and_the_only_one_of_a_stage_are_told_apart() -> None:
    """Tables hold sums: what a layer needs as the first or the only one is set right in the plan's own prediction."""
    described, plan = priced("data=4", num_stages=1, num_microbatches=1)
    halves = uniap.solve(described, strategy=parse_strategy("data=2"), num_stages=2, num_microbatches=1)
    graph, costs = described.graph, list[float]()
    for found in (plan, halves):
        strategy = found.layers[0].strategy
        plain = described.layer_cost(0, strategy)
        memory = {"kept_bytes": 0.0, "transient_bytes": 100.0, "marginal_bytes": 1000.0}
        told = Footprint(**memory, leading_bytes=10.0, alone_bytes=700.0)
        cost = replace(plain, **asdict(told), turned=told, origin="measured", runs=3)
        profile = Profile(
            source="measured",
            graph_fingerprint=graph.fingerprint,
            device_kind=described.device_kind,
            num_devices=4,
            batch_size=8,
            entries=tuple(
                sorted((Key(signature=x.signature, strategy=str(strategy), samples=8), cost) for x in graph.layers)
            ),
        )
        model = uniap.estimate(graph, described.cluster, profile)
        again = planner.solve(
            model, strategy=strategy, num_stages=found.num_stages, num_microbatches=1, schedule="one_f_one_b"
        )
        costs += cost_model.with_memory_parts(model, again).prediction.peak_bytes
    weights, batch = WIDTH * WIDTH * 4, 8 * WIDTH * 4
    assert costs[0] == 2 * 3 * weights + 4 + batch / 4 + 2 * 1000 + 100 + 10
    assert costs[1] == 3 * weights + 4 + batch / 2 + 700
    assert costs[2] == 3 * weights + batch / 2 + 700  # as large as the batch: what the first hands on


def test_a_layer_that_is_charged_by_itself_needs_all_that_it_was_compiled_with() -> None:
    plain = LayerCost(forward_s=1.0, backward_s=1.0, sync_s=0.0, kept_bytes=30.0, transient_bytes=20.0)
    assert by_itself(plain, 50.0) == (30.0, 20.0)
    assert by_itself(replace(plain, marginal_bytes=100.0), 50.0) == (30.0, 40.0)
    assert by_itself(replace(plain, marginal_bytes=40.0), 50.0) == (10.0, 0.0)
