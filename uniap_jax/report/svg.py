"""The drawings of a plan's page, as SVG text. Sizes in pixels of a 960 wide drawing; colours are CSS classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_bytes, format_range, format_seconds
from uniap_jax.core.schedule import FORWARD, Event

WIDTH = 960
LABEL = 96
"""Room for the names of rows on the left."""
ROOM = WIDTH - LABEL - 8
LANE, GAP = 30, 8
NUM_COLOURS = 8
CHARACTER = 6.6
"""Width of a character of the drawings' font."""


def drawing(height: float, parts: Iterable[str], *, title: str) -> str:
    """An SVG element that scales with the page."""
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'style="min-width:640px">{body}</svg>'
    )


def text(x: float, y: float, content: str, *, kind: str = "", anchor: str = "start") -> str:
    """A line of text; `kind` is its CSS class."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, *, kind: str, tip: str = "", stage: int | None = None) -> str:
    """A rectangle; `tip` is shown on hover and focus, `stage` lets the page select it."""
    extra = f' data-tip="{escape(tip)}" tabindex="0"' if tip else ""
    extra += "" if stage is None else f' data-stage="{stage}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{height:.1f}" class="{kind}"{extra}/>'


def lane_label(plan: Plan, stage: int, y: float) -> str:
    """Name of a stage's row; pressing it selects the stage."""
    devices = format_range(plan.stage_devices[stage])
    return (
        f'<g class="pick" data-pick="{stage}" tabindex="0" role="button" aria-label="select stage {stage}">'
        f"{text(0, y + 13, f'stage {stage}', kind='name')}{text(0, y + 26, f'devices {devices}', kind='dim')}</g>"
    )


def letter(index: int) -> str:
    """A, B, ..., Z, A1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def strategy_kinds(plan: Plan) -> dict[str, tuple[str, str]]:
    """Letter and CSS class of every strategy, the most used first; those beyond the colours share grey."""
    counts: dict[str, int] = {}
    for layer in plan.layers:
        counts[str(layer.strategy)] = counts.get(str(layer.strategy), 0) + 1
    ranked = sorted(counts, key=lambda s: -counts[s])
    return {s: (letter(i), f"c{i}" if i < NUM_COLOURS else "cx") for i, s in enumerate(ranked)}


def layers_drawing(plan: Plan, kinds: Mapping[str, tuple[str, str]]) -> str:
    """A row for each stage, a column for each layer in trace order, coloured by strategy."""
    width = ROOM / len(plan.layers)
    parts = []
    for stage in range(plan.num_stages):
        y = stage * (LANE + GAP)
        parts.append(box(LABEL, y, ROOM, LANE, kind="track"))
        parts.append(lane_label(plan, stage, y))
        for index in plan.stage_layers(stage):
            layer = plan.layers[index]
            mark, colour = kinds[str(layer.strategy)]
            x = LABEL + index * width
            gap = min(2.0, width * 0.1)
            tip = f"layer {index}: {layer.name}\n{layer.strategy}\nstage {stage}"
            parts.append(box(x + gap / 2, y, width - gap, LANE, kind=f"cell {colour}", tip=tip, stage=stage))
            if width > 1.6 * CHARACTER * len(mark):
                parts.append(text(x + width / 2, y + 20, mark, kind="mark", anchor="middle"))
    height = plan.num_stages * (LANE + GAP)
    for index in {0, len(plan.layers) - 1}:
        anchor = "start" if index == 0 else "end"
        x = LABEL if index == 0 else LABEL + ROOM
        parts.append(text(x, height + 10, f"layer {index}", kind="dim", anchor=anchor))
    return drawing(height + 18, parts, title="layers by stage, coloured by strategy")


def memory_drawing(plan: Plan) -> str:
    """Predicted peak of every stage against its limit."""
    peaks, limits = plan.prediction.peak_bytes, plan.prediction.capacity_bytes
    if len(peaks) != plan.num_stages:
        return ""
    known = limits if len(limits) == plan.num_stages else peaks
    scale = (ROOM - 150) / max(*peaks, *known, 1.0)
    parts = []
    for stage, (peak, limit) in enumerate(zip(peaks, known, strict=True)):
        y = stage * (LANE + GAP)
        tip = f"stage {stage}: {format_bytes(peak)} per device\nlimit {format_bytes(limit)}"
        parts += [
            lane_label(plan, stage, y),
            box(LABEL, y + 4, limit * scale, LANE - 8, kind="track"),
            box(LABEL, y + 4, peak * scale, LANE - 8, kind="bar", tip=tip, stage=stage),
            box(LABEL + limit * scale - 1, y, 2, LANE, kind="limit"),
            text(LABEL + limit * scale + 6, y + 20, f"{format_bytes(peak)} of {format_bytes(limit)}", kind="dim"),
        ]
    return drawing(plan.num_stages * (LANE + GAP), parts, title="peak memory per device against the limit")


def timeline_drawing(plan: Plan, events: tuple[Event, ...]) -> str:
    """A row for each stage, a box for each pass, the once-per-step work at the end."""
    if not events:
        return ""
    end = max(e.end_s for e in events)
    updates = plan.prediction.iteration_time_s or (0.0,) * plan.num_stages
    scale = ROOM / (end + max(updates))
    parts = []
    for stage in range(plan.num_stages):
        y = stage * (LANE + GAP)
        parts += [lane_label(plan, stage, y), box(LABEL, y, ROOM, LANE, kind="track")]
    for event in events:
        parts += _event(event, scale)
    for stage, seconds in enumerate(updates):
        if seconds > 0:
            tip = f"stage {stage}: once per step\n{format_seconds(seconds)}"
            y = stage * (LANE + GAP)
            parts.append(box(LABEL + end * scale, y, seconds * scale, LANE, kind="update", tip=tip, stage=stage))
    height = plan.num_stages * (LANE + GAP)
    parts.append(text(LABEL, height + 10, "0", kind="dim"))
    parts.append(text(LABEL + ROOM, height + 10, format_seconds(end + max(updates)), kind="dim", anchor="end"))
    return drawing(height + 18, parts, title="the step in time, as predicted")


def _event(event: Event, scale: float) -> list[str]:
    x, y = LABEL + event.start_s * scale, event.stage * (LANE + GAP)
    width = (event.end_s - event.start_s) * scale
    kind = "forward" if event.task.kind == FORWARD else "backward"
    seconds = format_seconds(event.end_s - event.start_s)
    tip = f"stage {event.stage}: {event.task.kind} of micro-batch {event.task.microbatch}\n{seconds}"
    gap = min(1.0, width * 0.1)
    parts = [box(x + gap / 2, y, width - gap, LANE, kind=kind, tip=tip, stage=event.stage)]
    if width > 1.6 * CHARACTER * len(str(event.task.microbatch)):
        parts.append(text(x + width / 2, y + 20, str(event.task.microbatch), kind="mark", anchor="middle"))
    return parts


def baselines_drawing(plan: Plan) -> str:
    """The plan's predicted step time beside what other ways of searching the same tables found."""
    rows = [("this plan", plan.prediction.step_time_s), *plan.certificate.baselines]
    if len(rows) == 1:
        return ""
    label = 190
    scale = (WIDTH - label - 110) / max(*(t for _, t in rows if t is not None), 1e-12)
    parts = []
    for row, (name, seconds) in enumerate(rows):
        y = row * 26
        parts.append(text(0, y + 15, name.replace("_", " "), kind="name"))
        if seconds is None:
            parts.append(text(label, y + 15, "no plan", kind="dim"))
            continue
        parts.append(box(label, y + 3, seconds * scale, 16, kind="bar" if row == 0 else "other"))
        parts.append(text(label + seconds * scale + 6, y + 15, format_seconds(seconds), kind="dim"))
    return drawing(len(rows) * 26, parts, title="predicted step time of this plan and of other ways")
