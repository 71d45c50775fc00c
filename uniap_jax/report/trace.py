"""The predicted and the measured step as one trace that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uniap_jax.core.observed import NOTHING, Observed
from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_range, plan_title
from uniap_jax.core.schedule import Event
from uniap_jax.core.timeline import predicted_events

PREDICTED, MEASURED = 1, 2
"""Processes of the trace; both start at 0, so that the viewer lays one over the other."""
MICROSECONDS = 1e6


def trace_events(plan: Plan, observed: Observed = NOTHING) -> list[dict[str, Any]]:
    """Chrome trace events: a process for predicted and one for measured, a thread a stage, a slice a pass.

    The once-per-step work stands at the end of the predicted passes; what was measured has passes only.
    """
    predicted = predicted_events(plan)
    events = _process(plan, PREDICTED, f"predicted: {plan_title(plan)}", predicted)
    end = max((e.end_s for e in predicted), default=0.0)
    if predicted:
        for stage, seconds in enumerate(plan.prediction.iteration_time_s):
            name = "gradient synchronisation and update"
            events.append(_slice(name, "update", (PREDICTED, stage), end, seconds))
    if observed.events:
        events += _process(plan, MEASURED, f"measured: {plan_title(plan)}", observed.events)
    return events


def _process(plan: Plan, process: int, name: str, events: Sequence[Event]) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}]
    for stage in range(plan.num_stages):
        told = f"stage {stage}, devices {format_range(plan.stage_devices[stage])}"
        named.append({"ph": "M", "pid": process, "tid": stage, "name": "thread_name", "args": {"name": told}})
    return named + [
        _slice(f"{e.task.kind} {e.task.microbatch}", e.task.kind, (process, e.stage), e.start_s, e.end_s - e.start_s)
        for e in events
    ]


def _slice(name: str, kind: str, where: tuple[int, int], start_s: float, seconds: float) -> dict[str, Any]:
    process, thread = where
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": kind,
        "ts": start_s * MICROSECONDS,
        "dur": seconds * MICROSECONDS,
    }


def write_trace(plan: Plan, path: str | Path, observed: Observed = NOTHING) -> None:
    """Writes the predicted step, and the measured one where there is one, in Chrome's trace format."""
    document = {"traceEvents": trace_events(plan, observed), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
