"""Sequence parallelism: what crosses a layer's edge is split along positions, at Megatron's cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dims_blocks import ACTIVATION, BLOCKS, FUSED, B, Block, E, F, S, X
from dims_support import collectives, make_layer, mesh_4x2, spec
from uniap_jax.core.dim_edges import expert_split, sequence_split
from uniap_jax.core.dims import tensor_split
from uniap_jax.core.rewrite import Ways, tensor_rewrite
from uniap_jax.core.rewrite_layout import Edges, spread

LOCAL = (ACTIVATION[0] // 4, *ACTIVATION[1:])
ALL = {**BLOCKS, **FUSED}
BLOCK_HALVES = {"gpt": 2, "gqa": 1, "rope": 1, "swiglu": 1, "fused_split": 1, "scanned": 1, "rematted": 1}


@dataclass(frozen=True)
class Case:
    """A block laid out on a 4x2 mesh: batch over "data", and "tensor" as the strategy has it."""

    block: Block
    jaxpr: Any
    params: tuple[int | None, ...]
    edge: PartitionSpec


def sequence_case(block):
    """data=4,tensor=2,sequence."""
    layer, n, m = block.layer(), len(block.params), len(block.operands)
    split = tensor_split(layer, 2)
    where = sequence_split(layer, 2, reads=[0] * len(block.reads), writes=[0], tensor=split)
    assert (where.reason, where.reads, where.writes) == ("", (1,) * len(block.reads), (1,))
    edges = Edges(
        num_params=n,
        num_operands=m,
        batch=(*[None] * (n + m), *[0] * len(block.reads), 0),
        sequence=(*[None] * (n + m), *where.reads, *where.writes),
        tensor=split.params,
        stored=tuple(d if p in split.moved else None for p, d in enumerate(split.stored)),
        expert=(None,) * n,
        batch_axes=("data",),
        sequence_axes=("tensor",),
        tensor_axes=("tensor",),
        expert_axes=(),
    )
    merged = tensor_rewrite(layer, split, Ways(mesh=mesh_4x2(), axes=("tensor",), degree=2))
    return Case(block, spread(merged, edges, mesh_4x2()), split.stored, PartitionSpec("data", "tensor"))


def expert_case(block):
    """data=4,expert=2, the experts over "tensor"."""
    layer, n = block.layer(), len(block.params)
    split = expert_split(layer, 2)
    assert split.reason == ""
    none = (None,) * (n + 2)
    edges = Edges(
        num_params=n,
        num_operands=0,
        batch=(*[None] * n, 0, 0),
        sequence=none,
        tensor=(None,) * n,
        stored=(None,) * n,
        expert=split.params,
        batch_axes=("data", "tensor"),
        sequence_axes=(),
        tensor_axes=(),
        expert_axes=("tensor",),
    )
    return Case(block, spread(layer.jaxpr, edges, mesh_4x2()), split.params, PartitionSpec(("data", "tensor")))


def both_ways(case):
    """Compiled forward and backward; (output, gradients) of it and of one device."""
    block, mesh, jaxpr = case.block, mesh_4x2(), case.block.layer().jaxpr
    args, n, m = block.arguments(), len(block.params), len(block.operands)
    specs = [spec(len(shape), d, "tensor") for shape, d in zip(block.params, case.params, strict=True)]
    specs += [PartitionSpec("data") if d == 0 else PartitionSpec() for d in block.batch_dims()[n : n + m]]
    specs += [case.edge] * len(block.reads)
    wanted = [i for i in range(len(args)) if i < n or i >= n + m]

    def pin(x, where):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, where))

    def run(jaxpr, pin, cotangent, *args):
        def f(*some):
            full = dict(enumerate(args)) | dict(zip(wanted, some, strict=True))
            return pin(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *full.values())[0], case.edge)

        out, pull = jax.vjp(f, *[args[i] for i in wanted])
        return out, [pin(g, specs[i]) for i, g in zip(wanted, pull(cotangent), strict=True)]

    cotangent = np.random.default_rng(1).normal(size=jaxpr.out_avals[0].shape).astype(np.float32)
    everything = [cotangent, *args]
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(everything, [case.edge, *specs], strict=True)]
    compiled = jax.jit(partial(run, case.jaxpr, pin)).lower(*placed).compile()
    one_device = jax.jit(partial(run, jaxpr, lambda x, _: x))(*everything)
    return compiled.as_text(), jax.tree.leaves(compiled(*placed)), jax.tree.leaves(one_device)


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 5e-6 * np.abs(np.asarray(b)).max()


@pytest.mark.parametrize("name", BLOCK_HALVES)
def test_every_reduction_becomes_a_gather_and_a_scatter(name):
    """A gather and a scatter of one activation each way, forward and backward: the bytes of the two all_reduces.

    Scatters show as all-reduce: XLA's CPU backend reduces, then slices.
    """
    block, halves = ALL[name], BLOCK_HALVES[name]
    hlo, got, want = both_ways(sequence_case(block))
    moved = collectives(hlo, "tensor")
    activations = [c for c in moved if c.shape == LOCAL]
    recomputed = 1 if name in ("scanned", "rematted") else 0
    assert sorted(c.op for c in activations) == ["all-gather"] * (2 * halves + recomputed) + ["all-reduce"] * 2 * halves
    rest = [c for c in moved if c not in activations]  # scales meet all positions; fused weights are exchanged
    scales = 4 * E * block.params.count((E,))
    fused = sum(4 * int(np.prod(block.params[p])) for p, _, _ in block.views)
    assert sum(c.nbytes for c in rest) <= 2 * scales + fused
    assert "collective-permute" not in hlo
    assert all(c in rest for c in moved if c.op == "all-to-all")
    assert_close(got, want)


def dense_experts(router, w1, w2, x):
    """Every expert sees every token; its say is weighed."""
    say = jax.nn.softmax(x @ router)
    h = jax.nn.gelu(jnp.einsum("bse,xef->bsxf", x, w1))
    return x + jnp.einsum("bsx,bsxe->bse", say, jnp.einsum("bsxf,xfe->bsxe", h, w2))


EXPERTS = {
    "experts": BLOCKS["experts"],
    "dense": Block(dense_experts, ((E, X), (X, E, F), (X, F, E)), ()),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_tokens_go_to_the_experts_and_weights_stay(name):
    block = EXPERTS[name]
    case = expert_case(block)
    assert case.params == (None, 0, 0)
    hlo, got, want = both_ways(case)
    moved = collectives(hlo, "tensor")
    assert "all-to-all" in {c.op for c in moved}
    weights = 4 * X * E * F
    assert all(c.nbytes < weights // 2 for c in moved)  # half of the weights is what a device holds
    assert_close(got, want)


def test_a_layer_without_stacked_experts_says_what_to_use():
    split = expert_split(BLOCKS["swiglu"].layer(), 2)
    assert split.params == (None,) * 3
    assert "no experts stacked in one weight; tensor splits" in split.reason


def test_experts_in_a_loop_are_to_be_stacked():
    def loop(*args):
        *weights, x = args
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return x + sum(jax.nn.gelu(x @ up) @ down for up, down in pairs)

    reason = expert_split(Block(loop, ((E, F), (F, E)) * 4, ()).layer(), 2).reason
    assert "4 of shape (16, 64) and 4 of (64, 16)" in reason
    assert "stack each kind in one array of shape (4, ...)" in reason


def test_experts_that_do_not_divide_say_what_would():
    assert (
        "its 4 experts do not divide by 3; expert=2, 4 would work" in expert_split(EXPERTS["dense"].layer(), 3).reason
    )


def no_split(size):
    return make_layer(lambda g, x: g * x, [np.ones(E, np.float32)], reads=[np.ones((B, size, E), np.float32)])


def test_positions_that_do_not_divide_are_refused_with_what_would_work():
    where = sequence_split(no_split(6), 4, reads=[0], writes=[0])
    assert where.reason == "its sequence of 6 positions does not divide by 4; 2, 3, 6 ways would"
    assert where.reads == (None,)


def test_attention_whose_heads_stay_whole_is_refused_unless_the_ways_are_of_its_own():
    layer = BLOCKS["gpt"].layer()
    split = tensor_split(layer, 6)  # nothing of 4 heads and 64 wide divides
    assert "positions meet positions" in sequence_split(layer, 6, reads=[0], writes=[0], tensor=split).reason
    assert sequence_split(layer, 6, reads=[0], writes=[0]).reason == ""


def test_a_shifted_sequence_stays_whole():
    layer = make_layer(
        lambda w, x: x[:, 1:] @ w, [np.ones((E, F), np.float32)], reads=[np.ones(ACTIVATION, np.float32)]
    )
    assert (
        f"its sequence of {S} positions stays whole: sliced 1:{S} of {S}"
        in sequence_split(layer, 2, reads=[0], writes=[0]).reason
    )


def test_an_activation_of_features_alone_has_no_sequence():
    layer = make_layer(lambda w, x: x @ w, [np.ones((E, F), np.float32)], reads=[np.ones((B, E), np.float32)])
    assert "has a sequence" in sequence_split(layer, 2, reads=[0], writes=[0]).reason
