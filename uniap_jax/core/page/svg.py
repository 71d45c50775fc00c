"""Pieces of a drawing, as SVG text. Sizes in pixels of a 960 wide drawing; colours are CSS classes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from uniap_jax.core.plan_text import format_range

if TYPE_CHECKING:  # a plan draws itself with this module
    from uniap_jax.core.plan import Plan

WIDTH = 960
LABEL = 96
"""Room for the names of rows on the left."""
ROOM = WIDTH - LABEL - 8
LANE, GAP = 30, 8
NUM_COLOURS = 8
CHARACTER = 6.6
"""Width of a character of the drawings' font."""


def drawing(height: float, parts: Iterable[str], *, title: str) -> str:
    """An SVG element that scales with the page; its marks are reached with the arrow keys."""
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="group" aria-label="{escape(title)}" '
        f'style="min-width:640px">{body}</svg>'
    )


def text(x: float, y: float, content: str, *, kind: str = "", anchor: str = "start") -> str:
    """A line of text; `kind` is its CSS class."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, *, kind: str, tip: str = "", stage: int | None = None) -> str:
    """A rectangle; `tip` is shown under the pointer and on focus, `stage` lets the page select it."""
    told = escape(tip)
    extra = f' data-tip="{told}" aria-label="{told}" role="img" tabindex="-1"' if tip else ""
    extra += "" if stage is None else f' data-stage="{stage}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.5):.2f}" height="{height:.1f}" class="{kind}"{extra}/>'


def labelled(x: float, y: float, width: float, mark: str, rectangle: str) -> list[str]:
    """A rectangle of a lane with a mark in its middle, where there is room for it."""
    if width <= 1.6 * CHARACTER * len(mark):
        return [rectangle]
    return [rectangle, text(x + width / 2, y + 20, mark, kind="mark", anchor="middle")]


def lane_y(row: int) -> float:
    """Top of a row."""
    return row * (LANE + GAP)


def lanes(plan: Plan) -> list[str]:
    """An empty row for each stage with its name; pressing the name selects the stage."""
    parts = []
    for stage in range(plan.num_stages):
        parts += [box(LABEL, lane_y(stage), ROOM, LANE, kind="track"), lane_label(plan, stage)]
    return parts


def lane_label(plan: Plan, stage: int) -> str:
    """Name of a stage's row."""
    y, devices = lane_y(stage), format_range(plan.stage_devices[stage])
    return (
        f'<g class="pick" data-pick="{stage}" tabindex="0" role="button" aria-pressed="false" '
        f'aria-label="select stage {stage}">'
        f"{text(0, y + 13, f'stage {stage}', kind='name')}{text(0, y + 26, f'devices {devices}', kind='dim')}</g>"
    )


def axis(height: float, left: str, right: str) -> list[str]:
    """What the left and the right end of the rows mean, below them."""
    return [
        text(LABEL, height + 10, left, kind="dim"),
        text(LABEL + ROOM, height + 10, right, kind="dim", anchor="end"),
    ]


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
