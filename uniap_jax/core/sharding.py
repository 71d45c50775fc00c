"""What a strategy does to a layer's arrays. The profiler measures it, the cost model prices it, the runtime runs it.

A stage's sub-mesh has axes of prime size, `x0`, `x1`, ..., largest factor first. The data ways of a layer take a
prefix of the axes, then come its fsdp, expert, context and tensor ways; so the batch is split over a prefix in every
layer, and two neighbours that split only the batch never swap axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core import dims
from uniap_jax.core.dim_edges import ExpertSplit, SequenceSplit, expert_split, sequence_split
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.strategy import DEGREES, Strategy, prime_factors


def axis_sizes(num_devices: int) -> tuple[tuple[str, int], ...]:
    """Axes of a sub-mesh: name and prime size; 12 -> (("x0", 3), ("x1", 2), ("x2", 2))."""
    return tuple((f"x{i}", p) for i, p in enumerate(prime_factors(num_devices)))


def make_mesh(devices: list) -> Mesh:  # type: ignore[type-arg]
    """The sub-mesh of a stage; one axis `x0` of size 1 where there is one device. Axes are Auto."""
    sizes = [p for _, p in axis_sizes(len(devices))] or [1]
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), tuple(f"x{i}" for i in range(len(sizes))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Names of the mesh axes that each kind of split takes."""

    data: tuple[str, ...]
    fsdp: tuple[str, ...]
    expert: tuple[str, ...]
    context: tuple[str, ...]
    tensor: tuple[str, ...]

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes over which the batch is split."""
        return self.data + self.fsdp + self.expert


def assign_axes(strategy: Strategy, num_devices: int) -> Axes:
    """Lays a strategy on a sub-mesh of `num_devices`.

    Raises:
        StrategyError: the degrees do not multiply to the number of devices or split a prime axis.
    """
    sizes = axis_sizes(num_devices)
    if strategy.num_devices != num_devices:
        raise StrategyError(
            f"strategy {strategy} uses {strategy.num_devices} devices but the stage has {num_devices}; "
            f"the degrees must multiply to {num_devices}",
            strategy=str(strategy),
            num_devices=num_devices,
        )
    names, position, taken = [n for n, _ in sizes], 0, []
    for degree in (getattr(strategy, name) for name in DEGREES):
        start, product = position, 1
        while product < degree and position < len(sizes):
            product *= sizes[position][1]
            position += 1
        if product != degree:
            raise StrategyError(
                f"strategy {strategy} cannot be laid on {num_devices} devices with axes "
                f"{'x'.join(str(p) for _, p in sizes)}: degree {degree} is not a product of neighbouring axes",
                strategy=str(strategy),
                num_devices=num_devices,
            )
        taken.append(tuple(names[start:position]))
    return Axes(**dict(zip(DEGREES, taken, strict=True)))


def sequence_axes(strategy: Strategy, axes: Axes) -> tuple[str, ...]:
    """Axes over which the sequence is split where it crosses to another layer."""
    return axes.context + (axes.tensor if strategy.sequence else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """How every array at the edge of a layer is laid out under one strategy.

    Attributes:
        params: of each parameter as the layer computes with it (gathered over fsdp axes under ZeRO 1 and 2).
        stored: of each parameter between steps.
        grads: of each gradient as it is accumulated.
        optimizer: of optimizer state of the same shape as the parameter.
        operands: of each operand.
        reads: of each value read.
        writes: of each value written.
        gathered: of each parameter for a program that computes the layer as it was traced: as `params`, but whole
            where `rewrite_layout.laid_out` exchanges parts of it.
    """

    params: tuple[PartitionSpec, ...]
    stored: tuple[PartitionSpec, ...]
    grads: tuple[PartitionSpec, ...]
    optimizer: tuple[PartitionSpec, ...]
    operands: tuple[PartitionSpec, ...]
    reads: tuple[PartitionSpec, ...]
    writes: tuple[PartitionSpec, ...]
    gathered: tuple[PartitionSpec, ...]


def activation_spec(
    value: Value, batch: tuple[str, ...], sequence: tuple[str, ...] = (), dim: int | None = None
) -> PartitionSpec:
    """Splits a value's batch dimension over the batch axes and its dimension `dim` over the sequence axes."""
    placed = {d: names for d, names in ((dim, sequence), (value.batch_dim, batch)) if d is not None and names}
    return PartitionSpec(*[placed.get(d) for d in range(max(placed, default=-1) + 1)])


def _with_fsdp(
    value: Value,
    spec: tuple[tuple[str, ...], ...],
    fsdp: tuple[str, ...],
    sizes: dict[str, int],
    free: Sequence[bool],
) -> PartitionSpec:
    """Adds the fsdp axes to the largest free dimension that still divides; unchanged where none does."""
    best, best_size, ways = None, 0, math.prod(sizes[n] for n in fsdp)
    for dim, names in enumerate(spec):
        local = value.shape[dim] // math.prod(sizes[n] for n in names)
        if free[dim] and local % ways == 0 and local > best_size:
            best, best_size = dim, local
    placed = [n + fsdp if d == best else n for d, n in enumerate(spec)]
    return PartitionSpec(*[n or None for n in placed])


def layer_sharding(graph: LayerGraph, layer: Layer, strategy: Strategy) -> LayerSharding:
    """Layout of a layer's arrays on a sub-mesh of `strategy.num_devices` devices.

    Raises:
        StrategyError: the strategy is illegal for this layer; says which dimension and which sizes would work.
    """
    axes = assign_axes(strategy, strategy.num_devices)
    sizes = dict(axis_sizes(strategy.num_devices))
    values = graph.layer_values(layer)
    for value in (*values, *(graph.values[i] for i in layer.writes)):
        if value.batch_dim is not None and value.shape[value.batch_dim] % strategy.batch_ways:
            size = value.shape[value.batch_dim]
            raise StrategyError(
                f"batch dimension {value.batch_dim} of {value.name or layer.name} has size {size} "
                f"({graph.num_microbatches} micro-batches of global batch {graph.batch_size}), which does not "
                f"divide by {_batch_degrees(strategy)}={strategy.batch_ways} of strategy {strategy}; "
                f"use a divisor of {size}",
                strategy=str(strategy),
                dimension=value.batch_dim,
                size=size,
                degree=strategy.batch_ways,
            )
    splits = layer_splits(graph, layer, strategy)
    param_specs = [
        tuple(
            axes.expert if d == splits.expert.params[i] else axes.tensor if d == splits.tensor.stored[i] else ()
            for d in range(len(graph.params[p].shape))
        )
        for i, p in enumerate(layer.params)
    ]
    plain = tuple(PartitionSpec(*[n or None for n in s]) for s in param_specs)
    sharded = tuple(
        _with_fsdp(graph.params[p], s, axes.fsdp, sizes, [layer.may(i, d, "fsdp") for d in range(len(s))])
        if axes.fsdp
        else q
        for i, (p, s, q) in enumerate(zip(layer.params, param_specs, plain, strict=True))
    )
    along = sequence_axes(strategy, axes)

    def spec(position: int, dim: int | None) -> PartitionSpec:
        return activation_spec(graph.values[position], axes.batch, along, dim)

    zero = strategy.zero if strategy.fsdp > 1 else 0
    return LayerSharding(
        params=plain,
        stored=sharded if zero == 3 else plain,
        grads=sharded if zero >= 2 else plain,
        optimizer=sharded if zero >= 1 else plain,
        operands=tuple(activation_spec(graph.operands[i], axes.batch) for i in layer.operands),
        reads=tuple(map(spec, layer.reads, splits.sequence.reads)),
        writes=tuple(map(spec, layer.writes, splits.sequence.writes)),
        gathered=tuple(PartitionSpec() if i in splits.tensor.moved else q for i, q in enumerate(plain)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What the ways of a strategy split in one layer.

    Attributes:
        tensor: what the tensor ways split inside it.
        expert: what the expert ways do.
        sequence: what is split along positions at its edges.
        along_tensor: whether the tensor ways split the sequence as well.
    """

    tensor: dims.TensorSplit
    expert: ExpertSplit
    sequence: SequenceSplit
    along_tensor: bool = False


def layer_splits(graph: LayerGraph, layer: Layer, strategy: Strategy) -> Splits:
    """Chooses what each kind of ways splits.

    Where nothing can be split over the tensor axes (`tensor.reason`) every device of them does the same work, or its
    share of the sequence.

    Raises:
        StrategyError: the layer has no experts or no sequence for ways that ask for one; says what would work.
    """
    expert = expert_split(layer, strategy.expert)
    if expert.reason:
        raise StrategyError(
            f"{layer.name}: {expert.reason} (strategy {strategy})", strategy=str(strategy), degree=strategy.expert
        )
    tensor = dims.tensor_split(layer, strategy.tensor, apart=expert.classes)
    sequence = SequenceSplit(reads=(None,) * len(layer.reads), writes=(None,) * len(layer.writes))
    if strategy.sequence_ways > 1:
        sequence = sequence_split(
            dims.longer_layer(layer, tensor.pads),
            strategy.sequence_ways,
            reads=[graph.values[v].batch_dim for v in layer.reads],
            writes=[graph.values[v].batch_dim for v in layer.writes],
            tensor=tensor if strategy.sequence else None,
        )
    if sequence.reason:
        raise StrategyError(
            f"{layer.name}: {sequence.reason} (strategy {strategy})",
            strategy=str(strategy),
            degree=strategy.sequence_ways,
        )
    return Splits(tensor=tensor, expert=expert, sequence=sequence, along_tensor=strategy.sequence)


def _batch_degrees(strategy: Strategy) -> str:
    return "×".join(n for n in ("data", "fsdp", "expert") if n != "expert" or strategy.expert > 1)


def shard_bytes(value: Value, spec: PartitionSpec, sizes: dict[str, int]) -> int:
    """Bytes of one device's shard of a value."""
    ways = 1
    for names in spec:
        for name in (names,) if isinstance(names, str) else names or ():
            ways *= sizes[name]
    return value.nbytes // ways


def named(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """A spec on a sub-mesh."""
    return NamedSharding(mesh, spec)
