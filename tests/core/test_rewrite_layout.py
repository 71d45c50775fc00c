"""Sequence parallelism: what crosses a layer's edge is split along positions, at Megatron's cost."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dims_blocks import ACTIVATION, BLOCKS, FUSED, B, E, F, S
from dims_support import collectives, make_layer, mesh_4x2, spec
from uniap_jax.core.dim_edges import sequence_split
from uniap_jax.core.dims import tensor_split
from uniap_jax.core.rewrite import Ways, tensor_rewrite
from uniap_jax.core.rewrite_layout import Edges, spread

LOCAL = (ACTIVATION[0] // 4, *ACTIVATION[1:])
ALL = {**BLOCKS, **FUSED}
BLOCK_HALVES = {"gpt": 2, "gqa": 1, "rope": 1, "swiglu": 1, "fused_split": 1, "scanned": 1, "rematted": 1}


def sequence_program(block, split):
    """The layer's jaxpr with its projections merged and its inside pinned, for data=4, tensor=2 on a 4x2 mesh."""
    layer, mesh = block.layer(), mesh_4x2()
    where = sequence_split(layer, 2, reads=[0] * len(block.reads), writes=[0], tensor=split)
    assert where.reason == ""
    assert where.reads == (1,) * len(block.reads)
    assert where.writes == (1,)
    empty = (None,) * (len(block.params) + len(block.operands))
    edges = Edges(
        num_params=len(block.params),
        num_operands=len(block.operands),
        batch=(*empty, *([0] * len(block.reads)), 0),
        sequence=(*empty, *where.reads, *where.writes),
        tensor=split.params,
        expert=(None,) * len(block.params),
        batch_axes=("data",),
        sequence_axes=("tensor",),
        tensor_axes=("tensor",),
        expert_axes=(),
    )
    merged = tensor_rewrite(layer, split, Ways(mesh=mesh, axes=("tensor",), degree=2))
    return spread(merged, edges, mesh)


def both_ways(block, jaxpr, split):
    """Compiled forward and backward with edges split along positions; (output, gradients) of it and of one device."""
    args, n, m, mesh = block.arguments(), len(block.params), len(block.operands), mesh_4x2()
    specs = [spec(len(shape), d, "tensor") for shape, d in zip(block.params, split.params, strict=True)]
    specs += [PartitionSpec("data") if d == 0 else PartitionSpec() for d in block.batch_dims()[n : n + m]]
    edge = PartitionSpec("data", "tensor")
    specs += [edge] * len(block.reads)
    wanted = [i for i in range(len(args)) if i < n or i >= n + m]

    def run(cotangent, *args):
        def f(*some):
            full = dict(enumerate(args)) | dict(zip(wanted, some, strict=True))
            return pin(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *full.values())[0], edge)

        def pin(x, where):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, where))

        out, pull = jax.vjp(f, *[args[i] for i in wanted])
        return out, [pin(g, specs[i]) for i, g in zip(wanted, pull(cotangent), strict=True)]

    cotangent = np.random.default_rng(1).normal(size=jaxpr.out_avals[0].shape).astype(np.float32)
    everything = [cotangent, *args]
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(everything, [edge, *specs], strict=True)]
    compiled = jax.jit(run).lower(*placed).compile()
    return compiled.as_text(), jax.tree.leaves(compiled(*placed)), jax.tree.leaves(jax.jit(run)(*everything))


@pytest.mark.parametrize("name", BLOCK_HALVES)
def test_every_reduction_becomes_a_gather_and_a_scatter(name):
    """A gather and a scatter of one activation each way, forward and backward: the bytes of the two all_reduces.

    Scatters show as all-reduce: XLA's CPU backend reduces, then slices.
    """
    block, halves = ALL[name], BLOCK_HALVES[name]
    split = tensor_split(block.layer(), 2)
    hlo, got, want = both_ways(block, sequence_program(block, split), split)
    moved = collectives(hlo, "tensor")
    activations = [c for c in moved if c.shape == LOCAL]
    recomputed = 1 if name in ("scanned", "rematted") else 0
    assert sorted(c.op for c in activations) == ["all-gather"] * (2 * halves + recomputed) + ["all-reduce"] * 2 * halves
    rest = [c for c in moved if c not in activations]  # scales meet positions of every device; fused weights are whole
    scales = 4 * E * block.params.count((E,))
    fused = sum(4 * int(np.prod(block.params[p])) for p, _, _ in block.views)
    assert sum(c.nbytes for c in rest) <= 2 * scales + fused
    assert "collective-permute" not in hlo
    assert "all-to-all" not in hlo
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 5e-6 * np.abs(np.asarray(b)).max()


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
