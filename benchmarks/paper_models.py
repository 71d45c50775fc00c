"""The models of the UniAP paper as plain JAX functions of shapes: nothing is ever allocated, tracing is all they do.

Positions, dropout and shifted windows are left out: they cost next to nothing and change no split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any
Case = tuple[Tree, Callable[..., Any], Tree]
"""State, train step and batch, as `trace` takes them; all of them shapes."""


def _shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(p: Mapping[str, jax.Array], x: jax.Array, source: jax.Array, *, causal: bool = False) -> jax.Array:
    q = jnp.einsum("...sh,hnd->...snd", x, p["q"])
    k = jnp.einsum("...sh,hnd->...snd", source, p["k"])
    v = jnp.einsum("...sh,hnd->...snd", source, p["v"])
    scores = jnp.einsum("...qnd,...knd->...nqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        mask = jnp.tril(jnp.ones((q.shape[-3], k.shape[-3]), dtype=bool))
        scores = jnp.where(mask, scores, -1e4)
    mixed = jnp.einsum("...nqk,...knd->...qnd", jax.nn.softmax(scores), v)
    return jnp.einsum("...snd,ndh->...sh", mixed, p["o"])


def _mlp(p: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    if "gate" in p:
        return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def _attention_shapes(hidden: int, heads: int, dtype: Any) -> Tree:
    size = hidden // heads
    into = {name: _shape(hidden, heads, size, dtype=dtype) for name in ("q", "k", "v")}
    return {**into, "o": _shape(heads, size, hidden, dtype=dtype)}


def _mlp_shapes(hidden: int, wide: int, dtype: Any, *, gated: bool = False) -> Tree:
    names = ("gate", "up") if gated else ("up",)
    return {name: _shape(hidden, wide, dtype=dtype) for name in names} | {"down": _shape(wide, hidden, dtype=dtype)}


def _block_shapes(hidden: int, heads: int, wide: int, dtype: Any, *, gated: bool = False, cross: bool = False) -> Tree:
    block = {
        "attention": _attention_shapes(hidden, heads, dtype),
        "mlp": _mlp_shapes(hidden, wide, dtype, gated=gated),
        "norms": _shape(3 if cross else 2, hidden, dtype=dtype),
    }
    return block | ({"cross": _attention_shapes(hidden, heads, dtype)} if cross else {})


def _block(p: Tree, x: jax.Array, *, causal: bool = False, memory: jax.Array | None = None) -> jax.Array:
    y = _norm(x, p["norms"][0])
    x = x + _attention(p["attention"], y, y, causal=causal)
    if memory is not None:
        x = x + _attention(p["cross"], _norm(x, p["norms"][2]), memory)
    return x + _mlp(p["mlp"], _norm(x, p["norms"][1]))


def _nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _case(params: Tree, loss: Callable[[Tree, Tree], jax.Array], batch: Tree) -> Case:
    optimizer = optax.adam(1e-4)

    def train_step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return {"params": params, "opt": jax.eval_shape(optimizer.init, params)}, train_step, batch


def decoder(
    *, layers: int, hidden: int, heads: int, wide: int, sequence: int, vocabulary: int, batch: int, gated: bool,
    causal: bool, dtype: Any
) -> Case:  # fmt: skip
    """A stack of blocks between an embedding and a head: BERT, GPT, Llama."""
    params = {
        "embed": _shape(vocabulary, hidden, dtype=dtype),
        "blocks": [_block_shapes(hidden, heads, wide, dtype, gated=gated) for _ in range(layers)],
        "head": _shape(hidden, vocabulary, dtype=dtype),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for block in params["blocks"]:
            x = _block(block, x, causal=causal)
        return _nll(x @ params["head"], batch["labels"])

    tokens = _shape(batch, sequence, dtype=jnp.int32)
    return _case(params, loss, {"tokens": tokens, "labels": tokens})


def alone(kind: str, *, layers: int, hidden: int, heads: int, sequence: int, batch: int, dtype: Any) -> Case:
    """A stack of residual layers of one kind: "attention", "mlp", or "conv" (3 × 3 over a square of `sequence` places).

    Args:
        kind: of the layers.
        layers: how many.
        hidden: features, channels of a convolution.
        heads: of attention.
        sequence: places; of a convolution the height times the width.
        batch: examples.
        dtype: of parameters and activations.
    """
    shapes: Mapping[str, Callable[[], Tree]] = {
        "attention": lambda: _attention_shapes(hidden, heads, dtype),
        "mlp": lambda: _mlp_shapes(hidden, 4 * hidden, dtype),
        "conv": lambda: {"kernel": _shape(3, 3, hidden, hidden, dtype=dtype)},
    }
    side = math.isqrt(sequence)
    inner = (side, side) if kind == "conv" else (sequence,)
    layer: Mapping[str, Callable[[Tree, jax.Array], jax.Array]] = {
        "attention": lambda p, x: _attention(p, x, x, causal=True),
        "mlp": _mlp,
        "conv": lambda p, x: jax.nn.relu(
            jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ),
    }
    params = [{"norm": _shape(hidden, dtype=dtype), kind: shapes[kind]()} for _ in range(layers)]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = x + layer[kind](p[kind], _norm(x, p["norm"]))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return _case(params, loss, {"x": _shape(batch, *inner, hidden, dtype=dtype)})


def bert_huge(batch: int) -> Case:
    """32 layers, hidden 1280."""
    return decoder(
        layers=32, hidden=1280, heads=16, wide=5120, sequence=512, vocabulary=30522, batch=batch, gated=False,
        causal=False, dtype=jnp.float32,
    )  # fmt: skip


def llama_7b(batch: int) -> Case:
    """32 layers, hidden 4096."""
    return decoder(
        layers=32, hidden=4096, heads=32, wide=11008, sequence=2048, vocabulary=32000, batch=batch, gated=True,
        causal=True, dtype=jnp.float16,
    )  # fmt: skip


def llama_13b(batch: int) -> Case:
    """40 layers, hidden 5120."""
    return decoder(
        layers=40, hidden=5120, heads=40, wide=13824, sequence=2048, vocabulary=32000, batch=batch, gated=True,
        causal=True, dtype=jnp.float16,
    )  # fmt: skip


def t5_large(batch: int, *, layers: int = 24, hidden: int = 1024, sequence: int = 512, vocabulary: int = 32128) -> Case:
    """24 encoder and 24 decoder layers; every decoder layer reads the encoder's output."""
    dtype = jnp.float32
    params = {
        "embed": _shape(vocabulary, hidden, dtype=dtype),
        "encoder": [_block_shapes(hidden, 16, 4 * hidden, dtype) for _ in range(layers)],
        "decoder": [_block_shapes(hidden, 16, 4 * hidden, dtype, cross=True) for _ in range(layers)],
        "head": _shape(hidden, vocabulary, dtype=dtype),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        memory = params["embed"][batch["source"]]
        for block in params["encoder"]:
            memory = _block(block, memory)
        x = params["embed"][batch["target"]]
        for block in params["decoder"]:
            x = _block(block, x, causal=True, memory=memory)
        return _nll(x @ params["head"], batch["target"])

    tokens = _shape(batch, sequence, dtype=jnp.int32)
    return _case(params, loss, {"source": tokens, "target": tokens})


def vit_huge(batch: int, *, layers: int = 32, hidden: int = 1280, tokens: int = 256) -> Case:
    """32 layers, hidden 1280, images of 16 × 16 patches of 14 × 14."""
    dtype = jnp.float32
    params = {
        "patch": _shape(14 * 14 * 3, hidden, dtype=dtype),
        "blocks": [_block_shapes(hidden, 16, 4 * hidden, dtype) for _ in range(layers)],
        "head": _shape(hidden, 1000, dtype=dtype),
    }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["patches"] @ params["patch"]
        for block in params["blocks"]:
            x = _block(block, x)
        return _nll(x.mean(axis=1) @ params["head"], batch["labels"])

    images = _shape(batch, tokens, 14 * 14 * 3)
    return _case(params, loss, {"patches": images, "labels": _shape(batch, dtype=jnp.int32)})


SWIN_DEPTHS, SWIN_HIDDEN, SWIN_SIDE, WINDOW = (2, 2, 26, 2), 320, 56, 7


def _windows(x: jax.Array) -> jax.Array:
    b, h, w, c = x.shape
    x = x.reshape(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h * w // WINDOW**2, WINDOW**2, c)


def _whole(x: jax.Array, side: int) -> jax.Array:
    b, _, _, c = x.shape
    n = side // WINDOW
    return x.reshape(b, n, n, WINDOW, WINDOW, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, side, side, c)


def swin_huge(batch: int) -> Case:
    """Four resolutions of 2, 2, 26 and 2 layers, hidden 320 to 2560, windows of 7 × 7 that do not shift."""
    dtype = jnp.float32
    params: Tree = {"patch": _shape(4 * 4 * 3, SWIN_HIDDEN, dtype=dtype), "stages": [], "merge": []}
    for i, depth in enumerate(SWIN_DEPTHS):
        hidden = SWIN_HIDDEN << i
        params["stages"].append([_block_shapes(hidden, hidden // 32, 4 * hidden, dtype) for _ in range(depth)])
        if i + 1 < len(SWIN_DEPTHS):
            params["merge"].append(_shape(4 * hidden, 2 * hidden, dtype=dtype))
    params["head"] = _shape(SWIN_HIDDEN << 3, 1000, dtype=dtype)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["patches"] @ params["patch"]
        for i, blocks in enumerate(params["stages"]):
            side = SWIN_SIDE >> i
            y = _windows(x)
            for block in blocks:
                y = _block(block, y)
            x = _whole(y, side)
            if i < len(params["merge"]):
                b, c = x.shape[0], x.shape[-1]
                x = x.reshape(b, side // 2, 2, side // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
                x = x.reshape(b, side // 2, side // 2, 4 * c) @ params["merge"][i]
        return _nll(x.mean(axis=(1, 2)) @ params["head"], batch["labels"])

    images = _shape(batch, SWIN_SIDE, SWIN_SIDE, 4 * 4 * 3)
    return _case(params, loss, {"patches": images, "labels": _shape(batch, dtype=jnp.int32)})


MODELS: dict[str, Callable[[int], Case]] = {
    "BERT-Huge": bert_huge,
    "T5-Large": t5_large,
    "ViT-Huge": vit_huge,
    "Swin-Huge-like": swin_huge,
    "Llama-7B": llama_7b,
    "Llama-13B": llama_13b,
}
"""By name; each takes the global batch."""

SMALL: dict[str, Callable[[int], Case]] = {
    "GPT, 8 × 256": lambda batch: decoder(
        layers=8, hidden=256, heads=8, wide=1024, sequence=128, vocabulary=8192, batch=batch, gated=False,
        causal=True, dtype=jnp.float32,
    ),
    "ViT, 8 × 192": lambda batch: vit_huge(batch, layers=8, hidden=192, tokens=64),
}  # fmt: skip
"""Of a size that virtual devices of a host can be measured with."""
