"""What people run into when they hand a train step of their own to a parallel runtime."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from runtime_support import WIDTH, Decoder, assert_as_one_device, decoder_state, decoder_step, make_plan, token_batch
from uniap_jax import frontend, runtime
from uniap_jax.core.errors import PlanMismatchError, TraceError

PLANS: list[dict[str, Any]] = [{"strategies": "data=2", "microbatches": 2}, {"stages": 2}]


def linear_batch() -> np.ndarray:
    return np.random.RandomState(0).randn(8, 6).astype(np.float32)


def weights() -> dict[str, Any]:
    return {"a": jnp.full((6, 5), 0.1), "b": jnp.full((5, 4), 0.2)}


@pytest.mark.parametrize("plan", PLANS)
def test_case_14_plain_grad(plan: dict[str, Any]) -> None:
    def train_step(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    assert_as_one_device(train_step, weights, linear_batch(), **plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_case_14_value_and_grad_with_aux(plan: dict[str, Any], argnums: Any) -> None:
    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(a: Any, b: Any) -> Any:
            out = jnp.tanh(batch @ a) @ b
            return jnp.mean(out**2), {"rows": out.sum(axis=1), "positive": jnp.sum(out > 0)}

        (loss, aux), grads = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=True)(params["a"], params["b"])
        found = dict(zip("ab", grads if isinstance(grads, tuple) else (grads, jnp.zeros((5, 4))), strict=True))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, found), {"loss": loss, **aux}

    assert_as_one_device(train_step, weights, linear_batch(), **plan)


@pytest.mark.parametrize("plan", PLANS)
def test_case_14_value_and_grad_of_nnx(plan: dict[str, Any]) -> None:
    structure, start = nnx.split(nnx.Sequential(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 4, rngs=nnx.Rngs(1))))

    def train_step(state: Any, batch: Any) -> Any:
        model = nnx.merge(structure, state)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.tanh(m(batch)) ** 2))(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    assert_as_one_device(train_step, lambda: start, linear_batch(), **plan)


def test_case_14_a_function_without_a_gradient() -> None:
    """It is not planned, and says what to do; beside a planned step it runs on the state as it lies."""
    with pytest.raises(TraceError, match="no gradient was found") as caught:
        frontend.trace(lambda params, batch: jnp.mean(batch @ params["a"]), weights(), linear_batch())
    assert caught.value.gradients == 0
    graph = frontend.trace(sum_step, weights(), linear_batch())
    step = runtime.compile(graph, make_plan(graph, stages=2))
    state = step.place(weights(), linear_batch())
    forward = step.jit(lambda params, batch: jnp.tanh(batch @ params["a"]) @ params["b"])
    expected = np.tanh(linear_batch() @ weights()["a"]) @ weights()["b"]
    np.testing.assert_allclose(forward(state, linear_batch()), expected, rtol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_case_36_a_closed_over_configuration(plan: dict[str, Any]) -> None:
    config = {"rate": 0.25, "table": np.arange(5, dtype=np.float32), "scale": jnp.float32(2.0)}

    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return config["scale"] * jnp.mean((jnp.tanh(batch @ p["a"]) + config["table"]) @ p["b"])

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - config["rate"] * config["scale"] * g, params, grads), loss

    assert_as_one_device(train_step, weights, linear_batch(), **plan)


def test_case_26_no_device_draws_the_whole_mask() -> None:
    state = decoder_state(optax.sgd(0.1), Decoder(dropout=0.5))
    graph = frontend.trace(decoder_step, state, token_batch(16))
    step = runtime.compile(graph, make_plan(graph, strategies="data=8"))
    (program,) = step.programs
    drawn = {tuple(map(int, s.split(","))) for s in re.findall(r"u32\[([\d,]+)\]", program.compiled.as_text())}
    sizes = [int(np.prod(s)) for s in drawn]
    assert 16 * 4 * WIDTH // 8 in sizes
    assert not any(int(np.prod(s)) >= 16 * 4 * WIDTH for s in drawn)


@pytest.mark.parametrize("plan", PLANS)
def test_case_50_a_smaller_last_batch_is_refused_by_name(plan: dict[str, Any]) -> None:
    graph = frontend.trace(decoder_step, decoder_state(optax.sgd(0.1)), token_batch())
    state = decoder_state(optax.sgd(0.1))
    graph = frontend.trace(decoder_step, state, token_batch())
    step = runtime.compile(graph, make_plan(graph, **plan))
    with pytest.raises(PlanMismatchError) as caught:
        step(state, token_batch(4))
    assert caught.value.shape == (4, 4)
    assert caught.value.expected == (8, 4)


@pytest.mark.parametrize("plan", PLANS)
def test_case_50_a_python_number_as_learning_rate(plan: dict[str, Any]) -> None:
    def train_step(params: Any, batch: Any, rate: float) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    batch = linear_batch()
    graph = frontend.trace(train_step, weights(), batch, 0.1)
    step = runtime.compile(graph, make_plan(graph, **plan))
    state: Any = (weights(), 0.1)
    expected = weights()
    current = step.place(weights(), batch, 0.1)[0]
    for rate in (0.1, 0.5, 1):
        current, loss = step(current, batch, rate)
        expected, want = jax.jit(lambda *a: train_step(*a))(expected, batch, rate)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert state[1] == 0.1
    np.testing.assert_allclose(current["a"], expected["a"], rtol=1e-5)


def sum_step(params: Any, batch: Any) -> Any:
    """A loss that is a sum over examples: gradients of micro-batches add up."""
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), {"loss": loss, "grads": grads}


@pytest.mark.parametrize("plan", [{"microbatches": 4}, {"stages": 2, "microbatches": 4}])
def test_a_loss_that_is_a_sum(plan: dict[str, Any]) -> None:
    assert_as_one_device(sum_step, weights, linear_batch(), atol=1e-5, **plan)


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_cast_before_the_loss(plan: dict[str, Any]) -> None:
    """Master weights in f32, differentiated in bf16: the gradient belongs to the cast, the update to the master."""

    def train_step(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

        def loss_fn(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(batch.astype(jnp.bfloat16) @ p["a"]) @ p["b"]).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(half)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(jnp.float32), params, grads), loss

    step, state = assert_as_one_device(train_step, weights, linear_batch(), rtol=2e-2, atol=2e-3, **plan)
    assert state["a"].dtype == jnp.float32
    assert step.graph.step.param_leaf == (None, None)


@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_parameters_and_unused_ones(stages: int) -> None:
    """What is not differentiated is read as it is, on the stage that reads it; what is not read stays as it was."""

    def make_state() -> Any:
        return {"train": weights(), "frozen": jnp.full((5, 5), 0.3), "unused": jnp.ones(3)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(p: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(batch @ p["a"]) @ state["frozen"]) @ p["b"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["train"])
        return {**state, "train": jax.tree.map(lambda p, g: p - 0.1 * g, state["train"], grads)}, loss

    assert_as_one_device(train_step, make_state, linear_batch(), stages=stages)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
@pytest.mark.parametrize("strategies", ["fsdp=2", "tensor=2"])
def test_a_teacher_that_follows_the_parameters(strategies: str, schedule: str) -> None:
    """An average of the parameters is stored as they are, and read by the loss of two stages."""

    def make_state() -> Any:
        student = {"a": jnp.full((6, 8), 0.1), "b": jnp.full((8, 4), 0.2)}
        return student, jax.tree.map(lambda x: 1.1 * x, student)

    def out(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def train_step(state: Any, batch: Any) -> Any:
        student, teacher = state

        def loss_fn(p: Any) -> jax.Array:
            aim = jax.lax.stop_gradient(out(teacher, batch))
            return jnp.mean((out(p, batch) - aim) ** 2) + 0.1 * jnp.mean(jnp.tanh(batch @ teacher["a"]) @ p["b"])

        loss, grads = jax.value_and_grad(loss_fn)(student)
        student = jax.tree.map(lambda p, g: p - 0.1 * g, student, grads)
        return (student, optax.incremental_update(student, teacher, 0.1)), loss

    step, _ = assert_as_one_device(
        train_step, make_state, linear_batch(), stages=2, microbatches=2, strategies=strategies, schedule=schedule
    )
    teacher = [i for i, v in enumerate(step.graph.step.state) if v.name.startswith("[0][1]")]
    assert any(any(s.spec) for i, s in enumerate(step.in_shardings) if i in teacher)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_parameter_that_the_loss_ignores(stages: int) -> None:
    def make_state() -> Any:
        return {**weights(), "ignored": jnp.ones((2, 2))}

    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p["a"]) @ p["b"]))(params)
        return jax.tree.map(lambda p, g: 0.9 * p - 0.1 * g, params, grads), (loss, grads)

    assert_as_one_device(train_step, make_state, linear_batch(), stages=stages, microbatches=2)


@pytest.mark.parametrize("plan", PLANS)
def test_case_37_random_streams_are_an_argument_of_their_own(plan: dict[str, Any]) -> None:
    """Model, optimizer and random streams as objects: masks are one device's, and the streams' counts come back."""

    def make() -> tuple[Any, Any, Any]:
        model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), nnx.Rngs(dropout=3)

    def train_step(model: Any, optimizer: Any, rngs: Any, batch: jax.Array) -> jax.Array:
        key = rngs.dropout()

        def loss_fn(model: Any) -> jax.Array:
            hidden = jnp.tanh(model.layers[0](batch))
            kept = jax.random.bernoulli(key, 0.5, hidden.shape)
            return jnp.mean(model.layers[1](jnp.where(kept, hidden, 0.0)) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    plain, batch = make(), linear_batch()
    expected = [float(train_step(*plain, jnp.asarray(batch))) for _ in range(3)]
    mine = make()
    graph = frontend.trace(train_step, *mine, batch, batch_argnums=(3,))
    step = runtime.compile(graph, make_plan(graph, **plan))
    np.testing.assert_allclose([float(step(*mine, batch)) for _ in range(3)], expected, rtol=1e-5)
    assert int(mine[2].dropout.count.get_value()) == int(plain[2].dropout.count.get_value()) == 3
