"""What one more equal layer adds to the memory of the one-program step: compiled with one layer and with two.

Peak memory is affine in the number of equal layers, and its slope is not the sum of what a layer keeps and of its
gradients: the compiler's order of work decides how much of both is alive at once. The window is the step without its
optimizer: forward, backward, and gradients accumulated over the micro-batches in a loop as the runtime writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.vjp import is_float, layer_avals
from uniap_jax.profiler.programs import Case, chain_function, compile_on, float_writes, pin, vjp


def successor(graph: LayerGraph, index: int) -> dict[int, int] | None:
    """How an equal layer reads this one: {position among its reads: position among this one's writes}.

    None where no equal layer follows at once.
    """
    layer = graph.layers[index]
    if index + 1 == len(graph.layers) or graph.layers[index + 1].signature != layer.signature:
        return None
    following = graph.layers[index + 1]
    links = {
        i: layer.writes.index(v) for i, v in enumerate(following.reads) if v in layer.writes and v in following.reads
    }
    return links or None


def links_of(case: Case) -> dict[int, int] | None:
    """How a layer of this kind reads one before it; None where no two follow each other."""
    followed = (successor(case.graph, i) for i in case.graph.unique[case.layer.signature])
    return next((found for found in followed if found is not None), None)


def window_bytes(case: Case, num_microbatches: int) -> tuple[float, float]:
    """(what a second equal layer adds beside its state, what the first needs beyond that), bytes per device.

    The first is of kept values, gradients and accumulators, the second is working memory. Where no equal layer follows
    this one the first is 0 and the second all that it needs.

    Args:
        case: the layer at the size of one micro-batch, on the devices of the only stage.
        num_microbatches: of the step.
    """
    links = links_of(case)
    one = _peak(case, 1, num_microbatches, links or {})
    if links is None:
        return 0.0, one
    slope = max(0.0, _peak(case, 2, num_microbatches, links) - one)
    return slope, max(0.0, one - slope)


def _peak(case: Case, number: int, pieces: int, links: dict[int, int]) -> float:
    """Temporaries and gradients of a window of `number` layers, without the gradients of what it reads."""
    where, run = case.sharding(), chain_function(case, number, links)
    sums, specs = case.sums(number)
    params, operands, reads = layer_avals(case.layer)
    writes = [i for i, a in enumerate(case.layer.jaxpr.out_avals) if is_float(a)]
    outer = [case.graph.operands[o].kind == "batch" for o in case.layer.operands]

    def chain(weights: Sequence[Any], operands: Any, reads: Any) -> list[Any]:
        outs = run(weights, operands, reads)
        return [outs[i] for i in writes]

    def gradients(weights: Any, operands: Any, reads: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
        _, pull = vjp(chain, case.view(weights), operands, reads)
        grads, into = pull(cotangents)
        return [pin(g, case.mesh, s) for g, s in zip(grads, specs, strict=True)], into

    def once(weights: Any, operands: Any, reads: Any, cotangents: Any) -> Any:
        grads, into = gradients(weights, operands, reads, cotangents)
        return [*grads, *into]

    def accumulated(weights: Any, operands: Any, reads: Any, cotangents: Any) -> Any:
        still = [o for o, b in zip(operands, outer, strict=True) if not b]

        def body(total: list[Any], piece: Any) -> tuple[list[Any], list[Any]]:
            batch, fixed = iter(piece[0]), iter(still)
            here = [next(batch) if b else next(fixed) for b in outer]
            grads, into = gradients(weights, here, piece[1], piece[2])
            added = [t + g.astype(t.dtype) / pieces for t, g in zip(total, grads, strict=True)]
            return [pin(a, case.mesh, s) for a, s in zip(added, specs, strict=True)], into

        zeros = [pin(jnp.zeros(a.shape, a.dtype), case.mesh, s) for a, s in zip(sums, specs, strict=True)]
        moving = [o for o, b in zip(operands, outer, strict=True) if b]
        total, into = lax.scan(body, zeros, (moving, reads, cotangents))
        return [*total, *into]

    stacked = (lambda a: jax.ShapeDtypeStruct((pieces, *a.shape), a.dtype)) if pieces > 1 else (lambda a: a)
    spread = (lambda s: PartitionSpec(None, *s)) if pieces > 1 else (lambda s: s)
    float_specs = [s for s, a in zip(where.writes, case.layer.jaxpr.out_avals, strict=True) if is_float(a)]
    shapes = (
        params * number,
        [stacked(a) if b else a for a, b in zip(operands, outer, strict=True)],
        [stacked(a) for a in reads],
        [stacked(a) for a in float_writes(case)],
    )
    layouts = (
        where.stored * number,
        [spread(s) if b else s for s, b in zip(where.operands, outer, strict=True)],
        [spread(s) for s in where.reads],
        [spread(s) for s in float_specs],
    )
    into = [spread(s) for s, a in zip(where.reads, reads, strict=True) if is_float(a)]
    body = accumulated if pieces > 1 else once
    program = compile_on(case, body, shapes, layouts, [*specs, *into], None)
    if not program.memory:
        return 0.0
    leaving = sum(
        math.prod(NamedSharding(case.mesh, s).shard_shape(stacked(a).shape)) * a.dtype.itemsize
        for s, a in zip(into, (a for a in reads if is_float(a)), strict=True)
    )
    return float(max(0.0, program.memory["temporaries"] + program.memory["outputs"] - leaving))
