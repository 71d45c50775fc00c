"""Rows of random bits are those of the whole array, and nothing else is drawn."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from uniap_jax.core.random_rows import bits_at


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("bit_width", [8, 32])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_those_of_the_whole_array(implementation: str, bit_width: int, dim: int) -> None:
    whole = (12, 6, 5)
    shape = tuple(n // 3 if d == dim else n for d, n in enumerate(whole))
    key = jax.random.key(11, impl=implementation)
    bits = jax.random.bits(key, whole, np.dtype(f"uint{bit_width}"))
    draw = jax.jit(lambda k, i: bits_at(k, i, shape=shape, whole=whole, dim=dim, bit_width=bit_width))
    pieces = [draw(key, i * shape[dim]) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=dim), bits)


def test_only_the_rows_are_drawn() -> None:
    def draw(key: jax.Array, start: int) -> jax.Array:
        return bits_at(key, start, shape=(2, 7), whole=(64, 7), dim=0, bit_width=32)

    assert "448" not in (text := str(jax.make_jaxpr(draw)(jax.random.key(0), 4)))
    assert not re.search(r"\[64,7\]", text)


def test_the_other_generator_of_jax_is_told_apart() -> None:
    key = jax.random.key(5)
    with jax.threefry_partitionable(False):
        bits = jax.random.bits(key, (6, 3))
        np.testing.assert_array_equal(bits_at(key, 2, shape=(2, 3), whole=(6, 3), dim=0, bit_width=32), bits[2:4])


def test_rows_may_be_mapped_over() -> None:
    key = jax.random.key(7)
    bits = jax.random.bits(key, (8, 3))
    drawn = jax.vmap(lambda start: bits_at(key, start, shape=(2, 3), whole=(8, 3), dim=0, bit_width=32))(
        jax.numpy.arange(0, 8, 2)
    )
    np.testing.assert_array_equal(drawn.reshape(8, 3), bits)
