"""Whether gradients of different parameters meet in the update, as where they are clipped by their common norm."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jaxprs import flatten, variables


def gradients_meet(graph: LayerGraph) -> bool:
    """Whether a state leaf comes out of gradients of several parameters: then all are known before it is.

    An update where none does can use each gradient up as soon as it is known.

    Args:
        graph: of the step.
    """
    tape = flatten(graph.step.update)
    first = len(tape.invars) - len(graph.params)
    reads: dict[Any, int] = {v: 1 << i for i, v in enumerate(tape.invars[first:])}  # as bits, one a parameter
    for eqn in tape.eqns:
        met = reduce(or_, (reads.get(v, 0) for v in variables(eqn.invars)), 0)
        reads.update(dict.fromkeys(eqn.outvars, met))
    leaves = [v for v, leaf in zip(tape.outvars, graph.step.output_leaf, strict=True) if leaf is not None]
    return any(reads.get(v, 0).bit_count() > 1 for v in variables(leaves))
