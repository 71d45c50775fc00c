"""A vision transformer on images cut into patches; the class token makes the sequence odd.

python examples/vit.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class ViT(nn.Module):
    depth: int
    width: int
    heads: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (self.patch, self.patch), strides=self.patch, padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(self.depth):
            x = Block(self.heads)(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(x)[:, 0])


def train_step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch["image"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (logits.argmax(-1) == batch["label"]).mean()

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


def make_batch(seed: int, size: int, pixels: int, classes: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, size)
    image = rng.normal(size=(size, pixels, pixels, 3)) + label[:, None, None, None] / classes  # brighter by class
    return {"image": jnp.asarray(image, jnp.float32), "label": jnp.asarray(label, jnp.int32)}


def build(
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    patch: int = 16,
    pixels: int = 224,
    classes: int = 1000,
    size: int = 128,
) -> tuple[train_state.TrainState, Any, dict[str, jax.Array]]:
    model, batch = ViT(depth, width, heads, patch, classes), make_batch(0, size, pixels, classes)
    params = jax.jit(model.init)(jax.random.key(0), batch["image"][:1])["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.05))
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx), train_step, batch


def main(steps: int = 10, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}  accuracy {float(metrics['accuracy']):.2f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=3, width=64, heads=4, patch=8, pixels=32, classes=10, size=32)  # leave the numbers out for ViT-B/16
