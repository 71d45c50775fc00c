"""Engines by name; each starts a refinement of one candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from uniap_jax.core.costs import Assignment, CostTables
from uniap_jax.core.errors import OptionError
from uniap_jax.planner import baselines as base
from uniap_jax.planner.brute import brute_force
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.interval import ChainRefinement
from uniap_jax.planner.joint import HybridRefinement, literal, miqp
from uniap_jax.planner.mcmc import mcmc
from uniap_jax.planner.search import Refinement


@dataclass(slots=True, eq=False)
class OneShot:
    """An engine that answers at once.

    Attributes:
        tables: of the candidate.
        choose: the engine.
        exact: its answer is the candidate's optimum.
        lower: proved bound in seconds; that of an exact engine once it answered.
        plan: what it chose, or None.
        done: it has answered.
        stuck: it has answered without proof.
    """

    tables: CostTables
    choose: Callable[[CostTables], Assignment | None]
    exact: bool
    lower: float = 0.0
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False

    def step(self, *, upper: float, clock: Clock) -> None:
        """Asks the engine."""
        self.plan = self.choose(self.tables)
        self.done, self.stuck = self.exact, not self.exact
        if self.exact and self.plan is None:
            self.lower = math.inf

    def widen(self) -> bool:
        """It has answered."""
        return False


def interval(tables: CostTables) -> Refinement:
    """Exact columns on a chain; the hybrid where edges skip layers."""
    return ChainRefinement(tables) if tables.is_chain else HybridRefinement(tables)


BASELINES: dict[str, Callable[[CostTables], Assignment | None]] = {
    "data_parallel": base.data_parallel,
    "fsdp": base.fsdp,
    "tensor": base.tensor,
    "inter_then_intra": base.inter_then_intra,
    "layerwise_dp": base.layerwise_dp,
    "mcmc": mcmc,
}

EXACT: dict[str, Callable[[CostTables], Refinement]] = {
    "interval": interval,
    "hybrid": HybridRefinement,
    "miqp": miqp,
    "literal": literal,
    "brute_force": lambda tables: OneShot(tables, brute_force, exact=True),
    # the same search over fewer candidates, see `restrict`
    "pipeline_only": interval,
    "intra_only": interval,
}

ENGINES = (*EXACT, *BASELINES)


def engine_named(name: str) -> Callable[[CostTables], Refinement]:
    """The engine of a name.

    Raises:
        OptionError: no engine has it; lists those that exist.
    """
    if name in EXACT:
        return EXACT[name]
    if name in BASELINES:
        choose = BASELINES[name]
        return lambda tables: OneShot(tables, choose, exact=False)
    raise OptionError(f"engine={name!r} is unknown; use one of {', '.join(ENGINES)}", engine=name, possible=ENGINES)
