"""A GPT in nnx, planned as it is: model, optimizer and random streams go in and are updated in place.

python examples/gpt_nnx.py
uniap-jax plan --devices 8 --step examples/gpt_nnx.py:build
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
    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class GPT(nnx.Module):
    def __init__(self, depth: int, width: int, heads: int, vocabulary: int, sequence: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sequence, width)))
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def loss_fn(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def train_step(state: tuple[GPT, nnx.Optimizer], batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    model, optimizer = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return state, {"loss": loss}


def make_batch(seed: int, size: int, vocabulary: int, sequence: int) -> dict[str, jax.Array]:
    starts = np.random.default_rng(seed).integers(0, vocabulary, (size, 1))
    rows = (starts + 3 * np.arange(sequence + 1)) % vocabulary  # counting in threes: soon learned
    return {"tokens": jnp.asarray(rows[:, :-1], jnp.int32), "targets": jnp.asarray(rows[:, 1:], jnp.int32)}


def build(
    depth: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50304, sequence: int = 1024, size: int = 32
) -> tuple[Any, Any, dict[str, jax.Array]]:
    model = GPT(depth, width, heads, vocabulary, sequence, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    return (model, optimizer), train_step, make_batch(0, size, vocabulary, sequence)


def main(steps: int = 20, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=4, width=128, heads=4, vocabulary=128, sequence=32, size=16)  # leave the numbers out for GPT-2 small
