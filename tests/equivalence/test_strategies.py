"""Loss, gradients and state under every kind of plan equal those of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from runtime_support import (
    BF16_RTOL,
    Decoder,
    assert_as_one_device,
    decoder_state,
    decoder_step,
    make_plan,
    token_batch,
    worst,
)
from uniap_jax import frontend, runtime

FOUR = ("data=4", "fsdp=4", "fsdp=4,zero=1", "fsdp=4,zero=2", "tensor=4", "data=2,tensor=2", "fsdp=2,tensor=2")
MIXED = ("data=4", "data=2,tensor=2", "fsdp=4,keep=inputs", "data=2,fsdp=2,zero=2", "fsdp=2,tensor=2,zero=1,keep=dots")


def quick(first: Sequence[Any], second: Sequence[Any], fast: set[tuple[Any, Any]]) -> list[Any]:
    """Every pair; those that are not in `fast` only run with the slow tests."""
    pairs = [(a, b) for a in first for b in second]
    return [pytest.param(*p, marks=() if p in fast else pytest.mark.slow) for p in pairs]


def sgd() -> Any:
    return decoder_state(optax.sgd(0.5, momentum=0.9))


@pytest.mark.parametrize(
    ("strategy", "microbatches"), quick(FOUR, [1, 2], {("fsdp=4", 1), ("tensor=4", 1), ("data=4", 2)})
)
def test_one_stage(strategy: str, microbatches: int) -> None:
    assert_as_one_device(decoder_step, sgd, token_batch(), microbatches=microbatches, strategies=strategy)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_stage_mixture(microbatches: int) -> None:
    assert_as_one_device(decoder_step, sgd, token_batch(), microbatches=microbatches, strategies=MIXED)


@pytest.mark.parametrize(
    ("schedule", "microbatches"), quick(["gpipe", "one_f_one_b"], [1, 2], {("gpipe", 2), ("one_f_one_b", 2)})
)
def test_two_stages_mixture(schedule: str, microbatches: int) -> None:
    assert_as_one_device(
        decoder_step, sgd, token_batch(), stages=2, microbatches=microbatches, schedule=schedule, strategies=MIXED
    )


@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    quick(["data=2", "fsdp=2", "tensor=2", "fsdp=2,zero=1,keep=inputs"], [1, 4], {("fsdp=2", 4)}),
)
def test_four_stages(strategy: str, microbatches: int) -> None:
    assert_as_one_device(decoder_step, sgd, token_batch(), stages=4, microbatches=microbatches, strategies=strategy)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_four_stages_of_one_device(schedule: str) -> None:
    assert_as_one_device(decoder_step, sgd, token_batch(), stages=4, microbatches=4, schedule=schedule)


def test_stages_of_unequal_size() -> None:
    devices = ((0, 1, 2, 3), (4, 5), (6,))
    strategies = ("data=2,tensor=2", "data=2", "data=1", "data=4")
    assert_as_one_device(
        decoder_step, sgd, token_batch(), stages=3, microbatches=2, strategies=strategies, stage_devices=devices
    )


@pytest.mark.parametrize(("stages", "microbatches"), quick([1, 2], [1, 4], {(1, 4), (2, 4)}))
def test_dropout_is_the_whole_batchs(stages: int, microbatches: int) -> None:
    state = decoder_state(optax.sgd(0.5), Decoder(dropout=0.5))
    assert_as_one_device(
        decoder_step, lambda: state, token_batch(), stages=stages, microbatches=microbatches, strategies="data=2"
    )


def test_a_head_of_its_own() -> None:
    model = Decoder(tied=False)
    assert_as_one_device(
        decoder_step, lambda: decoder_state(optax.sgd(0.5), model), token_batch(), stages=2, strategies="tensor=4"
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_case_29_bf16_parameters_with_f32_moments(stages: int) -> None:
    def bf16() -> Any:
        return decoder_state(optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32), dtype=jnp.bfloat16)

    assert_as_one_device(
        decoder_step,
        bf16,
        token_batch(),
        stages=stages,
        microbatches=2,
        strategies="data=2",
        rtol=BF16_RTOL,
        atol=BF16_RTOL,
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_case_29_f32_parameters_with_bf16_compute(stages: int) -> None:
    model = Decoder(dtype=jnp.bfloat16)
    assert_as_one_device(
        decoder_step,
        lambda: decoder_state(optax.sgd(0.1), model),
        token_batch(),
        stages=stages,
        strategies="data=2,tensor=2",
        rtol=BF16_RTOL,
        atol=BF16_RTOL,
    )


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (16, 16, 8):
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.relu(nn.Dense(width)(x)))
        return nn.Dense(1)(x)


@pytest.mark.parametrize("plan", [{"strategies": "data=4"}, {"stages": 2, "strategies": "data=2"}])
def test_batch_statistics(plan: dict[str, Any]) -> None:
    model, x = Normed(), np.random.RandomState(1).randn(8, 12).astype(np.float32)
    start = jax.device_get(model.init(jax.random.key(0), x))
    tx = optax.sgd(0.1)

    def make_state() -> dict[str, Any]:
        variables = jax.tree.map(jnp.asarray, start)
        return {**variables, "opt": tx.init(variables["params"])}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            out, changed = model.apply(variables, batch, mutable=["batch_stats"])
            return jnp.mean((out - 1.0) ** 2), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": stats, "opt": opt}, {"loss": loss, "grads": grads}

    assert_as_one_device(train_step, make_state, x, **plan)


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.List(
            [nnx.Linear(12, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 12, rngs=rngs)]
        )
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.inner:
            x = x + self.dropout(nnx.relu(layer(x))) if layer.out_features == 16 == x.shape[-1] else nnx.relu(layer(x))
        return x


def nnx_step(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
    def loss_fn(model: Any) -> jax.Array:
        return jnp.mean((model(batch) - batch) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("plan", [{"strategies": "data=4"}, {"stages": 2, "strategies": "data=2", "microbatches": 2}])
def test_case_37_nnx_objects_are_changed_in_place(plan: dict[str, Any]) -> None:

    def make() -> tuple[Any, Any]:
        model = Perceptron(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    batch = np.random.RandomState(2).randn(8, 12).astype(np.float32)
    model, optimizer = make()
    expected = [float(nnx_step(model, optimizer, jnp.asarray(batch))) for _ in range(3)]
    mine, my_optimizer = make()
    graph = frontend.trace(nnx_step, mine, my_optimizer, batch, batch_argnums=(2,))
    step = runtime.compile(graph, make_plan(graph, **plan))
    kinds = [type(v) for v in jax.tree.leaves(mine, is_leaf=lambda x: isinstance(x, nnx.Variable))]
    losses = [float(step(mine, my_optimizer, batch)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert kinds == [type(v) for v in jax.tree.leaves(mine, is_leaf=lambda x: isinstance(x, nnx.Variable))]
    assert worst(nnx.state(mine, nnx.Param), nnx.state(model, nnx.Param)) < 2e-4
