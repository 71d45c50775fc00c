"""A ResNet with BatchNorm: the running statistics live in the train state beside the parameters.

python examples/resnet.py

The normalisation takes its mean over the whole batch, so micro-batches would compute something else: the planner leaves
them out and says why (`uniap-jax trace --devices 8 --step examples/resnet.py:build`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap


class Block(nn.Module):
    filters: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(self.filters, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.filters, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    depths: tuple[int, ...]
    filters: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.filters, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                x = Block(self.filters * 2**stage, strides=2 if stage and not block else 1)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class State(train_state.TrainState):
    batch_stats: Any


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), {"loss": loss}


def make_batch(seed: int, size: int, pixels: int, classes: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, size)
    image = rng.normal(size=(size, pixels, pixels, 3)) + 3 * label[:, None, None, None] / classes
    return {"image": jnp.asarray(image, jnp.float32), "label": jnp.asarray(label, jnp.int32)}


def build(
    depths: tuple[int, ...] = (2, 2, 2, 2), filters: int = 64, pixels: int = 32, classes: int = 10, size: int = 512
) -> tuple[State, Any, dict[str, jax.Array]]:
    model, batch = ResNet(depths, filters, classes), make_batch(0, size, pixels, classes)
    made = jax.jit(model.init)(jax.random.key(0), batch["image"][:1])
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    state = State.create(apply_fn=model.apply, params=made["params"], batch_stats=made["batch_stats"], tx=tx)
    return state, train_step, batch


def main(steps: int = 10, **sizes: Any) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depths=(1, 1), filters=8, pixels=16, size=32)  # leave the numbers out for a ResNet-18 on CIFAR-10
