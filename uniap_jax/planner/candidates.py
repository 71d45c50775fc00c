"""Which candidates are searched, and tables under a pinned strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.errors import InfeasibleError, OptionError, StrategyError
from uniap_jax.core.plan import SCHEDULES
from uniap_jax.core.strategy import Strategy

Auto = Literal["auto"]


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
    if schedule == "auto":
        return _automatic(left)
    if schedule not in SCHEDULES:
        raise OptionError(
            f"schedule={schedule!r} is unknown; use 'auto', {', '.join(map(repr, SCHEDULES))}", schedule=schedule,
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
            else f"it must divide the global batch {costs.batch_size}"
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
    if not left:
        have = sorted({c.num_stages for c in candidates})
        raise OptionError(
            f"engine={engine!r} needs {only} stages, the candidates have {', '.join(map(str, have))}",
            engine=engine,
            possible=tuple(have),
        )
    return left


def _automatic(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for c in candidates:
        groups.setdefault((c.num_stages, c.num_microbatches), []).append(c)
    picked = []
    for (stages, _), group in groups.items():
        wanted = "one_f_one_b" if stages > 1 else "gpipe"
        picked.append(next((c for c in group if c.schedule == wanted), group[0]))
    return tuple(sorted(picked))


def changed_degrees(a: Strategy, b: Strategy) -> int:
    """How many of data, fsdp, tensor, ZeRO stage and what is kept differ; ZeRO counts only where fsdp is used."""
    zero = [s.zero if s.fsdp > 1 else 0 for s in (a, b)]
    return sum(
        (a.data != b.data, a.fsdp != b.fsdp, a.tensor != b.tensor, zero[0] != zero[1], a.keep != b.keep)
    )


def nearest(tables: CostTables, layer: int, wanted: Strategy) -> int | None:
    """Position of the legal strategy of a layer with the fewest changed degrees, or None without a legal one."""
    legal = np.flatnonzero(tables.allowed[layer]).tolist()
    return min(legal, key=lambda k: (changed_degrees(tables.strategies[k], wanted), k), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Tables restricted to one strategy wherever it is legal and to the nearest legal one elsewhere.

    Attributes:
        strategy: the one wanted.
        inner: builds the full tables.
    """

    strategy: Strategy
    inner: Callable[[Candidate], CostTables]

    def __call__(self, candidate: Candidate) -> CostTables:
        """The candidate's tables with one strategy per layer."""
        tables = self.inner(candidate)
        allowed = np.zeros(tables.allowed.shape, dtype=np.bool_)
        for u in range(tables.num_layers):
            k = nearest(tables, u, self.strategy)
            if k is not None:
                allowed[u, k] = True
        return replace(tables, allowed=allowed)


def check_pin(costs: CostModel, candidates: tuple[Candidate, ...], strategy: Strategy) -> tuple[Candidate, ...]:
    """Candidates whose stages have as many devices as the strategy.

    Raises:
        StrategyError: no candidate has; names the sizes that exist.
    """
    fitting = tuple(c for c in candidates if costs.num_devices // c.num_stages == strategy.num_devices)
    if not fitting:
        sizes = sorted({costs.num_devices // c.num_stages for c in candidates})
        raise StrategyError(
            f"strategy {strategy} is for {strategy.num_devices} devices per stage, but the {costs.num_devices} devices "
            f"here make stages of {', '.join(map(str, sizes))}; choose degrees that multiply to one of these",
            strategy=str(strategy),
            num_devices=costs.num_devices,
            possible=tuple(sizes),
        )
    return fitting
