"""Some rows of an array of random bits, drawn without drawing the others.

JAX's default generator (threefry, `jax_threefry_partitionable`) computes each element's bits from the key and the
element's position alone. So the rows of one micro-batch cost what they are, instead of a draw of the whole batch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

MOST = 2**32
"""Positions are counted in 32 bits here."""


def bits_at(key: Any, start: Any, *, shape: Sequence[int], whole: Sequence[int], dim: int, bit_width: int) -> Any:
    """`jax.random.bits(key, whole)`, rows `start` to `start + shape[dim]` of dimension `dim`.

    Args:
        key: one typed PRNG key.
        start: scalar, first row.
        shape: of what is drawn; equal to `whole` but for `dim`.
        whole: the shape that the rows are part of.
        dim: the dimension they are cut along.
        bit_width: 8, 16, 32 or 64.
    """
    if (
        jnp.shape(key) == ()
        and bit_width <= 32
        and math.prod(whole) < MOST
        and _draws_by_position(jax.random.key_impl(key))
    ):
        return _at(key, start, shape=shape, whole=whole, dim=dim, bit_width=bit_width)
    bits = jax.random.bits(key, tuple(whole), np.dtype(f"uint{bit_width}"))
    return jax.lax.dynamic_slice_in_dim(bits, start, shape[dim], axis=dim)


def _at(key: Any, start: Any, *, shape: Sequence[int], whole: Sequence[int], dim: int, bit_width: int) -> Any:
    position = jnp.zeros(tuple(shape), jnp.uint32)
    for d in range(len(shape)):
        row = jax.lax.broadcasted_iota(jnp.uint32, tuple(shape), d)
        first = jnp.asarray(start).astype(jnp.uint32) if d == dim else jnp.uint32(0)
        position = position + (row + first) * jnp.uint32(math.prod(whole[d + 1 :]))
    first_half, second_half = jax.random.key_data(key)
    upper = position ^ position  # zero, and mapped wherever the position is: the two halves must agree in shape
    high, low = threefry2x32_p.bind(first_half, second_half, upper, position)
    return (high ^ low).astype(np.dtype(f"uint{bit_width}"))


def _draws_by_position(implementation: Any) -> bool:
    """Whether keys of this kind draw as `_at` does, under the settings in force: tried, not assumed."""
    partitionable = bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]
    return _tried(str(implementation), partitionable)


@functools.cache
def _tried(implementation: str, partitionable: bool) -> bool:
    if not partitionable or "threefry" not in implementation:
        return False
    with jax.ensure_compile_time_eval():
        key = jax.random.key(3, impl="threefry2x32")
        mine = _at(key, 2, shape=(2, 5), whole=(6, 5), dim=0, bit_width=32)
        return bool(np.array_equal(mine, jax.random.bits(key, (6, 5))[2:4]))
