"""What the small models of `model_kinds` share: sizes, data, attention, train steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 8, 16, 2, 32

Built = tuple[Any, Callable[..., Any], Any]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, VOCABULARY, (BATCH, length)).astype(np.int32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(BATCH, *shape).astype(np.float32)


def step_of(loss_fn: Callable[..., Any], tx: Any = None) -> Callable[..., Any]:
    """A step over ({"params", "opt", "count"}, batch) for `loss_fn(params, batch, key)`."""
    tx = tx or optax.sgd(0.1, momentum=0.9)

    def train_step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(5), state["count"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "count": state["count"] + 1}, {"loss": loss}

    return train_step


def state_of(params: Any, tx: Any = None) -> Any:
    return {"params": params, "opt": (tx or optax.sgd(0.1, momentum=0.9)).init(params), "count": jnp.int32(0)}


def linen(model: nn.Module, batch: Any, loss_of: Callable[[Any, Any], Any], rngs: tuple[str, ...] = ()) -> Built:
    """A linen model whose output and batch `loss_of` turns into a loss."""
    keys = dict(zip(("params", *rngs), jax.random.split(jax.random.key(0), 1 + len(rngs)), strict=True))
    params = jax.jit(model.init)(keys, batch)["params"]

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        return loss_of(model.apply({"params": params}, batch, rngs=dict.fromkeys(rngs, key)), batch)

    return state_of(params), step_of(loss_fn), batch


class Attention(nn.Module):
    causal: bool = False

    @nn.compact
    def __call__(self, x: Any, memory: Any = None, allowed: Any = None) -> Any:
        memory = x if memory is None else memory
        query, key, value = (
            nn.DenseGeneral((HEADS, WIDTH // HEADS), name=n)(a) for n, a in zip("qkv", (x, memory, memory), strict=True)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH // HEADS)
        if self.causal:
            scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e9)
        if allowed is not None:
            scores = jnp.where(allowed[:, None, None], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(mixed)


class Feed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))


class PostNorm(nn.Module):
    """A layer that normalises after adding, reads the encoder's output and has dropout."""

    decoder: bool

    @nn.compact
    def __call__(self, x: Any, memory: Any, allowed: Any) -> Any:
        drop = partial(nn.Dropout(0.1), deterministic=False)
        x = nn.LayerNorm()(x + drop(Attention(causal=self.decoder)(x, allowed=None if self.decoder else allowed)))
        if self.decoder:
            x = nn.LayerNorm()(x + drop(Attention()(x, memory, allowed)))
        return nn.LayerNorm()(x + drop(Feed()(x)))
