"""A cost model whose devices are slower than they were: what a plan costs there, and what others would. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from uniap_jax.core.costs import Assignment, Candidate, CostModel, CostTables, evaluate
from uniap_jax.core.plan import Plan


class _Slowed:
    """Another cost model, times of every stage multiplied by what its slowest device takes longer."""

    def __init__(self, model: CostModel, factors: Sequence[float]) -> None:
        self._model, self._factors = model, tuple(factors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def tables(self, candidate: Candidate) -> CostTables:
        """Those of the model, stage by stage slower."""
        tables = self._model.tables(candidate)
        devices = self._model.stage_devices(candidate.num_stages)
        slower = np.asarray([max(self._factors[d] for d in stage) for stage in devices])[None, :, None]
        return replace(tables, time_s=tables.time_s * slower, iteration_time_s=tables.iteration_time_s * slower)

    def equal_candidates(self) -> tuple[Candidate, ...]:
        """None: stages of one program run in step, and wait for the slowest whatever the plan."""
        return ()

    def with_strategy(self, strategy: Any) -> CostModel:
        """The model with a pinned strategy, as slow."""
        return slowed(self._model.with_strategy(strategy), self._factors)


def slowed(model: CostModel, factors: Sequence[float]) -> CostModel:
    """A cost model in which devices take longer.

    Args:
        model: of the devices as they were.
        factors: [devices] how many times longer each takes, in the plan's numbering.
    """
    return cast(CostModel, _Slowed(model, factors))


def price(model: CostModel, plan: Plan) -> float | None:
    """Seconds per step of a plan under a cost model; None where the model cannot price it.

    Args:
        model: of the plan's devices.
        plan: with a program per stage.
    """
    candidate = Candidate.of(plan)
    known = {replace(c, storage="") for c in model.candidates()}
    if candidate not in known or model.stage_devices(plan.num_stages) != plan.stage_devices:
        return None
    tables = model.tables(candidate)
    position = {s: k for k, s in enumerate(tables.strategies)}
    if any(layer.strategy not in position for layer in plan.layers) or len(plan.layers) != tables.num_layers:
        return None
    assignment = Assignment(
        stage=tuple(layer.stage for layer in plan.layers),
        strategy=tuple(position[layer.strategy] for layer in plan.layers),
    )
    return evaluate(tables, assignment).step_time_s
