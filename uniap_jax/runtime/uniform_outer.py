"""Layers before and after the run: on all devices, the stages serving as one more way to split the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.sharding import LayerSharding, assign_axes
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.loss import layer_function
from uniap_jax.runtime.programs import is_differentiable, is_key
from uniap_jax.runtime.uniform_pass import STAGE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterLayers:
    """Consecutive layers outside the pipeline.

    Attributes:
        graph: as one micro-batch sees it.
        mesh: (stage, x0, x1, ...).
        layers: in trace order.
        shardings: of each, without the stage axis.
        strategies: of each.
    """

    graph: LayerGraph
    mesh: Mesh
    layers: tuple[Layer, ...]
    shardings: tuple[LayerSharding, ...]
    strategies: tuple[Strategy, ...]

    @property
    def params(self) -> tuple[int, ...]:
        """Positions of the parameters they read, each once, differentiable ones only."""
        found = dict.fromkeys(p for layer in self.layers for p in layer.params)
        return tuple(p for p in found if is_differentiable(self.graph.params[p].dtype))

    def run(self, params: Mapping[int, Any], operands: Mapping[int, Any], values: Mapping[int, Any]) -> dict[int, Any]:
        """Values after the layers.

        Args:
            params: by position in the graph.
            operands: by position in the graph.
            values: what earlier layers wrote, by position in the graph.
        """
        known = dict(values)
        for layer, sharding, strategy in zip(self.layers, self.shardings, self.strategies, strict=True):
            function = layer_function(layer, self._widened(layer, sharding, strategy), strategy.keep, self.mesh)
            chosen = [params[p] for p in layer.params], [operands[o] for o in layer.operands]
            written = function(*chosen, [known[v] for v in layer.reads])
            known.update(zip(layer.writes, written, strict=True))
        return known

    def _widened(self, layer: Layer, sharding: LayerSharding, strategy: Strategy) -> LayerSharding:
        """The layer's layout with the stage axis among its batch axes."""

        def widen(value: Value, spec: PartitionSpec) -> PartitionSpec:
            return with_stage_rows(value, spec, strategy, int(self.mesh.shape[STAGE]))

        graph = self.graph
        return LayerSharding(
            params=sharding.params,
            stored=sharding.stored,
            grads=sharding.grads,
            optimizer=sharding.optimizer,
            gathered=sharding.gathered,
            operands=tuple(widen(graph.operands[i], s) for i, s in zip(layer.operands, sharding.operands, strict=True)),
            reads=tuple(widen(graph.values[i], s) for i, s in zip(layer.reads, sharding.reads, strict=True)),
            writes=tuple(widen(graph.values[i], s) for i, s in zip(layer.writes, sharding.writes, strict=True)),
        )


def with_stage_rows(value: Value, spec: PartitionSpec, strategy: Strategy, num_stages: int) -> PartitionSpec:
    """A batch layout that splits rows over the stages as well, where they divide."""
    dim = value.batch_dim
    if dim is None or value.shape[dim] % (strategy.batch_ways * num_stages):
        return spec
    axes = assign_axes(strategy, strategy.num_devices)
    return PartitionSpec(*([None] * dim), (*axes.batch, STAGE))


def with_stage_dim(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    """A layout between steps that is split over the stages too: the largest dimension that divides, unsplit first."""
    entries = [spec[d] if d < len(spec) else None for d in range(len(shape))]
    names = [(e,) if isinstance(e, str) else tuple(e or ()) for e in entries]
    local = list(shape)
    for d, axes in enumerate(names):
        for axis in axes:
            local[d] //= sizes[axis]
    fits = [d for d in range(len(shape)) if local[d] and local[d] % sizes[STAGE] == 0]
    if not fits:
        return spec
    best = max(fits, key=lambda d: (not names[d], local[d], -d))
    names[best] = (*names[best], STAGE)
    return PartitionSpec(*[n or None for n in names])


def micro_operands(graph: LayerGraph, state: Sequence[Any], rows: Mapping[int, Any], index: Any) -> dict[int, Any]:
    """Operands of one micro-batch, by position.

    Args:
        graph: as one micro-batch sees it.
        state: state operands.
        rows: leaves of the batch, [c, B/c, ...].
        index: of the micro-batch.
    """

    def one(kind: str, leaf: int) -> Any:
        if kind == "state":
            return state[leaf]
        return index if kind == "index" else lax.dynamic_index_in_dim(rows[leaf], index, 0, keepdims=False)

    return {i: one(o.kind, o.leaf) for i, o in enumerate(graph.operands)}


def constrain_all(arrays: Sequence[Any], mesh: Mesh, specs: Sequence[PartitionSpec]) -> list[Any]:
    """Pins a list of arrays."""
    return [
        x if is_key(x.dtype) else lax.with_sharding_constraint(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, specs, strict=True)
    ]
