"""The interval engine: one candidate of a chain, solved exactly by stage columns.

Refined in steps so that the outer search can turn to whichever candidate has the least bound: Lagrangian bound, then
columns for targets a little above the bound. A target without a plan raises the bound to the target; the first target
with a plan proves the candidate's optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from uniap_jax.core.costs import Assignment, CostTables
from uniap_jax.planner.bounds import Bound, Multipliers, Potentials, lagrangian_bound, potentials
from uniap_jax.planner.chain import Chain, chain_of
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.columns import MAX_LABELS, grow_columns
from uniap_jax.planner.infeasible import least_memory
from uniap_jax.planner.master import Network, Path, master_mip, network_of, path_of, search_paths, without_slow
from uniap_jax.planner.mip_model import solve_mip

FIRST_TARGET = 1e-3
"""First target above the bound, relative; each further one is TARGET_GROWTH times as far."""

TARGET_GROWTH = 6.0
PROBE_LABELS = 2_000
OTHER_PRICES = (0.5, 0.8, 0.93, 1.08, 1.25, 2.0)
"""Shares of the memory price under which labels are judged as well."""

ASCENT_STEPS = 40
MASTER_COLUMNS = 3_000
"""Columns above which the master is left to the path search alone."""

MASTER_TIME_S = 10.0


def assignment_of(network: Network, path: Path) -> Assignment:
    """Stages and strategies of the layers along a path of columns."""
    columns = network.columns
    stage: list[int] = []
    strategy: list[int] = []
    for i, column in enumerate(path.columns):
        inner = columns.strategies(column)
        stage += [i] * len(inner)
        strategy += inner
    return Assignment(stage=tuple(stage), strategy=tuple(strategy))


@dataclass(slots=True, eq=False)
class ChainRefinement:
    """Progress on one candidate.

    Attributes:
        tables: of the candidate.
        lower: proved bound in seconds.
        plan: best assignment so far, or None.
        done: no plan below the last `upper` is left to be found.
        stuck: the labels outgrew their room; `lower` stays where it is.
    """

    tables: CostTables
    lower: float = -np.inf
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    _chain: Chain | None = None
    _bound: Bound | None = None
    _potentials: tuple[Potentials, ...] = ()
    _distance: float = FIRST_TARGET
    _value: float = np.inf
    _probed: bool = False

    @property
    def prices(self) -> Multipliers:
        """Of the bound; only after the first step."""
        assert self._bound is not None
        return self._bound.prices

    def step(self, *, upper: float, clock: Clock) -> None:
        """One refinement; plans at or above `upper` are of no interest."""
        if self._bound is None:
            self._ascend(upper, clock.expired)
        else:
            self._aim(upper, clock.expired)
        if not self.done and self.lower >= upper:
            self.done = True

    def _ascend(self, upper: float, expired: Callable[[], bool]) -> None:
        self._chain = chain_of(self.tables)
        self._bound = lagrangian_bound(self._chain, upper=upper, iterations=ASCENT_STEPS, expired=expired)
        self.lower = max(self.lower, self._bound.lower)
        if self._bound.plan is None and not least_memory(self.tables).fits:
            self.lower = np.inf
        self.done = not np.isfinite(self.lower)
        if self._bound.plan is not None:
            stages, strategies = self._bound.plan
            self.plan, self._value = Assignment(stage=tuple(stages), strategy=tuple(strategies)), self._bound.value

    def _aim(self, upper: float, expired: Callable[[], bool]) -> None:
        """Columns up to the next target; the first failure looks for a good plan with few labels."""
        assert self._chain is not None and self._bound is not None
        if not self._potentials:
            self._potentials = (potentials(self._chain, self._bound.prices),)
        # the bound's own plan is worth finding again: it may be the optimum
        ceiling = min(upper, self._value * (1 + 1e-9))
        target = ceiling if self._distance > 10 else min(self._bound.lower * (1 + self._distance) + 1e-12, ceiling)
        path, proved, network = self._grow(target, expired, MAX_LABELS)
        if path is not None:
            self._accept(path, network)
        if path is not None and proved:
            self.lower, self.done = max(self.lower, path.value(network.count)), True
        elif proved:
            self.lower = max(self.lower, target)
            self.done = target >= ceiling
            self._distance *= TARGET_GROWTH
        elif self._probed:
            self.stuck = path is None or path.value(network.count) >= ceiling * (1 - 1e-6)
        if not (self.done or self.stuck or self._probed):
            self._probe(upper, expired)

    def _probe(self, upper: float, expired: Callable[[], bool]) -> None:
        """Other prices for stricter pruning, and a plan from a growth with few labels, which caps later targets."""
        assert self._chain is not None and self._bound is not None
        self._probed = True
        prices = self._bound.prices
        if prices.memory.any():
            self._potentials += tuple(
                potentials(self._chain, replace(prices, memory=prices.memory * share)) for share in OTHER_PRICES
            )
        path, _, network = self._grow(min(upper, self._value), expired, PROBE_LABELS)
        if path is not None:
            self._accept(path, network)

    def _grow(
        self, target: float, expired: Callable[[], bool], max_labels: int
    ) -> tuple[Path | None, bool, Network]:
        """Best path of columns up to the target, and whether nothing below the target is missing."""
        assert self._chain is not None
        columns = grow_columns(
            self._chain,
            self._potentials[0],
            others=self._potentials[1:],
            upper=target,
            expired=expired,
            max_labels=max_labels,
        )
        network = network_of(self._chain, columns)
        path, finished = search_paths(network, upper=target * (1 + 1e-12), expired=expired)
        return path, columns.complete and finished, network

    def _accept(self, path: Path, network: Network) -> None:
        if self.plan is None or path.value(network.count) < self._value:
            self.plan = assignment_of(network, path)
        self._value = min(self._value, path.value(network.count))


def confirm_by_master(
    tables: CostTables, *, value: float, time_limit_s: float
) -> tuple[Assignment | None, str, str]:
    """Solves the master over the columns that could still beat or equal a plan, as a MIP in a child process.

    Args:
        tables: of the candidate; a chain with at least two stages.
        value: step time of the plan at hand, seconds.
        time_limit_s: for the whole confirmation.

    Returns:
        the master's assignment (None without one), the solver's name ("" where it was not used) and a note.
    """
    chain = chain_of(tables)
    bound = lagrangian_bound(chain, upper=value, iterations=ASCENT_STEPS)
    columns = grow_columns(chain, potentials(chain, bound.prices), upper=value * (1 + 1e-7))
    network = network_of(chain, columns)
    network = without_slow(network, upper=value * (1 + 1e-7))
    size = sum(len(members) for members in network.by_stage)
    if size > MASTER_COLUMNS:
        return None, "", f"the master of {size} columns was left to the path search"
    model, kept = master_mip(network)
    answer = solve_mip(model, time_limit_s=min(time_limit_s, MASTER_TIME_S))
    if answer.status == "failed":
        return None, "", f"CBC was of no help ({answer.reason}); the path search over the same columns stands"
    if answer.status == "infeasible":
        return None, "", "CBC called the master infeasible although a plan is known; the path search stands"
    if answer.values is None:
        return None, "", "CBC found nothing in its time; the path search stands"
    path = path_of(network, kept, answer.values)
    if path is None:
        return None, "", "CBC answered with something that is not a path of columns; the path search stands"
    return assignment_of(network, path), "cbc", ""
