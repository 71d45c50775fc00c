"""One turn of a loop over layers as a layer of its own, described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uniap_jax.core.described import Describer
from uniap_jax.core.equal_body import turn_alone
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.sharding import axis_sizes, layer_sharding, shard_bytes
from uniap_jax.core.strategy import Strategy
from uniap_jax.cost_model.hoisted import cast_shares
from uniap_jax.cost_model.numbers import Numbers

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShares:
    """What each device holds of a turn's weights, as a share of the whole, said for each input of the loop."""

    stored: tuple[float, ...]
    grads: tuple[float, ...]
    optimizer: tuple[float, ...]


class TurnCosts:
    """One turn of a loop as a layer of its own, described.

    Args:
        model: whose cluster and links are used.
        layer: of the graph, that holds the loop.

    Attributes:
        graph: with the turn as its only layer.
        layer: the turn.
        cast: bytes of the weights' narrower copies over those of the weights.
    """

    def __init__(self, model: Numbers, layer: int) -> None:
        self.graph = turn_alone(model.graph, layer)
        self.layer = self.graph.layers[0]
        self._describer = Describer(self.graph, model.cluster, model.links)
        sizes = [self.graph.params[p].nbytes for p in self.layer.params]
        copies = sum(share * n for share, n in zip(cast_shares(self.layer), sizes, strict=True))
        self.cast = copies / max(sum(sizes), 1)

    def cost(self, strategy: Strategy, *, samples: int) -> LayerCost | None:
        """Of one micro-batch; None where the strategy is illegal."""
        try:
            return self._describer.cost(self.layer, strategy, samples=samples, fused=False)
        except StrategyError:
            return None

    def shares(self, strategy: Strategy, count: int) -> TurnShares:
        """What a device holds of the weights, of all of them together, said for each of the loop's `count` inputs."""
        found, sizes = layer_sharding(self.graph, self.layer, strategy), dict(axis_sizes(strategy.num_devices))
        values = [self.graph.params[p] for p in self.layer.params]
        total = max(sum(v.nbytes for v in values), 1)

        def share(specs: Sequence[PartitionSpec]) -> tuple[float, ...]:
            return (sum(shard_bytes(v, s, sizes) for v, s in zip(values, specs, strict=True)) / total,) * count

        return TurnShares(stored=share(found.stored), grads=share(found.grads), optimizer=share(found.optimizer))
