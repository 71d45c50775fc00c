"""An nnx model, planned as it is: modules, optimizer and random streams go in and are updated in place.

python examples/nnx_mlp.py
uniap-jax check --devices 8 --step examples/nnx_mlp.py:build --stages 2
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import uniap_jax as uniap


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Classifier(nnx.Module):
    def __init__(self, width: int, depth: int, classes: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(depth)])
        self.last = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_fn(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def train_step(state: tuple[Classifier, nnx.Optimizer], batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
    model, optimizer = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return state, {"loss": loss}


def make_batch(seed: int, size: int = 16) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(size, 8)).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray((x.sum(1) > 0).astype(np.int32) + 2 * (x[:, 0] > 0))}


def build(width: int = 32, depth: int = 4) -> tuple[Any, Any, dict[str, Any]]:
    model = Classifier(width, depth, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    return (model, optimizer), train_step, make_batch(0)


def main() -> None:
    state, _, _ = build()
    step = uniap.parallelize(train_step, source="described")
    for seed in range(20):
        state, metrics = step(state, make_batch(seed))
        if seed % 5 == 4:
            print(f"step {seed + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main()
