"""Functions of the state beside the train step, whatever the plan."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from runtime_support import decoder_state, decoder_step, make_plan, token_batch
from uniap_jax import frontend, runtime
from uniap_jax.core.graph import LayerGraph
from uniap_jax.runtime.evaluate import OnAllDevices, spread

TX = optax.sgd(0.1, momentum=0.9)
PLANS: list[dict[str, Any]] = [{"strategies": "fsdp=4"}, {"stages": 2, "strategies": "fsdp=2", "microbatches": 2}]


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(decoder_step, decoder_state(TX), token_batch())


def loss(state: Any, batch: Any) -> jax.Array:
    logits = state.apply_fn({"params": state.params}, batch["x"], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@pytest.mark.parametrize("plan", PLANS, ids=["one stage", "two stages"])
def test_case_34_train_and_evaluate_in_turn(graph: LayerGraph, plan: dict[str, Any]) -> None:
    batch, start = token_batch(), decoder_state(TX)
    step = runtime.compile(graph, make_plan(graph, **plan))
    plain_step, plain_loss = jax.jit(lambda *a: decoder_step(*a)), jax.jit(loss)
    evaluate = step.jit(loss)
    assert isinstance(evaluate, OnAllDevices)
    state, expected = step.place(start, batch), start
    for _ in range(2):
        state, _ = step(state, batch)
        expected, _ = plain_step(expected, batch)
        found = [float(evaluate(state, batch)) for _ in range(2)]
        np.testing.assert_allclose(found, float(plain_loss(expected, batch)), rtol=1e-5)
    arrays = [x for x in jax.tree.leaves(state) if len(x.sharding.device_set) < 4]
    assert evaluate.copies == len(arrays)
    assert (evaluate.copies > 0) is (step.plan.num_stages > 1)
    del state, arrays
    gc.collect()
    assert evaluate.copies == 0


def test_no_device_holds_a_whole_model(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2, strategies="fsdp=2"))
    state = step.place(decoder_state(TX), token_batch())
    kernels = step.jit(lambda params: params)(state.params)
    for name in ("Dense_0", "Dense_1"):
        assert kernels["Block_2"][name]["kernel"].shape == state.params["Block_2"][name]["kernel"].shape
    mesh = Mesh(np.asarray(jax.devices()[:4], dtype=object), ("all",))
    assert spread((16, 64), mesh).shard_shape((16, 64)) == (16, 16)
    assert spread((64, 16), mesh).spec == PartitionSpec(("all",))
    assert spread((3, 5), mesh).spec == PartitionSpec()


def test_what_is_on_no_stage_is_handed_on(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2))
    double = step.jit(lambda x, scale: x * scale, static_argnums=1)
    np.testing.assert_array_equal(double(np.arange(3), 2), [0, 2, 4])
    np.testing.assert_array_equal(double(jnp.arange(3), 3), [0, 3, 6])
    assert double.copies == 0
