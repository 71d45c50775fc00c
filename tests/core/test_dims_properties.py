"""A class never joins dimensions that cannot shard together: sharding it alone inserts no collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dims_support import collectives, mesh_4x2
from uniap_jax.core.dim_classes import CROSSES
from uniap_jax.core.dim_walk import walk

A, B, C = 4, 6, 8


def split_last(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2) if x.shape[-1] % 2 == 0 and x.shape[-1] > 2 else x


def merge_last(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1) if x.ndim > 2 else x


def batched(x: jax.Array) -> jax.Array:
    """A product whose first dimension is a batch and whose last is summed over."""
    return jnp.einsum("a...k,a...k->a...", x, x)[..., None] * x


STEPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "element-wise": lambda x: jnp.tanh(x) + 1.0,
    "transpose": lambda x: jnp.moveaxis(x, 0, -1),
    "swap": lambda x: jnp.swapaxes(x, -1, -2),
    "split": split_last,
    "merge": merge_last,
    "merge first": lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim > 2 else x,
    "mean": lambda x: x - x.mean(-1, keepdims=True),
    "broadcast": lambda x: x + jnp.ones((2, *x.shape))[0],
    "stack": lambda x: jnp.stack([x, x * 2.0]).sum(0),
    "half": lambda x: x[..., : x.shape[-1] // 2] if x.shape[-1] > 1 else x,
    "reverse": lambda x: x[..., ::-1],
    "cumulative": lambda x: jnp.cumsum(x, -1),
    "sort": lambda x: jnp.sort(x, -1),
    "pad": lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 1)]),
    "join": lambda x: jnp.concatenate([x, x], -1),
    "softmax": jax.nn.softmax,
    "batched": batched,
    "turns": lambda x: jax.lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
    "branches": lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
}


def chained(names: list[str]) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array) -> jax.Array:
        for name in names:
            x = STEPS[name](x)
        return x

    return run


def compiled_text(f: Callable[..., Any], x: Any, first: PartitionSpec, last: PartitionSpec) -> str:
    mesh = mesh_4x2()
    jitted = jax.jit(f, in_shardings=NamedSharding(mesh, first), out_shardings=NamedSharding(mesh, last))
    return str(jitted.lower(x).compile().as_text())


def spec(dims: tuple[int | None, ...], index: int) -> PartitionSpec:
    return PartitionSpec(*["tensor" if d == index else None for d in dims])


@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_class_that_nothing_stops_shards_without_collectives(names: list[str]) -> None:
    f, x = chained(names), np.linspace(0.1, 0.9, A * B * C, dtype=np.float32).reshape(A, B, C)
    walked = walk(jax.make_jaxpr(f)(x), 0, 0)
    for c in walked.classes:
        free = not c.contracted and all(b.reason == CROSSES for b in c.blocks)
        if free and c.size % 2 == 0 and c.index in walked.ins[0] and c.index in walked.outs[0]:
            text = compiled_text(f, x, spec(walked.ins[0], c.index), spec(walked.outs[0], c.index))
            assert collectives(text) == [], (names, c)


def test_the_property_sees_a_class_that_is_summed_over() -> None:
    """The same check on a dimension that a class must not join finds the collective."""
    text = compiled_text(
        STEPS["mean"], np.ones((A, B, C), np.float32), PartitionSpec(None, None, "tensor"), PartitionSpec()
    )
    assert collectives(text)
