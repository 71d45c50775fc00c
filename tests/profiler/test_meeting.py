"""Updates that clip by a common norm have all gradients at once; plain ones use each up as it comes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniap_jax as uniap
from uniap_jax.profiler.meeting import gradients_meet


@pytest.mark.parametrize(
    ("tx", "meet"),
    [
        (optax.sgd(0.1), False),
        (optax.adamw(0.1), False),
        (optax.chain(optax.clip(1.0), optax.adam(0.1)), False),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), True),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), False),
    ],
    ids=["sgd", "adamw", "clipped each", "clipped together", "clipped by block"],
)
def test_gradients_meet_where_they_are_clipped_together(tx: optax.GradientTransformation, meet: bool) -> None:
    params = [jnp.ones((4, 4)), jnp.ones((4, 4))]

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jnp.tanh(x @ params[0]) @ params[1]).mean()

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, opt = tx.update(grads, state[1], state[0])
        norm = sum(jnp.vdot(g, g) for g in grads)  # a metric says nothing of the update
        return (optax.apply_updates(state[0], updates), opt), {"loss": value, "norm": norm}

    graph = uniap.trace(step, (params, tx.init(params)), np.ones((8, 4), np.float32))
    assert gradients_meet(graph) is meet
