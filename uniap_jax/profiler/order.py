"""Which entries a profile has, and which of them are worth measuring first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from uniap_jax.core.described import Describer, cut_batch, divisors
from uniap_jax.core.errors import ProfileError, StrategyError
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.profile import Key, LayerCost
from uniap_jax.core.searched import same_as, searched_strategies
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy

LIGHT = 0.02
"""Share of the model's time under which a kind of layer is measured last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One layer, strategy and micro-batch.

    Attributes:
        layer: first of its kind, index in the base graph.
        strategy: on the stage's sub-mesh.
        num_stages: P.
        num_microbatches: c.
        key: in the profile.
    """

    layer: int
    strategy: Strategy
    num_stages: int
    num_microbatches: int
    key: Key


def choices(wanted: int | Sequence[int] | str, possible: Sequence[int], name: str) -> tuple[int, ...]:
    """The numbers asked for, "auto" meaning all that are possible.

    Raises:
        ProfileError: a number that is not possible; lists those that are.
    """
    if isinstance(wanted, str):
        if wanted != "auto":
            raise ProfileError(f'{name}={wanted!r}: give "auto" or numbers among {list(possible)}', field=name)
        return tuple(possible)
    asked = (wanted,) if isinstance(wanted, int) else tuple(wanted)
    wrong = [n for n in asked if n not in possible]
    if wrong:
        raise ProfileError(f"{name}={wrong[0]} is not possible; use one of {list(possible)}", field=name)
    return asked


def entries(
    describer: Describer,
    *,
    num_stages: int | Sequence[int] | str,
    num_microbatches: int | Sequence[int] | str,
    keeps: tuple[str, ...],
) -> tuple[Entry, ...]:
    """Every legal entry, once per kind of layer."""
    graph, devices = describer.graph, describer.cluster.num_devices
    possible = [p for p in divisors(devices) if p <= len(graph.layers)]
    stages = choices(num_stages, possible, "num_stages")
    pieces = choices(num_microbatches, describer.splits, "num_microbatches")
    found = []
    for c in pieces:
        cut = cut_batch(graph, c)
        for p in stages:
            for strategy in searched_strategies(graph, devices // p, keeps=keeps).listed:
                for signature, group in graph.unique.items():
                    if _legal(cut, graph.layers[group[0]], strategy):
                        key = Key(signature=signature, strategy=str(strategy), samples=graph.batch_size // c)
                        found.append(
                            Entry(layer=group[0], strategy=strategy, num_stages=p, num_microbatches=c, key=key)
                        )
    return tuple(found)


def _legal(graph: LayerGraph, layer: Layer, strategy: Strategy) -> bool:
    try:
        layer_sharding(graph, layer, strategy)
        return same_as(graph, layer, strategy) is None
    except StrategyError:
        return False


def by_value(found: Sequence[Entry], describer: Describer) -> list[Entry]:
    """Entries in the order they are worth measuring.

    First the plain strategies (all data, all fsdp, all tensor) of the layers that take most of the time, for few and
    for many stages, at the micro-batch such a pipeline would use; then recompute; then other batch sizes; then
    mixtures; those that need more memory than there is last. Entries of one rank come layer by layer, the dearest
    first.
    """
    weight = _weights(describer)
    total = sum(weight.values())
    pieces: dict[tuple[int, Strategy], list[int]] = {}
    for e in found:
        pieces.setdefault((e.layer, e.strategy), []).append(e.num_microbatches)

    def order(e: Entry) -> tuple[bool, tuple[int, int, int, float]]:
        return too_large(e, describer), _rank(e, pieces[e.layer, e.strategy], weight[e.layer] / total)

    return sorted(found, key=order)


def described(entry: Entry, describer: Describer) -> LayerCost:
    """What an entry costs by its description."""
    layer, fused = describer.graph.layers[entry.layer], entry.num_stages == 1
    return describer.cost(layer, entry.strategy, samples=entry.key.samples, fused=fused)


def too_large(entry: Entry, describer: Describer) -> bool:
    """Whether a layer needs more memory than a device has, as described."""
    told = described(entry, describer)
    return told.kept_bytes + told.transient_bytes > describer.cluster.memory_bytes


def _weights(describer: Describer) -> dict[int, float]:
    """Described seconds of all layers of each kind, on one device."""
    graph, found = describer.graph, {}
    for group in graph.unique.values():
        cost = describer.cost(graph.layers[group[0]], Strategy(), samples=graph.batch_size, fused=True)
        found[group[0]] = len(group) * max(cost.time_s, 1e-12)
    return found


def _rank(entry: Entry, legal: Sequence[int], weight: float) -> tuple[int, int, int, float]:
    """(group, which plain strategy, stages, minus the weight): smaller is measured earlier."""
    s, stages, ways = entry.strategy, entry.num_stages, entry.strategy.num_devices
    degrees = [s.data, s.fsdp, s.tensor]
    plain = degrees.index(ways) if ways in degrees and s.zero == 3 and not s.sequence else len(degrees)
    usual = entry.num_microbatches == _nearest(legal, 1 if stages == 1 else 2 * stages)
    other = entry.num_microbatches == _nearest(legal, 4 if stages == 1 else stages // 2)
    if plain < 3 and s.keep == "all" and usual:
        group = 0
    elif plain == 0 and usual:
        group = 1
    elif plain < 3 and s.keep == "all" and other:
        group = 2
    else:
        group = 3
    light = 4 if weight < LIGHT else 0  # a layer that takes next to nothing is measured when all others are
    return light + group, plain, stages, -weight


def _nearest(legal: Sequence[int], wanted: int) -> int:
    return min(legal, key=lambda c: (abs(c - wanted), c))
