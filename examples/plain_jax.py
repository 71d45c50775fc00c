"""No framework at all: parameters in a dict, an optimizer of three lines, a state that is a dict.

python examples/plain_jax.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import uniap_jax as uniap

State = dict[str, Any]


def create_state(depth: int, width: int, seed: int = 0) -> State:
    keys = jax.random.split(jax.random.key(seed), depth + 2)
    sizes = [8, *[width] * (depth + 1), 1]
    params = [
        {"weight": jax.random.normal(k, (m, n)) / m**0.5, "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}


def predict(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return (x @ params[-1]["weight"] + params[-1]["bias"])[:, 0]


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    rate = 0.05 / jnp.sqrt(1.0 + state["step"] / 100)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - rate * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "step": state["step"] + 1}, {"loss": loss}


def make_batch(seed: int, size: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(size, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1] * x[:, 2]}


def build(depth: int = 8, width: int = 4096, size: int = 4096) -> tuple[State, Any, dict[str, np.ndarray]]:
    return create_state(depth, width), train_step, make_batch(0, size)


def main(steps: int = 20, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=3, width=64, size=64)
