"""Grouped convolutions beside tensor ways: the gradient of their weights is that of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from uniap_jax.core.dims import tensor_split
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.rewrite_layout import laid_out
from uniap_jax.core.sharding import layer_sharding, make_mesh
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.frontend import mark_layer, trace

FEATURES = 16


def graph_of(groups: int, batch: int, scanned: bool, inner: bool) -> tuple[LayerGraph, Any, np.ndarray]:
    """A convolution over features that cross to other layers, or (`inner`) over those of a wider product."""
    rows = np.random.RandomState(0).randn(batch, 9, FEATURES).astype(np.float32)
    width = 4 * FEATURES if inner else FEATURES
    kernel = np.random.RandomState(1).randn(3, width // groups, width).astype(np.float32)
    params = {"conv": jnp.asarray(kernel)}
    if inner:
        params["up"] = jnp.asarray(np.random.RandomState(2).randn(FEATURES, width).astype(np.float32))
        params["down"] = jnp.asarray(np.random.RandomState(3).randn(width, FEATURES).astype(np.float32))

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=groups, dimension_numbers=numbers)

    def loss_of(p: Any, x: jax.Array) -> jax.Array:
        x = x @ p["up"] if inner else x
        if scanned:
            x = jax.lax.scan(lambda c, _: (jnp.tanh(conv(c, p["conv"])), None), x, length=2)[0]
        else:
            x = jnp.tanh(jax.checkpoint(conv)(x, p["conv"]))
        return jnp.mean((mark_layer(x @ p["down"], "whole") if inner else x) ** 2)

    def step(p: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(p, x)
        return jax.tree.map(lambda a, g: a - g, p, grads), loss

    return trace(step, params, rows), params, rows


def gradients(layer: Layer, params: Any, rows: Any) -> Any:
    """Of the squares that a layer writes."""

    def loss(params: Any) -> Any:
        return jnp.mean(jax.core.eval_jaxpr(layer.jaxpr.jaxpr, layer.jaxpr.consts, *params, rows)[0] ** 2)

    return jax.grad(loss)(params)


def pins(layer: Layer) -> int:
    return str(layer.jaxpr).count("sharding_constraint")


@pytest.mark.parametrize("groups", [4, FEATURES])
@pytest.mark.parametrize("batch", [8, 4])
@pytest.mark.parametrize("scanned", [False, True])
def test_gradients_where_devices_hold_the_same_examples(groups: int, batch: int, scanned: bool) -> None:
    graph, params, rows = graph_of(groups, batch, scanned, inner=False)
    strategy, mesh = parse_strategy("data=4,tensor=2"), make_mesh(jax.devices()[:8])
    layer = graph.layers[0]
    assert layer.params == (0,)
    assert not layer.reads
    sharding = layer_sharding(graph, layer, strategy)
    planned = laid_out(graph, layer, strategy, mesh)
    assert pins(planned) == 1
    given = [NamedSharding(mesh, s) for s in sharding.params], NamedSharding(mesh, sharding.operands[0])
    step = jax.jit(lambda p, x: gradients(planned, p, x), in_shardings=given, out_shardings=given[0])
    leaves = jax.tree.leaves(params)
    got, want = step(leaves, rows), jax.jit(lambda p, x: gradients(layer, p, x))(leaves, rows)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def test_features_that_tensor_ways_split_stay_split() -> None:
    graph, _, _ = graph_of(4 * FEATURES, 8, scanned=False, inner=True)
    strategy, mesh = parse_strategy("data=4,tensor=2"), make_mesh(jax.devices()[:8])
    layer = graph.layers[0]
    assert tensor_split(layer, 2).params[[graph.params[p].name for p in layer.params].index("[0]['conv']")] == 2
    assert not pins(laid_out(graph, layer, strategy, mesh))


def test_without_tensor_ways_nothing_is_pinned() -> None:
    graph, _, _ = graph_of(4, 8, scanned=False, inner=False)
    layer = laid_out(graph, graph.layers[0], parse_strategy("data=8"), make_mesh(jax.devices()[:8]))
    assert not pins(layer)
