"""Trains a small GPT on a text file under a plan that is found for it.

    python examples/gpt.py                     # on the devices jax finds
    python examples/gpt.py --text book.txt --steps 200
    uniap-jax plan --devices 8 --step examples/gpt.py:build

The model and the train step are ordinary flax and optax; the one line that knows of plans is in `main`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import uniap_jax as uniap

VOCABULARY, SEQUENCE, BATCH = 128, 32, 16


class Block(nn.Module):
    width: int
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.num_heads, dropout_rate=0.1, deterministic=False)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(self.width)(hidden))


class GPT(nn.Module):
    num_layers: int
    width: int
    num_heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, self.width)
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (SEQUENCE, self.width))
        for _ in range(self.num_layers):
            x = Block(self.width, self.num_heads)(x)
        return embed.attend(nn.LayerNorm()(x))


class State(train_state.TrainState):
    rng: jax.Array


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    rng = jax.random.fold_in(state.rng, state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": rng})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def create_state(num_layers: int, width: int, num_heads: int) -> State:
    model = GPT(num_layers, width, num_heads)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(keys, jnp.zeros((1, SEQUENCE), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State.create(apply_fn=model.apply, params=params, tx=tx, rng=jax.random.key(2))


def batches(text: str, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    codes = np.frombuffer(text.encode("ascii", errors="replace"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(codes) - SEQUENCE - 1, BATCH)
        rows = np.stack([codes[s : s + SEQUENCE + 1] for s in starts])
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def build(num_layers: int = 4, width: int = 128, num_heads: int = 4) -> tuple[State, Any, dict[str, np.ndarray]]:
    """What `uniap-jax --step` asks for."""
    return create_state(num_layers, width, num_heads), train_step, next(batches(DEFAULT_TEXT))


DEFAULT_TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind. " * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file to learn; a sentence over and over where none is given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--described", action="store_true", help="price layers by described rates instead of a clock")
    options = parser.parse_args()

    data = batches(options.text.read_text() if options.text else DEFAULT_TEXT)
    state, batch = create_state(options.layers, options.width, 4), next(data)

    # The one line that knows of plans; it stands where jax.jit(train_step) stood.
    step = uniap.parallelize(train_step, source="described" if options.described else "measured")

    state = step.place(state, batch)
    for number in range(options.steps):
        state, metrics = step(state, batch)
        if number == 0:
            print(step.plan)
        print(f"step {number + 1:3d}  loss {float(metrics['loss']):.4f}")
        batch = next(data)


if __name__ == "__main__":
    main()
