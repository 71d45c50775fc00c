"""Which leaves of the training state belong to which parameter, how many bytes they are, and what a device holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.sharding import axis_sizes, layer_sharding, shard_bytes
from uniap_jax.core.strategy import Strategy

_KEYS = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of the whole (unsharded) training state.

    Attributes:
        param: of each parameter as stored between steps; 0 where it is computed from the state (a cast).
        work: of each parameter as the loss reads it.
        optimizer: of the optimizer state that has each parameter's shape, stored as its `optimizer` layout says.
        other: of every other leaf; small, and on every device.
    """

    param: tuple[float, ...]
    work: tuple[float, ...]
    optimizer: tuple[float, ...]
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What each device holds of each of a layer's parameters, as a share of the whole."""

    used: tuple[float, ...]
    stored: tuple[float, ...]
    grads: tuple[float, ...]
    optimizer: tuple[float, ...]


def layer_shares(graph: LayerGraph, layer: Layer, strategy: Strategy) -> Shares:
    """The shares of a layer under a strategy.

    Raises:
        StrategyError: the strategy is illegal for the layer.
    """
    found = layer_sharding(graph, layer, strategy)
    sizes = dict(axis_sizes(strategy.num_devices))
    values = [graph.params[p] for p in layer.params]

    def shares(specs: Sequence[PartitionSpec]) -> tuple[float, ...]:
        return tuple(shard_bytes(v, s, sizes) / max(v.nbytes, 1) for v, s in zip(values, specs, strict=True))

    return Shares(
        used=shares(found.params),
        stored=shares(found.stored),
        grads=shares(found.grads),
        optimizer=shares(found.optimizer),
    )


def state_bytes(graph: LayerGraph) -> StateBytes:
    """Reads the real state tree: leaves of a parameter's shape besides the parameter are its optimizer state.

    Of several parameters with that shape the one whose path ends alike is meant; frameworks repeat the parameter's
    path below `mu`, `nu` or the like.
    """
    step = graph.step
    owner = {leaf: p for p, leaf in enumerate(step.param_leaf) if leaf is not None}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for p, value in enumerate(graph.params):
        by_shape.setdefault(value.shape, []).append(p)
    optimizer, other = [0.0] * len(graph.params), 0.0
    used: dict[int, int] = {}
    for leaf, value in enumerate(step.state):
        if leaf in owner:
            continue
        same = by_shape.get(value.shape, []) if value.shape else []
        if not same:
            other += value.nbytes
            continue
        best = max(same, key=lambda p: (_common_tail(value.name, _path(graph, p)), -used.get(p, 0)))
        used[best] = used.get(best, 0) + 1
        optimizer[best] += value.nbytes
    stored = [0.0] * len(graph.params)
    for leaf, p in owner.items():
        stored[p] = float(step.state[leaf].nbytes)
    return StateBytes(
        param=tuple(stored),
        work=tuple(float(v.nbytes) for v in graph.params),
        optimizer=tuple(optimizer),
        other=other,
    )


def charged_to(layer: int, users: Sequence[int], reach: int) -> bool:
    """Whether a shared parameter is charged to a layer: once for every stage's worth of layers.

    Exact where a stage holds L/P layers; a table of layers cannot know which of them share a stage.

    Args:
        layer: one of `users`.
        users: layers that read the parameter, in order.
        reach: layers of a stage.
    """
    last: int | None = None
    for user in users:
        charged = last is None or user - last >= reach
        if user == layer:
            return charged
        last = user if charged else last
    return True


def _path(graph: LayerGraph, param: int) -> str:
    leaf = graph.step.param_leaf[param]
    return graph.params[param].name if leaf is None else graph.step.state[leaf].name


def _common_tail(a: str, b: str) -> int:
    """Keys that two paths share at their end."""
    count = 0
    for x, y in zip(reversed(_KEYS.findall(a)), reversed(_KEYS.findall(b)), strict=False):
        if x != y:
            break
        count += 1
    return count
