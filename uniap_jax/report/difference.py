"""How two plans differ, as data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_bytes, format_range, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two plans differ.

    Attributes:
        what: the field, or the layers.
        first: in the first plan.
        second: in the second plan.
    """

    what: str
    first: str
    second: str


def plan_difference(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """Decisions first, then layers by ranges that differ in the same way, then predictions; empty where equal."""
    found = [
        Difference(what=name, first=str(a), second=str(b))
        for name, a, b in (
            ("stages", first.num_stages, second.num_stages),
            ("micro-batches", first.num_microbatches, second.num_microbatches),
            ("schedule", first.schedule, second.schedule),
            ("batch", first.batch_size, second.batch_size),
            ("devices", first.num_devices, second.num_devices),
            ("device kind", first.device_kind, second.device_kind),
            ("model", first.graph_fingerprint, second.graph_fingerprint),
            ("layers", len(first.layers), len(second.layers)),
        )
        if a != b
    ]
    if len(first.layers) == len(second.layers):
        found.extend(_layer_differences(first, second))
    return (*found, *_prediction_differences(first, second))


def _layer_differences(first: Plan, second: Plan) -> tuple[Difference, ...]:
    def told(plan: Plan, layer: int) -> str:
        return f"stage {plan.layers[layer].stage}, {plan.layers[layer].strategy}"

    pairs = [(i, told(first, i), told(second, i)) for i in range(len(first.layers))]
    runs = (list(g) for _, g in itertools.groupby(pairs, key=lambda p: p[1:]))
    return tuple(
        Difference(
            what=f"layer{'s' if len(run) > 1 else ''} {format_range([i for i, _, _ in run])}",
            first=run[0][1],
            second=run[0][2],
        )
        for run in runs
        if run[0][1] != run[0][2]
    )


def _prediction_differences(first: Plan, second: Plan) -> tuple[Difference, ...]:
    def peak(plan: Plan) -> str:
        return format_bytes(max(plan.prediction.peak_bytes)) if plan.prediction.peak_bytes else ""

    rows = (
        ("step time", format_seconds(first.prediction.step_time_s), format_seconds(second.prediction.step_time_s)),
        ("largest peak memory", peak(first), peak(second)),
        ("times come from", first.prediction.source, second.prediction.source),
        ("status", first.certificate.status, second.certificate.status),
    )
    return tuple(Difference(what=name, first=a, second=b) for name, a, b in rows if a != b)
