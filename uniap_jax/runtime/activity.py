"""Which values carry gradients: those that depend on parameters and that the loss depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jax_compat import Literal
from uniap_jax.core.jaxprs import open_jaxpr, variables
from uniap_jax.runtime.programs import aval_shape, is_differentiable


def active_values(graph: LayerGraph) -> frozenset[int]:
    """Values that depend on a parameter through arithmetic that has derivatives."""
    active: set[int] = set()
    for layer in graph.layers:
        first_read = len(layer.params) + len(layer.operands)
        inner = open_jaxpr(layer.jaxpr)
        reached = set(inner.invars[: len(layer.params)])
        reached.update(v for v, r in zip(inner.invars[first_read:], layer.reads, strict=True) if r in active)
        for eqn in inner.eqns:
            if any(v in reached for v in variables(eqn.invars)):
                reached.update(v for v in eqn.outvars if is_differentiable(aval_shape(v).dtype))
        written = zip(inner.outvars, layer.writes, strict=True)
        active.update(w for v, w in written if not isinstance(v, Literal) and v in reached)
    return frozenset(active)


def wanted_reads(graph: LayerGraph, layers: Sequence[int], sought: Iterable[int]) -> frozenset[int]:
    """Values that some layers read and that reach `sought` through arithmetic that has derivatives."""
    wanted, found = set(sought), set[int]()
    for index in reversed(layers):
        found |= _read_for(graph.layers[index], wanted | found)
    return frozenset(found)


def _read_for(layer: Layer, wanted: set[int]) -> set[int]:
    inner = open_jaxpr(layer.jaxpr)
    needed = set(variables(v for v, w in zip(inner.outvars, layer.writes, strict=True) if w in wanted))
    for eqn in reversed(inner.eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in variables(eqn.invars) if is_differentiable(aval_shape(v).dtype))
    first_read = len(layer.params) + len(layer.operands)
    return {r for v, r in zip(inner.invars[first_read:], layer.reads, strict=True) if v in needed}
