"""The predicted step in time, and as a trace file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from uniap_jax.core.plan import Plan, Prediction
from uniap_jax.core.timeline import bubble_share, predicted_events
from uniap_jax.report.trace import write_trace


def test_gpipe_by_hand(plan: Plan) -> None:
    events = {(e.stage, str(e.task)): (e.start_s, e.end_s) for e in predicted_events(plan)}
    assert len(events) == 2 * 2 * 3
    # stage 0 takes 10 ms forward, 20 back; stage 1 20 and 40; the link 5 each way
    for key, start, end in (
        ((0, "forward(2)"), 0.020, 0.030),
        ((1, "forward(0)"), 0.015, 0.035),
        ((1, "forward(2)"), 0.055, 0.075),
        ((1, "backward(0)"), 0.075, 0.115),
        ((1, "backward(2)"), 0.155, 0.195),
        ((0, "backward(2)"), 0.200, 0.220),
    ):
        assert events[key] == pytest.approx((start, end))


def test_bubble_is_what_is_not_work(plan: Plan) -> None:
    events = predicted_events(plan)
    assert bubble_share(events, num_places=2) == pytest.approx(1 - 3 * (0.03 + 0.06) / (2 * 0.220))
    assert bubble_share((), num_places=2) == 0.0


def test_no_times_no_events(plan: Plan) -> None:
    assert predicted_events(dataclasses.replace(plan, prediction=Prediction(step_time_s=0.0))) == ()


def test_trace_has_a_named_thread_for_each_stage_and_all_slices(plan: Plan, tmp_path: Path) -> None:
    write_trace(plan, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["stage 0, devices 0-3", "stage 1, devices 4-7"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 12 + 2
    last = next(e for e in slices if e["name"] == "backward 2" and e["tid"] == 0)
    assert (last["ts"], last["dur"]) == pytest.approx((200_000, 20_000))
    update = next(e for e in slices if e["cat"] == "update" and e["tid"] == 0)
    assert (update["ts"], update["dur"]) == pytest.approx((220_000, 20_000))


def test_measured_passes_lie_over_the_predicted_ones(plan: Plan, tmp_path: Path) -> None:
    from uniap_jax.core.observed import Observed

    late = tuple(dataclasses.replace(e, end_s=e.end_s + 0.001) for e in predicted_events(plan))
    write_trace(plan, tmp_path / "trace.json", Observed(events=late))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"].split(":")[0] for e in events if e["name"] == "process_name"]
    assert names == ["predicted", "measured"]
    first = {e["pid"]: (e["ts"], e["dur"]) for e in reversed(events) if e["ph"] == "X" and e["name"] == "forward 0"}
    assert first[1] == pytest.approx((0, 10_000))
    assert first[2] == pytest.approx((0, 11_000))
    assert sum(e["ph"] == "X" and e["pid"] == 2 for e in events) == 12
