"""Random bits of a micro-batch are the whole batch's, cut: dropout does not change with the number of micro-batches.

`random_bits` of shape (B/c, ...) under the same key gives other bits than the first rows of (B, ...). So every such
equation whose shape depends on the batch draws those of the whole batch's bits that are its micro-batch's rows; a key
that is split once per example is split for the whole batch, and the micro-batch takes its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from uniap_jax.core.jax_compat import Var, fresh_like, shape_of
from uniap_jax.core.jaxprs import close, flatten, inline_into, inner_jaxprs, scan_counts
from uniap_jax.core.random_rows import bits_at

CHECKPOINTS = ("remat2", "checkpoint", "remat")
DRAWN = ("random_bits", "random_split")


class CannotSlice(ValueError):
    """Random bits are drawn where the micro-batch's index cannot be handed in."""


def slice_random_bits(micro: Sequence[Any], whole: Sequence[Any], index: Var) -> list[Any]:
    """The micro-batch's equations with its random bits cut from the whole batch's.

    Args:
        micro: equations traced at batch B/c.
        whole: the same equations traced at batch B.
        index: scalar int32 variable, which micro-batch.

    Raises:
        CannotSlice: random bits that depend on the batch inside a construct that cannot take the index.
    """
    out: list[Any] = []
    for small, large in zip(micro, whole, strict=True):
        if _differ(small, large):
            _cut(small, large, index, out)
        elif _draws(small, large):
            if small.primitive.name == "scan":
                _enter_loop(small, large, index, out)
            else:
                out.append(_enter(small, large, index))
        else:
            out.append(small)
    return out


def _differ(small: Any, large: Any) -> bool:
    """Whether an equation draws, or splits a key, for the examples of the batch."""
    return small.primitive.name in DRAWN and small.params["shape"] != large.params["shape"]


def _draws(small: Any, large: Any) -> bool:
    """Whether bodies of two aligned equations hold random bits of different shapes."""
    for a, b in zip(inner_jaxprs(small), inner_jaxprs(large), strict=True):
        for x, y in zip(flatten(a).eqns, flatten(b).eqns, strict=True):
            if _differ(x, y) or _draws(x, y):
                return True
    return False


def _cut(small: Any, large: Any, index: Var, out: list[Any]) -> None:
    shape, full = small.params["shape"], large.params["shape"]
    dims = [d for d, (a, b) in enumerate(zip(shape, full, strict=True)) if a != b]
    if len(dims) != 1:
        raise CannotSlice("random bits over pairs of examples")
    (dim,) = dims

    def keys(key: Any, i: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(jax.random.split(key, full), i * shape[dim], shape[dim], dim)

    def bits(key: Any, i: Any) -> Any:
        width = small.params["bit_width"]
        return bits_at(key, i * shape[dim], shape=shape, whole=full, dim=dim, bit_width=width)

    rows = keys if small.primitive.name == "random_split" else bits

    shapes = shape_of(large.invars[0]), jax.ShapeDtypeStruct((), jnp.int32)
    outs = inline_into(jax.make_jaxpr(rows)(*shapes), [small.invars[0], index], out, {}, small.source_info)
    last = out.pop()
    assert last.outvars == outs, "the slice is the last equation"
    out.append(last.replace(outvars=small.outvars))


def _enter(small: Any, large: Any, index: Var) -> Any:
    """Rewrites the body of a checkpoint, handing the index in as its last operand."""
    if small.primitive.name not in CHECKPOINTS:
        raise CannotSlice(f"random bits inside `{small.primitive.name}`")
    body = _sliced_body(small, large, index)
    return small.replace(invars=[*small.invars, index], params={**small.params, "jaxpr": body.jaxpr})


def _sliced_body(small: Any, large: Any, index: Var) -> Any:
    """The body of a construct with its random bits cut; reads the index after its own inputs."""
    (a,), (b,) = inner_jaxprs(small), inner_jaxprs(large)
    micro, whole = flatten(a), flatten(b)
    if micro.consts:
        raise CannotSlice(f"random bits inside a `{small.primitive.name}` that closes over arrays")
    inner = fresh_like(index)
    return close([*micro.invars, inner], micro.outvars, slice_random_bits(micro.eqns, whole.eqns, inner))


def _enter_loop(small: Any, large: Any, index: Var, out: list[Any]) -> None:
    """Rewrites a scan; the index is one more value that every turn reads."""
    body = _sliced_body(small, large, index)
    first, carried, _ = scan_counts(small)
    settings = {name: small.params[name] for name in ("length", "reverse", "unroll")}

    def run(*args: Any) -> Any:
        *operands, number = args
        consts, carry, scanned = operands[:first], operands[first : first + carried], operands[first + carried :]

        def turn(carry: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = jax.core.eval_jaxpr(body.jaxpr, (), *consts, *carry, *own, number)
            return list(outs[:carried]), list(outs[carried:])

        carry, stacked = jax.lax.scan(turn, list(carry), list(scanned), **settings)
        return [*carry, *stacked]

    shapes = [shape_of(v) for v in (*small.invars, index)]
    outs = inline_into(jax.make_jaxpr(run)(*shapes), [*small.invars, index], out, {}, small.source_info)
    last = out.pop()
    if list(last.outvars) != list(outs):  # a loop whose result is one of its inputs as it came
        raise CannotSlice("random bits inside a loop whose results are not its own")
    out.append(last.replace(outvars=small.outvars))
