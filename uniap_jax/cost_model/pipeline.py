"""What a pipeline does to the costs of its layers: micro-batches in flight, shared cores, working memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import Candidate
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.strategy import Strategy

FloatArray = NDArray[np.float64]


def flights(candidate: Candidate, stage: int) -> int:
    """Micro-batches whose kept values a stage holds at its worst: 1F1B min(P - i, c), GPipe c, one stage one."""
    if candidate.num_stages == 1:
        return 1
    if candidate.schedule == "gpipe":
        return candidate.num_microbatches
    return min(candidate.num_stages - stage, candidate.num_microbatches)


def turns_at_once(candidate: Candidate, stage: int) -> bool:
    """Whether a stage runs each backward right after its forward, both in one program: as `Schedule.turns_at_once`."""
    last = candidate.num_stages > 1 and stage + 1 == candidate.num_stages
    return last and (candidate.schedule == "one_f_one_b" or candidate.num_microbatches == 1)


def holds_as_one(candidate: Candidate, stage: int, strategy: Strategy, cost: LayerCost) -> bool:
    """Whether a layer is charged as there; where only inputs are kept, two programs hold the same unless asked."""
    return turns_at_once(candidate, stage) and (strategy.keep != "inputs" or cost.turned is not None)


def busy_factor(candidate: Candidate, slowdown: float) -> float:
    """Time of a stage in this pipeline over its time when all stages are busy.

    On shared cores a stage is faster while others wait. Of P stages P·c/(P + c - 1) are busy on average; between alone
    (1/slowdown) and all busy (1) the time is taken as linear in their number.
    """
    stages, pieces = candidate.num_stages, candidate.num_microbatches
    if stages == 1 or slowdown <= 1.0:
        return 1.0
    busy = stages * pieces / (stages + pieces - 1)
    return (1.0 + (slowdown - 1.0) * (busy - 1.0) / (stages - 1)) / slowdown


def working_share(transient: FloatArray, graph: LayerGraph, candidate: Candidate) -> FloatArray:
    """[layers, strategies] bytes of working memory that each layer carries.

    Working memory is that of the largest layer, not the sum, but tables add. Layers that repeat carry
    1 / (layers per stage) of their own; a layer of its own kind carries what exceeds the largest of those.
    """
    repeated = [u for group in graph.unique.values() if len(group) > 1 for u in group]
    if not repeated:
        repeated = [max(range(len(graph.layers)), key=lambda u: float(transient[u].max()))]
    base: FloatArray = transient[repeated].max(axis=0)
    per_stage = max(1.0, len(repeated) / candidate.num_stages)
    shares: FloatArray = np.maximum(transient - base[None, :], 0.0)
    shares[repeated] = transient[repeated] / per_stage
    return shares
