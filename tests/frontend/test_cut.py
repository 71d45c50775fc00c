"""Cuts: equal blocks are equal layers, nothing is lost, and the layers together are the loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from uniap_jax.core.reference import reference_gradients
from uniap_jax.frontend import mark_layer, trace
from uniap_jax.frontend.cut import _periods

TOKENS = jnp.arange(64).reshape(8, 8) % 13


class Block(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x, memory=None, bias=0.0):
        h = nn.LayerNorm()(x)
        x = x + attention(self, h, h, bias)
        if memory is not None:
            x = x + attention(self, nn.LayerNorm()(x), memory, 0.0)
        h = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(h))


def attention(module, x, memory, bias):
    q, k, v = nn.Dense(module.width)(x), nn.Dense(module.width)(memory), nn.Dense(module.width)(memory)
    return nn.Dense(module.width)(jax.nn.softmax(q @ k.swapaxes(-1, -2) + bias) @ v)


class Decoder(nn.Module):
    depth: int
    tied: bool = True

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(13, 16)
        x = table(tokens) + self.param("positions", nn.initializers.normal(), (8, 16))
        for _ in range(self.depth):
            x = Block()(x, bias=jnp.tril(jnp.ones((8, 8))) * 2.0)
        x = nn.LayerNorm()(x)
        return table.attend(x) if self.tied else nn.Dense(13)(x)


class EncoderDecoder(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(13, 16)
        memory, bias = table(tokens), nn.Dense(8)(jnp.eye(8))
        for _ in range(self.depth):
            memory = Block()(memory, bias=bias)
        x = table(tokens[:, ::-1])
        for _ in range(self.depth):
            x = Block()(x, memory)
        return table.attend(x)


class UNet(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, tokens):
        x, skips = nn.Embed(13, 16)(tokens), []
        for _ in range(self.depth):
            x = nn.gelu(nn.Dense(16)(x))
            skips.append(x)
        for skip in reversed(skips):
            x = nn.gelu(nn.Dense(16)(jnp.concatenate([x, skip], -1)))
        return nn.Dense(13)(x)


class TwoTowers(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, tokens):
        a, b = nn.Embed(13, 16)(tokens), nn.Embed(13, 16)(tokens[:, ::-1])
        for _ in range(self.depth):
            a, b = Block()(a), Block()(b)
        return nn.Dense(13)(a * b)


def traced(model):
    variables = model.init(jax.random.key(0), TOKENS)

    def loss_of(p, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, tokens), tokens).mean()

    def step(p, tokens):
        loss, grads = jax.value_and_grad(loss_of)(p, tokens)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    return trace(step, variables, TOKENS), variables, loss_of


@pytest.mark.parametrize(
    "model",
    [Decoder(3), Decoder(2, tied=False), EncoderDecoder(3), UNet(4), TwoTowers(2)],
    ids=["tied", "untied", "encoder-decoder", "u-net", "towers"],
)
def test_layers_are_the_loss(model):
    graph, variables, loss_of = traced(model)
    loss, grads = jax.jit(reference_gradients(graph))(*jax.tree.leaves(variables), TOKENS)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss_of))(variables, TOKENS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for a, b in zip(grads, jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert {p for layer in graph.layers for p in layer.params} == set(range(len(graph.params)))
    assert len(graph.layers) >= 4
    written = [v for layer in graph.layers for v in layer.writes]
    assert sorted(written) == list(range(len(graph.values))), "every value has one writer"
    seen: set[int] = set()
    for layer in graph.layers:
        assert set(layer.reads) <= seen, "edges go forward"
        seen |= set(layer.writes)


@pytest.mark.parametrize("depth", [4, 9])
def test_equal_blocks_are_equal_layers(depth):
    graph, _, _ = traced(Decoder(depth))
    groups = sorted(map(len, graph.unique.values()))
    assert groups[-1] == depth
    assert len(graph.unique) <= 4
    blocks = max(graph.unique.values(), key=len)
    assert [graph.layers[i].name for i in blocks] == [f"Decoder/Block_{i}" for i in range(depth)]


def test_encoder_and_decoder_blocks_are_told_apart():
    graph, _, _ = traced(EncoderDecoder(4))
    groups = sorted(map(len, graph.unique.values()))
    assert groups[-2:] == [4, 4]
    memory_readers = [v for v in range(len(graph.values)) if sum(v in layer.reads for layer in graph.layers) == 4]
    assert memory_readers, "the encoder's output is read by all decoder layers"


def test_skips_are_edges():
    graph, _, _ = traced(UNet(4))
    assert any(v - u > 1 for u, v, _ in graph.edges)


def test_shared_table_is_a_parameter_of_two_layers():
    graph, _, _ = traced(Decoder(2))
    table = next(i for i, p in enumerate(graph.params) if "embedding" in p.name)
    assert len([layer for layer in graph.layers if table in layer.params]) == 2


class Spare(nn.Module):
    """Blocks with a table that the loss does not read, and a pooler nobody asks for."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(13, 16)(tokens)
        for _ in range(3):
            x = SpareBlock()(x)
        nn.Dense(16, name="pooler")(x[:, 0])
        return nn.Dense(13)(x)


class SpareBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.param("mask", nn.initializers.zeros, (8, 8))
        return Block()(x)


def test_parameters_that_nothing_reads_are_in_the_layer_of_their_module():
    graph, params, _ = traced(Spare())
    names = [{graph.params[p].name for p in layer.params} for layer in graph.layers]
    assert set().union(*names) == {p.name for p in graph.params}
    assert all(sum(name in found for found in names) == 1 for name in (p.name for p in graph.params))
    for i in range(3):
        (own,) = (found for found in names if any(f"SpareBlock_{i}']['mask']" in name for name in found))
        assert any(f"SpareBlock_{i}']['Block_0']['Dense_0']" in name for name in own)
    assert len({layer.signature for layer in graph.layers if "Block" in layer.name}) == 1
    _, grads = reference_gradients(graph)(*jax.tree.leaves(params), TOKENS)
    unread = [i for i, p in enumerate(graph.params) if "pooler" in p.name or "mask" in p.name]
    assert [float(jnp.abs(grads[i]).sum()) for i in unread] == [0.0] * 5
    assert [layer.params for layer in graph.microbatch(2).layers] == [layer.params for layer in graph.layers]


def test_work_is_linear_in_depth():
    counts = []
    for depth in (8, 16):
        graph, _, _ = traced(Decoder(depth))
        counts.append((len(graph.unique), sum(len(layer.jaxpr.eqns) for layer in graph.layers)))
    assert counts[0][0] == counts[1][0]
    assert counts[1][1] < 2.2 * counts[0][1]


def test_batch_dimensions():
    graph, _, _ = traced(Decoder(2))
    assert {v.batch_dim for v in graph.values if v.shape} == {0}
    assert graph.microbatch(4).values[0].shape == (2, *graph.values[0].shape[1:])


def test_source_and_name_are_told():
    graph, _, _ = traced(Decoder(2))
    block = next(layer for layer in graph.layers if "Block_1" in layer.name)
    assert block.source.startswith("test_cut.py:")


def test_marks_override_and_name():
    def loss_of(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p[i])
            if i % 2:
                x = mark_layer(x, f"pair {i // 2}")
        return (x**2).mean()

    def step(p, x):
        loss, grads = jax.value_and_grad(loss_of)(p, x)
        return [a - g for a, g in zip(p, grads, strict=True)], loss

    weights = [jnp.eye(4) * (i + 1) for i in range(4)]
    graph = trace(step, weights, jnp.ones((8, 4)))
    assert [layer.name for layer in graph.layers[:2]] == ["pair 0", "pair 1"]
    assert [len(layer.params) for layer in graph.layers] == [2, 2, 0]
    loss, _ = reference_gradients(graph)(*weights, jnp.ones((8, 4)))
    np.testing.assert_allclose(loss, loss_of(weights, jnp.ones((8, 4))), rtol=1e-6)


def test_scan_is_one_layer_and_checkpoint_is_kept():
    def loss_of(p, x):
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["stack"])
        return (jax.checkpoint(lambda h: jnp.sin(h @ p["out"]))(x) ** 2).mean()

    def step(p, x):
        loss, grads = jax.value_and_grad(loss_of)(p, x)
        return jax.tree.map(lambda a, g: a - g, p, grads), loss

    p = {"stack": jnp.ones((3, 4, 4)), "out": jnp.ones((4, 4))}
    graph = trace(step, p, jnp.ones((8, 4)))
    names = {e.primitive.name for layer in graph.layers for e in layer.jaxpr.eqns}
    assert "scan" in names
    assert names & {"remat2", "checkpoint"}
    assert graph.split_reason == ""
    (note,) = graph.notes
    assert "The 3 turns of the loop in" in note
    assert "test_cut.py:" in note


class Wide(nn.Module):
    """A vocabulary so large beside the width that its softmax is real work."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(4096, 16)
        x = table(tokens)
        for _ in range(2):
            x = Block()(x)
        return table.attend(nn.LayerNorm()(x))


def test_logits_do_not_cross_between_layers():
    model = Wide()
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def step(params, tokens):
        def loss_of(params):
            logits = model.apply({"params": params}, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    graph = trace(step, params, TOKENS)
    assert all(graph.values[v].shape in ((8, 8, 16), ()) for layer in graph.layers for v in layer.writes)
    assert graph.layers[-1].params


def test_distances_of_equal_blocks_are_few_and_found():
    block = np.r_[np.arange(20), np.arange(12), np.arange(20)]
    counts = []
    for depth in (10, 100, 400):
        ids = np.r_[np.arange(7), np.tile(block, depth), 50 + np.arange(9)]
        periods = _periods(ids)
        assert len(block) in periods
        counts.append(len(periods))
    assert counts[1] == counts[2] <= 200, "as many to try at any depth"
