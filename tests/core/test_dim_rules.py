"""What each primitive does to classes, and that a class shards without anything being moved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dims_support import collectives, compile_sharded, mesh_4x2
from uniap_jax.core.dim_classes import PIECES
from uniap_jax.core.dim_walk import walk


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def classes_of(f, *args):
    """Classes of a function whose arguments are all parameters, and its notes."""
    walked = walk(jax.make_jaxpr(f)(*args), len(args), 0)
    return walked.classes, walked.notes


def together(f, *args):
    """Sets of (argument, dimension) in one class, largest first, singles left out."""
    found = [set(c.params) for c in classes_of(f, *args)[0] if len(c.params) > 1]
    return sorted(found, key=lambda s: (-len(s), sorted(s)))


def reasons(f, *args):
    """For each argument dimension why it is not sharded, crossing aside."""
    return {
        pair: [b.reason for b in c.blocks if "crosses" not in b.reason]
        for c in classes_of(f, *args)[0]
        for pair in c.params
    }


def swapped(pair):
    return pair[1], pair[0]


TOGETHER = [
    ("dot", lambda a, b: a @ b, [(2, 3), (3, 4)], [{(0, 1), (1, 0)}]),
    ("batched dot", lambda a, b: jax.vmap(jnp.dot)(a, b), [(5, 2, 3), (5, 3, 4)], [{(0, 0), (1, 0)}, {(0, 2), (1, 1)}]),
    ("right-aligned", lambda a, b: a + b, [(2, 3), (3,)], [{(0, 1), (1, 0)}]),
    ("size 1 carries none", lambda a, b: a + b, [(2, 3), (1, 3)], [{(0, 1), (1, 1)}]),
    ("transpose", lambda a, b: a.T + b, [(2, 3), (3, 2)], [{(0, 0), (1, 1)}, {(0, 1), (1, 0)}]),
    ("split keeps the slow factor", lambda a, b: a.reshape(4, 3) + b, [(12,), (4, 3)], [{(0, 0), (1, 0)}]),
    ("merge keeps the slow factor", lambda a, b: a.reshape(12) + b, [(4, 3), (12,)], [{(0, 0), (1, 0)}]),
    ("squeeze", lambda a, b: lax.squeeze(a, (1,)) + b, [(2, 1), (2,)], [{(0, 0), (1, 0)}]),
    ("reduce", lambda a, b: a.max(0) + b, [(2, 3), (3,)], [{(0, 1), (1, 0)}]),
    ("argmax", lambda a, b: a.argmax(0) + b, [(2, 3), (3,)], [{(0, 1), (1, 0)}]),
    ("cumsum", lambda a, b: jnp.cumsum(a, 0) + b, [(2, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("sort", lambda a, b: jnp.sort(a, 0) + b, [(2, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("top_k", lambda a, b: lax.top_k(a, 2)[0] + b, [(4, 3), (4, 2)], [{(0, 0), (1, 0)}]),
    ("slice", lambda a, b: a[1:] + b, [(4, 3), (3, 3)], [{(0, 1), (1, 1)}]),
    ("pad", lambda a, b: jnp.pad(a, ((1, 0), (0, 0))) + b, [(4, 3), (5, 3)], [{(0, 1), (1, 1)}]),
    ("rev", lambda a, b: lax.rev(a, (0,)) + b, [(4, 3), (4, 3)], [{(0, 1), (1, 1)}]),
    ("concatenate", lambda a, b: jnp.concatenate([a, b]), [(4, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("stack", lambda a, b: jnp.stack([a, b]), [(4,), (4,)], [{(0, 0), (1, 0)}]),
    ("where", lambda a, b: jnp.where(a > 0, a, b), [(4, 3), (4, 3)], [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]),
    ("dynamic_slice", lambda a, b: lax.dynamic_slice(a, (1, 0), (2, 3)) + b, [(4, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("dynamic_update_slice", lambda a, b: lax.dynamic_update_slice(a, b, (1, 0)), [(4, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("gather rows", lambda a, b: a[np.asarray([0, 2])] + b, [(4, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("scatter-add rows", lambda a, b: a.at[np.asarray([0, 2])].add(b), [(4, 3), (2, 3)], [{(0, 1), (1, 1)}]),
    ("fft", lambda a, b: jnp.abs(jnp.fft.fft(a)) + b, [(4, 3), (4, 3)], [{(0, 0), (1, 0)}]),
    ("repeat", lambda a, b: jnp.repeat(a, 2, axis=0) + b, [(4, 3), (8, 3)], [{(0, 0), (1, 0)}, {(0, 1), (1, 1)}]),
    ("calls", lambda a, b: jax.checkpoint(jax.jit(jax.nn.relu))(a) + b, [(4,), (4,)], [{(0, 0), (1, 0)}]),
    ("cond", lambda a, b: lax.cond(True, lambda a, b: a, lambda a, b: b, a, b), [(4,), (4,)], [{(0, 0), (1, 0)}]),
    ("while", lambda a, b: lax.while_loop(lambda c: c[0][0] < 9, swapped, (a, b)), [(4,), (4,)], [{(0, 0), (1, 0)}]),
    ("scan carry", lambda a, b: lax.scan(lambda c, x: (c + x, c), a, b)[0], [(4,), (5, 4)], [{(0, 0), (1, 1)}]),
]  # fmt: skip


@pytest.mark.parametrize(("f", "shapes", "expected"), [c[1:] for c in TOGETHER], ids=[c[0] for c in TOGETHER])
def test_dimensions_that_shard_together(f, shapes, expected):
    assert together(f, *[ones(*s) for s in shapes]) == expected


def windowed(a):
    return lax.reduce_window(a, 0.0, lax.add, (1, 2), (1, 1), "SAME")


STOPPED = [
    ("cumsum", lambda a: jnp.cumsum(a, 1), 1, "cumsum runs along it"),
    ("sort", lambda a: jnp.sort(a, 1), 1, "sort runs along it"),
    ("top_k", lambda a: lax.top_k(a, 2)[0], 1, "top_k runs along it"),
    ("slice", lambda a: a[:, 1:], 1, "sliced 1:6 of 6"),
    ("pad", lambda a: jnp.pad(a, ((0, 0), (0, 1))), 1, "pad moves along it"),
    ("rev", lambda a: lax.rev(a, (1,)), 1, "rev moves along it"),
    ("concatenate", lambda a: jnp.concatenate([a, a], 1), 1, "concatenated with others"),
    ("unequal split", lambda a: jnp.split(a, [2], 1)[0], 1, "cut into unequal pieces (2, 4)"),
    ("equal split", lambda a: jnp.split(a, 2, 1)[0], 1, PIECES),
    ("equal slice", lambda a: a[:, 2:4], 1, PIECES),
    ("index", lambda a: a[:, 3], 1, PIECES),
    ("fast factor", lambda a: a.reshape(24), 1, "the faster part of a joined dimension"),
    ("scan", lambda a: lax.scan(lambda c, x: (c, x), 0.0, a.T)[1], 1, "a scan runs along it"),
    ("window", lambda a: windowed(a), 1, "reduce_window_sum moves along it"),
    ("outer product", lambda a: jnp.einsum("ij,ik->jk", a, a), 1, "there twice in one value"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "dim", "reason"), [c[1:] for c in STOPPED], ids=[c[0] for c in STOPPED])
def test_dimensions_that_stop(f, dim, reason):
    found = reasons(f, ones(4, 6))
    assert reason in found[0, dim]
    if "twice" not in reason:
        assert reason not in found[0, 0]


def test_convolution_sums_input_channels_and_stops_windows():
    def f(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, k = ones(2, 5, 5, 4), ones(3, 3, 4, 8)
    assert together(f, x, k) == [{(0, 3), (1, 2)}]
    summed = [set(c.params) for c in classes_of(f, x, k)[0] if c.contracted]
    assert summed == [{(0, 3), (1, 2)}]
    assert "a convolution window moves along it" in reasons(f, x, k)[0, 1]


def test_depthwise_convolution_keeps_channels_together():
    def f(x, k):
        numbers = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=numbers, feature_group_count=4)

    classes, _ = classes_of(f, ones(2, 5, 4), ones(3, 1, 4))
    channels = next(c for c in classes if (0, 2) in c.params)
    assert (set(channels.params), channels.size, channels.contracted) == ({(0, 2), (1, 2)}, 4, False)


def test_groups_bound_the_size_of_a_grouped_convolution():
    def f(x, k):
        numbers = ("NHC", "HIO", "NHC")
        return lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=numbers, feature_group_count=2)

    classes, _ = classes_of(f, ones(2, 5, 8), ones(3, 4, 8))
    assert next(c for c in classes if (0, 2) in c.params).size == 2


def test_a_table_is_looked_up_along_its_rows():
    classes, _ = classes_of(lambda w: w[np.asarray([[0, 2]])], ones(4, 3))
    rows = next(c for c in classes if (0, 0) in c.params)
    assert (rows.lookup, rows.contracted, rows.size) == (True, True, 4)


def test_ragged_rows_flow_and_groups_stop():
    def f(x, w):
        return lax.ragged_dot(x, w, jnp.asarray([2, 4], jnp.int32))

    x, w = ones(6, 3), ones(2, 3, 8)
    assert together(f, x, w) == [{(0, 1), (1, 1)}]
    found = reasons(f, x, w)
    assert "grouped by data" in found[0, 0]
    assert "grouped by data" in found[1, 0]


def test_work_inside_a_scan_counts_every_turn():
    def f(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

    classes, _ = classes_of(f, ones(4, 4), ones(2, 4))
    assert next(c for c in classes if (1, 0) in c.params).flops == 5 * 2 * 2 * 4 * 4


def test_sizes_of_a_class_have_one_divisor():
    """Twelve features seen as four groups of three: at most four ways."""
    classes, _ = classes_of(lambda w: w.reshape(4, 3).sum(1), ones(12))
    assert next(c for c in classes if (0, 0) in c.params).size == 4


def test_third_dimension_of_a_fused_projection_is_seen_through_a_view():
    classes, _ = classes_of(lambda w: w.reshape(3, 4, 2)[1].sum(), ones(24))
    views = [(c.size, v.outer) for c in classes for v in c.views]
    assert views == [(4, 3)]


UNARY = (jnp.sin, lambda x: x * 2, jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.1))
MOVES = (
    lambda x: x.T,
    lambda x: x.swapaxes(0, -1),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.reshape(2, -1, *x.shape[1:]) if x.shape[0] % 2 == 0 else x,
    lambda x: x[None],
    lambda x: jnp.broadcast_to(x, (4, *x.shape)),
    lambda x: jnp.concatenate([x, x], -1),
    lambda x: x[..., 1:],
    lambda x: jnp.split(x, 2, -1)[1],
    lambda x: x.sum(-1),
    lambda x: jax.nn.softmax(x, -1),
    lambda x: jnp.cumsum(x, -1),
    lambda x: lax.map(jnp.cos, x),
    lambda x: jnp.repeat(x, 2, 0),
    lambda x: x[np.asarray([2, 0])] if x.shape[0] > 2 else x,
    lambda x: jnp.einsum("i...,...->i...", x, x[0]),
)


def build(ops):
    """A program out of numbers: two inputs, moves applied in turn, the second input added where shapes allow."""

    def f(x, y):
        for op in ops:
            small = x.ndim <= 4 and x.size <= 4096 and x.ndim > 0 and x.shape[-1] % 2 == 0
            x = MOVES[op % len(MOVES)](x) if small else UNARY[op % len(UNARY)](x)
            x = x + y if x.shape == y.shape else x
        return x

    return f


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(ops=st.lists(st.integers(0, 15), min_size=2, max_size=6))
def test_a_class_shards_alone_without_moving_anything(ops):
    """Sharding one free class inserts no collective; one that is summed over only reductions."""
    f, args = build(ops), [ones(4, 8), ones(4, 8)]
    for c in classes_of(f, *args)[0]:
        if not c.params or c.size % 2 or any("crosses" not in b.reason for b in c.blocks):
            continue
        dims = [next((d for p, d in c.params if p == i), None) for i in range(2)]
        compiled, placed = compile_sharded(f, args, dims, [None, None], mesh_4x2())
        moved = {m.op for m in collectives(compiled.as_text())}
        assert moved <= ({"all-reduce"} if c.contracted else set()), (c, ops)
        np.testing.assert_allclose(compiled(*placed), f(*args), rtol=1e-5)


def test_empty_slices() -> None:
    """Rolling by nothing joins all of an array with none of it."""

    def rolled(a, b):
        return lax.concatenate([a, lax.slice_in_dim(a, 0, 0, axis=1)], 1) + b

    assert together(rolled, ones(2, 3), ones(2, 3)) == [{(0, 0), (1, 0)}]
