"""The page itself: tiles, drawings and tables in their order. No network, light and dark, keyboard as well as mouse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from uniap_jax.core.observed import NOTHING, Observed
from uniap_jax.core.page import drawings
from uniap_jax.core.page.svg import strategy_kinds
from uniap_jax.core.plan_text import (
    HEADER,
    SCHEDULE_NAMES,
    SOURCE_NAMES,
    STATUS_NAMES,
    format_bytes,
    format_seconds,
    plan_rows,
    plan_summary,
    plan_title,
)
from uniap_jax.core.timeline import bubble_share, predicted_events

if TYPE_CHECKING:  # a plan draws itself with this module
    from uniap_jax.core.plan import Plan

FRAME_HEIGHT = 720
"""Pixels of the page inside a notebook's cell."""
MEMORY_PARTS = ("parameters", "optimizer", "gradients", "activations", "transients")
PASSES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("update", "once per step: gradient synchronisation, update"),
)
HALVES = (
    "Numbers are micro-batches. Forward and backward of a stage are taken as 1 : 2 and laid end to end; "
    "the predicted step is the formula's and may differ from where this drawing ends."
)


def plan_page(plan: Plan, observed: Observed = NOTHING) -> str:
    """The whole page as text; write it to a file and open it.

    Args:
        plan: what to show.
        observed: what the compiler and the clock said of it, put beside what was predicted.
    """
    assets = resources.files("uniap_jax.core.page")
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    script = assets.joinpath("page.js").read_text(encoding="utf-8")
    sections = "".join(
        f"<section><h2>{escape(name)}</h2>{body}</section>" for name, body in _sections(plan, observed) if body
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Plan: {escape(plan_title(plan))}</title><style>{style}</style></head><body><main>"
        f"<h1>{escape(plan_title(plan))}</h1>{_provenance(plan, observed)}{_tiles(plan, observed)}{sections}"
        f'</main><div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def notebook_frame(page: str) -> str:
    """A page inside a notebook's cell, apart from the notebook's own style and scripts."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="plan" loading="lazy" '
        f'style="width:100%;height:{FRAME_HEIGHT}px;border:0"></iframe>'
    )


def _provenance(plan: Plan, observed: Observed) -> str:
    source = SOURCE_NAMES.get(plan.prediction.source, plan.prediction.source)
    beside = " What was compiled and measured stands beside it." if observed != NOTHING else ""
    return f'<p class="lead">Times and memory are predicted, {escape(source)}.{beside}</p>'


def _tiles(plan: Plan, observed: Observed) -> str:
    proof, prediction = plan.certificate, plan.prediction
    tiles = [
        ("predicted step", format_seconds(prediction.step_time_s) if prediction.step_time_s > 0 else "unknown", "")
    ]
    if observed.step_time_s is not None:
        tiles.append(("measured step", format_seconds(observed.step_time_s), f"of {len(observed.step_times_s)} steps"))
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
        share = bubble_share(events, num_places=len(plan.device_sets))
        tiles.append(("pipeline bubble", f"{100 * share:.0f} %", "share of time in which stages wait"))
    body = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
        for name, value, more in tiles
    )
    return f'<div class="tiles">{body}</div>'


def _sections(plan: Plan, observed: Observed) -> Iterable[tuple[str, str]]:
    kinds = strategy_kinds(plan)
    named = [(colour, f"{mark}  {strategy}") for strategy, (mark, colour) in kinds.items()]
    yield "Stages and layers", _legend(named) + _scroll(drawings.layers_drawing(plan, kinds))
    yield "Memory of each device", _memory(plan)
    yield "One step in time", _timelines(plan, observed)
    yield "Links between stages", _scroll(drawings.links_drawing(plan))
    yield "Predicted, compiled, measured", _comparison(plan, observed)
    yield "Other ways, same tables", _scroll(drawings.ways_drawing(_ways(plan)))
    yield "The search", _search(plan)
    yield "The plan as a table", _table(HEADER, (row.cells for row in plan_rows(plan)), stages=True)
    yield "What is known of it", "".join(f"<p>{escape(line)}</p>" for line in plan_summary(plan))


def _memory(plan: Plan) -> str:
    drawn = drawings.memory_drawing(plan)
    if not drawn:
        return ""
    parts = _legend([(f"m-{name}", name) for name in MEMORY_PARTS]) if plan.prediction.memory else ""
    told = "Bars are drawn to the fullest stage; the limit lies beyond the right edge."
    return parts + (f'<p class="dim">{told}</p>' if drawings.is_zoomed(plan) else "") + _scroll(drawn)


def _timelines(plan: Plan, observed: Observed) -> str:
    predicted = predicted_events(plan)
    if not predicted:
        return ""
    span = drawings.time_scale(plan, predicted, observed.events)
    told = _legend(PASSES) + f'<p class="dim">{HALVES}</p>'
    drawn = _scroll(drawings.timeline_drawing(plan, predicted, span_s=span))
    seen = drawings.timeline_drawing(plan, observed.events, span_s=span, measured=True)
    return told + (f"<h3>predicted</h3>{drawn}<h3>measured, on the same scale</h3>{_scroll(seen)}" if seen else drawn)


def _comparison(plan: Plan, observed: Observed) -> str:
    if observed == NOTHING:
        return ""
    rows: list[tuple[str, ...]] = [
        (
            "step time",
            format_seconds(plan.prediction.step_time_s),
            "",
            format_seconds(observed.step_time_s) if observed.step_time_s is not None else "",
            _off(plan.prediction.step_time_s, observed.step_time_s),
        )
    ]
    for stage, peak in enumerate(plan.prediction.peak_bytes):
        compiled, live = _at(observed.compiled_bytes, stage), _at(observed.live_bytes, stage)
        seen = live if live is not None else compiled
        told = ("" if n is None else format_bytes(n) for n in (compiled, live))
        rows.append((f"peak of a device of stage {stage}", format_bytes(peak), *told, _off(peak, seen)))
    return _table(("", "predicted", "compiled", "measured", "prediction is off by"), rows)


def _at(values: Sequence[float], stage: int) -> float | None:
    return values[stage] if stage < len(values) else None


def _off(predicted: float, seen: float | None) -> str:
    return "" if not seen or predicted <= 0 else f"{100 * (predicted - seen) / seen:+.1f} %"


def _ways(plan: Plan) -> list[tuple[str, float | None, str]]:
    proof = plan.certificate
    rows: list[tuple[str, float | None, str]] = [("this plan", plan.prediction.step_time_s, "")]
    rows += [(f"with {w.what}", w.step_time_s, "a plan of another problem") for w in proof.what_ifs]
    rows += [
        (f"{i}: {other.what}", other.prediction.step_time_s, f"plan.with_alternative({i})")
        for i, other in enumerate(proof.alternatives)
    ]
    return rows + [(name.replace("_", " "), seconds, "a simpler search") for name, seconds in proof.baselines]


def _search(plan: Plan) -> str:
    header = ("stages", "micro-batches", "schedule", "no plan is faster than", "outcome")
    rows = [
        (
            str(s.num_stages),
            str(s.num_microbatches),
            SCHEDULE_NAMES.get(s.schedule, s.schedule) if s.num_stages > 1 else "",
            "no plan fits" if s.bound_s is None else format_seconds(s.bound_s),
            s.outcome,
        )
        for s in plan.certificate.searched
    ]
    if not rows:
        return ""
    counts = {kind: sum(row[-1] == kind for row in rows) for kind in ("pruned", "no plan", "open")}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return (
        f'<p class="dim">{len(rows)} candidate{"s" if len(rows) > 1 else ""}: 1 chosen{told and ", " + told}.</p>'
        + _table(header, rows)
    )


def _scroll(drawing: str) -> str:
    return drawing and f'<div class="scroll">{drawing}</div>'


def _legend(kinds: Iterable[tuple[str, str]]) -> str:
    items = (
        f'<li><svg width="18" height="14" aria-hidden="true"><rect width="18" height="14" rx="2" class="{kind}"/></svg>'
        f"{escape(name)}</li>"
        for kind, name in kinds
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, stages: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        stage = f' data-stage="{escape(row[0])}"' if stages else ""
        body += f"<tr{stage}>{cells}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
