"""What is to be planned: the cost model, the candidates, and what the user fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner.candidates import Pinned, filled
from uniap_jax.planner.pins import Pin, PinnedLayers, Pinning, pin_notes, read_pins, refuse_impossible
from uniap_jax.planner.search import Priced

TablesOf = Callable[[Candidate], CostTables]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Cost model, candidates and what the user fixed.

    Attributes:
        costs: with every fixed strategy listed.
        candidates: to choose from.
        strategy: of all layers where legal.
        pins: of some layers.
    """

    costs: CostModel
    candidates: tuple[Candidate, ...]
    strategy: Strategy | None
    pins: tuple[Pin, ...]

    @property
    def fixed(self) -> bool:
        """Whether strategies or stages were fixed by hand, so that baselines are no comparison."""
        return self.strategy is not None or bool(self.pins)

    def tables_of(self, change: Callable[[CostTables], CostTables] = lambda tables: tables) -> TablesOf:
        """The tables with what is fixed, changed before that."""

        def full(candidate: Candidate) -> CostTables:
            return change(self.costs.tables(candidate))

        inner: TablesOf = full
        if self.strategy is not None:
            inner = Pinned(strategy=self.strategy, num_devices=self.costs.num_devices, inner=full)
        if self.pins:
            return PinnedLayers(pins=self.pins, num_devices=self.costs.num_devices, inner=inner, full=full)
        return inner


def problem_of(
    costs: CostModel, candidates: tuple[Candidate, ...], *, strategy: Strategy | None, pin: Pinning
) -> Problem:
    """The problem with its pins read and checked.

    Raises:
        OptionError: a pin that matches no layer, or that no candidate can keep.
    """
    pins = read_pins(pin, costs.layer_names)
    for wanted in dict.fromkeys([strategy, *(p.strategy for p in pins)]):
        costs = costs if wanted is None else costs.with_strategy(wanted)
    problem = Problem(costs=costs, candidates=candidates, strategy=strategy, pins=pins)
    tables_of = problem.tables_of()
    if isinstance(tables_of, PinnedLayers):
        refuse_impossible(tables_of, candidates, costs.layer_names)
    return problem


def fixed_notes(problem: Problem, best: Priced) -> list[str]:
    """What the certificate says of what was fixed by hand."""
    found = [] if problem.strategy is None else _strategy_notes(problem.costs, best, problem.strategy)
    return found + pin_notes(problem.pins)


def _strategy_notes(costs: CostModel, best: Priced, strategy: Strategy) -> list[str]:
    chosen = costs.tables(best.candidate).strategies
    wanted = filled(strategy, costs.num_devices // best.candidate.num_stages)
    others: dict[Strategy, list[str]] = {}
    for name, k in zip(costs.layer_names, best.assignment.strategy, strict=True):
        if chosen[k] != wanted:
            others.setdefault(chosen[k], []).append(name)
    notes = [f"the strategy is pinned to {wanted}; optimal means over what is left"]
    notes += [
        f"{len(names)} of {len(costs.layer_names)} layers may not take it and run {other}: "
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for other, names in others.items()
    ]
    return notes
