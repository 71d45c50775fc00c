"""Which ways may split which dimensions of parameters, where the user says so; by default any may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from uniap_jax.core.graph import Allowed, Layer, LayerGraph

ROLES = ("fsdp", "expert", "tensor")
"""Ways that split parameters."""


def restricted(graph: LayerGraph, allowed: Mapping[int, Allowed]) -> LayerGraph:
    """The graph with dimensions of parameters kept for some ways.

    Args:
        graph: of any number of micro-batches; those made from it are restricted too.
        allowed: for parameters (by position), for each dimension the ways that may split it, None for any.
    """
    return replace(
        graph,
        layers=tuple(_restricted(layer, allowed) for layer in graph.layers),
        microbatch=lambda count: restricted(graph.microbatch(count), allowed),
    )


def _restricted(layer: Layer, allowed: Mapping[int, Allowed]) -> Layer:
    """Layers that may be split differently are not equal."""
    own = tuple(allowed.get(p, ()) for p in layer.params)
    if not any(own):
        return layer
    told = ";".join(",".join("*" if d is None else "+".join(sorted(d)) for d in dims) for dims in own)
    return replace(layer, allowed=own, signature=f"{layer.signature}|{told}" if layer.signature else "")
