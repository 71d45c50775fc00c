"""Engines by name; each starts a refinement of one candidate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from uniap_jax.core.costs import Assignment, CostTables
from uniap_jax.core.errors import OptionError
from uniap_jax.planner import baselines as base
from uniap_jax.planner.brute import brute_force
from uniap_jax.planner.chain_mip import ChainThenMip
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.joint import HybridRefinement, literal, miqp
from uniap_jax.planner.mcmc import mcmc
from uniap_jax.planner.mip_model import SOLVERS
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
        notes: none.
    """

    tables: CostTables
    choose: Callable[[CostTables], Assignment | None]
    exact: bool
    lower: float = 0.0
    plan: Assignment | None = None
    done: bool = False
    stuck: bool = False
    notes: list[str] = field(default_factory=list)

    def step(self, *, upper: float, clock: Clock) -> None:
        """Asks the engine."""
        self.plan = self.choose(self.tables)
        self.done, self.stuck = self.exact, not self.exact
        if self.exact and self.plan is None:
            self.lower = math.inf

    def widen(self) -> bool:
        """It has answered."""
        return False


def interval(tables: CostTables, solver: str = "cbc") -> Refinement:
    """Exact columns on a chain; the hybrid where edges skip layers."""
    return ChainThenMip(tables) if tables.is_chain else HybridRefinement(tables, solver)


def _brute_force(tables: CostTables, solver: str = "cbc") -> Refinement:
    """Everything is tried; no solver takes part."""
    return OneShot(tables, brute_force, exact=True)


BASELINES: dict[str, Callable[[CostTables], Assignment | None]] = {
    "data_parallel": base.data_parallel,
    "fsdp": base.fsdp,
    "tensor": base.tensor,
    "inter_then_intra": base.inter_then_intra,
    "layerwise_dp": base.layerwise_dp,
    "mcmc": mcmc,
}

EXACT: dict[str, Callable[[CostTables, str], Refinement]] = {
    "interval": interval,
    "hybrid": HybridRefinement,
    "miqp": miqp,
    "literal": literal,
    "brute_force": _brute_force,
    # the same search over fewer candidates, see `restrict`
    "pipeline_only": interval,
    "intra_only": interval,
}

ENGINES = (*EXACT, *BASELINES)


def engine_named(name: str, solver: str = "cbc") -> Callable[[CostTables], Refinement]:
    """The engine of a name, with the solver it asks first where it asks one.

    Raises:
        OptionError: no engine or solver has the name; lists those that exist.
    """
    if solver not in SOLVERS:
        possible = tuple(SOLVERS)
        raise OptionError(
            f"solver={solver!r} is unknown; use one of {', '.join(possible)}", solver=solver, possible=possible
        )
    if name in EXACT:
        exact = EXACT[name]
        return lambda tables: exact(tables, solver)
    if name in BASELINES:
        choose = BASELINES[name]
        return lambda tables: OneShot(tables, choose, exact=False)
    raise OptionError(f"engine={name!r} is unknown; use one of {', '.join(ENGINES)}", engine=name, possible=ENGINES)
