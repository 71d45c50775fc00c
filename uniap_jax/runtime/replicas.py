"""Gradients of replicated parameters, reduced once per step instead of once per micro-batch.

Where a layer's parameters are replicated over data axes, each replica is given its rows of a micro-batch as a
micro-batch of its own: the same layer, traced for that many rows, mapped over a leading dimension that lies on the
data axes. A parameter's gradient then has that dimension too, stays on its device, and is added up there over the
micro-batches; the sum over the replicas is taken at the end. It is exact whenever micro-batches are, for the same
reason. Results that no layer reads, the loss among them, meet then too: with a single number summed over devices in
every micro-batch XLA's GPU compiler leaves all gradients of weights to the end of the loop's body, and what they are
computed from stays alive, even where a stage recomputes (198 MiB instead of 109, docs/benchmarks/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from uniap_jax.core.errors import TraceError
from uniap_jax.core.graph import LayerGraph, Operand
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.rewrite_layout import laid_out
from uniap_jax.core.sharding import LayerSharding, assign_axes
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.loss import combine, layer_function
from uniap_jax.runtime.programs import constrain


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The data axes of a layer.

    Attributes:
        count: devices along them.
        axes: their names.
    """

    count: int
    axes: tuple[str, ...]

    def lead(self, spec: PartitionSpec) -> PartitionSpec:
        """A layout with the replicas as first dimension."""
        return PartitionSpec(self.axes, *self.inside(spec))

    def inside(self, spec: PartitionSpec) -> PartitionSpec:
        """A layout as one replica sees it."""
        groups = ((names,) if isinstance(names, str) else tuple(names or ()) for names in spec)
        return PartitionSpec(*(tuple(n for n in names if n not in self.axes) or None for names in groups))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """What is mapped over replicas on one stage.

    Attributes:
        layers: those that are, and over what.
        params: those whose gradients are kept apart: read by such layers of equal ways alone.
        results: values of the step without rows that are kept apart: written by such layers and read by none.
        graphs: by the number of replicas, the graph as one of them sees it.
    """

    layers: Mapping[int, Ways]
    params: Mapping[int, Ways]
    results: Mapping[int, Ways]
    graphs: Mapping[int, LayerGraph]

    def shape(self, param: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a gradient as it is accumulated."""
        return (self.params[param].count, *shape) if param in self.params else shape

    def spec(self, param: int, spec: PartitionSpec) -> PartitionSpec:
        """Layout of a gradient as it is accumulated."""
        return self.params[param].lead(spec) if param in self.params else spec

    def view(self, param: int, array: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
        """Each replica's view of a parameter that is stored as `spec`; nothing is copied."""
        if param not in self.params:
            return array
        ways = self.params[param]
        return constrain(jnp.broadcast_to(array[None], (ways.count, *array.shape)), mesh, ways.lead(spec))

    def summed(self, param: int, total: Any) -> Any:
        """A gradient from its accumulator."""
        return total.sum(axis=0) if param in self.params else total

    def result_shape(self, value: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a micro-batch's result as it leaves its stage."""
        return (self.results[value].count, *shape) if value in self.results else shape

    def result_spec(self, value: int, spec: PartitionSpec) -> PartitionSpec:
        """Layout of a micro-batch's result as it leaves its stage."""
        return self.results[value].lead(spec) if value in self.results else spec

    def result(self, graph: LayerGraph, value: int, array: Any) -> Any:
        """A micro-batch's result from those of its replicas."""
        return _joined(graph, value, array) if value in self.results else array

    def whole(self, graph: LayerGraph, value: int, pieces: Any) -> Any:
        """The whole batch's result from those of its micro-batches: [micro-batches, ...]."""
        how = graph.reductions[graph.results.index(value)]
        return combine(jax.vmap(partial(self.result, graph, value))(pieces), how, graph.values[value].batch_dim)


def replicas_of(layout: Layout, stage: int) -> Replicas:
    """The replicas of a stage: none where every gradient is reduced with its micro-batch.

    Args:
        layout: graph under its plan.
        stage: which.
    """
    plan, graph = layout.plan, layout.graph
    mine = plan.stage_layers(stage)
    wanted = [
        i for i in mine if plan.num_microbatches > 1 and reduces_once(graph, graph.layers[i], plan.layers[i].strategy)
    ]
    counts = {plan.layers[i].strategy.data for i in wanted}
    graphs = {n: seen for n in counts if (seen := _as_seen(graph, plan.num_microbatches * n)) is not None}
    layers = {i: _ways(plan.layers[i].strategy) for i in wanted if plan.layers[i].strategy.data in graphs}
    readers: dict[int, set[Ways | None]] = {}
    for i in mine:
        for p in graph.layers[i].params:
            readers.setdefault(p, set()).add(layers.get(i))
    apart = {p: ways for p, found in readers.items() if len(found) == 1 and (ways := next(iter(found))) is not None}
    read = {v for layer in graph.layers for v in layer.reads}
    ends = [v for v in graph.results if v not in read and graph.values[v].batch_dim is None]
    results = {v: layers[graph.producer[v]] for v in ends if graph.producer[v] in layers}
    return Replicas(layers=layers, params=apart, results=results, graphs=graphs)


def _ways(strategy: Strategy) -> Ways:
    return Ways(count=strategy.data, axes=assign_axes(strategy, strategy.num_devices).data)


def _as_seen(graph: LayerGraph, count: int) -> LayerGraph | None:
    """The graph at batch B/count; None where the step does other things with so few examples."""
    try:
        return graph.microbatch(count)
    except TraceError:
        return None


def run_stage(
    layout: Layout,
    replicas: Replicas,
    layers: Sequence[int],
    params: Mapping[int, Any],
    operands: Mapping[int, Any],
    values: Mapping[int, Any],
) -> dict[int, Any]:
    """Values after some layers of one micro-batch, in trace order; results that are kept apart have a row per replica.

    Args:
        layout: graph under its plan.
        replicas: of the stage.
        layers: indices, all of one stage.
        params: by position in the graph, from `Replicas.view`.
        operands: by position in the graph.
        values: what earlier layers wrote, by position in the graph.
    """
    known = dict(values)
    for index in layers:
        layer = layout.graph.layers[index]
        run = _mapped if index in replicas.layers else _whole
        inputs = (
            [params[p] for p in layer.params],
            [operands[o] for o in layer.operands],
            [known[v] for v in layer.reads],
        )
        known.update(zip(layer.writes, run(layout, replicas, index, *inputs), strict=True))
    return known


def _whole(layout: Layout, _: Replicas, index: int, params: Any, operands: Any, reads: Any) -> list[Any]:
    """A layer on the whole micro-batch."""
    choice = layout.plan.layers[index]
    mesh = layout.meshes[choice.stage]
    layer = laid_out(layout.graph, layout.graph.layers[index], choice.strategy, mesh)
    return layer_function(layer, layout.layers[index], choice.strategy.keep, mesh)(params, operands, reads)


def _mapped(layout: Layout, replicas: Replicas, index: int, params: Any, operands: Any, reads: Any) -> list[Any]:
    """A layer on each replica's rows."""
    graph, choice, ways = layout.graph, layout.plan.layers[index], replicas.layers[index]
    mesh, layer = layout.meshes[choice.stage], replicas.graphs[ways.count].layers[index]
    run = layer_function(layer, _seen(ways, layout.layers[index]), choice.strategy.keep, mesh)
    kinds = [graph.operands[o] for o in layer.operands]
    axes = (
        [0 if p in replicas.params else None for p in layer.params],
        [None if o.kind == "state" else 0 for o in kinds],
        [0] * len(layer.reads),
    )
    written = jax.vmap(run, in_axes=axes, spmd_axis_name=ways.axes)(
        params,
        [_apart(ways, o, x, mesh) for o, x in zip(kinds, operands, strict=True)],
        [_cut(ways, x, graph.values[v].batch_dim, mesh) for v, x in zip(layer.reads, reads, strict=True)],
    )
    outs = zip(layer.writes, written, layout.layers[index].writes, strict=True)
    return [
        constrain(x if v in replicas.results else _joined(graph, v, x), mesh, replicas.result_spec(v, spec))
        for v, x, spec in outs
    ]


def _seen(ways: Ways, sharding: LayerSharding) -> LayerSharding:
    """A layer's layouts as one replica sees them."""
    fields = ("params", "operands", "reads", "writes")
    return replace(sharding, **{f: tuple(ways.inside(s) for s in getattr(sharding, f)) for f in fields})


def _apart(ways: Ways, operand: Operand, array: Any, mesh: Mesh) -> Any:
    """An operand with a row per replica: of the batch its rows, of the micro-batch's number its own."""
    if operand.kind == "batch":
        return _cut(ways, array, operand.batch_dim or 0, mesh)
    return array if operand.kind == "state" else array * ways.count + jnp.arange(ways.count, dtype=array.dtype)


def _cut(ways: Ways, array: Any, dim: int | None, mesh: Mesh) -> Any:
    assert dim is not None, "checked when the replicas were made"
    shape = array.shape
    rows = array.reshape(*shape[:dim], ways.count, shape[dim] // ways.count, *shape[dim + 1 :])
    left = [PartitionSpec.UNCONSTRAINED] * len(shape)
    return constrain(jnp.moveaxis(rows, dim, 0), mesh, PartitionSpec(ways.axes, *left))


def _joined(graph: LayerGraph, value: int, array: Any) -> Any:
    """A micro-batch's value from those of its replicas."""
    batch_dim = graph.values[value].batch_dim
    if batch_dim is not None:
        return combine(array, "concat", batch_dim)
    return combine(array, graph.reductions[graph.results.index(value)], None)
