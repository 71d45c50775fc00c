"""The default engine of chains: columns, and where these outgrow their room a MIP over the places that are left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from uniap_jax.core.costs import Assignment, CostTables, evaluate
from uniap_jax.planner.chain import chain_of
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.guide import guide
from uniap_jax.planner.interval import ChainRefinement
from uniap_jax.planner.intervals import build_intervals
from uniap_jax.planner.joint import Question, Reader
from uniap_jax.planner.mip_model import SOLVERS, MipModel
from uniap_jax.planner.miqp import joint_model, live_nodes

MOST_PLACES = 1_500
"""Layers × stages × strategies still possible beyond which the MIP is not tried."""

MIP_TIME_S = 25.0
SOLVER = "highs"
"""Proves in seconds what CBC does not in a minute, on chains whose layers all differ a little."""


@dataclass(slots=True, eq=False)
class ChainThenMip:
    """One candidate of a chain.

    Attributes as in `ChainRefinement`; `notes` says where a proof is a solver's alone.
    """

    tables: CostTables
    lower: float = -math.inf
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    notes: list[str] = field(default_factory=list)
    _columns: ChainRefinement | None = None
    _asked: bool = False

    def step(self, *, upper: float, clock: Clock) -> None:
        """Refines the columns; once their labels outgrow their room, the MIP is asked before they get more."""
        columns = self._columns = self._columns or ChainRefinement(self.tables)
        if columns.stuck and not self._asked:
            self._asked = True
            self._ask(columns, upper, clock)
            return
        columns.step(upper=upper, clock=clock)
        self.lower = max(self.lower, columns.lower)
        if columns.plan is not None and self._price(columns.plan) < self._price(self.plan):
            self.plan = columns.plan
        self.done = columns.done or self.lower >= upper
        self.stuck = columns.stuck and self._asked

    def widen(self) -> bool:
        """More labels for the columns."""
        if self._columns is None or not self._columns.widen():
            return False
        self.stuck = False
        return True

    def _price(self, plan: Assignment | None) -> float:
        return math.inf if plan is None else evaluate(self.tables, plan).step_time_s

    def _ask(self, columns: ChainRefinement, upper: float, clock: Clock) -> None:
        """Has the MIP solved over what the bounds leave below the limit; bounds do the fixing by reduced costs."""
        self.stuck, tables, own = True, self.tables, self._price(self.plan)
        limit, chain = min(upper, own), chain_of(tables)
        width = tables.num_layers - tables.candidate.num_stages + 1
        way = guide(
            chain, build_intervals(chain, columns.prices, width=width), columns.prices, upper=limit * (1 + 1e-9)
        )
        live = live_nodes(tables) if way is None else live_nodes(tables) & way.live
        if live.sum() > MOST_PLACES or not math.isfinite(limit):
            return

        def build(tables: CostTables, upper: float) -> tuple[MipModel, Reader]:
            joint = joint_model(tables, live=live, upper=upper)
            return joint.model, joint.assignment

        found = Question(
            tables=tables,
            build=build,
            upper=limit,
            known=own <= upper,
            solver=SOLVER,
            clock=Clock(limit_s=min(MIP_TIME_S, clock.left())),
            check=False,
        ).answer()
        if found.note:
            self.notes.append(found.note)
        if found.plan is not None and self._price(found.plan) < own:
            self.plan = found.plan
        self.lower = max(self.lower, found.lower)
        if found.proved:
            self.done, self.stuck = True, False
            self.lower = max(self.lower, limit if found.plan is None else self._price(self.plan))
            self.notes.append(
                f"the last step of the proof is {SOLVERS[SOLVER]}'s alone: too many labels for columns of "
                f"{tables.candidate.num_stages} stages, {tables.candidate.num_microbatches} micro-batches"
            )
