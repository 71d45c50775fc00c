"""A plan as one self-contained HTML page: no network, light and dark, readable without a mouse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import (
    HEADER,
    SOURCE_NAMES,
    STATUS_NAMES,
    format_bytes,
    format_seconds,
    plan_rows,
    plan_summary,
    plan_title,
)
from uniap_jax.report import svg
from uniap_jax.report.timeline import bubble_share, predicted_events


def plan_page(plan: Plan) -> str:
    """The whole page as text; write it to a file and open it."""
    assets = resources.files("uniap_jax.report")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    script = assets.joinpath("page.js").read_text(encoding="utf-8")
    sections = "".join(f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in _sections(plan) if body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan: {escape(plan_title(plan))}</title><style>{style}</style></head><body><main>"
        f"<h1>{escape(plan_title(plan))}</h1>{_provenance(plan)}{_tiles(plan)}{sections}"
        f'</main><div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _provenance(plan: Plan) -> str:
    source = SOURCE_NAMES.get(plan.prediction.source, plan.prediction.source)
    return f'<p class="lead">Times and memory are predicted, {escape(source)}.</p>'


def _tiles(plan: Plan) -> str:
    proof, prediction = plan.certificate, plan.prediction
    tiles = [
        ("predicted step", format_seconds(prediction.step_time_s) if prediction.step_time_s > 0 else "unknown", "")
    ]
    if proof.status in ("optimal", "feasible"):
        told = f"bound {format_seconds(proof.bound_s)}, gap {100 * proof.gap:.2f} %, {format_seconds(proof.seconds)}"
        tiles.append(("status", proof.status, told))
    else:
        tiles.append(("status", proof.status.replace("_", " "), STATUS_NAMES.get(proof.status, "")))
    if prediction.peak_bytes:
        stage = max(range(len(prediction.peak_bytes)), key=lambda i: prediction.peak_bytes[i])
        limit = f" of {format_bytes(prediction.capacity_bytes[stage])}" if prediction.capacity_bytes else ""
        tiles.append(("fullest device", format_bytes(prediction.peak_bytes[stage]), f"stage {stage}{limit}"))
    events = predicted_events(plan)
    if events and plan.num_stages > 1:
        share = bubble_share(events, num_stages=plan.num_stages)
        tiles.append(("pipeline bubble", f"{100 * share:.0f} %", "share of time in which stages wait"))
    body = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
        for name, value, more in tiles
    )
    return f'<div class="tiles">{body}</div>'


def _sections(plan: Plan) -> Iterable[tuple[str, str]]:
    kinds = svg.strategy_kinds(plan)
    yield "Stages and layers", _legend(kinds) + _scroll(svg.layers_drawing(plan, kinds))
    yield "Memory of each device", _scroll(svg.memory_drawing(plan))
    timeline = svg.timeline_drawing(plan, predicted_events(plan))
    yield "One step in time", timeline and _timeline_legend() + _scroll(timeline)
    yield "Other ways, same tables", _scroll(svg.baselines_drawing(plan))
    yield "The plan as a table", _table(HEADER, (row.cells for row in plan_rows(plan)))
    yield "What is known of it", "".join(f"<p>{escape(line)}</p>" for line in plan_summary(plan))


def _scroll(drawing: str) -> str:
    return drawing and f'<div class="scroll">{drawing}</div>'


def _legend(kinds: dict[str, tuple[str, str]]) -> str:
    items = (
        f'<li><svg width="18" height="14"><rect width="18" height="14" rx="2" class="cell {colour}"/></svg>'
        f"<b>{mark}</b> {escape(strategy)}</li>"
        for strategy, (mark, colour) in kinds.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _timeline_legend() -> str:
    items = (
        f'<li><svg width="18" height="14"><rect width="18" height="14" rx="2" class="{kind}"/></svg>{name}</li>'
        for kind, name in (
            ("forward", "forward"),
            ("backward", "backward"),
            ("update", "once per step: gradient synchronisation, update"),
        )
    )
    told = (
        "Numbers are micro-batches. Forward and backward of a stage are taken as 1 : 2 and laid end to end; "
        "the predicted step is the formula's and may differ from where this drawing ends."
    )
    return f'<ul class="legend">{"".join(items)}</ul><p class="dim">{told}</p>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr data-stage="{escape(row[0])}">{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>' for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
