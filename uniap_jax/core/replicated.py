"""Which layers' gradients are summed over their data ways once per step, not with every micro-batch."""

from __future__ import annotations

from typing import Any

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jaxprs import flatten, inner_jaxprs
from uniap_jax.core.strategy import Strategy

GROUPED = frozenset({"conv_general_dilated"})
"""Operations that turn into slower ones when their parameters get a leading dimension; layers with them stay whole."""


def reduces_once(graph: LayerGraph, layer: Layer, strategy: Strategy) -> bool:
    """Whether a layer under a strategy can run replica by replica: nothing inside it is laid out over all axes."""
    splits_batch_alone = strategy.data * strategy.fsdp == strategy.num_devices
    return strategy.data > 1 and splits_batch_alone and _by_rows(graph, layer)


def _by_rows(graph: LayerGraph, layer: Layer) -> bool:
    """Whether all that a layer reads and writes has rows, but for results that nobody reads."""
    read = {v for other in graph.layers for v in other.reads}
    free = set(graph.results) - read
    values = [graph.values[v] for v in (*layer.reads, *(w for w in layer.writes if w not in free))]
    return all(v.batch_dim is not None for v in values) and not _has_grouped(layer.jaxpr)


def _has_grouped(jaxpr: Any) -> bool:
    eqns = flatten(jaxpr).eqns
    return any(e.primitive.name in GROUPED or any(map(_has_grouped, inner_jaxprs(e))) for e in eqns)
