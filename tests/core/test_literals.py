"""Constants of layers that are equal but for them: which differ, and become inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uniap_jax.core.literals import NotEqual, equal_values, lift_literals


def layer(inside: float, outside: float, dtype: Any) -> Any:
    def run(x: Any) -> Any:
        def turn(carry: Any, _: None) -> Any:
            return jnp.where(carry > 0, carry, jnp.asarray(inside, dtype)), None

        return jax.lax.scan(turn, x + jnp.asarray(outside, dtype), None, length=2)[0]

    return jax.make_jaxpr(run)(jnp.ones(3, dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_constant_that_is_no_number_is_equal_to_itself(dtype: Any) -> None:
    lifted, values = lift_literals([layer(np.nan, 1.0, dtype), layer(np.nan, 2.0, dtype)])
    assert [v.tolist() for v in values] == [[1.0, 2.0]]
    np.testing.assert_array_equal(
        np.float32(jax.core.eval_jaxpr(lifted.jaxpr, (), *map(dtype, (np.ones(3), 2.0)))[0]), 3.0
    )
    assert equal_values(np.nan, np.nan)
    assert not equal_values(np.nan, 0.0)


def test_a_constant_that_differs_inside_a_loop_is_told() -> None:
    with pytest.raises(NotEqual, match="scan"):
        lift_literals([layer(1.0, 0.0, jnp.float32), layer(2.0, 0.0, jnp.float32)])
