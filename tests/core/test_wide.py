"""The widened step: nothing narrow is left at its edges, and it is the step in 32 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uniap_jax.core.wide import is_narrow, wide_array, widen

HALF = jnp.bfloat16
X = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(0.5, -0.5, 64, dtype=np.float32).reshape(8, 8)


def plain(x: Any, w: Any, dtype: Any) -> Any:
    x, w = x.astype(dtype), w.astype(dtype)
    return jax.lax.dot(jnp.tanh(x @ w) + dtype(0.25), w, preferred_element_type=jnp.float32).sum()


def looped(x: Any, w: Any, dtype: Any) -> Any:
    x, w = x.astype(dtype), w.astype(dtype)
    x, rows = jax.lax.scan(lambda c, s: (c * s @ w, c.sum(1)), x, jnp.arange(1.0, 4.0, dtype=dtype))
    return rows.sum() + jax.checkpoint(lambda a: jnp.sin(a).mean())(x)


def branched(x: Any, w: Any, dtype: Any) -> Any:
    y = x.astype(dtype)
    y = jax.lax.cond(x[0, 0] < 0, lambda a: a * 3, lambda a: a / 3, y)
    fixed = jax.lax.stop_gradient(w.astype(dtype))
    power = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ fixed), (0, fixed))[1]
    return jax.jit(jnp.mean)(y @ power)


@pytest.mark.parametrize("function", [plain, looped, branched])
def test_is_the_same_function_in_32_bits(function: Any) -> None:
    def of(dtype: Any) -> Any:
        return jax.value_and_grad(lambda x, w: function(x, w, dtype).astype(jnp.float32), argnums=(0, 1))

    narrow = jax.make_jaxpr(lambda x, w: function(x, w, HALF))(X, W)
    wide = widen(narrow)

    def evaluated(x: Any, w: Any) -> Any:
        return jax.core.eval_jaxpr(wide.jaxpr, wide.consts, x, w)[0]

    got = jax.value_and_grad(evaluated, argnums=(0, 1))(X, W)
    expected, rounded = of(jnp.float32)(X, W), of(HALF)(X, W)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    worst = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(expected), strict=True))
    assert worst > 1e-4, "rounding shows where it is not taken away"


@jax.custom_vjp
def halved(x: jax.Array, y: jax.Array, power: int) -> jax.Array:
    """x y, with half of its gradient to x and none to y."""
    return x * y


halved.defvjp(lambda x, y, power: (x * y, (y, power)), lambda kept, g: (g * kept[0] / 2, 0 * g, None))


@jax.custom_jvp
def doubled(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, with twice its gradient to x."""
    return x + y


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0] + tangents[1]))


def test_derivatives_of_ones_own_are_kept() -> None:
    def loss(x: Any, dtype: Any) -> Any:
        x = x.astype(dtype)
        return jnp.sum(jax.nn.relu(halved(x, x, 2)) + doubled(x, x) * x * dtype(0.3))

    wide = widen(jax.make_jaxpr(lambda x: loss(x, HALF))(X))
    x = jnp.asarray(X).at[0, 0].set(0.0)
    got = jax.value_and_grad(lambda x: jax.core.eval_jaxpr(wide.jaxpr, wide.consts, x)[0])(x)
    assert wide.out_avals[0].dtype == jnp.float32
    for a, b in zip(got, jax.value_and_grad(loss)(x, jnp.float32), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-3 if a.shape == () else 1e-2, atol=1e-6)
    own = 0.5 * x * (x != 0) + 0.3 * (2 * x + 3 * x)
    factor = np.float32(HALF(0.3)) / 0.3
    np.testing.assert_allclose(got[1], 0.5 * x * (x != 0) + factor * (own - 0.5 * x * (x != 0)), rtol=1e-5, atol=1e-6)


def test_random_bits_are_the_narrow_ones() -> None:
    def drawn(key: Any) -> Any:
        return jax.random.uniform(key, (64,), HALF)

    key = jax.random.key(3)
    wide = widen(jax.make_jaxpr(drawn)(key))
    (got,) = jax.core.eval_jaxpr(wide.jaxpr, wide.consts, key)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide_array(drawn(key)))


def test_only_narrow_floats_are_widened() -> None:
    assert [is_narrow(d) for d in (HALF, jnp.float16, jnp.float32, jnp.int8, jnp.bool_)] == [True, True, *[False] * 3]
    assert wide_array(np.arange(3)).dtype == np.arange(3).dtype
    key = jax.random.key(0)
    assert wide_array(key) is key
