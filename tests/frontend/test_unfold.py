"""Loops over layers written out: turns as layers, rows of stacked arrays as parameters and leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

import uniform_support as support
from runtime_support import numbers, worst
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.reference import reference_results
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.frontend import trace

LAYERS = 4


def stacked(values: list[Any], groups: Any) -> list[Any]:
    """Values by rows as the user's."""
    return [values[g[0]] if len(g) == 1 else jnp.stack([values[i] for i in g]) for g in groups]


def both_updates(graph: LayerGraph, state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
    """Outputs of the step in the user's form and by rows, from one loss and its gradients."""
    rows = graph.step.by_rows
    assert rows is not None

    @jax.jit
    def run(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
        results, grads = reference_results(graph)(*state, *batch)
        own = [r for x, g in zip(state, rows.leaves, strict=True) for r in ([x] if len(g) == 1 else list(x))]
        step, inner = graph.step.update, rows.step.update
        users = jax.core.eval_jaxpr(step.jaxpr, step.consts, *state, *batch, *results, *grads)
        ours = jax.core.eval_jaxpr(inner.jaxpr, inner.consts, *own, *batch, *results, *grads)
        return users, stacked(ours, rows.outputs)

    return run(state, batch)


def check_numbers(state: Any, step: Callable[..., Any], batch: Any) -> LayerGraph:
    """Compares both forms of an unfolded step with the step itself; returns the graph."""
    graph = trace(step, state, batch, unfold_scans=True)
    leaves = graph.step.flatten(state, batch)
    expected = jax.jit(graph.step.flat)(*leaves[0], *leaves[1])
    for outputs in both_updates(graph, *leaves):
        assert [x.shape for x in outputs] == [x.shape for x in expected]
        for a, b in zip(numbers(outputs), numbers(expected), strict=True):
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2e-5, atol=2e-6)
    return graph


def names_of_split_leaves(graph: LayerGraph) -> list[str]:
    rows = graph.step.by_rows
    assert rows is not None
    return [v.name for v, group in zip(graph.step.state, rows.leaves, strict=True) if len(group) > 1]


def test_turns_of_a_linen_loop_are_equal_layers() -> None:
    state, step, batch = support.gpt(scan=True, remat=True)
    folded, graph = trace(step, state, batch), check_numbers(state, step, batch)
    assert len(graph.layers) == len(folded.layers) + LAYERS - 1
    assert len(graph.unique) == len(folded.unique)
    turns = max(graph.unique.values(), key=len)
    assert len(turns) == LAYERS
    assert [graph.params[graph.layers[u].params[0]].name[-3:] for u in turns] == [f"[{i}]" for i in range(LAYERS)]
    assert sum(layer.flops for layer in graph.layers) == pytest.approx(sum(x.flops for x in folded.layers), rel=1e-3)
    assert graph.fingerprint != folded.fingerprint
    assert [v.name for v in graph.step.state] == [v.name for v in folded.step.state]
    assert len(names_of_split_leaves(graph)) == 3 * 11  # parameters and both moments of AdamW


def test_gradients_of_rows_are_rows_of_gradients() -> None:
    state, step, batch = support.gpt(scan=True, dropout=0.1)
    folded, graph = trace(step, state, batch), trace(step, state, batch, unfold_scans=True)
    leaves = [x for group in graph.step.flatten(state, batch) for x in group]
    (_, whole), (_, rows) = (jax.jit(reference_results(g))(*leaves) for g in (folded, graph))
    assert graph.step.by_rows is not None
    groups = iter(graph.step.by_rows.params)
    at = 0
    for gradient, value in zip(whole, folded.params, strict=True):
        group = next(groups) if "blocks" in value.name else (at,)
        found = rows[at] if len(group) == 1 else jnp.stack([rows[i] for i in group])
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6)
        at += len(group)


@pytest.mark.parametrize("how", [{}, {"reverse": True}, {"batched": True}])
def test_what_can_hang_on_a_loop(how: dict[str, bool]) -> None:
    """A cast before it, a mask from the batch, numbers of layers, statistics that come out in rows."""
    graph = check_numbers(*support.plain_scan(**how))
    assert len(max(graph.unique.values(), key=len)) >= LAYERS - 2  # first and last may hold what is before and after
    assert not graph.split_reason


def test_statistics_and_keys_of_an_nnx_loop_are_kept_by_rows() -> None:
    graph = check_numbers(*support.nnx_stack())
    assert len(max(graph.unique.values(), key=len)) == LAYERS
    split = names_of_split_leaves(graph)
    assert any("mean" in name for name in split)
    assert any("key" in name for name in split)


def stack_of(tx: Any) -> tuple[Any, Any, Any]:
    """State, train step and batch of a `lax.scan` over a matrix, a vector and a number of each layer."""
    rng, width = np.random.default_rng(0), 16

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    params = {"in": weight(8, width), "w": weight(LAYERS, width, width), "b": weight(LAYERS, width)}
    params |= {"s": weight(LAYERS), "out": weight(width, 3)}

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            def turn(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ own["w"] + own["b"]) * own["s"], None

            x, _ = lax.scan(turn, batch["x"] @ params["in"], {k: params[k] for k in "wbs"})
            penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
            return jnp.mean((x @ params["out"] - batch["y"]) ** 2) + 1e-3 * penalty

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "norm": optax.tree.norm(grads)}

    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32), "y": rng.normal(size=(8, 3)).astype(np.float32)}
    return (params, tx.init(params)), step, batch


OPTIMIZERS = {
    "clip_adamw": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), 9),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=8), 7),  # factored without the layers' dimension
    "lamb": (optax.lamb(1e-3), 9),  # ratios of norms of whole leaves
    "every_second": (optax.MultiSteps(optax.adam(1e-3), 2), 12),  # a conditional
    "finite": (optax.apply_if_finite(optax.adam(1e-3), 3), 9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_by_rows(name: str) -> None:
    tx, split = OPTIMIZERS[name]
    graph = check_numbers(*stack_of(tx))
    assert len(names_of_split_leaves(graph)) == split


def test_an_update_that_mixes_rows_is_computed_on_the_whole() -> None:
    """Sorting and a running sum over layers, and a slice of them."""

    def mixed(grads: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: -0.1 * jnp.cumsum(jnp.sort(g, axis=0), axis=0).at[1:3].mul(0.5), grads), state

    state, step, batch = stack_of(optax.chain(optax.GradientTransformation(lambda p: (), mixed), optax.trace(0.9)))
    check_numbers(state, step, batch)


def test_a_step_without_a_loop_over_layers_is_the_same() -> None:
    """A loop over time reads the same parameters at every turn."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            def turn(x: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ params["w"] + now), None

            x, _ = lax.scan(turn, jnp.zeros((8, 4)), jnp.moveaxis(batch["x"], 1, 0))
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params, batch = {"w": jnp.eye(4)}, {"x": np.ones((8, 3, 4), np.float32)}
    graph = trace(step, params, batch, unfold_scans=True)
    assert graph.step.by_rows is None
    assert graph.fingerprint == trace(step, params, batch).fingerprint


def test_a_loop_of_one_turn_is_left_as_it_is() -> None:
    state, step, batch = support.gpt(scan=True, layers=1)
    assert trace(step, state, batch, unfold_scans=True).step.by_rows is None


def test_microbatches_draw_their_rows_of_random_numbers() -> None:
    state, step, batch = support.gpt(scan=True, remat=True, dropout=0.2)
    graph = trace(step, state, batch, unfold_scans=True)
    whole, micro = graph, graph.microbatch(2)
    assert [x.name for x in micro.layers] == [x.name for x in whole.layers]
    assert len(micro.unique) == len(whole.unique)
    leaves, rows = graph.step.flatten(state, batch)
    losses = [reference_results(micro, index=i)(*leaves, *(x[4 * i : 4 * i + 4] for x in rows))[0][0] for i in range(2)]
    expected = reference_results(whole)(*leaves, *rows)[0][0]
    np.testing.assert_allclose(np.mean(losses), expected, rtol=1e-5)


def test_rules_name_the_dimensions_of_a_row() -> None:
    class Turn(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            def dense(width: int, *names: str) -> nn.Dense:
                init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
                return nn.Dense(width, kernel_init=init, use_bias=False)

            return x + dense(16, "mlp", "embed")(nn.gelu(dense(64, "embed", "mlp")(x))), None

    loop = nn.scan(
        Turn,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()
    x = np.ones((8, 16), np.float32)
    state = TrainState.create(
        apply_fn=loop.apply, params=loop.init(jax.random.key(0), x, None)["params"], tx=optax.sgd(0.1)
    )

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(loop.apply({"params": params}, batch["x"], None)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    rules = (("mlp", "tensor"), ("embed", None), ("layers", None))
    graph = trace(step, state, {"x": x}, unfold_scans=True, logical_axis_rules=rules)
    free = trace(step, state, {"x": x}, unfold_scans=True)
    for g, cut in ((graph, False), (free, True)):
        layer = g.layers[1]
        stored = layer_sharding(g, layer, Strategy(fsdp=2)).stored
        assert any(any(spec) for spec in stored) is cut  # by the rules only tensor ways may split a dimension
        assert any(any(spec) for spec in layer_sharding(g, layer, Strategy(tensor=2)).stored)


def test_the_state_is_the_users_whatever_is_unfolded() -> None:
    state, step, batch = support.gpt(scan=True)
    graph = trace(step, state, batch, unfold_scans=True)
    leaves, _ = graph.step.flatten(state, batch)
    assert worst(numbers(graph.step.state_result(leaves)), numbers(state)) == 0.0
    assert jax.tree.structure(graph.step.state_result(leaves)) == jax.tree.structure(state)
