"""One small network in linen and in nnx, with one peculiarity at a time, and a train step for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

BATCH, TOKENS, WIDTH, VOCABULARY, BLOCKS = 8, 4, 8, 16, 3
FEATURES = ("dropout", "tied", "batch_stats", "bf16", "aux")
TX = optax.sgd(0.3, momentum=0.9)


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (BATCH, TOKENS)).astype(np.int32)
    return {"x": tokens, "y": np.roll(tokens, 1, axis=1)}


@dataclass(frozen=True)
class Example:
    """A step, the state it starts from, and the batch."""

    make_state: Callable[[], Any]
    train_step: Callable[..., Any]


def build(library: str, feature: str) -> Example:
    """A train step in a library, with one peculiarity."""
    return {"linen": _linen, "nnx": _nnx}[library](feature)


def _dtype(feature: str) -> Any:
    return jnp.bfloat16 if feature == "bf16" else jnp.float32


def _losses(logits: jax.Array, penalty: Any, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss, and what the step reports beside it: per example, a count, a mean."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    hits = jnp.sum(jnp.argmax(logits, -1) == labels)
    aux = {"per_example": losses.mean(axis=1), "hits": hits, "penalty": jnp.asarray(penalty, jnp.float32)}
    return losses.mean() + 0.1 * aux["penalty"], aux


class LinenTower(nn.Module):
    feature: str

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        dtype = _dtype(self.feature)
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=dtype)
        x, penalty = embed(tokens), 0.0
        for _ in range(BLOCKS):
            h = nn.Dense(WIDTH, dtype=dtype)(nn.gelu(nn.Dense(2 * WIDTH, dtype=dtype)(x)))
            if self.feature == "batch_stats":
                h = nn.BatchNorm(use_running_average=False, momentum=0.9)(h)
            if self.feature == "dropout":
                h = nn.Dropout(0.4, deterministic=False)(h)
            if self.feature == "aux":
                penalty = penalty + jnp.mean(h**2)
            x = x + h
        return embed.attend(x) if self.feature == "tied" else nn.Dense(VOCABULARY, dtype=dtype)(x), penalty


def _linen(feature: str) -> Example:
    model = LinenTower(feature)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    start = jax.device_get(jax.jit(model.init)(keys, batch()["x"]))

    def make_state() -> Any:
        variables = jax.tree.map(jnp.asarray, start)
        return {"variables": variables, "opt": TX.init(variables["params"]), "step": jnp.int32(0)}

    def train_step(state: Any, batch: Any) -> Any:
        rest = {k: v for k, v in state["variables"].items() if k != "params"}
        key = jax.random.fold_in(jax.random.key(7), state["step"])

        def loss_fn(params: Any) -> Any:
            (logits, penalty), changed = model.apply(
                {"params": params, **rest}, batch["x"], rngs={"dropout": key}, mutable=list(rest)
            )
            loss, aux = _losses(logits, penalty, batch["y"])
            return loss, (aux, changed)

        (loss, (aux, changed)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["variables"]["params"])
        updates, opt = TX.update(grads, state["opt"])
        params = optax.apply_updates(state["variables"]["params"], updates)
        new = {"variables": {"params": params, **changed}, "opt": opt, "step": state["step"] + 1}
        return new, {"loss": loss, "grads": grads, **aux}

    return Example(make_state=make_state, train_step=train_step)


class NnxBlock(nnx.Module):
    def __init__(self, feature: str, rngs: nnx.Rngs) -> None:
        dtype = _dtype(feature)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs) if feature == "batch_stats" else None
        self.dropout = nnx.Dropout(0.4, rngs=rngs) if feature == "dropout" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.down(nnx.gelu(self.up(x)))
        h = h if self.norm is None else self.norm(h)
        return h if self.dropout is None else self.dropout(h)


class NnxTower(nnx.Module):
    def __init__(self, feature: str, rngs: nnx.Rngs) -> None:
        self.feature = feature
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=_dtype(feature), rngs=rngs)
        self.blocks = nnx.List([NnxBlock(feature, rngs) for _ in range(BLOCKS)])
        tied = feature == "tied"
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, dtype=_dtype(feature), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Any]:
        x, penalty = self.embed(tokens), 0.0
        for block in self.blocks:
            h = block(x)
            penalty = penalty + jnp.mean(h**2) if self.feature == "aux" else penalty
            x = x + h
        return self.embed.attend(x) if self.head is None else self.head(x), penalty


def _nnx(feature: str) -> Example:
    graphdef, params, rest = nnx.split(NnxTower(feature, nnx.Rngs(0)), nnx.Param, ...)
    start = jax.device_get(params)

    def make_state() -> Any:
        ready = jax.tree.map(jnp.asarray, start)
        return {"params": ready, "rest": jax.tree.map(jnp.copy, rest), "opt": TX.init(ready)}

    def train_step(state: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, state["params"], state["rest"])

        def loss_fn(model: Any) -> Any:
            return _losses(*model(batch["x"]), batch["y"])

        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        updates, opt = TX.update(grads, state["opt"])
        new = {"params": optax.apply_updates(state["params"], updates), "rest": nnx.split(model, nnx.Param, ...)[2]}
        return {**new, "opt": opt}, {"loss": loss, "grads": grads, **aux}

    return Example(make_state=make_state, train_step=train_step)
