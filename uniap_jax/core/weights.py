"""Bytes of a layer's parameters on one device under a strategy, and what of them is moved before it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from uniap_jax.core.dim_edges import expert_split
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.sharding import axis_sizes, layer_sharding, layer_splits, shard_bytes
from uniap_jax.core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamBytes:
    """Bytes of a layer's parameters on one device, by use.

    Attributes:
        used: as the layer computes with them, gathered over fsdp.
        stored: between steps.
        grads: accumulated gradients.
        full_grads: gradients before they are scattered.
        shared_grads: of `full_grads`, those that expert ways do not split.
        count: number of parameters.
        exchanged: of each parameter whose parts the tensor ways exchange before it is used, as it is used.
        regathered: of each whose gradient they gather, for it is stored whole: as it is used, on all of them.
    """

    used: float
    stored: float
    grads: float
    full_grads: float
    shared_grads: float
    count: int
    exchanged: tuple[float, ...] = ()
    regathered: tuple[float, ...] = ()

    @property
    def gathered(self) -> float:
        """Parameters put together from fsdp ways for their use."""
        return self.used if self.used > self.stored else 0.0

    @property
    def copied(self) -> float:
        """Parameters that are computed with in another layout than that of the state."""
        return sum(self.exchanged) + sum(self.regathered)


def param_bytes(graph: LayerGraph, layer: Layer, strategy: Strategy) -> ParamBytes:
    """Bytes of a layer's parameters on one device.

    Raises:
        StrategyError: the strategy is illegal for this layer.
    """
    where, split = layer_sharding(graph, layer, strategy), layer_splits(graph, layer, strategy).tensor
    sizes = dict(axis_sizes(strategy.num_devices))
    values = [graph.params[p] for p in layer.params]
    copies = {
        i: values[i].nbytes * math.prod(p.padded / p.size for p in split.pads if p.param == i) / strategy.tensor
        for i in sorted(split.moved)
    }

    def total(specs: Any) -> float:
        return float(sum(shard_bytes(v, s, sizes) for v, s in zip(values, specs, strict=True)))

    experts = expert_split(layer, strategy.expert).params
    used = total(where.params)
    own = sum(shard_bytes(v, s, sizes) for v, s, d in zip(values, where.params, experts, strict=True) if d is not None)
    return ParamBytes(
        used=used,
        stored=total(where.stored),
        grads=total(where.grads),
        full_grads=used,
        shared_grads=used - own,
        count=len(values),
        exchanged=tuple(n for i, n in copies.items() if split.stored[i] is not None),
        regathered=tuple(n for i, n in copies.items() if split.stored[i] is None),
    )
