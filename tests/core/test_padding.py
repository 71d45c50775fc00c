"""Dimensions that do not divide are made longer inside a layer: split all the same, and exact."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from dims_support import collectives, make_layer, mesh_4x2, spec
from runtime_support import VOCABULARY, Decoder, assert_as_one_device, decoder_state, decoder_step, token_batch
from uniap_jax import frontend
from uniap_jax.core.described import Describer
from uniap_jax.core.dims import tensor_split
from uniap_jax.core.padding import Pad, filled, padded_layer
from uniap_jax.core.rewrite import Ways, tensor_rewrite
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.topology import load_cluster

B, S, E, V = 8, 6, 16, 97
LABELS = (np.arange(B * S).reshape(B, S) * 7 % V).astype(np.int32)
TABLE, BIAS = (V, E), (V,)


def tied(table, labels, x):
    """Looked up, used as a head, and looked up again by the loss."""
    h = jnp.tanh(x + jnp.take(table, labels, axis=0))
    return optax.softmax_cross_entropy_with_integer_labels(h @ table.T, labels).mean()


def smoothed(table, bias, labels, x):
    """Labels as rows of a one-hot matrix, smoothed, as in the Flax examples; accuracy and perplexity too."""
    logits = x @ table.T + bias
    one_hot = labels[..., None] == jnp.arange(V).reshape(1, 1, V)
    soft = jax.lax.select(one_hot, jnp.full(one_hot.shape, 0.9), jnp.full(one_hot.shape, 0.1 / (V - 1)))
    loss = -(soft * jax.nn.log_softmax(logits)).sum(-1).mean()
    return loss, (logits.argmax(-1) == labels).mean(), jnp.exp(loss)


def by_hand(table, labels, x):
    """A log-sum-exp whose maximum has a gradient, and logits far below zero: e^(0 - max) overflows in added places."""
    logits = x @ table.T - 500.0
    top = logits.max(-1, keepdims=True)
    z = jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True)) + top
    return (z - jnp.take_along_axis(logits, labels[..., None], -1)).mean()


def odd_reductions(table, labels, x):
    p = jax.nn.sigmoid(x @ table.T)
    return p.min(-1).sum(), p.prod(-1).sum(), (p > 0.99).any(-1).sum(), (p > 1e-4).all(-1).sum(), p.argmin(-1).sum()


def out_of_range(table, labels, x):
    """Places beyond the table: clipped, or filled, as they were."""
    far = labels + V - 3
    clipped = jnp.take(table, far, axis=0, mode="clip")
    none = jnp.nan_to_num(jnp.take(table, far, axis=0, mode="fill"), nan=0.5)
    return (x * (clipped + none)).sum()


def soft_embedding(table, labels, x):
    """Summed over by a product, both ways, inside a body that is computed again."""
    return jax.checkpoint(lambda t, x: jax.nn.softmax(x @ t.T / 3) @ t)(table, x).sum()


def odd_mlp(up, bias, down, labels, x):
    """Functions with derivatives of their own; the reciprocal is infinite in added places."""
    h = jax.nn.relu(x @ up + bias)
    return ((h / (h + 1e-6)) @ down + jax.nn.silu(x @ up) @ down).sum()


def narrow(table, labels, x):
    logits = (x.astype(jnp.bfloat16) @ table.astype(jnp.bfloat16).T).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()


CASES = {
    "tied": (tied, (TABLE,)),
    "smoothed": (smoothed, (TABLE, BIAS)),
    "by hand": (by_hand, (TABLE,)),
    "odd reductions": (odd_reductions, (TABLE,)),
    "out of range": (out_of_range, (TABLE,)),
    "soft embedding": (soft_embedding, (TABLE,)),
    "odd mlp": (odd_mlp, ((E, V), (V,), (V, E))),
    "narrow": (narrow, (TABLE,)),
}


def arguments(params):
    rng = np.random.default_rng(0)
    return [
        *(rng.normal(size=s).astype(np.float32) / 2 for s in params),
        LABELS,
        rng.normal(size=(B, S, E)).astype(np.float32),
    ]


def layer_of(name):
    f, params = CASES[name]
    args = arguments(params)
    return make_layer(f, args[: len(params)], args[len(params) : -1], args[-1:])


def with_gradients(jaxpr, longer, *args):
    """Outputs, and gradients of the sum of the differentiable ones."""

    def f(*moving):
        full = longer([*moving[:-1], LABELS, moving[-1]])
        outs = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *full)
        return sum(o.sum() for o in outs if jnp.issubdtype(o.dtype, jnp.floating)), outs

    (_, outs), grads = jax.value_and_grad(f, argnums=tuple(range(len(args))), has_aux=True)(*args)
    return [*outs, *grads]


@pytest.mark.parametrize("name", CASES)
def test_longer_dimensions_change_no_number(name):
    layer = layer_of(name)
    split = tensor_split(layer, 4)
    assert {(p.size, p.padded) for p in split.pads} == {(V, 100)}
    inner = padded_layer(layer, split.pads)

    def longer(args):
        return [filled(a, [p for p in split.pads if p.param == i]) for i, a in enumerate(args)]

    args = [a for a in arguments(CASES[name][1]) if a is not LABELS]
    got = jax.jit(partial(with_gradients, inner.jaxpr, longer))(*args)
    want = jax.jit(partial(with_gradients, layer.jaxpr, list))(*args)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


def test_a_longer_layer_is_one_of_its_own():
    layer = layer_of("tied")
    pads = (Pad(param=0, dim=0, size=V, padded=98),)
    inner = padded_layer(layer, pads)
    assert inner.jaxpr.in_avals[0].shape == (98, E)
    assert padded_layer(layer, ()) is layer
    assert not tensor_split(inner, 2).pads


@pytest.mark.parametrize("name", ["tied", "smoothed"])
def test_logits_are_split_and_the_table_is_exchanged(name):
    """Two exchanges of half a shard there and back; what else moves is one activation and a number per position."""
    layer, mesh = layer_of(name), mesh_4x2()
    split = tensor_split(layer, 2)
    assert (split.params[0], split.stored[0]) == (0, 1)
    jaxpr = tensor_rewrite(layer, split, Ways(mesh=mesh, axes=("tensor",), degree=2))
    args = [a for a in arguments(CASES[name][1]) if a is not LABELS]
    specs = [*(spec(a.ndim, d, "tensor") for a, d in zip(args, split.stored, strict=False)), spec(3, 0, "data")]
    shardings = [NamedSharding(mesh, s) for s in specs]
    outs = [None] * (len(jaxpr.out_avals)) + shardings
    run = jax.jit(partial(with_gradients, jaxpr, list), in_shardings=shardings, out_shardings=outs)
    hlo = run.lower(*args).compile().as_text()
    table, activation = 98 * E * 4, B // 4 * S * E * 4
    moved = collectives(hlo, "tensor")
    assert sum(c.nbytes for c in moved if c.op == "all-to-all") == table
    rest = sorted(c.nbytes for c in moved if c.op != "all-to-all")
    assert rest[-2 if name == "tied" else -1] == activation
    assert all(n <= 2 * 4 * V for n in rest if n != activation)
    assert f",{V}]" not in hlo
    assert ",98]" not in hlo
    assert ",49]" in hlo


def test_what_has_no_rule_is_left_whole_with_its_source():
    @jax.custom_vjp
    def own(logits):
        return jax.nn.logsumexp(logits, -1)

    own.defvjp(lambda z: (own(z), jax.nn.softmax(z)), lambda p, ct: (p * ct[..., None],))
    args = arguments((TABLE,))
    layer = make_layer(lambda t, x: own(x @ t.T).sum(), args[:1], [], args[-1:])
    split = tensor_split(layer, 2)
    assert (split.pads, split.params) == ((), (None,))
    assert "size 97 is not filled up to 98: custom_vjp_call has no rule" in split.reason
    assert "(test_padding.py:" in split.reason


ODD = Decoder(layers=2, vocabulary=VOCABULARY + 1)


def odd_state(tx=None):
    return decoder_state(tx or optax.sgd(0.5, momentum=0.9), ODD)


@pytest.mark.parametrize(
    ("stages", "strategies", "ways"),
    [
        (1, "data=2,tensor=4", 4),
        (1, "fsdp=4,tensor=2,zero=2", 2),
        (2, "data=2,tensor=2", 2),
        (1, "data=2,tensor=4,sequence", 4),
    ],
)
def test_a_step_with_an_odd_vocabulary_is_that_of_one_device(stages, strategies, ways):
    plan = {"stages": stages, "microbatches": 2, "strategies": strategies}
    _, state = assert_as_one_device(decoder_step, odd_state, token_batch(), **plan)
    table = state.params["Embed_0"]["embedding"]
    assert table.addressable_shards[0].data.nbytes == table.nbytes / ways


def test_state_is_split_and_memory_counts_the_copy():
    graph = frontend.trace(decoder_step, odd_state(), token_batch())
    head = next(
        la for la in graph.layers if any(graph.params[p].shape == (33, 16) for p in la.params) and la.flops > 2e4
    )
    describer = Describer(graph, load_cluster("v5e:2x4"))
    weights = describer.weights(head, Strategy(data=4, tensor=2))
    table = 33 * 16 * 4
    rest = sum(graph.params[p].nbytes for p in head.params) - table
    assert weights.stored == weights.grads == table / 2 + rest
    assert weights.exchanged == (34 * 16 * 4 / 2,)
    whole, split = (
        describer.cost(head, s, samples=8, fused=True) for s in (Strategy(data=8), Strategy(data=4, tensor=2))
    )
    assert split.kept_bytes > 0
    assert whole.kept_bytes > 0
