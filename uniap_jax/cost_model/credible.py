"""Numbers of a profile that no device of the cluster could reach are set apart."""

from __future__ import annotations

from collections.abc import Mapping

from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Key, LayerCost
from uniap_jax.core.strategy import parse_strategy

CLOCKED = ("measured", "compiled")
SLACK = 0.95
"""A clock may be a little off; published peaks are not exceeded by more."""


def credible(entries: Mapping[Key, LayerCost], describer: Describer) -> tuple[dict[Key, LayerCost], tuple[str, ...]]:
    """Entries that respect the devices' peak rate, and a note on those that do not.

    A layer cannot take less time than its operations at the peak. On CPUs the peak is assumed, not published, and
    nothing is set apart.

    Args:
        entries: of a profile.
        describer: of the same graph; knows the operations and the rates.
    """
    graph, cluster = describer.graph, describer.cluster
    if cluster.platform == "cpu":
        return dict(entries), ()
    layers = {s: graph.layers[group[0]] for s, group in graph.unique.items()}
    kept: dict[Key, LayerCost] = {}
    refused: list[str] = []
    for key, cost in entries.items():
        layer = layers.get(key.signature)
        if layer is not None and cost.origin in CLOCKED:
            strategy = parse_strategy(key.strategy)
            fused = strategy.num_devices == cluster.num_devices
            parts = describer.parts(layer, strategy, samples=key.samples, fused=fused)
            least_s = parts.flops_s * cluster.matmul_efficiency
            if cost.time_s + cost.sync_s < SLACK * least_s:
                refused.append(
                    f"{layer.name} under {key.strategy} with {key.samples} samples: {cost.time_s + cost.sync_s:.3g} s, "
                    f"but its operations take {least_s:.3g} s at the peak rate"
                )
                continue
        kept[key] = cost
    if not refused:
        return kept, ()
    return kept, (f"{len(refused)} entries of the profile are faster than possible and not used; {refused[0]}.",)
