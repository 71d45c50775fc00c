"""The interval engine: one candidate of a chain, solved exactly by stage columns.

Refined in steps so that the outer search can turn to whichever candidate has the least bound: Lagrangian bound, then
columns for targets a little above the bound. A target without a plan raises the bound to the target; the first target
with a plan proves the candidate's optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from uniap_jax.core.costs import Assignment, CostTables
from uniap_jax.planner.baselines import MEMORY_STEPS, fill_stages, layerwise_dp
from uniap_jax.planner.bounds import lagrangian_bound, path_value, separable_bound
from uniap_jax.planner.chain import Chain, chain_of
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.columns import MAX_LABELS, grow_columns
from uniap_jax.planner.guide import guide
from uniap_jax.planner.infeasible import fits
from uniap_jax.planner.intervals import MANY, Intervals, build_intervals, widest
from uniap_jax.planner.master import Network, Path, master_mip, network_of, path_of, search_paths, without_hopeless
from uniap_jax.planner.mip_model import SOLVERS, solve_mip
from uniap_jax.planner.multipliers import Multipliers

FIRST_TARGET = 2e-3
"""First target above the bound, relative; each further one is TARGET_GROWTH times as far."""

TARGET_GROWTH = 8.0
PROBE_LABELS = 2_000
WIDER = 5
MOST_LABELS = 300_000
NEARER = 2.0
NEAREST = 1e-5
NEAR = 1.1
"""Plans within this factor of the bound are good enough to aim by; no other one is looked for first."""

FAR = 1.02
"""Plans further than this factor from the bound are not good enough: the cuts of the bound are filled, too."""

ASCENT_STEPS = 10
HINTED_STEPS = 3
FIRST_WIDTH = 2
COARSE_STEPS = 64
TOO_MANY = 4_000_000
"""Arcs (layers × stages × strategies²) beyond which the Lagrangian bound over all layers at once is not computed."""

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
        hint: prices that were good for a candidate much like this one.
        notes: none; no solver takes part.
    """

    tables: CostTables
    lower: float = -np.inf
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    hint: Multipliers | None = None
    notes: list[str] = field(default_factory=list)
    _chain: Chain | None = None
    _prices: Multipliers | None = None
    _intervals: Intervals | None = None
    _value: float = np.inf
    _base: float = 0.0
    _distance: float = FIRST_TARGET
    _probed: bool = False
    _crowded: bool = False
    _crowded_at: float = np.inf
    _room: int = MAX_LABELS

    @property
    def prices(self) -> Multipliers:
        """Of the Lagrangian bound; only after the first step."""
        assert self._prices is not None
        return self._prices

    def step(self, *, upper: float, clock: Clock) -> None:
        """One refinement; plans at or above `upper` are of no interest."""
        if self._chain is None:
            self._ascend(chain_of(self.tables), upper, clock.expired)
        elif self._intervals is None:
            self._measure(self._chain, upper)
        else:
            self._aim(self._chain, self._intervals, upper, clock.expired)
        if not self.done and self.lower >= upper:
            self.done = True

    def widen(self) -> bool:
        """More labels per length, and a new look for a good plan with more of them."""
        if self._room >= MOST_LABELS:
            return False
        self._room *= WIDER
        self.stuck = self._crowded = self._probed = False
        self._crowded_at = np.inf
        return True

    def _ascend(self, chain: Chain, upper: float, expired: Callable[[], bool]) -> None:
        lower, prices = separable_bound(chain, upper=upper)
        self._chain, self._prices, self.lower = chain, prices, max(self.lower, lower)
        if self.lower >= upper or chain.time.size * chain.shape[2] > TOO_MANY:
            if not fits(self.tables):
                self.lower = np.inf
            self.done = not np.isfinite(self.lower)
            return
        steps = ASCENT_STEPS if self.hint is None else HINTED_STEPS
        bound = lagrangian_bound(chain, upper=upper, iterations=steps, expired=expired, start=self.hint)
        self._chain, self._prices = chain, bound.prices
        self.lower = max(self.lower, bound.lower)
        if bound.plan is None and not fits(self.tables):
            self.lower = np.inf
        self.done = not np.isfinite(self.lower)
        if bound.plan is not None:
            stages, strategies = bound.plan
            self._offer(Assignment(stage=tuple(stages), strategy=tuple(strategies)), bound.value)

    def _measure(self, chain: Chain, upper: float) -> None:
        """Interval bounds; how wide intervals may be follows from the best plan known."""
        if not np.isfinite(min(upper, self._value)):
            plan = self._first_plan(chain)
            if plan is not None:
                self._offer(plan, path_value(chain, list(plan.stage), list(plan.strategy)))
        ceiling, weight = min(upper, self._value), chain.num_microbatches - 1
        fastest = float(chain.time.min(axis=(1, 2)).sum())
        limit = (ceiling - fastest) / weight if weight else np.inf
        self._intervals = build_intervals(chain, self.prices, width=widest(chain, limit))
        self._base = self._intervals.bound(ceiling)[0]
        self.lower = self._base = max(self.lower, self._base)
        if self.lower * FAR < ceiling < np.inf:
            cuts = self._intervals.cuts(ceiling)
            plan = fill_stages(chain, cuts, steps=COARSE_STEPS) if cuts else None
            if plan is not None:
                self._offer(plan, path_value(chain, list(plan.stage), list(plan.strategy)))

    def _first_plan(self, chain: Chain) -> Assignment | None:
        """A plan to aim by: the cuts of an interval bound over stages of about equal size, filled layer by layer."""
        num_layers, num_stages, _ = chain.shape
        width = min(FIRST_WIDTH * -(-num_layers // num_stages) + 1, num_layers - num_stages + 1)
        cuts = build_intervals(chain, self.prices, width=width).cuts(np.inf)
        many = chain.time.size > MANY
        plan = fill_stages(chain, cuts, steps=COARSE_STEPS if many else MEMORY_STEPS) if cuts else None
        return plan if plan or many else layerwise_dp(self.tables)

    def _aim(self, chain: Chain, intervals: Intervals, upper: float, expired: Callable[[], bool]) -> None:
        """Columns up to the next target.

        A target without a plan raises the bound and the next one is further away. A target with too many labels is
        followed by nearer ones, as long as these raise the bound.
        """
        ceiling = min(upper, self._value * (1 + 1e-9))
        target = ceiling if self._distance > 10 else min(self._base * (1 + self._distance) + 1e-12, ceiling)
        found = self._grow(chain, intervals, target, expired, self._room, give_up=True)
        if found.value < np.inf and found.proved:
            self.lower, self.done = max(self.lower, found.value), True
        elif found.proved:
            self.lower = max(self.lower, target)
            self.done = target >= ceiling
            self._distance *= NEARER if self._crowded else TARGET_GROWTH
            self.stuck = self._base * (1 + self._distance) >= self._crowded_at and not self.done
        else:
            self._crowded, self._crowded_at = True, target
            self._distance = (target / self._base - 1) / TARGET_GROWTH
            self.stuck = self._distance < NEAREST or target <= self.lower
        near = found.proved and ceiling <= self.lower * NEAR
        if not (self.done or self._probed or near):
            self._probed = True
            labels = PROBE_LABELS * (1 + len(np.unique(chain.kinds)) // 8) * self._room // MAX_LABELS
            self._grow(chain, intervals, min(upper, self._value), expired, labels)

    def _grow(
        self,
        chain: Chain,
        intervals: Intervals,
        target: float,
        expired: Callable[[], bool],
        max_labels: int,
        give_up: bool = False,
    ) -> _Found:
        """The best plan up to the target, and whether none below the target is missing."""
        way = guide(chain, intervals, self.prices, upper=target)
        if way is None:
            return _Found(value=np.inf, proved=True)
        columns = grow_columns(chain, way, expired=expired, max_labels=max_labels, give_up=give_up)
        network = network_of(chain, columns)
        path, finished = search_paths(network, upper=target * (1 + 1e-12), expired=expired)
        value = np.inf if path is None else path.value(network.count)
        if path is not None:
            self._offer(assignment_of(network, path), value)
        return _Found(value=value, proved=columns.complete and finished)

    def _offer(self, plan: Assignment, value: float) -> None:
        if self.plan is None or value < self._value:
            self.plan = plan
        self._value = min(self._value, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    value: float
    proved: bool


def confirm_by_master(
    tables: CostTables, *, value: float, time_limit_s: float, solver: str = "cbc"
) -> tuple[Assignment | None, str, str]:
    """Solves the master over the columns that could still beat or equal a plan, as a MIP in a child process.

    Args:
        tables: of the candidate; a chain with at least two stages.
        value: step time of the plan at hand, seconds.
        time_limit_s: for the whole confirmation.
        solver: "cbc" or "highs".

    Returns:
        the master's assignment (None without one), the solver's name ("" where it was not used) and a note.
    """
    chain, upper = chain_of(tables), value * (1 + 1e-7)
    clock = Clock(limit_s=time_limit_s)
    prices = lagrangian_bound(chain, upper=value, iterations=ASCENT_STEPS).prices
    limit = (upper - float(chain.time.min(axis=(1, 2)).sum())) / max(chain.num_microbatches - 1, 1e-9)
    way = guide(chain, build_intervals(chain, prices, width=widest(chain, limit)), prices, upper=upper)
    if way is None:
        return None, "", "the master could not be rebuilt around the plan; the path search stands"
    columns = grow_columns(chain, way, expired=clock.expired)
    network = without_hopeless(network_of(chain, columns), upper=upper)
    size = sum(len(members) for members in network.by_stage)
    if size > MASTER_COLUMNS or not columns.complete:
        return None, "", f"the master of {size} columns was left to the path search"
    model, kept = master_mip(network)
    answer = solve_mip(model, time_limit_s=min(clock.left(), MASTER_TIME_S), solver=solver)
    name = SOLVERS[solver]
    if answer.status == "failed":
        return None, "", f"{name} was of no help ({answer.reason}); the path search over the same columns stands"
    if answer.status == "infeasible":
        return None, "", f"{name} called the master infeasible although a plan is known; the path search stands"
    if answer.values is None:
        return None, "", f"{name} found nothing in its time; the path search stands"
    path = path_of(network, kept, answer.values)
    if path is None:
        return None, "", f"{name} answered with something that is not a path of columns; the path search stands"
    return assignment_of(network, path), solver, ""
