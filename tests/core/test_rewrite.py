"""Projections merged under tensor parallelism: Megatron's reductions, the numbers of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dims_blocks import (
    ACTIVATION,
    BLOCKS,
    FUSED,
    HEADS,
    B,
    Block,
    D,
    E,
    F,
    H,
    S,
    attend,
    fused_split,
    gpt,
    joined,
    norm,
    swiglu,
)
from dims_support import collectives, compile_sharded, make_layer, mesh_4x2
from uniap_jax.core.dims import tensor_split
from uniap_jax.core.rewrite import Ways, tensor_rewrite

LOCAL = (ACTIVATION[0] // 4, *ACTIVATION[1:])
REWRITTEN = ["gpt", "gqa", "gqa_grouped", "rope", "fused_kv", "relative_bias", "swiglu"]
LEFT_ALONE = ["mqa", "fused_by_head", "embed", "bottleneck", "experts", "scanned", "rematted", *HEADS]
ALL = {**BLOCKS, **HEADS, **FUSED}


def both_ways(block, jaxpr):
    """Compiled forward and backward of a layer under tensor=2, and its (output, gradients)."""
    args, n, m = block.arguments(), len(block.params), len(block.operands)
    mesh, batch = mesh_4x2(), block.batch_dims()
    dims = [*tensor_split(block.layer(), 2).stored, *([None] * (m + len(block.reads)))]
    wanted = [i for i in range(len(args)) if i < n or i >= n + m]

    def run(cotangent, *args):
        def f(*some):
            full = dict(enumerate(args)) | dict(zip(wanted, some, strict=True))
            return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *full.values())[0]

        out, pull = jax.vjp(f, *[args[i] for i in wanted])
        return out, [_pinned(g, dims[i], batch[i], mesh) for i, g in zip(wanted, pull(cotangent), strict=True)]

    shape = jaxpr.out_avals[0].shape
    cotangent = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    batch_of_output = 0 if shape else None
    compiled, placed = compile_sharded(run, [cotangent, *args], [None, *dims], [batch_of_output, *batch], mesh)
    return compiled.as_text(), jax.tree.leaves(compiled(*placed)), jax.tree.leaves(jax.jit(run)(cotangent, *args))


def _pinned(x, tensor, data, mesh):
    spec = PartitionSpec(*["tensor" if d == tensor else "data" if d == data else None for d in range(x.ndim)])
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def rewrite(layer):
    return tensor_rewrite(layer, tensor_split(layer, 2), Ways(mesh=mesh_4x2(), axes=("tensor",), degree=2))


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 5e-6 * np.abs(np.asarray(b)).max()


@pytest.mark.parametrize("name", REWRITTEN)
def test_reductions_of_forward_and_backward_are_megatrons(name):
    """Two all-reduces of one activation per block half, in bytes too."""
    block = BLOCKS[name]
    hlo, got, want = both_ways(block, rewrite(block.layer()))
    moved = collectives(hlo, "tensor")
    assert [(c.op, c.shape) for c in moved] == [("all-reduce", LOCAL)] * (2 * block.reduced)
    close(got, want)
    plain, _, one_device = both_ways(block, block.layer().jaxpr)
    assert sum(c.nbytes for c in moved) < sum(c.nbytes for c in collectives(plain, "tensor"))
    close(got, one_device)


def exchanged(block):
    """Bytes of the fused weights, and of what has no other dimension to be stored along (biases)."""
    stored = tensor_split(block.layer(), 2).stored
    sizes = {p: 4 * int(np.prod(block.params[p])) for p, _, _ in block.views}
    return [sum(n for p, n in sizes.items() if (stored[p] is None) == whole) for whole in (False, True)]


@pytest.mark.parametrize("name", FUSED)
def test_fused_projections_move_no_activation_but_the_reductions(name):
    """The one thing more is of the fused weight: half of each half is exchanged on the way in and on the way back.

    Its shards are rows, for a shard of its columns would be another part of q, k and v than the device's heads.
    """
    block = FUSED[name]
    hlo, got, want = both_ways(block, rewrite(block.layer()))
    moved = collectives(hlo, "tensor")
    assert [c.shape for c in moved if c.op == "all-reduce"] == [LOCAL] * 2
    weights, biases = exchanged(block)
    assert sum(c.nbytes for c in moved if c.op == "all-to-all") == weights
    assert sum(c.nbytes for c in moved if c.op == "all-gather") == biases
    assert {c.op for c in moved} <= {"all-reduce", "all-to-all", "all-gather"}
    close(got, want)
    close(got, both_ways(block, block.layer().jaxpr)[2])


@pytest.mark.parametrize("name", FUSED)
def test_forward_of_a_fused_projection_only_reduces(name):
    block = FUSED[name]
    jaxpr, split = rewrite(block.layer()), tensor_split(block.layer(), 2)
    dims = [*split.stored, *([None] * (len(block.operands) + 1))]
    f = lambda *args: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)  # noqa: E731
    compiled, _ = compile_sharded(f, block.arguments(), dims, block.batch_dims(), mesh_4x2())
    moved = collectives(compiled.as_text(), "tensor")
    assert [(c.op, c.shape) for c in moved if c.op != "all-to-all"] == [("all-reduce", LOCAL)]
    assert sum(c.nbytes for c in moved if c.op == "all-to-all") == exchanged(block)[0] / 2


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_nothing_to_merge_leaves_the_jaxpr_itself(name):
    layer = ALL[name].layer()
    assert rewrite(layer) is layer.jaxpr


def test_an_illegal_or_whole_layer_is_left_alone():
    layer = BLOCKS["gqa"].layer()
    assert tensor_rewrite(layer, tensor_split(layer, 1), Ways(mesh=mesh_4x2(), axes=(), degree=1)) is layer.jaxpr
    norm_only = make_layer(lambda g, x: g * x, [np.ones(E, np.float32)], reads=[np.ones((B, S, E), np.float32)])
    assert rewrite(norm_only) is norm_only.jaxpr


def checkpointed(*args):
    return jax.checkpoint(gpt)(*args)


def scanned_swiglu(gate, up, down, x):
    return jax.lax.scan(lambda c, w: (c + swiglu(*w, c), None), x, (gate, up, down))[0]


def scanned_fused(w, b, wo, mask, x):
    """Small after a norm, or attention saturates and makes much of the last bit."""

    def turn(c, p):
        return c + fused_split(*p, mask, norm(c, 0.25)), None

    return jax.lax.scan(turn, x, (w, b, wo))[0]


def cast_twice(gate, up, down, x):
    """Each projection casts its input for itself, as flax layers with a dtype do."""
    half = jnp.bfloat16
    h = jax.nn.silu(x.astype(half) @ gate.astype(half)) * (x.astype(half) @ up.astype(half))
    return (h @ down.astype(half)).astype(jnp.float32)


def inside_jit(gate, up, down, x):
    return jax.jit(swiglu)(gate, up, down, x)


def cast_fused(w, b, wo, mask, x):
    return fused_split(w.T.T * 2.0, b, wo, mask, x)


def bias_of_rank_3(w, b, wo, mask, x):
    """The fused bias is reshaped before it is added; its pieces stay apart."""
    q, k, v = (t.reshape(B, S, H, D) for t in jnp.split(x @ w + b.reshape(1, 1, -1), 3, -1))
    return x + joined(attend(q, k, v, mask), wo)


WRAPPED = {
    "remat": (
        Block(checkpointed, BLOCKS["gpt"].params, (), operands=BLOCKS["gpt"].operands),
        5,
    ),  # attention is recomputed
    "scan": (Block(scanned_swiglu, ((3, E, F), (3, E, F), (3, F, E)), ()), 2),
    "scan of fused": (
        Block(scanned_fused, tuple((3, *s) for s in FUSED["fused_split"].params), (), operands=BLOCKS["gpt"].operands),
        2,
    ),
    "jit": (Block(inside_jit, BLOCKS["swiglu"].params, ()), 2),
    "bias reshaped": (Block(bias_of_rank_3, FUSED["fused_split"].params, (), operands=(BLOCKS["gpt"].operands)), 2),
    "weight made before use": (
        Block(cast_fused, FUSED["fused_split"].params, (), operands=(BLOCKS["gpt"].operands)),
        2,
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_bodies_of_calls_and_loops_are_rewritten(name):
    block, reductions = WRAPPED[name]
    jaxpr = rewrite(block.layer())
    assert jaxpr is not block.layer().jaxpr
    hlo, got, want = both_ways(block, jaxpr)
    moved = [c for c in collectives(hlo, "tensor") if c.shape == LOCAL]
    assert [c.op for c in moved] == ["all-reduce"] * reductions
    assert "collective-permute" not in hlo
    close(got, want)
    close(got, both_ways(block, block.layer().jaxpr)[2])


def test_inputs_cast_separately_count_as_one():
    block = Block(cast_twice, BLOCKS["swiglu"].params, ())
    jaxpr = rewrite(block.layer())
    dots = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(dots) == 2
    assert [a.dtype for a in jaxpr.out_avals] == [np.float32]


def test_rewritten_jaxpr_takes_and_returns_what_the_layer_does():
    layer = BLOCKS["gpt"].layer()
    jaxpr = rewrite(layer)
    for ours, theirs in ((jaxpr.in_avals, layer.jaxpr.in_avals), (jaxpr.out_avals, layer.jaxpr.out_avals)):
        assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in theirs]
    assert not jaxpr.consts
