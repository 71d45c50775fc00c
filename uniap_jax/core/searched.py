"""Which strategies the search lists, and which it leaves out because another does the same or better.

Left out for every layer:

- ZeRO 1: ZeRO 2 sends the same gradients (a scatter rather than a sum) and holds fewer of them.
- ZeRO 2, and a split sequence, beside both data and fsdp ways: a hybrid is there for the gathers of ZeRO 3 to stay
  among near devices, and ZeRO 2 gathers once a step.
- in a model with experts, so that what they add stays few: ZeRO 2 with a split sequence where all is kept, and data
  beside fsdp ways with tensor ways or recomputation.
- experts beside fsdp or tensor ways, and context ways: legal when asked for.

Left out for one layer: what it does not allow. Fsdp ways that find nothing to split are not measured, for data ways
do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.sharding import layer_sharding, layer_splits
from uniap_jax.core.strategy import Strategy, enumerate_strategies, used_degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Strategies of one sub-mesh.

    Attributes:
        listed: in the search.
        left_out: (how many, why) of those that are not.
    """

    listed: tuple[Strategy, ...]
    left_out: tuple[tuple[int, str], ...]


def searched_strategies(graph: LayerGraph, num_devices: int, *, keeps: tuple[str, ...]) -> Searched:
    """The strategies that a search over `graph` lists on a sub-mesh of `num_devices`.

    Args:
        graph: whose layers say which kinds of split there are at all.
        num_devices: of the sub-mesh.
        keeps: what the forward may keep for the backward.
    """
    kinds = [graph.layers[group[0]] for group in graph.unique.values()]
    full = all_strategies(num_devices, keeps=keeps)
    possible = {e: any(_splits(graph, layer, e) for layer in kinds) for e in {_edges(s) for s in full}}
    experts = any(possible[e] for e in possible if e.expert > 1)
    why: tuple[tuple[str, Callable[[Strategy], bool]], ...] = (
        ("no layer has the sequence or the experts that they split", lambda s: not possible[_edges(s)]),
        ("ZeRO 1 does what ZeRO 2 does and holds more", lambda s: s.zero == 1),
        (
            "ZeRO 2 or a split sequence beside both data and fsdp ways",
            lambda s: s.data > 1 and s.fsdp > 1 and (s.zero == 2 or s.sequence),
        ),
        (
            "ZeRO 2 with a split sequence and all kept, where experts can be split",
            lambda s: experts and s.zero == 2 and s.sequence and s.keep == "all",
        ),
        (
            "data beside fsdp ways, with tensor ways or recomputation, where experts can be split",
            lambda s: experts and s.data > 1 and s.fsdp > 1 and (s.tensor > 1 or s.keep != "all"),
        ),
        ("experts beside fsdp or tensor ways", lambda s: s.expert > 1 and s.fsdp * s.tensor > 1),
    )
    listed, left_out = list(full), []
    for reason, dropped in why:
        count = len(listed)
        listed = [s for s in listed if not dropped(s)]
        left_out.append((count - len(listed), reason))
    return Searched(listed=tuple(listed), left_out=tuple((n, r) for n, r in left_out if n))


def all_strategies(num_devices: int, *, keeps: tuple[str, ...]) -> tuple[Strategy, ...]:
    """Every ZeRO stage, sequences split or whole, and experts; context ways apart."""
    return enumerate_strategies(
        num_devices,
        keeps=keeps,
        zeros=(1, 2, 3),
        degrees=("data", "fsdp", "expert", "tensor"),
        sequence=(False, True),
    )


def _edges(s: Strategy) -> Strategy:
    """What decides whether a layer has what a strategy splits: nothing, unless it splits sequence or experts."""
    return Strategy(expert=s.expert, tensor=s.tensor if s.sequence else 1, sequence=s.sequence)


def _splits(graph: LayerGraph, layer: Layer, strategy: Strategy) -> bool:
    try:
        layer_splits(graph, layer, strategy)
    except StrategyError:
        return False
    return True


def same_as(graph: LayerGraph, layer: Layer, strategy: Strategy) -> Strategy | None:
    """The strategy without fsdp ways that does the same for this layer, None where they split something.

    Raises:
        StrategyError: the strategy is illegal for this layer.
    """
    if strategy.fsdp == 1:
        return None
    plain = replace(strategy, data=strategy.data * strategy.fsdp, fsdp=1, zero=3)
    ours, theirs = layer_sharding(graph, layer, strategy), layer_sharding(graph, layer, plain)
    return plain if (ours.optimizer, ours.params) == (theirs.params, theirs.params) else None


class StrategySpace:
    """The strategies of one graph by the size of a stage's sub-mesh, each found out once.

    Args:
        graph: traced with the whole batch.
        keeps: what the forward may keep for the backward.
        wanted: strategies asked for by name: their kin are listed too, and nothing is left out as a repetition.
    """

    def __init__(self, graph: LayerGraph, keeps: tuple[str, ...], wanted: tuple[Strategy, ...] = ()) -> None:
        self._graph, self._keeps, self._wanted = graph, keeps, wanted
        self._found: dict[int, Searched] = {}
        self._same: dict[tuple[str, Strategy], Strategy] = {}

    def asking(self, wanted: Strategy) -> StrategySpace:
        """The same space with one more strategy asked for by name."""
        return StrategySpace(self._graph, self._keeps, (*self._wanted, wanted))

    def searched(self, num_devices: int) -> Searched:
        """What a search lists on a sub-mesh."""
        if num_devices not in self._found:
            self._found[num_devices] = searched_strategies(self._graph, num_devices, keeps=self._keeps)
        return self._found[num_devices]

    def strategies(self, num_devices: int) -> tuple[Strategy, ...]:
        """On a sub-mesh, those asked for by name last."""
        listed = dict.fromkeys(self.searched(num_devices).listed)
        for wanted in self._wanted:
            asked = enumerate_strategies(
                num_devices,
                keeps=(wanted.keep,),
                zeros=(wanted.zero,),
                degrees=used_degrees(wanted),
                sequence=(False, wanted.sequence),
            )
            listed |= dict.fromkeys(asked)
        return tuple(listed)

    def twin(self, layer: Layer, strategy: Strategy) -> Strategy:
        """The strategy under which a layer is measured: without fsdp ways where they find nothing to split."""
        key = (layer.signature, replace(strategy, keep="all"))
        if key not in self._same:
            self._same[key] = same_as(self._graph, layer, key[1]) or key[1]
        return replace(self._same[key], keep=strategy.keep)

    def note(self, num_devices: int) -> str:
        """How many strategies a layer has at most on a sub-mesh, and what was left out."""
        found = self.searched(num_devices)
        told = "".join(f"; {n} left out: {why}" for n, why in found.left_out)
        return f"{len(found.listed)} strategies are searched on {num_devices} devices{told}."
