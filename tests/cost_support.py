"""A small train step for the tests of profiles and costs: an embedding-free residual network with Adam-like state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import uniap_jax

WIDTH, HIDDEN, BATCH, BLOCKS = 16, 64, 8, 3


def build() -> tuple[Any, Any, Any]:
    """State, train step and batch of a residual network of `BLOCKS` blocks."""
    rng = np.random.default_rng(0)
    params = [
        {
            "up": rng.normal(size=(WIDTH, HIDDEN)).astype(np.float32) * 0.1,
            "down": rng.normal(size=(HIDDEN, WIDTH)).astype(np.float32) * 0.1,
        }
        for _ in range(BLOCKS)
    ]
    tx = optax.adam(1e-2)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = batch["x"]
            for block in params:
                x = x + jnp.tanh(x @ block["up"]) @ block["down"]
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    state = {"params": params, "opt": tx.init(params)}
    batch = {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
    }
    return state, train_step, batch


def graph() -> Any:
    """The traced step."""
    state, step, batch = build()
    return uniap_jax.trace(step, state, batch)
