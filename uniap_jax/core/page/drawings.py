"""The drawings of a plan's page: layers, memory, time, links, and other ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from uniap_jax.core.page.svg import (
    LABEL,
    LANE,
    ROOM,
    WIDTH,
    axis,
    box,
    drawing,
    labelled,
    lane_label,
    lane_y,
    lanes,
    text,
)
from uniap_jax.core.plan_text import format_bytes, format_seconds
from uniap_jax.core.schedule import FORWARD, Event

if TYPE_CHECKING:  # a plan draws itself with this module
    from uniap_jax.core.plan import Plan

AMOUNTS = 190
"""Room for amounts to the right of bars."""
ZOOM = 0.2
"""Bars are drawn to the limit where they fill this much of it, to the longest of them where they fill less."""
ROW = 26


def layers_drawing(plan: Plan, kinds: Mapping[str, tuple[str, str]]) -> str:
    """A row for each stage, a column for each layer in trace order, coloured by strategy."""
    width = ROOM / len(plan.layers)
    gap = min(2.0, width * 0.1)
    parts = lanes(plan)
    for stage in range(plan.num_stages):
        y = lane_y(stage)
        for index in plan.stage_layers(stage):
            layer = plan.layers[index]
            mark, colour = kinds[str(layer.strategy)]
            x = LABEL + index * width
            tip = f"layer {index}: {layer.name}\n{layer.strategy}\nstage {stage}"
            cell = box(x + gap / 2, y, width - gap, LANE, kind=f"cell {colour}", tip=tip, stage=stage)
            parts += labelled(x, y, width, mark, cell)
    height = lane_y(plan.num_stages)
    parts += axis(height, "layer 0", f"layer {len(plan.layers) - 1}")
    return drawing(height + 18, parts, title="layers by stage, coloured by strategy")


def memory_drawing(plan: Plan) -> str:
    """Predicted peak of every stage against its limit, taken apart where the plan knows its parts."""
    peaks, limits = plan.prediction.peak_bytes, plan.prediction.capacity_bytes
    if len(peaks) != plan.num_stages:
        return ""
    known = limits if len(limits) == plan.num_stages else peaks
    longest = max(*peaks, *(known if max(peaks) >= ZOOM * max(known) else ()), 1.0)
    scale = (ROOM - AMOUNTS) / longest
    parts = []
    for stage, (peak, limit) in enumerate(zip(peaks, known, strict=True)):
        y, end = lane_y(stage), min(limit, longest) * scale
        parts += [lane_label(plan, stage), box(LABEL, y + 4, end, LANE - 8, kind="track")]
        parts += _memory_bar(plan, stage, peak, limit, scale)
        if limit <= longest:
            parts.append(box(LABEL + end - 1, y, 2, LANE, kind="limit"))
        share = f" ({100 * peak / limit:.2g} %)" if limit > 0 else ""
        told = f"{format_bytes(peak)} of {format_bytes(limit)}{share}"
        parts.append(text(LABEL + ROOM - AMOUNTS + 8, y + 20, told, kind="dim"))
    return drawing(lane_y(plan.num_stages), parts, title="peak memory per device against the limit")


def is_zoomed(plan: Plan) -> bool:
    """Whether the limit lies beyond the right edge of the memory drawing."""
    peaks, limits = plan.prediction.peak_bytes, plan.prediction.capacity_bytes
    return bool(peaks) and bool(limits) and max(peaks) < ZOOM * max(limits)


def _memory_bar(plan: Plan, stage: int, peak: float, limit: float, scale: float) -> list[str]:
    y, parts, x = lane_y(stage) + 4, [], float(LABEL)
    whole = f"stage {stage}: {format_bytes(peak)} per device\nlimit {format_bytes(limit)}"
    if len(plan.prediction.memory) != plan.num_stages:
        return [box(x, y, peak * scale, LANE - 8, kind="bar", tip=whole, stage=stage)]
    made_of = plan.prediction.memory[stage]
    for part in fields(made_of):
        size = getattr(made_of, part.name)
        if size > 0:
            tip = f"{part.name}: {format_bytes(size)} per device\n{whole}"
            parts.append(box(x, y, size * scale, LANE - 8, kind=f"m-{part.name}", tip=tip, stage=stage))
            x += size * scale
    return parts


def time_scale(plan: Plan, *schedules: Sequence[Event]) -> float:
    """Seconds of the longest of some schedules of a plan, the once-per-step work at its end included."""
    updates = max(plan.prediction.iteration_time_s, default=0.0)
    return max((e.end_s for events in schedules for e in events), default=0.0) + updates


def timeline_drawing(plan: Plan, events: Sequence[Event], *, span_s: float, measured: bool = False) -> str:
    """A row for each stage, a box for each pass, the predicted once-per-step work at the end.

    Args:
        plan: the plan.
        events: passes of one step.
        span_s: seconds that the width of the drawing stands for.
        measured: whether a clock made the events; the once-per-step work is then left out.
    """
    if not events:
        return ""
    scale, parts = ROOM / span_s, lanes(plan)
    for event in events:
        parts += _pass(event, scale)
    end = max(e.end_s for e in events)
    for stage, seconds in enumerate(() if measured else plan.prediction.iteration_time_s):
        if seconds > 0:
            tip = f"stage {stage}: once per step\n{format_seconds(seconds)}"
            parts.append(
                box(LABEL + end * scale, lane_y(stage), seconds * scale, LANE, kind="update", tip=tip, stage=stage)
            )
    height = lane_y(plan.num_stages)
    parts += axis(height, "0", format_seconds(span_s))
    return drawing(height + 18, parts, title=f"the step in time, as {'measured' if measured else 'predicted'}")


def _pass(event: Event, scale: float) -> list[str]:
    x, y = LABEL + event.start_s * scale, lane_y(event.stage)
    width = (event.end_s - event.start_s) * scale
    kind = "forward" if event.task.kind == FORWARD else "backward"
    seconds = format_seconds(event.end_s - event.start_s)
    tip = f"stage {event.stage}: {event.task.kind} of micro-batch {event.task.microbatch}\n{seconds}"
    gap = min(1.0, width * 0.1)
    cell = box(x + gap / 2, y, width - gap, LANE, kind=kind, tip=tip, stage=event.stage)
    return labelled(x, y, width, str(event.task.microbatch), cell)


def links_drawing(plan: Plan) -> str:
    """How much of a step each boundary between stages is busy."""
    links, step = plan.prediction.link_time_s, plan.prediction.step_time_s
    if not links or step <= 0:
        return ""
    scale, parts = (ROOM - AMOUNTS) / step, []
    for boundary, seconds in enumerate(links):
        y, busy = boundary * ROW, seconds * plan.num_microbatches
        name = f"stage {boundary} → {boundary + 1}"
        tip = f"{name}\n{format_seconds(seconds)} per micro-batch, there and back\n{format_seconds(busy)} per step"
        parts += [
            text(0, y + 15, name, kind="name"),
            box(LABEL, y + 3, ROOM - AMOUNTS, 16, kind="track"),
            box(LABEL, y + 3, busy * scale, 16, kind="bar", tip=tip),
            text(LABEL + ROOM - AMOUNTS + 8, y + 15, f"{100 * busy / step:.1f} % of the step", kind="dim"),
        ]
    return drawing(len(links) * ROW, parts, title="share of the step in which each link is busy")


def ways_drawing(rows: Sequence[tuple[str, float | None, str]]) -> str:
    """Predicted step times beside each other; the first row is the plan.

    Args:
        rows: (name, seconds or None where there is no plan, what the tooltip adds).
    """
    if len(rows) < 2:
        return ""
    label = 230
    scale = (WIDTH - label - 110) / max(*(t for _, t, _ in rows if t is not None), 1e-12)
    parts = []
    for row, (name, seconds, more) in enumerate(rows):
        y = row * ROW
        parts.append(text(0, y + 15, name, kind="name"))
        if seconds is None:
            parts.append(text(label, y + 15, "no plan", kind="dim"))
            continue
        tip = "\n".join(filter(None, (f"{name}: {format_seconds(seconds)}", more)))
        parts.append(box(label, y + 3, seconds * scale, 16, kind="bar" if row == 0 else "other", tip=tip))
        parts.append(text(label + seconds * scale + 6, y + 15, format_seconds(seconds), kind="dim"))
    return drawing(len(rows) * ROW, parts, title="predicted step time of this plan and of other ways")
