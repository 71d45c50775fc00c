"""The model of `uniap-jax demo`: a GPT in flax linen, an optax optimizer and a train step, as a user writes them.

Nothing here knows of plans: the demo hands `train_step` to `uniap_jax` unchanged, and
`uniap-jax plan --step uniap_jax.demo_gpt:build` does the same from a shell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

VOCABULARY = 128
"""Characters are their ASCII codes."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model and of a batch; the defaults have 10.7 million parameters."""

    num_layers: int = 6
    width: int = 384
    num_heads: int = 6
    sequence: int = 32
    batch: int = 16
    dropout: float = 0.1


FULL = Size()
TINY = Size(num_layers=2, width=32, num_heads=2, sequence=16, batch=8)


class Block(nn.Module):
    """Attention and a two-layer network, each normalised before and added to what it read."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, sequence, width] to the same shape."""
        size = self.size
        batch, sequence, width = x.shape
        normed = nn.LayerNorm()(x)
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(normed)
        qkv = qkv.reshape(batch, sequence, 3, size.num_heads, width // size.num_heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
        causal = jnp.tril(jnp.ones((sequence, sequence), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, sequence, width)
        x = x + nn.Dropout(size.dropout, deterministic=False)(nn.Dense(width, use_bias=False, name="out")(mixed))
        hidden = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dropout(size.dropout, deterministic=False)(nn.Dense(width, name="down")(hidden))


class GPT(nn.Module):
    """Decoder-only language model over characters, with a tied head."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""
        embed = nn.Embed(VOCABULARY, self.size.width, name="embed")
        positions = self.param("positions", nn.initializers.normal(0.02), (self.size.sequence, self.size.width))
        x = embed(tokens) + positions[: tokens.shape[1]]
        for i in range(self.size.num_layers):
            x = Block(self.size, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


class State(train_state.TrainState):
    """Flax's train state and the key that dropout is drawn from."""

    rng: jax.Array


def make_text(rng: np.random.Generator, length: int) -> str:
    """Sums of digits in words, which a small model learns to spell: "three plus four is seven. "."""
    sentences: list[str] = []
    total = 0
    while total < length:
        a = int(rng.integers(0, 10))
        b = int(rng.integers(0, 10 - a))
        sentences.append(f"{DIGITS[a]} plus {DIGITS[b]} is {DIGITS[a + b]}. ")
        total += len(sentences[-1])
    return "".join(sentences)[:length]


def make_batch(seed: int, *, size: Size) -> dict[str, np.ndarray]:
    """Tokens and the tokens after them, int32 [batch, sequence]; equal for equal seeds."""
    text = make_text(np.random.default_rng(seed), size.batch * (size.sequence + 1))
    codes = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32).reshape(size.batch, size.sequence + 1)
    return {"tokens": codes[:, :-1], "targets": codes[:, 1:]}


def create_state(*, size: Size) -> State:
    """Parameters from a fixed key, AdamW after clipping by the global norm."""
    model = GPT(size)
    tokens = jnp.zeros((1, size.sequence), jnp.int32)
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01))
    return State.create(apply_fn=model.apply, params=variables["params"], tx=tx, rng=jax.random.key(2))


def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    """One optimizer step; the ordinary thing."""
    rng = jax.random.fold_in(state.rng, state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": rng})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def build(*, size: Size = FULL) -> tuple[State, Callable[..., Any], dict[str, np.ndarray]]:
    """State, train step and a batch, for `--step uniap_jax.demo_gpt:build`."""
    return create_state(size=size), train_step, make_batch(0, size=size)


def build_tiny() -> tuple[State, Callable[..., Any], dict[str, np.ndarray]]:
    """The same in a size that compiles in seconds, for tests and documentation."""
    return build(size=TINY)
