"""Values in pieces: a fused projection's result stays cut into its parts as long as what follows allows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from uniap_jax.core.dim_rules import ELEMENTWISE
from uniap_jax.core.jax_compat import JaxprEqn, Literal, Var, build_jaxpr


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A value while a layer is evaluated.

    Attributes:
        arrays: the value, or its equal pieces.
        joined: the dimension that the pieces join; None for a value in one piece.
        sharded: of a parameter, the dimension that is sharded (within each piece).
        param: whether it is made of parameters alone.
    """

    arrays: tuple[Any, ...]
    joined: int | None = None
    sharded: int | None = None
    param: bool = False

    def whole(self) -> Any:
        """The value in one piece."""
        return self.arrays[0] if self.joined is None else jnp.concatenate(self.arrays, self.joined)


def evaluate(eqn: JaxprEqn, args: Sequence[Any]) -> list[jax.Array]:
    """One equation on other arguments."""
    variables = [(v, a) for v, a in zip(eqn.invars, args, strict=True) if not isinstance(v, Literal)]
    unique = dict(variables)
    closed = build_jaxpr(list(unique), list(eqn.outvars), [eqn])
    return jax.core.eval_jaxpr(closed.jaxpr, [], *unique.values())


def per_piece(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    """Results of an equation whose inputs come in pieces, None where it needs them whole."""
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, ins)


def follow(eqn: JaxprEqn, ins: Sequence[Held], out: Held) -> int | None:
    """Where the sharded dimension of a parameter goes in an equation on it; None where that is not plain."""
    first = next((h for h in ins if h.sharded is not None), None)
    if first is None or first.sharded is None:
        return None
    name, p, dim = eqn.primitive.name, eqn.params, first.sharded
    if name == "transpose":
        return int(list(p["permutation"]).index(dim))
    if name == "broadcast_in_dim":
        return int(p["broadcast_dimensions"][dim])
    if name == "reshape":
        return _reshaped(first.arrays[0].shape, out.arrays[0].shape, dim)
    same = all(h.sharded in (None, dim) for h in ins) and first.arrays[0].shape == out.arrays[0].shape
    return dim if name in ELEMENTWISE and same else None


def _reshaped(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """The dimension whose slowest part a reshaped one becomes: what comes before it keeps its size."""
    before = math.prod(old[:dim])
    for i in range(len(new)):
        if math.prod(new[:i]) == before and new[i] != 1:
            return i if new[i] % old[dim] == 0 or old[dim] % new[i] == 0 else None
    return None


def _bind(eqn: JaxprEqn, args: Sequence[Any]) -> Any:
    """The equation's operation on arrays of other sizes."""
    values = [jnp.asarray(a) for a in args]
    invars = [Var(jax.typeof(a)) for a in values]
    closed = build_jaxpr(invars, list(eqn.outvars), [eqn.replace(invars=[*invars])])
    return jax.core.eval_jaxpr(closed.jaxpr, [], *values)[0]


def _elementwise(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    cut = next(h for h in ins if h.joined is not None)
    dim, count = cut.joined, len(cut.arrays)
    if dim is None or any(h.joined not in (None, dim) for h in ins) or len(eqn.outvars) != 1:
        return None
    size = cut.arrays[0].shape[dim]

    def part(h: Held, i: int) -> Any:
        x = h.arrays[i if h.joined is not None else 0]
        if h.joined is not None or jnp.ndim(x) == 0 or x.shape[dim] == 1:
            return x
        return lax.slice_in_dim(x, i * size, (i + 1) * size, axis=dim)

    arrays = tuple(_bind(eqn, [part(h, i) for h in ins]) for i in range(count))
    return [Held(arrays=arrays, joined=dim)]


def _broadcast(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    (held, *_), where = ins, tuple(eqn.params["broadcast_dimensions"])
    assert held.joined is not None
    dim = where[held.joined]
    shape = list(eqn.params["shape"])
    shape[dim] = held.arrays[0].shape[held.joined]
    return [Held(arrays=tuple(lax.broadcast_in_dim(a, shape, where) for a in held.arrays), joined=dim)]


def _transpose(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    order = tuple(eqn.params["permutation"])
    assert ins[0].joined is not None
    return [Held(arrays=tuple(lax.transpose(a, order) for a in ins[0].arrays), joined=order.index(ins[0].joined))]


def _split(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    held = ins[0]
    assert held.joined is not None
    sizes = [a.shape[held.joined] for a in held.arrays]
    if eqn.params["axis"] != held.joined or list(map(int, eqn.params["sizes"])) != sizes:
        return None
    return [replace(held, arrays=(a,), joined=None) for a in held.arrays]


def _slice(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    held, p = ins[0], eqn.params
    dim = held.joined
    assert dim is not None
    size = held.arrays[0].shape[dim]
    start, limit = p["start_indices"][dim], p["limit_indices"][dim]
    strides = p["strides"] or (1,) * held.arrays[0].ndim
    if start % size or limit != start + size or strides[dim] != 1:
        return None
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    starts[dim], limits[dim] = 0, size
    return [Held(arrays=(lax.slice(held.arrays[start // size], starts, limits, strides),))]


def _reshape(eqn: JaxprEqn, ins: Sequence[Held]) -> list[Held] | None:
    """(pieces x n) seen as (pieces, ...): the pieces are stacked along a dimension of their own, which is whole.

    Where the joined dimension stays as it is, so do the pieces.
    """
    held, new = ins[0], tuple(eqn.params["new_sizes"])
    assert held.joined is not None
    count, before = len(held.arrays), math.prod(held.arrays[0].shape[: held.joined])
    size = held.arrays[0].shape[held.joined]
    for i, n in enumerate(new):
        if n == count * size and math.prod(new[:i]) == before:
            arrays = tuple(a.reshape(*new[:i], size, *new[i + 1 :]) for a in held.arrays)
            return [Held(arrays=arrays, joined=i)]
        if n == count and math.prod(new[:i]) == before:
            parts = [a.reshape(*new[:i], *new[i + 1 :]) for a in held.arrays]
            return [Held(arrays=(jnp.stack(parts, i),))]
    return None


_RULES = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "split": _split,
    "slice": _slice,
    "reshape": _reshape,
}
