"""A search's result as a plan with its certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from uniap_jax.core.costs import Candidate, CostModel
from uniap_jax.core.plan import Alternative, Certificate, LayerPlan, Plan, Prediction, Searched
from uniap_jax.planner.alternatives import Other
from uniap_jax.planner.search import PROOF_GAP, Priced


def plan_of(costs: CostModel, found: Priced, certificate: Certificate) -> Plan:
    """A priced assignment as a plan."""
    candidate = found.candidate
    return Plan(
        num_stages=candidate.num_stages,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        batch_size=costs.batch_size,
        stage_devices=costs.stage_devices(candidate.num_stages),
        layers=_layers(costs, found),
        prediction=_prediction(costs, found),
        certificate=certificate,
        graph_fingerprint=costs.graph_fingerprint,
        device_kind=costs.device_kind,
    )


def _layers(costs: CostModel, found: Priced) -> tuple[LayerPlan, ...]:
    strategies = costs.tables(found.candidate).strategies
    return tuple(
        LayerPlan(name=name, stage=i, strategy=strategies[k])
        for name, i, k in zip(costs.layer_names, found.assignment.stage, found.assignment.strategy, strict=True)
    )


def _prediction(costs: CostModel, found: Priced) -> Prediction:
    price = found.evaluation
    return Prediction(
        step_time_s=found.value,
        stage_time_s=price.stage_time_s,
        link_time_s=price.link_time_s,
        iteration_time_s=price.iteration_time_s,
        peak_bytes=price.stage_memory_bytes,
        capacity_bytes=tuple(costs.tables(found.candidate).capacity_bytes.tolist()),
        source=costs.source,
    )


def alternative_of(costs: CostModel, other: Other) -> Alternative:
    """An alternative as plain data."""
    candidate = other.plan.candidate
    return Alternative(
        what=other.what,
        num_stages=candidate.num_stages,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        stage_devices=costs.stage_devices(candidate.num_stages),
        layers=_layers(costs, other.plan),
        prediction=_prediction(costs, other.plan),
        bound_s=min(other.bound_s, other.plan.value),
    )


def searched_of(bounds: Mapping[Candidate, float], best: Priced) -> tuple[Searched, ...]:
    """What is known of every candidate, in order of their bounds."""
    least: dict[Candidate, float] = {}
    for candidate, bound in bounds.items():
        told = replace(candidate, storage="")
        least[told] = min(bound, least.get(told, math.inf))

    def outcome(candidate: Candidate, bound: float) -> str:
        if candidate == replace(best.candidate, storage=""):
            return "chosen"
        if math.isinf(bound):
            return "no plan"
        return "pruned" if bound >= best.value * (1 - PROOF_GAP) else "open"

    return tuple(
        Searched(
            num_stages=candidate.num_stages,
            num_microbatches=candidate.num_microbatches,
            schedule=candidate.schedule,
            bound_s=bound if math.isfinite(bound) else None,
            outcome=outcome(candidate, bound),
        )
        for candidate, bound in sorted(least.items(), key=lambda item: (item[1], item[0]))
    )


def gap_of(value: float, bound: float) -> tuple[float, float]:
    """Relative gap and bound, with rounding below PROOF_GAP taken as proved."""
    bound = min(bound, value)
    gap = (value - bound) / value if value > 0 else 0.0
    return (0.0, value) if gap <= PROOF_GAP or math.isnan(gap) else (gap, bound)
