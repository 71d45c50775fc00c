"""Small layers of every kind, written by hand: `f(*params, *operands, *reads)` and what tensor=2 should shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dims_support import make_layer
from uniap_jax.core.graph import Layer

B, S, E, H, D, F, V = 8, 6, 16, 4, 4, 64, 96
X, C = 4, 6  # experts, capacity of one
MASK = np.where(np.tril(np.ones((1, 1, S, S))), 0.0, -1e9).astype(np.float32)
LABELS = (np.arange(B * S).reshape(B, S) * 7) % V
ACTIVATION = (B, S, E)


@dataclass(frozen=True)
class Block:
    """A layer, the parameter dimensions that tensor=2 shards, and the activations its forward reduces."""

    f: Callable[..., Any]
    params: tuple[tuple[int, ...], ...]
    dims: tuple[int | None, ...]
    operands: tuple[Any, ...] = ()
    reads: tuple[tuple[int, ...], ...] = (ACTIVATION,)
    reduced: int = 1
    views: tuple[tuple[int, int, int], ...] = field(default=())

    def arguments(self) -> list[np.ndarray]:
        """Random parameters and reads, the operands between."""
        rng = np.random.default_rng(0)

        def draw(shape: tuple[int, ...]) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32) * np.float32(0.5)

        return [*map(draw, self.params), *map(np.asarray, self.operands), *map(draw, self.reads)]

    def layer(self) -> Layer:
        """As a layer of a graph."""
        args, n, m = self.arguments(), len(self.params), len(self.operands)
        return make_layer(self.f, args[:n], args[n : n + m], args[n + m :])

    def batch_dims(self) -> list[int | None]:
        """Which dimension of each argument is the batch."""
        operands = [0 if np.ndim(o) and np.shape(o)[0] == B else None for o in self.operands]
        return [*([None] * len(self.params)), *operands, *([0] * len(self.reads))]


def norm(x: Any, scale: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale


def heads(x: Any, w: Any, n: int = H) -> Any:
    return (x @ w).reshape(*x.shape[:2], n, D)


def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v)


def joined(o: Any, w: Any) -> Any:
    return o.reshape(*o.shape[:2], -1) @ w


def gpt(wq, wk, wv, wo, w1, b1, w2, scale, mask, x):
    h = norm(x, scale)
    x = x + joined(attend(heads(h, wq), heads(h, wk), heads(h, wv), mask), wo)
    return x + jax.nn.gelu(norm(x, scale) @ w1 + b1) @ w2


def fused_split(w, b, wo, mask, x):
    q, k, v = (t.reshape(B, S, H, D) for t in jnp.split(x @ w + b, 3, -1))
    return x + joined(attend(q, k, v, mask), wo)


def fused_indexed(w, b, wo, mask, x):
    t = (x @ w + b).reshape(B, S, 3, H, D)
    return x + joined(attend(t[:, :, 0], t[:, :, 1], t[:, :, 2], mask), wo)


def fused_by_head(w, wo, mask, x):
    t = (x @ w).reshape(B, S, H, 3, D)
    return x + joined(attend(t[..., 0, :], t[..., 1, :], t[..., 2, :], mask), wo)


def gqa(wq, wk, wv, wo, mask, x):
    k, v = (jnp.repeat(heads(x, w, 2), 2, axis=2) for w in (wk, wv))
    return joined(attend(heads(x, wq), k, v, mask), wo)


def gqa_grouped(wq, wk, wv, wo, mask, x):
    q = (x @ wq).reshape(B, S, 2, 2, D)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, heads(x, wk, 2)) + mask[:, None]
    return joined(jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), heads(x, wv, 2)), wo)


def mqa(wq, wk, wv, wo, mask, x):
    k, v = (jnp.repeat(heads(x, w, 1), H, axis=2) for w in (wk, wv))
    return joined(attend(heads(x, wq), k, v, mask), wo)


def rotate(t, cos, sin):
    a, b = jnp.split(t, 2, -1)
    return jnp.concatenate([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)


def rope(wq, wk, wv, wo, mask, cos, sin, x):
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
    return jnp.einsum("bqhd,hde->bqe", attend(rotate(q, cos, sin), rotate(k, cos, sin), v, mask), wo)


def fused_kv(wq, wkv, wo, mask, x):
    q = jnp.einsum("bte,hed->bthd", x, wq)
    k, v = jnp.einsum("bse,ched->cbshd", x, wkv)
    return jnp.einsum("bthd,hde->bte", attend(q, k, v, mask), wo)


def relative_bias(table, wq, wk, wv, wo, buckets, x):
    bias = table[buckets].transpose(2, 0, 1)[None]
    return joined(attend(heads(x, wq), heads(x, wk), heads(x, wv), bias), wo)


def swiglu(gate, up, down, x):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def fused_swiglu(w, down, x):
    gate, up = jnp.split(x @ w, 2, -1)
    return (jax.nn.silu(gate) * up) @ down


def embed(table, positions, tokens):
    return table[tokens] + positions[jnp.arange(S)]


def head_lookup(scale, table, labels, x):
    logp = jax.nn.log_softmax(norm(x, scale) @ table.T)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


def head_one_hot(w, labels, x):
    return -(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x @ w)).sum(-1).mean()


def bottleneck(k1, scale, k2, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, k1, (1, 1), "SAME", dimension_numbers=numbers)
    y = jax.nn.relu((y - y.mean((0, 1, 2))) * jax.lax.rsqrt(y.var((0, 1, 2)) + 1e-5) * scale)
    return x + jax.lax.conv_general_dilated(y, k2, (1, 1), "SAME", dimension_numbers=numbers)


def experts(router, w1, w2, x):
    probs = jax.nn.softmax(x @ router)
    _, best = jax.lax.top_k(probs, 1)
    to_expert = jax.nn.one_hot(best[..., 0], X)
    place = (jnp.cumsum(to_expert, 1) * to_expert).max(-1).astype(int) - 1
    dispatch = to_expert[..., None] * jax.nn.one_hot(place, C)[:, :, None]
    h = jnp.einsum("xbce,xef->xbcf", jnp.einsum("bsxc,bse->xbce", dispatch, x), w1)
    return jnp.einsum("bsxc,xbce->bse", dispatch * probs[..., None], jnp.einsum("xbcf,xfe->xbce", jax.nn.gelu(h), w2))


def scanned(w1, w2, x):
    return jax.lax.scan(lambda c, w: (c + jax.nn.gelu(c @ w[0]) @ w[1], None), x, (w1, w2))[0]


def rematted(w1, w2, x):
    return jax.checkpoint(lambda x: jax.nn.relu(jax.jit(lambda x: x @ w1)(x)) @ w2)(x)


_SQUARE = ((E, E),) * 4
_GQA = ((E, E), (E, 2 * D), (E, 2 * D), (E, E))
_ANGLES = np.linspace(0, 1, S * D // 2, dtype=np.float32).reshape(S, D // 2)
_BUCKETS = np.abs(np.arange(S)[:, None] - np.arange(S))
_FUSED_VIEW = ((0, 1, 3), (1, 0, 3))
_FUSED = ((E, 3 * E), (3 * E,), (E, E))

BLOCKS = {
    "gpt": Block(gpt, (*_SQUARE, (E, F), (F,), (F, E), (E,)), (1, 1, 1, 0, 1, 0, 0, None), operands=(MASK,), reduced=2),
    "gqa": Block(gqa, _GQA, (1, 1, 1, 0), operands=(MASK,)),
    "gqa_grouped": Block(gqa_grouped, _GQA, (1, 1, 1, 0), operands=(MASK,)),
    "mqa": Block(mqa, ((E, E), (E, D), (E, D), (E, E)), (1, None, None, 0), operands=(MASK,)),
    "rope": Block(
        rope, (*((E, H, D),) * 3, (H, D, E)), (1, 1, 1, 0), operands=(MASK, np.cos(_ANGLES), np.sin(_ANGLES))
    ),
    "fused_kv": Block(fused_kv, ((H, E, D), (2, H, E, D), (H, D, E)), (0, 1, 0), operands=(MASK,)),
    "relative_bias": Block(relative_bias, ((32, H), *_SQUARE), (1, 1, 1, 1, 0), operands=(_BUCKETS,)),
    "fused_by_head": Block(fused_by_head, ((E, 3 * E), (E, E)), (1, 0), operands=(MASK,)),
    "swiglu": Block(swiglu, ((E, F), (E, F), (F, E)), (1, 1, 0)),
    "embed": Block(embed, ((V, E), (S, E)), (0, None), operands=(LABELS,), reads=()),
    "bottleneck": Block(bottleneck, ((3, 3, 8, 16), (16,), (3, 3, 16, 8)), (3, 0, 2), reads=((B, S, S, 8),)),
    "experts": Block(experts, ((E, X), (X, E, F), (X, F, E)), (None, 2, 1)),
    "scanned": Block(scanned, ((3, E, F), (3, F, E)), (2, 1)),
    "rematted": Block(rematted, ((E, F), (F, E)), (1, 0)),
}
HEADS = {
    "head_lookup": Block(head_lookup, ((E,), (V, E)), (None, 0), operands=(LABELS,), reduced=0),
    "head_one_hot": Block(head_one_hot, ((E, V),), (1,), operands=(LABELS,), reduced=0),
}
FUSED = {
    "fused_split": Block(fused_split, _FUSED, (None, None, 0), operands=(MASK,), views=_FUSED_VIEW),
    "fused_indexed": Block(fused_indexed, _FUSED, (None, None, 0), operands=(MASK,), views=_FUSED_VIEW),
    "fused_swiglu": Block(fused_swiglu, ((E, 2 * F), (F, E)), (None, 0), views=((0, 1, 2),)),
}
