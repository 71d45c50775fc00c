"""Arrays to run programs with where only their shapes are at hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEYS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
"""Names of key kinds by the tag that their dtype shows."""


def example(shape: Any) -> Any:
    """An array of a shape and dtype for a program that is timed.

    Values are small positive numbers: time does not depend on them, but denormals and NaNs are slow. Whole numbers are
    0, which picks a row of any table.

    Args:
        shape: a `jax.ShapeDtypeStruct`, or what has `shape` and `dtype` like one.
    """
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        tag = str(shape.dtype).partition("<")[2].rstrip(">")
        key = jax.random.key(0, impl=_KEYS.get(tag, tag))
        return jax.random.split(key, shape.shape) if shape.shape else key
    if jnp.issubdtype(shape.dtype, np.inexact):
        return np.random.default_rng(0).uniform(0.01, 0.05, shape.shape).astype(shape.dtype)
    return np.zeros(shape.shape, shape.dtype)
