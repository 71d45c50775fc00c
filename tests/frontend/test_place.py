"""What is made of parameters stands with its readers: casts, penalties, tables of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.reference import reference_gradients
from uniap_jax.frontend import trace

DEPTH, HEADS, LENGTH, WIDTH, WORDS = 3, 2, 6, 8, 24
TOKENS = np.random.RandomState(0).randint(0, WORDS, (4, LENGTH)).astype(np.int32)
Tree = Any


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).randn(*shape) / np.sqrt(shape[0]), jnp.float32)


def params() -> Tree:
    layers = [
        {n: normal(10 * i + j, WIDTH, WIDTH) for j, n in enumerate(("q", "k", "v", "out", "up", "down"))}
        for i in range(DEPTH)
    ]
    return {"table": normal(98, WORDS, WIDTH), "near": normal(99, 2 * LENGTH, HEADS), "layers": layers}


def forward(p: Tree, tokens: jax.Array) -> jax.Array:
    """A tied table at both ends, and a bias of relative positions and padding that every layer reads."""
    x, place = p["table"][tokens], np.arange(LENGTH)
    bias = p["near"][place[:, None] - place[None] + LENGTH].transpose(2, 0, 1)[None]
    bias = bias + jnp.where(tokens > 0, 0.0, -9.0)[:, None, None, :].astype(bias.dtype)
    for w in p["layers"]:
        q, k, v = ((x @ w[n]).reshape(*x.shape[:2], HEADS, -1) for n in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["out"]
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return x @ p["table"].T


def plain(p: Tree, tokens: jax.Array) -> jax.Array:
    return jnp.mean(forward(p, tokens).astype(jnp.float32) ** 2)


def cast(p: Tree, tokens: jax.Array) -> jax.Array:
    return plain(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), tokens)


def penalised(p: Tree, tokens: jax.Array) -> jax.Array:
    return plain(p, tokens) + 1e-2 * sum(jnp.sum(a**2) for a in jax.tree.leaves((p["layers"], p["table"])))


def graph_of(loss_of: Callable[..., jax.Array], p: Tree) -> LayerGraph:
    def step(p: Tree, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(p, tokens)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    return trace(step, p, TOKENS)


@pytest.mark.parametrize("loss_of", [plain, cast, penalised])
def test_every_layer_reads_its_own_parameters(loss_of: Callable[..., jax.Array]) -> None:
    graph = graph_of(loss_of, params())
    blocks = max(graph.unique.values(), key=len)
    assert len(blocks) == DEPTH
    for number, i in enumerate(blocks):
        names = {graph.params[p].name for p in graph.layers[i].params}
        assert {n for n in names if "layers" in n} == {n for n in names if f"['layers'][{number}]" in n}
        assert any("near" in n for n in names), "positions are made again in every layer"
    tables = [layer.index for layer in graph.layers if any("table" in graph.params[p].name for p in layer.params)]
    assert tables == [0, len(graph.layers) - 1]
    assert sum(len(v.shape) > 0 for v in graph.values) == len(graph.layers) - 1, "only activations cross"


@pytest.mark.parametrize("loss_of", [plain, cast, penalised])
@pytest.mark.parametrize("pieces", [1, 2])
def test_the_loss_is_the_same(loss_of: Callable[..., jax.Array], pieces: int) -> None:
    p = params()
    graph = graph_of(loss_of, p)
    if pieces > 1:
        assert [layer.params for layer in graph.microbatch(pieces).layers] == [layer.params for layer in graph.layers]
        return
    loss, grads = jax.jit(reference_gradients(graph))(*jax.tree.leaves(p), TOKENS)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss_of))(p, TOKENS)
    tolerance = 2e-2 if loss_of is cast else 1e-4
    np.testing.assert_allclose(loss, expected, rtol=tolerance)
    for a, b in zip(grads, jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.abs(b).max()))


def test_a_penalty_goes_along_as_one_sum() -> None:
    graph = graph_of(penalised, params())
    scalars = [i for i, v in enumerate(graph.values) if v.shape == () and i not in graph.results]
    for here in graph.layers[1:-1]:
        written = [v for v in here.writes if v in scalars]
        assert len(written) == 1
        assert [v for v in here.reads if v in scalars], "what the layers before it added up"


def test_small_statistics_of_weights_are_sent() -> None:
    """A norm of a large weight is not taken again by a layer that would have to hold the weight for it."""

    def normed(p: Tree, tokens: jax.Array) -> jax.Array:
        size = jnp.sqrt(jnp.sum(p["layers"][0]["up"] ** 2, axis=0))
        p = {**p, "layers": [{**w, "down": w["down"] / size} for w in p["layers"]]}
        return plain(p, tokens)

    graph = graph_of(normed, params())
    name = next(i for i, p in enumerate(graph.params) if "[0]['up']" in p.name)
    assert len([layer for layer in graph.layers if name in layer.params]) == 1
