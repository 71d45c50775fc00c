"""Small image models for `model_kinds`: denoisers, windows, depthwise convolutions."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kinds_support import BATCH, HEADS, WIDTH, Built, cross_entropy, linen, normal, state_of, step_of


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
