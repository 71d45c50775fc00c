"""A covering array: few combinations of settings in which every pair of values occurs together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Setting = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(setting: Mapping[str, Any]) -> set[Pair]:
    """Every pair of values in one combination."""
    return set(itertools.combinations(sorted(setting.items()), 2))


def combinations(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Setting], bool]) -> list[Setting]:
    """The full product without what is not allowed."""
    product = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [s for s in product if allowed(s)]


def cover(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Setting], bool]) -> list[Setting]:
    """Combinations that together hold every pair that any allowed combination holds.

    Greedy: each takes the most pairs that are still missing, the first in the order of the product where several do.
    """
    everything = combinations(factors, allowed)
    missing: set[Pair] = set().union(*(pairs_of(s) for s in everything))
    chosen: list[Setting] = []
    while missing:
        best = max(everything, key=lambda s: len(pairs_of(s) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen
