"""Values that earlier layers make once per step, made again where a loop over layers reads them.

A cast of stacked parameters ahead of the loop may be cut into another layer than the loop. What the loop runs over must
be made once per step, not once per micro-batch, so its equations join the loop's layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jax_compat import Literal, Var, fresh_like
from uniap_jax.core.jaxprs import close, inline_into, live_eqns, open_jaxpr, signature


def with_static_reads(graph: LayerGraph, layer: Layer) -> Layer:
    """The layer without those of its inputs that depend on neither batch nor activations: it makes them itself."""
    if not any(is_static(graph, v) for v in layer.reads):
        return layer
    return _Join(graph).layer(layer)


def is_static(graph: LayerGraph, value: int) -> bool:
    """Whether a value depends on parameters and state alone."""
    producer = graph.layers[graph.producer[value]]
    jaxpr = open_jaxpr(producer.jaxpr)
    atom = jaxpr.outvars[producer.writes.index(value)]
    if isinstance(atom, Literal):
        return True
    _, free = live_eqns(jaxpr.eqns, [atom])
    p, o = len(producer.params), len(producer.operands)
    for i, var in enumerate(jaxpr.invars[p:]):
        if var not in free:
            continue
        if i < o and graph.operands[producer.operands[i]].kind != "state":
            return False
        if i >= o and not is_static(graph, producer.reads[i - o]):
            return False
    return True


class _Join:
    """Equations of several layers over common inputs."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._params: dict[int, Var] = {}
        self._operands: dict[int, Var] = {}
        self._reads: dict[int, Var] = {}
        self._made: dict[int, Any] = {}
        self._eqns: list[Any] = []

    def layer(self, layer: Layer) -> Layer:
        """A layer with its static inputs made inside."""
        outs = inline_into(layer.jaxpr, self._inputs(layer), self._eqns, {})
        params, operands, reads = dict(self._params), dict(self._operands), dict(self._reads)
        jaxpr = close([*params.values(), *operands.values(), *reads.values()], outs, self._eqns)
        return replace(
            layer,
            jaxpr=jaxpr,
            params=tuple(params),
            operands=tuple(operands),
            reads=tuple(reads),
            signature=f"{signature(jaxpr)}-{len(params)}-{len(operands)}",
        )

    def _inputs(self, layer: Layer) -> list[Any]:
        invars = iter(open_jaxpr(layer.jaxpr).invars)
        params = [self._params.setdefault(p, fresh_like(next(invars))) for p in layer.params]
        operands = [self._operands.setdefault(o, fresh_like(next(invars))) for o in layer.operands]
        return [*params, *operands, *(self._value(v, next(invars)) for v in layer.reads)]

    def _value(self, value: int, var: Var) -> Any:
        if not is_static(self._graph, value):
            return self._reads.setdefault(value, fresh_like(var))
        if value not in self._made:
            producer = self._graph.layers[self._graph.producer[value]]
            jaxpr = open_jaxpr(producer.jaxpr)
            atom = jaxpr.outvars[producer.writes.index(value)]
            eqns, free = live_eqns(jaxpr.eqns, [atom])
            inputs = self._needed(producer, free)
            cone = close(list(inputs), [atom], eqns)
            (self._made[value],) = inline_into(cone, list(inputs.values()), self._eqns, {})
        return self._made[value]

    def _needed(self, layer: Layer, free: set[Var]) -> dict[Var, Any]:
        """Inputs of a layer that a computation reads, as they are here."""
        p, o = len(layer.params), len(layer.operands)
        found: dict[Var, Any] = {}
        for i, var in enumerate(open_jaxpr(layer.jaxpr).invars):
            if var not in free:
                continue
            if i < p:
                found[var] = self._params.setdefault(layer.params[i], fresh_like(var))
            elif i < p + o:
                found[var] = self._operands.setdefault(layer.operands[i - p], fresh_like(var))
            else:
                found[var] = self._value(layer.reads[i - p - o], var)
        return found
