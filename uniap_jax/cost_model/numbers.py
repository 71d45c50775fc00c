"""What a cost model says of layers on a cluster, as the tables of one program read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.machine import Cluster
from uniap_jax.core.profile import LayerCost, Links
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.weights import ParamBytes
from uniap_jax.cost_model.reshard import Bundle
from uniap_jax.cost_model.state import Shares, StateBytes


class Numbers(Protocol):
    """What the tables of one program are made from: layers, strategies and their costs on a cluster."""

    @property
    def graph(self) -> LayerGraph:
        """Of the whole batch."""
        ...

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        ...

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        ...

    @property
    def batch_size(self) -> int:
        """Global batch."""
        ...

    @property
    def links(self) -> Links:
        """Times of collectives and transfers."""
        ...

    @property
    def state(self) -> StateBytes:
        """Bytes of the whole training state."""
        ...

    @property
    def bundles(self) -> Sequence[Bundle]:
        """What layers hand to each other."""
        ...

    @property
    def dispatch_s(self) -> float:
        """Of starting one program."""
        ...

    def strategies(self, num_stages: int) -> tuple[Strategy, ...]:
        """On the sub-mesh of a stage."""
        ...

    def reason(self, layer: int, strategy: Strategy, *, num_microbatches: int = 1) -> str:
        """Why a layer may not take a strategy; "" where it may."""
        ...

    def layer_cost(self, layer: int, strategy: Strategy, *, num_microbatches: int = 1) -> LayerCost:
        """What one micro-batch of a layer costs."""
        ...

    def update_s(self, layer: Layer, strategy: Strategy) -> float:
        """Of the optimizer, once per step."""
        ...

    def shares(self, layer: Layer, strategy: Strategy) -> Shares:
        """What a device holds of a layer's parameters."""
        ...

    def weights(self, layer: Layer, strategy: Strategy) -> ParamBytes:
        """Bytes of a layer's parameters on a device."""
        ...
