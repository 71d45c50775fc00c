"""Weight gradients are products, not products and transposes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uniap_jax.core.jaxprs import inner_jaxprs, open_jaxpr
from uniap_jax.runtime.products import without_transposes


def names(jaxpr: Any) -> list[str]:
    eqns = open_jaxpr(jaxpr).eqns
    return [e.primitive.name for e in eqns] + [n for e in eqns for j in inner_jaxprs(e) for n in names(j)]


def dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w).sum()


def heads(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.einsum("bi,iho->bho", x, w)).sum()


@pytest.mark.parametrize("keep", ["all", "inputs"])
@pytest.mark.parametrize(("function", "shape"), [(dense, (8, 16)), (heads, (8, 2, 16))])
def test_gradients_are_the_same_without_transposes(function: Any, shape: tuple[int, ...], keep: str) -> None:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    x = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    grad = jax.grad(function if keep == "all" else jax.checkpoint(function), argnums=(0, 1))
    traced = jax.make_jaxpr(grad)(w, x)
    rewritten = without_transposes(traced)
    assert names(rewritten).count("transpose") < names(traced).count("transpose")
    assert names(rewritten).count("dot_general") == names(traced).count("dot_general")
    for a, b in zip(grad(w, x), jax.core.eval_jaxpr(rewritten.jaxpr, rewritten.consts, w, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_product_that_is_read_elsewhere_stays() -> None:
    traced = jax.make_jaxpr(lambda a, b: ((a @ b).T, a @ b, jnp.transpose(a)))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    both = jax.make_jaxpr(lambda a, b: (lambda c: (c.T, c))(a @ b))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    assert names(without_transposes(traced)).count("transpose") == 1
    assert names(without_transposes(both)) == names(both)
