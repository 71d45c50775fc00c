"""The predicted step as a trace that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_range, plan_title
from uniap_jax.core.timeline import predicted_events

PROCESS = 1
MICROSECONDS = 1e6


def trace_events(plan: Plan) -> list[dict[str, Any]]:
    """Chrome trace events: a thread for each stage, a slice for each pass, and the once-per-step work at the end."""
    events = predicted_events(plan)
    named: list[dict[str, Any]] = [
        {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": f"predicted: {plan_title(plan)}"}}
    ]
    for stage in range(plan.num_stages):
        name = f"stage {stage}, devices {format_range(plan.stage_devices[stage])}"
        named.append({"ph": "M", "pid": PROCESS, "tid": stage, "name": "thread_name", "args": {"name": name}})
    slices = [
        _slice(f"{e.task.kind} {e.task.microbatch}", e.task.kind, e.stage, e.start_s, e.end_s - e.start_s)
        for e in events
    ]
    end = max((e.end_s for e in events), default=0.0)
    updates = [
        _slice("gradient synchronisation and update", "update", stage, end, seconds)
        for stage, seconds in enumerate(plan.prediction.iteration_time_s)
        if events
    ]
    return [*named, *slices, *updates]


def _slice(name: str, kind: str, stage: int, start_s: float, seconds: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": stage,
        "name": name,
        "cat": kind,
        "ts": start_s * MICROSECONDS,
        "dur": seconds * MICROSECONDS,
    }


def write_trace(plan: Plan, path: str | Path) -> None:
    """Writes the predicted step in Chrome's trace format."""
    document = {"traceEvents": trace_events(plan), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
