"""Layers in one `nn.scan`, each recomputed in the backward pass: one traced layer, however deep the model.

python examples/scan_remat.py
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
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))), None


class GPT(nn.Module):
    depth: int
    width: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.depth,
        )
        x, _ = layers(self.heads)(x, nn.make_causal_mask(tokens))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def train_step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def build(
    depth: int = 24, width: int = 1024, heads: int = 16, vocabulary: int = 50304, sequence: int = 1024, size: int = 64
) -> tuple[train_state.TrainState, Any, dict[str, jax.Array]]:
    rows = (np.random.default_rng(0).integers(0, vocabulary, (size, 1)) + np.arange(sequence + 1)) % vocabulary
    batch = {"tokens": jnp.asarray(rows[:, :-1], jnp.int32), "targets": jnp.asarray(rows[:, 1:], jnp.int32)}
    model = GPT(depth, width, heads, vocabulary)
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"][:1])["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3)), train_step, batch


def main(steps: int = 10, **sizes: int) -> None:
    state, _, batch = build(**sizes)
    step = uniap.parallelize(train_step, source="described")
    state = step.place(state, batch)
    for number in range(steps):
        state, metrics = step(state, batch)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
    print(step.plan)


if __name__ == "__main__":
    main(depth=4, width=64, heads=4, vocabulary=64, sequence=16, size=16)  # leave the numbers out for 350 M parameters
