"""`parallelize` as a user meets it: planned at the first call, run as planned, planned again when the call changes."""

from __future__ import annotations

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import uniap_jax as uniap

QUICK = {"source": "described"}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(3):
            x = x + nn.Dropout(0.2, deterministic=not train)(nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))))
        return nn.Dense(4)(x)


def make_batch(size=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"x": jax.random.normal(keys[0], (size, 16)), "y": jax.random.randint(keys[1], (size,), 0, 4)}


def create_state(key):
    net = Net()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = net.init({"params": key, "dropout": key}, jnp.zeros((1, 16)))["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_of(params):
        key = jax.random.fold_in(jax.random.key(3), state.step)
        out = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key})
        rows = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        return rows.mean(), {"rows": rows, "correct": (out.argmax(-1) == batch["y"]).sum()}

    (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, **aux}


@pytest.fixture
def compiles():
    """How many programs XLA has compiled."""
    counted = [0]

    def listen(event, seconds, **_):
        counted[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: counted[0]
    jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("pins", [{}, {"num_stages": 2, "num_microbatches": 4}, {"strategy": "fsdp=4,tensor=2"}])
def test_trains_as_one_device_and_compiles_once(pins, compiles):
    step = uniap.parallelize(train_step, **QUICK, **pins)
    batch = make_batch()
    state = step.place(create_state(jax.random.key(0)), batch)
    reference, expected = create_state(jax.random.key(0)), jax.jit(train_step)
    for i in range(3):
        reference, wanted = expected(reference, batch)
        before = compiles()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        if i:
            assert compiles() == before, "the second call compiles nothing"
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["rows"], wanted["rows"], rtol=1e-4, atol=1e-5)
        assert int(metrics["correct"]) == int(wanted["correct"])
    assert int(state.step) == 3
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert step.plan.certificate.status == "optimal"
    text = str(step.plan)
    assert "stage" in text
    assert "gap" in text


def test_decorator_and_state_created_sharded():
    @uniap.parallelize(**QUICK, num_stages=1, strategy="fsdp=8")
    def step(state, batch):
        return train_step(state, batch)

    state = step.init(create_state, jax.random.key(0), batch=make_batch())
    kernel = state.params["Dense_0"]["kernel"]
    assert len({str(s.index) for s in kernel.addressable_shards}) == 8, "a shard each"
    state, metrics = step(state, make_batch())
    _, wanted = jax.jit(train_step)(create_state(jax.random.key(0)), make_batch())
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


def test_case_50_smaller_last_batch_plans_again_with_one_line(caplog):
    step = uniap.parallelize(train_step, **QUICK, donate_argnums=())
    state = create_state(jax.random.key(0))
    step(state, make_batch(8))
    with caplog.at_level(logging.INFO, "uniap_jax"):
        _, metrics = step(state, make_batch(4))
        _, again = step(state, make_batch(4))
    assert len([r for r in caplog.records if "planning again for batch 4" in r.getMessage()]) == 1
    assert metrics["loss"] == again["loss"]


def test_plan_saved_loaded_and_run(tmp_path):
    graph = uniap.trace(train_step, create_state(jax.random.key(0)), make_batch())
    plan = uniap.solve(uniap.estimate(graph), num_stages=2)
    uniap.save(plan, tmp_path / "plan.json")
    loaded = uniap.load(tmp_path / "plan.json")
    assert loaded == plan
    step = uniap.parallelize(train_step, plan=loaded)
    _, metrics = step(create_state(jax.random.key(0)), make_batch())
    _, wanted = jax.jit(train_step)(create_state(jax.random.key(0)), make_batch())
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


def test_plan_of_another_model_is_refused():
    graph = uniap.trace(train_step, create_state(jax.random.key(0)), make_batch())
    plan = uniap.solve(uniap.estimate(graph))
    with pytest.raises(uniap.PlanMismatchError):
        uniap.parallelize(train_step, plan=plan)(create_state(jax.random.key(0)), make_batch(16))


def test_plan_for_more_devices_is_refused():
    graph = uniap.trace(train_step, create_state(jax.random.key(0)), make_batch())
    plan = uniap.solve(uniap.estimate(graph))
    with pytest.raises(uniap.PlanMismatchError):
        uniap.compile_plan(graph, plan, devices=jax.devices()[:4])


def test_case_07_more_micro_batches_than_examples():
    step = uniap.parallelize(train_step, **QUICK, num_microbatches=16)
    with pytest.raises(ValueError, match="16"):
        step.place(create_state(jax.random.key(0)), make_batch(8))


def test_case_49_memory_too_small_is_said_before_compiling(compiles):
    step = uniap.parallelize(train_step, **QUICK, memory_limit=1000)
    state, batch = create_state(jax.random.key(0)), make_batch()
    before = compiles()
    with pytest.raises(uniap.InfeasibleError) as caught:
        step.place(state, batch)
    assert caught.value.needed_bytes > 1000
    assert compiles() == before


@pytest.mark.parametrize("size", [1, 6])
def test_case_05_batches_that_hardly_divide(size):
    step = uniap.parallelize(train_step, **QUICK)
    _, metrics = step(create_state(jax.random.key(0)), make_batch(size))
    _, wanted = jax.jit(train_step)(create_state(jax.random.key(0)), make_batch(size))
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


@pytest.mark.parametrize("count", [5, 6])
def test_case_04_numbers_of_devices_that_hardly_divide(count):
    step = uniap.parallelize(train_step, devices=jax.devices()[:count], **QUICK)
    _, metrics = step(create_state(jax.random.key(0)), make_batch(8))
    _, wanted = jax.jit(train_step)(create_state(jax.random.key(0)), make_batch(8))
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


def test_case_27_explicit_mesh_set_by_the_user():
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        step = uniap.parallelize(train_step, **QUICK)
        _, metrics = step(create_state(jax.random.key(0)), make_batch())
    _, wanted = jax.jit(train_step)(create_state(jax.random.key(0)), make_batch())
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-5)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.gelu(self.first(x))))


def nnx_step(model, optimizer, batch):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("stages", [1, 2])
def test_case_37_nnx_objects_are_changed_in_place(stages):
    def create():
        model = Nnx(nnx.Rngs(params=0, dropout=1))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    step = uniap.parallelize(nnx_step, batch_argnums=(2,), num_stages=stages, num_microbatches=2, **QUICK)
    (model, optimizer), (plain, plain_optimizer) = create(), create()
    reference = nnx.jit(nnx_step)
    for _ in range(3):
        loss = step(model, optimizer, make_batch())
        np.testing.assert_allclose(loss, reference(plain, plain_optimizer, make_batch()), rtol=1e-5)
    assert isinstance(model.first.kernel, nnx.Param)
    np.testing.assert_allclose(model.first.kernel[...], plain.first.kernel[...], atol=1e-5)


def test_plan_is_asked_for_too_early():
    with pytest.raises(uniap.TraceError, match="no plan yet"):
        _ = uniap.parallelize(train_step).plan


def test_case_36_an_optimizer_built_anew_does_not_solve_again(caplog):
    step = uniap.parallelize(train_step, **QUICK, donate_argnums=())
    first = step(create_state(jax.random.key(0)), make_batch())
    with caplog.at_level(logging.INFO, "uniap_jax"):
        second = step(create_state(jax.random.key(0)), make_batch())
    assert not [r for r in caplog.records if "planning again" in r.getMessage()]
    assert first[1]["loss"] == second[1]["loss"]


def test_case_36_static_argument_that_changes_plans_again():
    def scaled(state, batch, config):
        loss, grads = jax.value_and_grad(lambda w: config["scale"] * ((batch @ w) ** 2).mean())(state)
        return state - grads, loss

    step = uniap.parallelize(scaled, static_argnums=(2,), **QUICK, donate_argnums=())
    state, batch = jnp.ones((4, 4)), jnp.ones((8, 4))
    once, twice = step(state, batch, {"scale": 1.0}), step(state, batch, {"scale": 2.0})
    np.testing.assert_allclose(twice[1], 2 * once[1], rtol=1e-6)


def test_another_dtype_is_planned_again():
    step = uniap.parallelize(train_step, **QUICK, donate_argnums=())
    state, batch = create_state(jax.random.key(0)), make_batch()
    step(state, batch)
    _, metrics = step(state, {**batch, "x": batch["x"].astype(jnp.bfloat16)})
    assert np.isfinite(metrics["loss"])
