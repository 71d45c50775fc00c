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
from flax import nnx

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


# ---- encoder-decoder -------------------------------------------------------------------------------------------


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


# ---- U-Nets ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(x)))
        h = h + nn.Dense(self.width)(nn.silu(time))[:, None, None]
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class Denoiser(nn.Module):
    """Down and up again; every level on the way up reads its own on the way down."""

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        angles = time[:, None] * np.exp(-np.arange(4.0))[None]
        time = nn.Dense(WIDTH)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        x, skips = nn.Conv(8, (3, 3))(x), []
        for width in (8, 16):
            x = Residual(width)(x, time)
            skips.append(x)
            x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
        x = Residual(16)(x, time)
        for width in (16, 8):
            x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = Residual(width)(jnp.concatenate([x, skips.pop()], -1), time)
        return nn.Conv(1, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(x)))


def diffusion() -> Built:
    """Noise and its strength are drawn inside the loss."""
    model, batch = Denoiser(), normal(0, 8, 8, 1)
    params = jax.jit(model.init)(jax.random.key(0), batch, jnp.zeros(BATCH))["params"]

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        noise_key, time_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, batch.shape)
        time = jax.random.uniform(time_key, batch.shape[:1])
        strength = time[:, None, None, None]
        noisy = jnp.sqrt(1.0 - strength) * batch + jnp.sqrt(strength) * noise
        return jnp.mean((model.apply({"params": params}, noisy, time) - noise) ** 2)

    return state_of(params), step_of(loss_fn), batch


class Windowed(nn.Module):
    """Attention inside windows of 2 × 2, rolled by one in every other layer."""

    shift: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        batch, height, width, channels = x.shape
        h = jnp.roll(nn.LayerNorm()(x), (-self.shift, -self.shift), (1, 2))
        h = h.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        h = h.reshape(-1, 4, channels)
        query, key, value = jnp.split(nn.Dense(3 * channels)(h).reshape(-1, 4, HEADS, 3 * channels // HEADS), 3, -1)
        table = self.param("relative", nn.initializers.normal(0.02), (9, HEADS))
        place = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij"), -1).reshape(4, 2)
        apart = (place[:, None] - place[None] + 1) @ np.array([3, 1])
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) + table[apart].transpose(2, 0, 1)
        h = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value).reshape(-1, 4, channels)
        h = nn.Dense(channels)(h).reshape(batch, height // 2, width // 2, 2, 2, channels)
        h = h.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
        x = x + jnp.roll(h, (self.shift, self.shift), (1, 2))
        return x + nn.Dense(channels)(nn.gelu(nn.Dense(2 * channels)(nn.LayerNorm()(x))))


class WindowedUNet(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Conv(8, (2, 2), strides=(2, 2))(batch["image"])
        x = skip = Windowed(1)(Windowed(0)(x))
        b, h, w, c = x.shape
        merged = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)
        x = nn.Dense(2 * c, use_bias=False)(nn.LayerNorm()(merged))
        x = Windowed(1)(Windowed(0)(x))
        x = nn.Dense(4 * c, use_bias=False)(x).reshape(b, h // 2, w // 2, 2, 2, c)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = Windowed(1)(Windowed(0)(nn.Dense(c)(jnp.concatenate([x, skip], -1))))
        return nn.ConvTranspose(4, (2, 2), strides=(2, 2))(x)


def windowed_unet() -> Built:
    labels = np.random.RandomState(1).randint(0, 4, (BATCH, 8, 8)).astype(np.int32)
    batch = {"image": normal(0, 8, 8, 3), "label": labels}
    return linen(WindowedUNet(), batch, lambda out, batch: cross_entropy(out, batch["label"]).mean())


class Depthwise(nn.Module):
    """A convolution of every channel by itself, then a wide product, as in ConvNeXt."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        h = nn.LayerNorm()(nn.Conv(width, (3, 3), feature_group_count=width)(x))
        h = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h)))
        return x + h * self.param("scale", nn.initializers.constant(0.1), (width,))


class Separable(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> Any:
        x = nn.Conv(WIDTH, (2, 2), strides=(2, 2))(batch["image"])
        for _ in range(2):
            x = Depthwise()(x)
        x = nn.Conv(2 * WIDTH, (2, 2), strides=(2, 2))(nn.LayerNorm()(x))
        return nn.Dense(4)(Depthwise()(x).mean((1, 2)))


def depthwise() -> Built:
    labels = np.random.RandomState(1).randint(0, 4, BATCH).astype(np.int32)
    batch = {"image": normal(0, 8, 8, 3), "label": labels}
    return linen(Separable(), batch, lambda out, batch: cross_entropy(out, batch["label"]).mean())


# ---- nnx -------------------------------------------------------------------------------------------------------


class Experts(nnx.Module):
    """Four experts, two for each token, and a loss that balances them over the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, 4, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (4, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (4, 2 * WIDTH, WIDTH)))

    def __call__(self, x: Any) -> tuple[Any, Any]:
        chances = jax.nn.softmax(self.router(x))
        weight, chosen = jax.lax.top_k(chances, 2)
        picked = jax.nn.one_hot(chosen, 4)
        gate = jnp.einsum("bsk,bske->bse", weight / weight.sum(-1, keepdims=True), picked)
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        out = jnp.einsum("bsef,efd,bse->bsd", hidden, self.down[...], gate)
        return out, 4.0 * (chances.mean((0, 1)) * picked.sum(2).mean((0, 1))).sum()


class Mixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.experts = nnx.List([Experts(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        x, balance = self.table(x), jnp.float32(0.0)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            out, extra = experts(norm(x))
            x, balance = x + out, balance + extra
        return self.head(x), balance


def nnx_step(loss_of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = state
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return (model, optimizer), {"loss": loss}

    return train_step


def experts() -> Built:
    def loss_of(model: Any, batch: Any) -> Any:
        out, balance = model(batch["x"])
        return cross_entropy(out, batch["y"]).mean() + 0.01 * balance

    model = Mixture(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return state, nnx_step(loss_of), {"x": tokens(0), "y": tokens(1)}


class Sorted(Experts):
    """Tokens sorted by expert and written into the places that each expert has, two experts a token."""

    places = 48

    def __call__(self, x: Any) -> tuple[Any, Any]:
        tokens = x.reshape(-1, WIDTH)
        chances = jax.nn.softmax(self.router(tokens))
        weight, chosen = jax.lax.top_k(chances, 2)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        expert, token = chosen.reshape(-1)[order], order // 2
        place = jnp.arange(len(order)) - jnp.searchsorted(expert, jnp.arange(4))[expert]
        taken = jnp.zeros((4, self.places, WIDTH)).at[expert, place].set(tokens[token], mode="drop")
        hidden = jax.nn.silu(jnp.einsum("epd,edf->epf", taken, self.up[...]))
        given = jnp.einsum("epf,efd->epd", hidden, self.down[...]).at[expert, place].get(mode="fill", fill_value=0.0)
        out = jnp.zeros_like(tokens).at[token].add(given * weight.reshape(-1)[order][:, None])
        balance = 4.0 * (chances.mean(0) * jax.nn.one_hot(chosen, 4).sum(1).mean(0)).sum()
        return out.reshape(x.shape), balance


def routed() -> Built:
    state, train_step, batch = experts()
    model = state[0]
    model.experts = nnx.List([Sorted(nnx.Rngs(i)) for i in range(3)])
    return (model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)), train_step, batch


class Dropped(nnx.Module):
    """Dropout whose counter lives in the model and moves on in the loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + self.dropout(jax.nn.relu(layer(self.norm(x))))
        return x


def nnx_dropout() -> Built:
    model = Dropped(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return state, nnx_step(lambda model, batch: jnp.mean((model(batch) - 1.0) ** 2)), normal(0, WIDTH)


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
