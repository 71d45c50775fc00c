"""Small models of every kind that people train: `KINDS[name]() -> (state, train_step, batch)`, random weights.

None is copied from anywhere; each holds what makes its kind hard to plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from kinds_images import depthwise, diffusion, windowed_unet
from kinds_nnx import experts, nnx_dropout, routed
from kinds_support import (
    BATCH,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Attention,
    Built,
    Feed,
    PostNorm,
    cross_entropy,
    linen,
    normal,
    state_of,
    step_of,
    tokens,
)


class EncoderDecoder(nn.Module):
    """One table for both sides and the head, learned positions, padding."""

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        table = nn.Embed(VOCABULARY, WIDTH)
        allowed = batch["source"] > 0
        memory = nn.LayerNorm()(table(batch["source"]) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH)))
        for _ in range(2):
            memory = PostNorm(decoder=False)(memory, None, allowed)
        shifted = jnp.pad(batch["target"][:, :-1], ((0, 0), (1, 0)))
        x = nn.LayerNorm()(table(shifted) + nn.Embed(LENGTH, WIDTH)(jnp.arange(LENGTH)))
        for _ in range(2):
            x = PostNorm(decoder=True)(x, memory, allowed)
        return table.attend(x) + self.param("final_bias", nn.initializers.zeros, (VOCABULARY,))


def encoder_decoder() -> Built:
    batch = {"source": tokens(0), "target": tokens(1)}
    return linen(
        EncoderDecoder(), batch, lambda out, batch: cross_entropy(out, batch["target"]).mean(), rngs=("dropout",)
    )


# ---- two towers ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    causal: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + Attention(self.causal)(nn.LayerNorm()(x))
        return x + Feed()(nn.LayerNorm()(x))


class TwoTowers(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        patches = nn.Conv(WIDTH, (4, 4), strides=(4, 4))(batch["image"])
        image = patches.reshape(patches.shape[0], -1, WIDTH)
        first = self.param("class", nn.initializers.normal(0.02), (1, 1, WIDTH))
        image = jnp.concatenate([jnp.broadcast_to(first, (image.shape[0], 1, WIDTH)), image], 1)
        text = nn.Embed(VOCABULARY, WIDTH)(batch["text"])
        for _ in range(2):
            image, text = Block()(image), Block(causal=True)(text)
        pair = [nn.Dense(WIDTH, use_bias=False)(image[:, 0]), nn.Dense(WIDTH, use_bias=False)(text[:, -1])]
        image, text = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in pair)
        return image @ text.T * jnp.exp(self.param("temperature", nn.initializers.constant(1.0), ()))


def two_towers() -> Built:
    """Every image meets every text of the batch."""

    def loss_of(scores: Any, _: Any) -> Any:
        labels = jnp.arange(scores.shape[0])
        return (cross_entropy(scores, labels).mean() + cross_entropy(scores.T, labels).mean()) / 2

    return linen(TwoTowers(), {"image": normal(0, 8, 8, 3), "text": tokens(1)}, loss_of)


# ---- loops, statistics, rules of one's own ---------------------------------------------------------------------


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH)(batch["x"])
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
        return nn.Dense(VOCABULARY)(x)


def lstm() -> Built:
    """Scans over time, in both layers."""
    batch = {"x": tokens(0), "y": tokens(1)}
    return linen(Recurrent(), batch, lambda out, batch: cross_entropy(out, batch["y"]).mean())


class Fed(nn.Module):
    """A cell that looks at the source and is fed its own output."""

    @nn.compact
    def __call__(self, carry: Any, x: Any, memory: Any) -> Any:
        cell, before = carry
        cell, h = nn.OptimizedLSTMCell(WIDTH)(cell, jnp.concatenate([x, before], -1))
        weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", nn.Dense(WIDTH)(h), memory))
        out = jnp.tanh(nn.Dense(WIDTH)(jnp.concatenate([h, jnp.einsum("bs,bsd->bd", weights, memory)], -1)))
        return (cell, out), out


class Translation(nn.Module):
    """Both directions over the source, lengths and all; attention at every step of the target."""

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        both = nn.Bidirectional(nn.RNN(nn.GRUCell(WIDTH // 2)), nn.RNN(nn.GRUCell(WIDTH // 2)))
        memory = both(nn.Embed(VOCABULARY, WIDTH)(batch["source"]), seq_lengths=batch["lengths"])
        decode = nn.scan(
            Fed, variable_broadcast="params", split_rngs={"params": False}, in_axes=(1, nn.broadcast), out_axes=1
        )()
        start = jnp.zeros_like(memory[:, 0])
        shifted = jnp.pad(batch["target"][:, :-1], ((0, 0), (1, 0)))
        _, out = decode(((start, start), start), nn.Embed(VOCABULARY, WIDTH)(shifted), memory)
        return nn.Dense(VOCABULARY)(out)


def translation() -> Built:
    lengths = np.random.RandomState(2).randint(2, LENGTH, BATCH)
    batch = {"source": tokens(0), "target": tokens(1), "lengths": lengths.astype(np.int32)}
    return linen(Translation(), batch, lambda out, batch: cross_entropy(out, batch["target"]).mean())


class Encoded(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = x + Feed()(nn.LayerNorm()(x))
        return nn.Dense(WIDTH)(x)


def teacher() -> Built:
    """Own noise for each example, a teacher that is an average of the student, and the slope of the output."""
    model, batch, tx = Encoded(), normal(0, WIDTH), optax.adam(1e-3)
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]

    def train_step(state: Any, batch: Any) -> Any:
        def out(params: Any, x: Any) -> Any:
            return model.apply({"params": params}, x)

        def loss_fn(params: Any) -> Any:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(7), state["count"]), batch.shape[0])
            noisy = jax.vmap(lambda x, key: x + 0.1 * jax.random.normal(key, x.shape))(batch, keys)
            aim = jax.lax.stop_gradient(out(state["teacher"], batch))
            slope = jax.grad(lambda x: out(params, x).sum())(batch)
            return jnp.mean((out(params, noisy) - aim) ** 2) + 0.1 * jnp.mean((jnp.abs(slope).sum(-1) - 1.0) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["teacher"], 0.1)
        return {"params": params, "teacher": average, "opt": opt, "count": state["count"] + 1}, {"loss": loss}

    start = jax.tree.map(jnp.copy, params)
    return {"params": params, "teacher": start, "opt": tx.init(params), "count": jnp.int32(0)}, train_step, batch


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (16, 16, 16, 8):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(width)(x)))
        return nn.Dense(1)(x)


def batch_stats() -> Built:
    """Running statistics are changed in the loss and come back beside it."""
    model, batch, tx = Normed(), normal(0, 12), optax.sgd(0.1)
    variables = jax.jit(model.init)(jax.random.key(0), batch)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            out, changed = model.apply({**state["vars"], "params": params}, batch, mutable=["batch_stats"])
            return jnp.mean((out - 1.0) ** 2), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["vars"]["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["vars"]["params"], updates)
        return {"vars": {**changed, "params": params}, "opt": opt}, {"loss": loss}

    return {"vars": variables, "opt": tx.init(variables["params"])}, train_step, batch


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    """Itself, with half of its gradient."""
    return x * 1.0


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (0.5 * g,))


@jax.custom_jvp
def squashed(x: jax.Array) -> jax.Array:
    """tanh with its derivative written out."""
    return jnp.tanh(x)


@squashed.defjvp
def _squashed_jvp(primals: Any, tangents: Any) -> Any:
    y = squashed(*primals)
    return y, (1.0 - y * y) * tangents[0]


def _dense(seed: int, fan_in: int, fan_out: int) -> dict[str, Any]:
    return {"w": jnp.asarray(np.random.RandomState(seed).randn(fan_in, fan_out) / np.sqrt(fan_in), jnp.float32)}


def own_rules() -> Built:
    """Derivatives of one's own inside plain functions over a list of dicts."""
    params = [_dense(i, WIDTH, WIDTH) for i in range(4)]

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        x = batch
        for layer in params:
            x = x + halved(squashed(x @ layer["w"]))
        return jnp.mean((x - 1.0) ** 2)

    return state_of(params), step_of(loss_fn), normal(0, WIDTH)


def checkpointed() -> Built:
    """`jax.checkpoint` with a policy around every layer, inside a jit."""
    params = [{"up": _dense(i, WIDTH, 2 * WIDTH), "down": _dense(9 + i, 2 * WIDTH, WIDTH)} for i in range(4)]

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["up"]["w"]) @ p["down"]["w"]

    @jax.jit
    def forward(params: Any, x: Any) -> Any:
        for p in params:
            x = layer(p, x)
        return x

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((forward(params, batch) - 1.0) ** 2)

    return state_of(params), step_of(loss_fn), normal(0, WIDTH)


class Rotated(nn.Module):
    """Queries and keys are turned by tables that the model closes over."""

    table: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.RMSNorm()(x)
        query, key, value = (nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name=n)(h) for n in "qkv")

        def turn(a: Any) -> Any:
            first, second = jnp.split(a, 2, -1)
            cos, sin = (t[None, : x.shape[1], None] for t in self.table)
            return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

        scores = jnp.einsum("bqhd,bkhd->bhqk", turn(query), turn(key))
        scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False)(mixed)
        h = nn.RMSNorm()(x)
        gated = nn.silu(nn.Dense(2 * WIDTH, use_bias=False)(h)) * nn.Dense(2 * WIDTH, use_bias=False)(h)
        return x + nn.Dense(WIDTH, use_bias=False)(gated)


class Rotary(nn.Module):
    table: Any

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH)(batch)
        for _ in range(3):
            x = Rotated(self.table)(x)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.RMSNorm()(x))


def rotary() -> Built:
    half = WIDTH // HEADS // 2
    angles = jnp.outer(jnp.arange(2 * LENGTH), 10.0 ** -jnp.arange(half, dtype=jnp.float32))
    model = Rotary((jnp.cos(angles), jnp.sin(angles)))
    return linen(model, tokens(0), lambda out, batch: cross_entropy(out[:, :-1], batch[:, 1:]).mean())


class Related(nn.Module):
    """One table of relative positions for all layers, as in T5, joined with the padding."""

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        table = self.param("relative", nn.initializers.normal(0.1), (2 * LENGTH, HEADS))
        place = np.arange(LENGTH)
        bias = table[place[:, None] - place[None] + LENGTH].transpose(2, 0, 1)[None]
        bias = bias + jnp.where(batch > 0, 0.0, -1e9)[:, None, None]
        x = nn.Embed(VOCABULARY, WIDTH)(batch)
        for i in range(3):
            h = nn.RMSNorm()(x)
            query, key, value = (
                nn.Dense(WIDTH, use_bias=False, name=f"{n}{i}")(h).reshape(*h.shape[:2], HEADS, -1) for n in "qkv"
            )
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(x.shape)
            x = x + nn.Dense(WIDTH, use_bias=False)(mixed)
            x = x + Feed()(nn.RMSNorm()(x))
        return nn.Dense(VOCABULARY, use_bias=False)(nn.RMSNorm()(x))


def relative() -> Built:
    """The squares of all matrices are part of the loss."""
    model, batch = Related(), tokens(0)
    params = jax.jit(model.init)(jax.random.key(0), batch)["params"]

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        out = model.apply({"params": params}, batch)
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1)
        return cross_entropy(out[:, :-1], batch[:, 1:]).mean() + 1e-3 * penalty

    return state_of(params), step_of(loss_fn), batch


KINDS: dict[str, Callable[[], Built]] = {
    "encoder_decoder": encoder_decoder,
    "two_towers": two_towers,
    "diffusion": diffusion,
    "windowed_unet": windowed_unet,
    "experts": experts,
    "nnx_dropout": nnx_dropout,
    "lstm": lstm,
    "batch_stats": batch_stats,
    "own_rules": own_rules,
    "checkpointed": checkpointed,
    "rotary": rotary,
    "depthwise": depthwise,
    "relative": relative,
    "routed": routed,
    "translation": translation,
    "teacher": teacher,
}
