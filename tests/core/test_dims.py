"""Which dimensions tensor parallelism shards, and what that costs in the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dims_blocks import ACTIVATION, BLOCKS, FUSED, HEADS, B, D, E, F, H, S, V, attend, heads, joined
from dims_support import collectives, compile_sharded, make_layer, mesh_4x2
from uniap_jax.core.dims import tensor_split

ALL = {**BLOCKS, **HEADS, **FUSED}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("name", ALL)
def test_shards_what_megatron_shards(name):
    block = ALL[name]
    split = tensor_split(block.layer(), 2)
    assert split.params == block.dims
    assert tuple((v.param, v.dim, v.outer) for v in split.views) == block.views
    assert split.reason == ""
    assert split.chosen


@pytest.mark.parametrize("name", ALL)
def test_one_way_shards_nothing(name):
    split = tensor_split(ALL[name].layer(), 1)
    assert (set(split.params), split.reason, split.chosen) == ({None}, "", ())


def assert_close(got, want, limit):
    """Largest difference against the largest element: sums of many terms cancel."""
    assert np.abs(np.asarray(got) - np.asarray(want)).max() <= limit * np.abs(np.asarray(want)).max()


def sharded_and_plain(block, f, args, dims, batch):
    """Compiled program, its outputs under tensor=2 and those of one device."""
    compiled, placed = compile_sharded(f, args, dims, batch, mesh_4x2())
    return compiled, jax.tree.leaves(compiled(*placed)), jax.tree.leaves(jax.jit(f)(*args))


@pytest.mark.parametrize("name", BLOCKS)
def test_forward_reduces_as_megatron_does(name):
    block = BLOCKS[name]
    dims = [*tensor_split(block.layer(), 2).params, *([None] * (len(block.operands) + len(block.reads)))]
    compiled, got, want = sharded_and_plain(block, block.f, block.arguments(), dims, block.batch_dims())
    moved = collectives(compiled.as_text(), "tensor")
    assert [c.op for c in moved] == ["all-reduce"] * block.reduced
    if name not in ("bottleneck", "experts"):
        local = (ACTIVATION[0] // 4, *ACTIVATION[1:])
        assert [c.shape for c in moved] == [local] * block.reduced
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 2e-6)


@pytest.mark.parametrize("name", ["gpt", "gqa", "embed", "head_lookup", "experts", "fused_split"])
def test_gradients_are_those_of_one_device(name):
    block, mesh = ALL[name], mesh_4x2()
    args, n = block.arguments(), len(block.params)
    dims = [*tensor_split(block.layer(), 2).params, *([None] * (len(block.operands) + len(block.reads)))]

    def gradients(*args):
        def loss(*params):
            return jnp.sum(jnp.sin(block.f(*params, *args[n:])))

        grads = jax.grad(loss, argnums=tuple(range(n)))(*args[:n])
        specs = [
            PartitionSpec(*["tensor" if d == k else None for k in range(g.ndim)])
            for g, d in zip(grads, dims, strict=False)
        ]
        return [jax.lax.with_sharding_constraint(g, NamedSharding(mesh, s)) for g, s in zip(grads, specs, strict=True)]

    _, got, _ = sharded_and_plain(block, gradients, args, dims, block.batch_dims())
    want = jax.jit(jax.grad(lambda *p: jnp.sum(jnp.sin(block.f(*p, *args[n:]))), argnums=tuple(range(n))))(*args[:n])
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 5e-6)


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_never_gathered(name):
    block = HEADS[name]
    dims = [*block.dims, None, None]
    compiled, got, want = sharded_and_plain(block, block.f, block.arguments(), dims, block.batch_dims())
    moved = collectives(compiled.as_text(), "tensor")
    assert 1 <= len(moved) <= 3
    assert all(c.op == "all-reduce" and c.nbytes <= B // 4 * S * 4 for c in moved)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_degree_beyond_the_heads_keeps_the_mlp():
    split = tensor_split(BLOCKS["gpt"].layer(), 8)
    assert split.params == (None, None, None, None, 1, 0, 0, None)
    assert split.notes == (f"a dimension of size {H} stays whole: it does not divide by 8",)


def test_kv_heads_bound_the_degree():
    split = tensor_split(BLOCKS["gqa"].layer(), 4)
    assert split.params == (None,) * 4
    assert "size 2 do not divide by 4; tensor=2 would work" in split.reason


def test_a_vocabulary_that_does_not_divide_is_filled_up():
    layer = make_layer(lambda w, t: w[t], [zeros(50257, 4)], [np.zeros((B, S), np.int32)])
    split = tensor_split(layer, 2)
    assert [(p.size, p.padded) for p in split.pads] == [(50257, 50258)]
    assert (split.params, split.stored, split.moved) == ((0,), (1,), {0})
    assert "a dimension of size 50257 is filled up to 50258 where it is computed with" in split.notes


def test_a_layer_of_norms_alone_has_nothing_to_split():
    layer = make_layer(lambda g, x: g * x / x.std(-1, keepdims=True), [zeros(E)], reads=[zeros(B, S, E)])
    split = tensor_split(layer, 2)
    assert split.params == (None,)
    assert "every one crosses to another layer" in split.reason


def test_head_dimension_is_never_sharded():
    """Three heads of 4: two ways divide the head dimension only."""

    def f(wq, wk, wv, wo, x):
        return joined(attend(heads(x, wq, 3), heads(x, wk, 3), heads(x, wv, 3), 0.0), wo)

    def per_head(wq, wk, wv, wo, x):
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
        return jnp.einsum("bshd,hde->bse", attend(q, k, v, 0.0), wo)

    flat = make_layer(f, [*[zeros(E, 3 * D)] * 3, zeros(3 * D, E)], reads=[zeros(B, S, E)])
    split = tensor_split(flat, 2)
    assert split.params == (None,) * 4
    assert "size 3 do not divide by 2; tensor=3 would work" in split.reason
    apart = tensor_split(make_layer(per_head, [*[zeros(E, 3, D)] * 3, zeros(3, D, E)], reads=[zeros(B, S, E)]), 2)
    assert apart.params == (1, 1, 1, 0)  # the heads, filled up to four
    assert {(p.size, p.padded) for p in apart.pads} == {(3, 4)}


def test_a_contrast_of_two_batches_may_be_summed_in_parts():
    """Similarities of whole batches (CLIP) are small: their width is sharded, unlike a head dimension."""

    def f(a, b, x, y):
        return jax.nn.log_softmax((x @ a) @ (y @ b).T)

    x = zeros(B, E)
    assert tensor_split(make_layer(f, [zeros(E, F), zeros(E, F)], reads=[x, x]), 2).params == (1, 1)


def test_only_one_of_two_classes_that_share_a_value_is_chosen():
    """A chain of two square layers inside one layer: the middle or its neighbours, never both."""

    def f(a, b, c, x):
        return jax.nn.relu(jax.nn.relu(x @ a) @ b) @ c

    layer = make_layer(f, [zeros(E, F), zeros(F, 32), zeros(32, E)], reads=[zeros(B, S, E)])
    split = tensor_split(layer, 2)
    assert split.params == (1, 0, None)
    assert "a dimension of size 32 stays whole: it shares a value with a heavier one" in split.notes


def test_a_mask_does_not_tie_its_readers():
    """Two attentions of different head counts read one mask that depends on constants alone."""

    def f(w1, o1, w2, o2, mask, x):
        y = joined(attend(*[heads(x, w1)] * 3, mask), o1)
        return y + joined(attend(*[heads(y, w2, 3)] * 3, mask), o2)

    shapes = [zeros(E, H * D), zeros(H * D, E), zeros(E, 3 * D), zeros(3 * D, E)]
    split = tensor_split(make_layer(f, shapes, [zeros(B, 1, S, S)], [zeros(B, S, E)]), 2)
    assert split.params == (1, 0, None, None)


def test_an_unknown_primitive_stops_its_class_with_one_note():
    def f(w, o, x):
        return jnp.linalg.cholesky(jnp.einsum("bse,ef->bsf", x, w)[:, :, None] * jnp.eye(F)).sum(-1) @ o

    split = tensor_split(make_layer(f, [zeros(E, F), zeros(F, E)], reads=[zeros(B, S, E)]), 2)
    assert split.params == (None, None)
    found = [n for n in split.notes if n.startswith("no rule for cholesky at test_dims.py:")]
    assert len(found) == 1
    assert "cholesky has no rule (test_dims.py:" in split.reason


def test_running_statistics_do_not_keep_channels_whole():
    """A batch norm's new mean leaves the layer, but is small enough to be gathered."""

    def f(k1, k2, mean, x):
        y = x @ k1
        return jax.nn.relu(y - y.mean((0, 1))) @ k2, 0.9 * mean + 0.1 * y.mean((0, 1))

    split = tensor_split(make_layer(f, [zeros(E, F), zeros(F, E)], [zeros(F)], [zeros(B, S, E)]), 2)
    assert split.params == (1, 0)


def test_a_frozen_weight_is_cut_like_a_trained_one():
    """LoRA: the base weight is an operand, the adapters are parameters."""

    def f(a, b, w2, w1, x):
        return jax.nn.relu(x @ w1 + x @ a @ b) @ w2

    split = tensor_split(make_layer(f, [zeros(E, 2), zeros(2, F), zeros(F, E)], [zeros(E, F)], [zeros(B, S, E)]), 2)
    assert split.params == (None, 1, 0)


def test_a_gate_of_no_weight_stays_whole():
    def f(a, b, w1, w2, x):
        return jax.nn.sigmoid(jax.nn.relu(x.mean(1) @ a) @ b)[:, None] * (jax.nn.relu(x @ w1) @ w2)

    params = [zeros(E, 2), zeros(2, E), zeros(E, 8 * F), zeros(8 * F, E)]
    split = tensor_split(make_layer(f, params, reads=[zeros(B, S, E)]), 2)
    assert split.params == (None, None, 1, 0)
    assert "a dimension of size 2 stays whole: its work is too little for a reduction" in split.notes


def test_small_tables_stay_whole_beside_a_vocabulary():
    def f(words, positions, kinds, tokens, types):
        return words[tokens] + positions[jnp.arange(S)] + kinds[types]

    tokens = np.zeros((B, S), np.int32)
    split = tensor_split(make_layer(f, [zeros(V, E), zeros(S, E), zeros(2, E)], [tokens, tokens]), 2)
    assert split.params == (0, None, None)


def test_recurrent_weights_of_one_class_twice_stay_whole():
    def f(wx, wh, x):
        def step(h, xt):
            h = jnp.tanh(xt @ wx + h @ wh)
            return h, h

        return jax.lax.scan(step, jnp.zeros((B, F)), x.swapaxes(0, 1))[1].sum(0) @ wx.T

    split = tensor_split(make_layer(f, [zeros(E, F), zeros(F, F)], reads=[zeros(B, S, E)]), 2)
    assert split.params == (None, None)
    assert "there twice in one value" in split.reason


def test_equal_layers_are_walked_once():
    from uniap_jax.core.dims import layer_classes

    def f(a, b, x):
        return jax.nn.relu(x @ a) @ b

    shapes, x = [zeros(E, F), zeros(F, E)], zeros(B, S, E)
    first, second = (make_layer(f, shapes, reads=[x], signature="same") for _ in range(2))
    assert layer_classes(first) is layer_classes(second)
    assert layer_classes(make_layer(f, shapes, reads=[x])) is not layer_classes(make_layer(f, shapes, reads=[x]))
