"""Which candidates are searched, and tables under a pinned strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import InfeasibleError, OptionError
from uniap_jax.core.plan import SCHEDULES
from uniap_jax.core.strategy import DEGREES, Strategy, storage

Auto = Literal["auto"]

SAME_FOR_ALL: dict[str, Callable[[int], Strategy]] = {
    "data_parallel": lambda n: Strategy(data=n),
    "fsdp": lambda n: Strategy(fsdp=n),
    "tensor": lambda n: Strategy(tensor=n),
}
"""Baselines with one strategy for every layer."""


def select_candidates(
    costs: CostModel, *, num_stages: int | Auto, num_microbatches: int | Auto, schedule: str
) -> tuple[Candidate, ...]:
    """Candidates that match what the user fixed, in order.

    `schedule="auto"` is 1F1B with several stages (never more memory than GPipe, same time) and GPipe with one.

    Raises:
        OptionError: no candidate has a fixed value; names the values that exist.
        InfeasibleError: the cost model has no candidate at all.
    """
    every = tuple(sorted(costs.candidates()))
    if not every:
        raise InfeasibleError(
            f"the cost model has no candidate for {costs.num_devices} devices and global batch {costs.batch_size}",
            num_devices=costs.num_devices,
            batch_size=costs.batch_size,
        )
    left = _matching(every, "num_stages", num_stages, costs)
    left = _matching(left, "num_microbatches", num_microbatches, costs)
    refused = [costs.refusal(c) for c in left] if num_microbatches != "auto" else []
    if refused and all(refused):
        raise OptionError(refused[0], num_microbatches=num_microbatches)
    if schedule == "auto":
        return _automatic(left)
    if schedule not in SCHEDULES:
        raise OptionError(
            f"schedule={schedule!r} is unknown; use 'auto', {', '.join(map(repr, SCHEDULES))}",
            schedule=schedule,
            possible=("auto", *SCHEDULES),
        )
    # with one stage a schedule is of no effect, so a pinned one must not rule the stage out
    chosen = tuple(c for c in left if c.schedule == schedule)
    lone = tuple(c for c in _automatic(left) if c.num_stages == 1 and not any(d.num_stages == 1 for d in chosen))
    if not chosen and not lone:
        have = sorted({c.schedule for c in left})
        raise OptionError(
            f"schedule={schedule!r} is not possible here; use one of {', '.join(have)}",
            schedule=schedule,
            possible=tuple(have),
        )
    return tuple(sorted((*chosen, *lone)))


def _matching(
    candidates: tuple[Candidate, ...], name: str, wanted: int | Auto, costs: CostModel
) -> tuple[Candidate, ...]:
    if wanted == "auto":
        return candidates
    found = tuple(c for c in candidates if getattr(c, name) == wanted)
    if not found:
        have = sorted({int(getattr(c, name)) for c in candidates})
        why = (
            f"it must divide the {costs.num_devices} devices and not exceed the {len(costs.layer_names)} layers"
            if name == "num_stages"
            else costs.split_reason or f"it must divide the global batch {costs.batch_size}"
        )
        raise OptionError(
            f"{name}={wanted!r} is not possible: {why}; use one of {', '.join(map(str, have))}",
            **{name: wanted, "possible": tuple(have)},
        )
    return found


def restrict(candidates: tuple[Candidate, ...], engine: str, num_devices: int) -> tuple[Candidate, ...]:
    """Candidates that an engine may choose from.

    Raises:
        OptionError: none is left.
    """
    only = {"pipeline_only": num_devices, "intra_only": 1, "data_parallel": 1, "fsdp": 1, "tensor": 1}.get(engine)
    left = tuple(c for c in candidates if only is None or c.num_stages == only)
    if engine in SAME_FOR_ALL:
        alike = storage(SAME_FOR_ALL[engine](num_devices))
        left = tuple(c for c in left if c.storage in ("", alike))
    if not left:
        have = sorted({c.num_stages for c in candidates})
        raise OptionError(
            f"engine={engine!r} needs {only} stages, the candidates have {', '.join(map(str, have))}",
            engine=engine,
            possible=tuple(have),
        )
    return left


def _automatic(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    groups: dict[tuple[int, int, str], list[Candidate]] = {}
    for c in candidates:
        groups.setdefault((c.num_stages, c.num_microbatches, c.storage), []).append(c)
    picked = []
    for (stages, *_), group in groups.items():
        wanted = "one_f_one_b" if stages > 1 else "gpipe"
        picked.append(next((c for c in group if c.schedule == wanted), group[0]))
    return tuple(sorted(picked))


def changed_degrees(a: Strategy, b: Strategy) -> int:
    """How many degrees, ZeRO stage, sequence and what is kept differ; ZeRO counts only where fsdp is used."""
    zero = [s.zero if s.fsdp > 1 else 0 for s in (a, b)]
    degrees = sum(bool(getattr(a, name) != getattr(b, name)) for name in DEGREES)
    return degrees + sum((zero[0] != zero[1], a.keep != b.keep, a.sequence != b.sequence))


def nearest(tables: CostTables | EqualTables, layer: int, wanted: Strategy) -> int | None:
    """Position of the legal strategy of a layer with the fewest changed degrees, or None without a legal one.

    Of several with as few changes, the one whose degrees are nearest.
    """
    legal = np.flatnonzero(tables.allowed[layer]).tolist()

    def distance(k: int) -> tuple[int, float, int]:
        s = tables.strategies[k]
        ratios = [getattr(s, name) / getattr(wanted, name) for name in DEGREES]
        return changed_degrees(s, wanted), sum(abs(math.log2(r)) for r in ratios), k

    return min(legal, key=distance, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Tables restricted to one strategy wherever it is legal and to the nearest legal one elsewhere.

    Attributes:
        strategy: the one wanted; where its degrees do not fill a stage, more data parallelism does.
        num_devices: of the cluster.
        inner: builds the full tables.
    """

    strategy: Strategy
    num_devices: int
    inner: Callable[[Candidate], CostTables]

    def __call__(self, candidate: Candidate) -> CostTables:
        """The candidate's tables with one strategy per layer."""
        tables = self.inner(candidate)
        every = self.inner(replace(candidate, storage="")) if candidate.storage else tables
        wanted = filled(self.strategy, self.num_devices // candidate.num_stages)
        allowed = np.zeros(tables.allowed.shape, dtype=np.bool_)
        for u in range(tables.num_layers):
            k = nearest(every, u, wanted)
            if k is not None:
                allowed[u, k] = tables.allowed[u, k]
        return replace(tables, allowed=allowed)


def filled(strategy: Strategy, num_devices: int) -> Strategy:
    """The strategy with its data degree raised to fill a stage: tensor=2 on 8 devices is data=4,tensor=2.

    The degrees stay where they fill the stage or cannot. Without fsdp ways a ZeRO stage means nothing and is 3.
    """
    strategy = strategy if strategy.fsdp > 1 else replace(strategy, zero=3)
    if num_devices % strategy.num_devices:
        return strategy
    return replace(strategy, data=strategy.data * (num_devices // strategy.num_devices))
