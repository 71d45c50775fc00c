"""A stage of one program for all stages: its ticks as a loop over micro-batches, its equal layers as a loop in that.

What such a program keeps lies in stacks, one place a tick, and on TPUs the compiler lays them out by their shape and
puts as many as there is room for in the cores' own memory. So neither a layer alone nor fewer ticks tell what all take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from uniap_jax.core.equal_body import EqualBody
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.vjp import is_float
from uniap_jax.profiler.piece import Placed, compile_piece, halves, piece_of
from uniap_jax.profiler.programs import Case, Direction, pin


def compile_ticks(body: EqualBody, strategy: Strategy, mesh: Mesh, *, layers: int, ticks: int) -> Direction:
    """All ticks forward, then all back: `(params, operands, reads, cotangents, sums) -> (writes, sums, gradients)`.

    Args:
        body: one of the equal layers.
        strategy: of all of them.
        mesh: of a stage.
        layers: of a stage.
        ticks: of a pass; as many micro-batches are read, one a tick.
    """
    piece = piece_of([Case(graph=body.graph, layer=body.layer, strategy=strategy, mesh=mesh)])
    half, chain = halves(piece, stay=False), _of_writes(body)
    moving = [i for i, read in enumerate(piece.reads) if is_float(read.shape)]
    passed = [i for i, out in enumerate(chain) if out is not None]
    common = [i for i in moving if chain[i] is None]

    def pinned(values: Sequence[Any], places: Sequence[Placed]) -> list[Any]:
        return [pin(x, mesh, p.spec) for x, p in zip(values, places, strict=True)]

    def program(params: Any, operands: Any, reads: Any, cotangents: Any, sums: Any) -> Any:
        def forward(_: None, read: Any) -> Any:
            def one(held: Any, own: Any) -> Any:
                found = half.ahead([*own, *operands, *held])
                outs = pinned(found[: len(piece.writes)], piece.writes)
                after = [x if out is None else outs[out] for x, out in zip(held, chain, strict=True)]
                return after, found[len(piece.writes) :]

            left, kept = lax.scan(one, list(read), params)
            return None, ([left[i] for i in passed], kept)

        def backward(totals: Any, past: Any) -> Any:
            def one(carry: Any, own: Any) -> Any:
                after, shared, totals = carry
                place, weights, kept = own
                flat = [*weights, *operands]
                grads, into = half.behind([flat[i] for i in half.inputs], kept, after)
                totals = [_added(t, g, place) for t, g in zip(totals, pinned(grads, piece.sums), strict=True)]
                back = dict(zip(moving, pinned(into, piece.moving), strict=True))
                before = [_sum([back[i] for i in moving if chain[i] == w], x) for w, x in enumerate(after)]
                shared = [x + back[i] for i, x in zip(common, shared, strict=True)]
                return (before, shared, totals), None

            kept, after = past
            zeros = [jnp.zeros(piece.reads[i].shape.shape, piece.reads[i].shape.dtype) for i in common]
            every = jnp.arange(layers), params, kept
            (before, shared, totals), _ = lax.scan(one, (list(after), zeros, totals), every, reverse=True)
            return totals, [*before, *shared]

        _, (outs, kept) = lax.scan(forward, None, reads)
        totals, into = lax.scan(backward, list(sums), (kept, cotangents), reverse=True)
        return [*outs, *totals, *into]

    reads, writes = ([x.stacked(ticks) for x in group] for group in (piece.reads, piece.writes))
    params, sums = ([x.stacked(layers) for x in group] for group in (piece.params, piece.sums))
    given = [params, piece.operands, reads, writes, sums]
    outs = [x.spec for x in (*(reads[i] for i in passed), *sums, *writes, *(reads[i] for i in common))]
    return compile_piece(piece, program, given, outs, None, donate=(4,))


def _of_writes(body: EqualBody) -> list[int | None]:
    """The chain, told by the place among what the layer writes that has a gradient."""
    smooth = [i for i, a in enumerate(body.layer.jaxpr.out_avals) if is_float(a)]
    return [smooth.index(out) if out in smooth else None for out in body.chain]


def _added(total: Any, grad: Any, place: Any) -> Any:
    """In the place of one layer."""
    sums = lax.dynamic_index_in_dim(total, place, 0, keepdims=False) + grad.astype(total.dtype)
    return lax.dynamic_update_index_in_dim(total, sums, place, 0)


def _sum(values: Sequence[Any], like: Any) -> Any:
    return sum(values[1:], values[0]) if values else jnp.zeros_like(like)
