"""Capture: the step in three parts computes what the step computed, and what cannot be captured says why."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax import value_and_grad as bound_early

import uniap_jax
from uniap_jax.core.errors import PlanMismatchError, TraceError
from uniap_jax.core.reference import reference_gradients
from uniap_jax.frontend import trace


def params():
    return {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}


def batch(size=8):
    return {"x": jnp.linspace(0, 1, size * 4).reshape(size, 4), "y": jnp.ones((size, 3))}


def loss_of(p, b):
    return ((jnp.tanh(b["x"] @ p["w"] + p["b"]) - b["y"]) ** 2).mean()


def sgd(p, b):
    loss, g = jax.value_and_grad(loss_of)(p, b)
    return jax.tree.map(lambda a, d: a - 0.1 * d, p, g), loss


def run_captured(graph, *args):
    """before -> loss and gradients of the layers -> update, on one device."""
    state, data = graph.step.flatten(*args)
    loss, grads = jax.jit(reference_gradients(graph))(*state, *data)
    values = {graph.results[0]: loss}
    results = [values[r] for r in graph.results]
    outs = jax.core.eval_jaxpr(graph.step.update.jaxpr, graph.step.update.consts, *state, *data, *results, *grads)
    return graph.step.unflatten(outs, *args)


def assert_trees_equal(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_parts_compute_the_step():
    graph = trace(sgd, params(), batch())
    assert_trees_equal(run_captured(graph, params(), batch()), jax.jit(sgd)(params(), batch()))
    assert graph.batch_size == 8
    assert graph.step.param_leaf == (0, 1)


@pytest.mark.parametrize("shape_only", [True, False])
def test_shapes_are_enough(shape_only):
    args = params(), batch()
    if shape_only:
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert trace(sgd, *args).fingerprint == trace(sgd, params(), batch()).fingerprint


def test_gradient_without_value():
    def step(p, b):
        return jax.tree.map(lambda a, d: a - d, p, jax.grad(loss_of)(p, b))

    assert_trees_equal(run_captured(trace(step, params(), batch()), params(), batch()), step(params(), batch()))


def test_several_differentiated_arguments():
    def step(p, b):
        loss, (gw, gb) = jax.value_and_grad(lambda w, c: loss_of({"w": w, "b": c}, b), argnums=(0, 1))(p["w"], p["b"])
        return {"w": p["w"] - gw, "b": p["b"] - gb}, loss

    assert_trees_equal(run_captured(trace(step, params(), batch()), params(), batch()), step(params(), batch()))


def test_auxiliary_output_and_clip():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.relu(nn.Dense(5)(x)))

    net = Net()
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    state = train_state.TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), batch()["x"]), tx=tx)

    def step(state, b):
        def loss(p):
            out = state.apply_fn(p, b["x"])
            return ((out - b["y"]) ** 2).mean(), out

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    graph = trace(step, state, batch())
    new, metrics = run_captured(graph, state, batch())
    expected, told = jax.jit(step)(state, batch())
    assert_trees_equal((new.params, metrics), (expected.params, told))
    assert graph.reductions == ("mean",), "an auxiliary output nobody reads is dropped"


def test_jitted_step_that_ran_before():
    step = jax.jit(sgd)
    step(params(), batch())
    assert len(trace(step, params(), batch()).params) == 2


def test_jit_inside_the_step_that_ran_before():
    inner = jax.jit(sgd)
    inner(params(), batch())
    assert len(trace(lambda p, b: inner(p, b), params(), batch()).params) == 2


class TinyNnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.second = nnx.Linear(6, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.first(x))))


def make_nnx():
    model = TinyNnx(nnx.Rngs(params=0, dropout=1))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def nnx_step(state, b):
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda m: ((m(b["x"]) - b["y"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_nnx_objects_receive_their_new_values():
    state, other = make_nnx(), make_nnx()
    graph = trace(nnx_step, state, batch())
    loss = run_captured(graph, state, batch())
    expected = nnx.jit(nnx_step)(other, batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    mine, theirs = nnx.state(state[0]), nnx.state(other[0])
    keys = jax.tree.leaves(
        jax.tree.map(lambda a, b: bool((a == b).all()) if a.dtype == jnp.uint32 else True, mine, theirs)
    )
    assert all(keys), "random counts advance as in the user's step"
    np.testing.assert_allclose(state[0].first.kernel[...], other[0].first.kernel[...], rtol=1e-6)


def test_early_bound_gradient_is_explained_and_ours_works():
    def early(p, b):
        loss, g = bound_early(loss_of)(p, b)
        return jax.tree.map(lambda a, d: a - d, p, g), loss

    with pytest.raises(TraceError, match=r"uniap_jax\.value_and_grad") as caught:
        trace(early, params(), batch())
    assert caught.value.gradients == 0

    def ours(p, b):
        loss, g = uniap_jax.value_and_grad(loss_of)(p, b)
        return jax.tree.map(lambda a, d: a - d, p, g), loss

    assert len(trace(ours, params(), batch()).params) == 2


def test_no_gradient():
    with pytest.raises(TraceError) as caught:
        trace(lambda p, b: loss_of(p, b), params(), batch())
    assert caught.value.gradients == 0


def test_two_gradients():
    def step(p, b):
        return jax.grad(loss_of)(p, b), jax.grad(lambda q: loss_of(q, b) * 2)(p)

    with pytest.raises(TraceError) as caught:
        trace(step, params(), batch())
    assert caught.value.gradients == 2


def penalised(p, b):
    """The norm of the gradient by the input is part of the loss."""
    slope = jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum())(b["x"])
    curve = jax.vmap(jax.grad(lambda x: jnp.tanh(x @ p["w"]).sum()))(b["x"])
    return loss_of(p, b) + (slope**2).mean() + jnp.abs(curve).mean()


def test_gradients_inside_the_loss_are_part_of_it():
    def step(p, b):
        loss, g = jax.value_and_grad(penalised)(p, b)
        return jax.tree.map(lambda a, d: a - 0.1 * d, p, g), loss

    graph = trace(step, params(), batch())
    assert_trees_equal(run_captured(graph, params(), batch()), jax.jit(step)(params(), batch()))
    assert not graph.split_reason


@pytest.mark.parametrize(
    ("gradient", "inside"),
    [
        (lambda p, b: jax.vmap(jax.grad(loss_of), (None, 0))(p, b), "vmap"),
        (lambda p, b: jax.jvp(lambda q: jax.grad(loss_of)(q, b), (p,), (p,))[1], "jvp"),
    ],
)
def test_gradient_that_is_transformed(gradient, inside):
    with pytest.raises(TraceError) as caught:
        trace(lambda p, b: (p, gradient(p, b)), params(), batch())
    assert caught.value.inside == inside


def test_gradient_inside_a_loop():
    def step(p, b):
        def body(carry, x):
            return carry, jax.grad(loss_of)(carry, {"x": x[None], "y": jnp.ones((1, 3))})

        return jax.lax.scan(body, p, b["x"])

    with pytest.raises(TraceError) as caught:
        trace(step, params(), batch())
    assert caught.value.inside == "scan"


def test_loss_that_is_no_scalar():
    with pytest.raises(TraceError) as caught:
        trace(lambda p, b: jax.grad(lambda q: b["x"] @ q["w"])(p), params(), batch())
    assert caught.value.shape == (8, 3)


def test_gradient_functions_are_restored_after_an_error():
    before = jax.value_and_grad, jax.grad
    with pytest.raises(ZeroDivisionError):
        trace(lambda p, b: 1 / 0, params(), batch())
    assert (jax.value_and_grad, jax.grad) == before


def test_batch_leaves_that_disagree():
    with pytest.raises(TraceError) as caught:
        trace(sgd, params(), {**batch(), "y": jnp.ones((4, 3))})
    assert sorted(caught.value.sizes.values()) == [4, 8]


def test_leaf_that_is_no_array():
    with pytest.raises(TraceError) as caught:
        trace(sgd, {**params(), "name": "tiny"}, batch())
    assert "name" in caught.value.leaf


def test_call_with_another_shape_or_structure():
    graph = trace(sgd, params(), batch())
    with pytest.raises(PlanMismatchError) as caught:
        graph.step.flatten(params(), batch(4))
    assert caught.value.shape == (4, 4)
    with pytest.raises(PlanMismatchError) as caught:
        graph.step.flatten({**params(), "extra": jnp.ones(2)}, batch())
    assert "extra" in caught.value.leaf


def test_axis_of_pmap_is_the_whole_batch():
    def step(p, b):
        def loss(q):
            return jax.lax.pmean(loss_of(q, b), "batch")

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, d: a - jax.lax.pmean(d, "batch"), p, g), value

    def one_replica(p, b):
        out = jax.vmap(step, in_axes=None, out_axes=0, axis_name="batch", axis_size=1)(p, b)
        return jax.tree.map(lambda x: x[0], out)

    graph = trace(one_replica, params(), batch())
    assert_trees_equal(run_captured(graph, params(), batch()), jax.jit(one_replica)(params(), batch()))


def test_batch_read_ahead_of_the_loss_moves_into_it():
    def step(p, b):
        doubled = b["x"] * 2
        loss, g = jax.value_and_grad(lambda q: loss_of(q, {**b, "x": doubled}))(p)
        return jax.tree.map(lambda a, d: a - d, p, g), loss

    graph = trace(step, params(), batch())
    assert {o.kind for o in graph.operands if o.name != "micro-batch"} == {"batch"}
    assert_trees_equal(run_captured(graph, params(), batch()), step(params(), batch()))


def test_arrays_closed_over_become_operands():
    table = jnp.arange(12.0).reshape(4, 3)

    def step(p, b):
        loss, g = jax.value_and_grad(lambda q: loss_of({**q, "w": q["w"] + table}, b))(p)
        return jax.tree.map(lambda a, d: a - d, p, g), loss

    graph = trace(step, params(), batch())
    assert [o.shape for o in graph.operands if o.kind == "state"] == [(4, 3)]
    assert_trees_equal(run_captured(graph, params(), batch()), step(params(), batch()))


def test_a_learning_rate_beside_the_loss_is_not_replaced_by_it():
    def step(p, b, rate):
        loss, g = jax.value_and_grad(loss_of)(p, b)
        return jax.tree.map(lambda a, d: a - rate * d, p, g), loss

    graph = trace(step, params(), batch(), 0.1)
    assert graph.step.output_leaf == (0, 1, None)


@pytest.mark.parametrize("kind", ["tree", "nnx"])
def test_a_graph_keeps_none_of_the_arrays_it_was_traced_with(kind):
    """On an accelerator they would be a second copy of the whole training state."""
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def nnx_step(model, b):
        loss, grads = nnx.value_and_grad(lambda m: ((m(b["x"]) - b["y"]) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda a, d: a - 0.1 * d, nnx.state(model), grads))
        return loss

    state, step = (params(), sgd) if kind == "tree" else (model, nnx_step)
    leaves = jax.tree.leaves(state if kind == "tree" else nnx.state(model))
    dead = [weakref.ref(x) for x in leaves]
    graph = trace(step, state, batch())
    graph.microbatch(2)
    del state, model, leaves
    gc.collect()
    assert [w() for w in dead] == [None] * len(dead)
    assert graph.batch_size == 8
