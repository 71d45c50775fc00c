"""A plan as text: plain Python, so that `str(plan)` needs no table library and every report shows the same rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the plan imports this module for its `str`
    from uniap_jax.core.plan import Alternative, Binding, LayerPlan, Plan, WhatIf

GIB = 2.0**30
SAME = 1e-6
"""Relative difference of step times below which two plans take equally long."""
HEADER = ("stage", "devices", "layers", "strategy", "time", "memory")
SCHEDULE_NAMES = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved 1F1B"}
SOURCE_NAMES = {
    "measured": "from layers measured on these devices",
    "compiled": "from compiled programs, without a clock",
    "described": "from described rates and links, nothing measured",
}
STATUS_NAMES = {
    "optimal": "optimal, proved over the whole search",
    "feasible": "feasible, not proved optimal",
    "pinned": "pinned by hand, not searched",
    "infeasible": "infeasible",
    "no_plan_in_time": "no plan in time",
}


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best, three digits: 0.01234 -> "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * scale >= 1.0 or (seconds == 0.0 and unit == "ms"):
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def format_bytes(count: float) -> str:
    """Bytes in binary units, three digits: 1610612736 -> "1.50 GiB"."""
    for unit, scale in (("TiB", 2.0**40), ("GiB", GIB), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def _three_digits(number: float) -> str:
    magnitude = abs(number)
    return f"{number:.0f}" if magnitude >= 99.95 else f"{number:.1f}" if magnitude >= 9.995 else f"{number:.2f}"


def format_range(indices: Sequence[int]) -> str:
    """Whole numbers as ranges: (0, 1, 2, 5) -> "0-2,5"."""
    runs = [
        [i for _, i in group]
        for _, group in itertools.groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Neighbouring layers of one stage that share a strategy.

    Attributes:
        stage: pipeline stage.
        devices: of the stage, as ranges; "" but in the first row of a stage.
        layers: as ranges with the names of the first and last.
        strategy: of all of them.
        time: of the stage, forward + backward of one micro-batch; "" but in the first row of a stage.
        memory: predicted peak of the stage per device, with the limit; "" but in the first row of a stage.
    """

    stage: int
    devices: str
    layers: str
    strategy: str
    time: str
    memory: str

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of `HEADER`."""
        return (str(self.stage), self.devices, self.layers, self.strategy, self.time, self.memory)


def plan_rows(plan: Plan) -> tuple[PlanRow, ...]:
    """Rows of the plan table, by stage and then in trace order."""
    rows: list[PlanRow] = []
    for stage in range(plan.num_stages):
        indices = plan.stage_layers(stage)
        runs = [list(g) for _, g in itertools.groupby(indices, key=lambda i: str(plan.layers[i].strategy))]
        for position, run in enumerate(runs):
            first = position == 0
            rows.append(
                PlanRow(
                    stage=stage,
                    devices=format_range(plan.stage_devices[stage]) if first else "",
                    layers=_layer_names(run, plan.layers),
                    strategy=str(plan.layers[run[0]].strategy),
                    time=_stage_time(plan, stage) if first else "",
                    memory=_stage_memory(plan, stage) if first else "",
                )
            )
    return tuple(rows)


def _layer_names(run: Sequence[int], layers: Sequence[LayerPlan]) -> str:
    first, last = layers[run[0]].name, layers[run[-1]].name
    names = first if len(run) == 1 or first == last else f"{first} … {last}"
    return f"{format_range(run)}  {names}".rstrip()


def _at(values: Sequence[float], stage: int) -> float | None:
    return values[stage] if stage < len(values) else None


def _stage_time(plan: Plan, stage: int) -> str:
    seconds = _at(plan.prediction.stage_time_s, stage)
    return "" if seconds is None else format_seconds(seconds)


def _stage_memory(plan: Plan, stage: int) -> str:
    peak, limit = _at(plan.prediction.peak_bytes, stage), _at(plan.prediction.capacity_bytes, stage)
    if peak is None:
        return ""
    return format_bytes(peak) if limit is None else f"{format_bytes(peak)} of {format_bytes(limit)}"


def plan_title(plan: Plan) -> str:
    """One line: stages, micro-batches, schedule, batch, devices."""
    pipeline = _pipeline_told(plan.num_stages, plan.num_microbatches)
    schedule = f", {SCHEDULE_NAMES.get(plan.schedule, plan.schedule)}" if plan.num_stages > 1 else ""
    kind = f" ({plan.device_kind})" if plan.device_kind else ""
    program = ", one program" if plan.executor == "program" and plan.num_stages > 1 else ""
    return f"{pipeline}{schedule}{program}, batch {plan.batch_size}, {plan.num_devices} devices{kind}"


def plan_summary(plan: Plan) -> tuple[str, ...]:
    """Lines under the table: predicted time and its source, status, baselines, why, alternatives, notes."""
    proof, prediction = plan.certificate, plan.prediction
    lines = []
    if prediction.step_time_s > 0:
        source = SOURCE_NAMES.get(prediction.source, prediction.source)
        lines.append(f"step: {format_seconds(prediction.step_time_s)} predicted, {source}")
    status = f"status: {STATUS_NAMES.get(proof.status, proof.status)}"
    if proof.status in ("optimal", "feasible"):
        status += f"; bound {format_seconds(proof.bound_s)}, gap {100 * proof.gap:.2f} %"
        status += f"; {proof.engine}, {proof.candidates} candidates, {format_seconds(proof.seconds)}"
    lines.append(status)
    if proof.baselines:
        told = (f"{name} {'no plan' if t is None else format_seconds(t)}" for name, t in proof.baselines)
        lines.append(f"same tables, other ways: {', '.join(told)}")
    lines += [f"why: {_binding_told(b)}" for b in proof.binding]
    lines += [f"with {w.what}: {_what_if_told(plan, w)}" for w in proof.what_ifs]
    lines += [f"alternative {i}: {_alternative_told(plan, a)}" for i, a in enumerate(proof.alternatives)]
    return (*lines, *(f"note: {n}" for n in proof.notes))


def _binding_told(binding: Binding) -> str:
    """What keeps the step from being shorter, and by how much."""
    time, share = format_seconds(binding.seconds), f"{100 * binding.share:.0f} %"
    return {
        "memory": f"stage {binding.index} is {share} full, and without any limit the step would be {time} shorter",
        "stage": f"stage {binding.index} is the slowest and sets the pace, {time} ({share}) of the step",
        "link": f"the link from stage {binding.index} to {binding.index + 1} is the slowest and sets the pace, {time} "
        f"({share}) of the step",
        "fill": f"stages wait while the pipeline fills and drains, {time} ({share}) of the step",
        "once": f"once per step stage {binding.index} synchronises and updates, {time} ({share}) of the step",
    }[binding.kind]


def _what_if_told(plan: Plan, other: WhatIf) -> str:
    if other.step_time_s >= plan.prediction.step_time_s * (1 - SAME):
        return "no faster plan"
    return f"{_compared(plan, other.step_time_s)}, {_pipeline_told(other.num_stages, other.num_microbatches)}"


def _alternative_told(plan: Plan, other: Alternative) -> str:
    peak = f", {format_bytes(max(other.prediction.peak_bytes))} per device" if other.prediction.peak_bytes else ""
    return f"{other.what}: {_compared(plan, other.prediction.step_time_s)}{peak}"


def _compared(plan: Plan, seconds: float) -> str:
    off = 100 * (seconds / plan.prediction.step_time_s - 1) if plan.prediction.step_time_s > 0 else 0.0
    return f"{format_seconds(seconds)} ({off:+.1f} %)"


def _pipeline_told(stages: int, pieces: int) -> str:
    return f"{stages} stage{'s' if stages != 1 else ''}, {pieces} micro-batch{'es' if pieces != 1 else ''}"


def align(rows: Iterable[Sequence[str]], *, header: Sequence[str]) -> str:
    """Columns of text with a rule under the header; trailing blanks dropped."""
    table = [tuple(header), *(tuple(r) for r in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-+-".join("-" * w for w in widths), *lines[1:]])


def format_plan(plan: Plan) -> str:
    """The plan as a plain-text table: stage | devices | layers | strategy | time | memory, then what is known of it."""
    table = align((row.cells for row in plan_rows(plan)), header=HEADER)
    return "\n".join([plan_title(plan), table, *plan_summary(plan)])
