"""A plan as text."""

from __future__ import annotations

import dataclasses

import pytest

from uniap_jax.core.plan import Alternative, Binding, Certificate, LayerPlan, Plan, Prediction, WhatIf
from uniap_jax.core.plan_text import format_bytes, format_range, format_seconds, plan_rows, plan_summary
from uniap_jax.core.strategy import Strategy

SPLIT = (
    Strategy(data=2, tensor=2),
    Strategy(data=2, tensor=2),
    Strategy(fsdp=4),
    Strategy(data=4, keep="inputs"),
)


def make_plan() -> Plan:
    """Two stages on eight devices."""
    return Plan(
        num_stages=2,
        num_microbatches=4,
        schedule="one_f_one_b",
        batch_size=16,
        stage_devices=((0, 1, 2, 3), (4, 5, 6, 7)),
        layers=tuple(LayerPlan(name=f"Block_{i}", stage=i // 3, strategy=s) for i, s in enumerate(SPLIT)),
        prediction=Prediction(
            step_time_s=0.125,
            stage_time_s=(0.02, 0.03),
            link_time_s=(0.001,),
            iteration_time_s=(0.002, 0.003),
            peak_bytes=(1.5 * 2**30, 300 * 2**20),
            capacity_bytes=(6 * 2.0**30, 6 * 2.0**30),
            source="measured",
        ),
        certificate=Certificate(
            status="optimal",
            bound_s=0.125,
            engine="interval+cbc",
            seconds=0.25,
            candidates=28,
            baselines=(("data", 0.2), ("fsdp", None)),
            notes=("a note",),
        ),
        device_kind="cpu",
    )


def test_rows_join_neighbours_of_one_strategy_and_tell_a_stage_once() -> None:
    rows = plan_rows(make_plan())
    assert [r.cells for r in rows] == [
        ("0", "0-3", "0-1  Block_0 … Block_1", "data=2,tensor=2", "20.0 ms", "1.50 GiB of 6.00 GiB"),
        ("0", "", "2  Block_2", "fsdp=4", "", ""),
        ("1", "4-7", "3  Block_3", "data=4,keep=inputs", "30.0 ms", "300 MiB of 6.00 GiB"),
    ]


def test_str_of_a_plan_holds_table_status_bound_gap_and_seconds() -> None:
    text = str(make_plan())
    lines = text.splitlines()
    assert lines[0] == "2 stages, 4 micro-batches, 1F1B, batch 16, 8 devices (cpu)"
    assert [c.strip() for c in lines[1].split("|")] == ["stage", "devices", "layers", "strategy", "time", "memory"]
    for fact in (
        "125 ms predicted, from layers measured",
        "optimal",
        "bound 125 ms",
        "gap 0.00 %",
        "250 ms",
        "data 200 ms",
    ):
        assert fact in text
    assert lines[-1] == "note: a note"
    assert all(line == line.rstrip() for line in lines)


def test_a_pinned_plan_without_a_prediction_claims_nothing() -> None:
    plan = dataclasses.replace(
        make_plan(), prediction=Prediction(step_time_s=0.0), certificate=Certificate(status="pinned")
    )
    text = str(plan)
    assert "status: pinned" in text
    for word in ("predicted", "bound", "gap"):
        assert word not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (12.5, "12.5 s"),
        (0.01234, "12.3 ms"),
        (0.0099999, "10.0 ms"),
        (1e-3, "1.00 ms"),
        (4.2e-6, "4.20 µs"),
        (3e-8, "30.0 ns"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1.5 * 2**30, "1.50 GiB"), (2**41, "2.00 TiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_ranges() -> None:
    assert format_range((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert format_range(()) == ""


def test_summary_says_why_this_plan_and_what_else_there_is() -> None:
    plan = make_plan()
    other = Alternative(
        what="1 stage, 4 micro-batches",
        num_stages=1,
        num_microbatches=4,
        schedule="gpipe",
        stage_devices=(tuple(range(8)),),
        layers=plan.layers,
        prediction=Prediction(step_time_s=0.15, peak_bytes=(2.0**31,)),
    )
    proof = dataclasses.replace(
        plan.certificate,
        binding=(
            Binding(kind="memory", index=1, seconds=0.025, share=0.97),
            Binding(kind="stage", index=1, seconds=0.1, share=0.8),
            Binding(kind="link", index=0, seconds=0.1, share=0.8),
            Binding(kind="fill", index=0, seconds=0.02, share=0.16),
            Binding(kind="once", index=1, seconds=0.005, share=0.04),
        ),
        what_ifs=(
            WhatIf(what="10 % more memory", step_time_s=0.1, bound_s=0.1, num_stages=2, num_microbatches=8),
            WhatIf(what="unlimited memory", step_time_s=0.125, bound_s=0.1, num_stages=2, num_microbatches=4),
        ),
        alternatives=(other,),
    )
    lines = plan_summary(dataclasses.replace(plan, certificate=proof))
    assert [line for line in lines if line.split(":")[0].startswith(("why", "with", "alternative"))] == [
        "why: stage 1 is 97 % full, and without any limit the step would be 25.0 ms shorter",
        "why: stage 1 is the slowest and sets the pace, 100 ms (80 %) of the step",
        "why: the link from stage 0 to 1 is the slowest and sets the pace, 100 ms (80 %) of the step",
        "why: stages wait while the pipeline fills and drains, 20.0 ms (16 %) of the step",
        "why: once per step stage 1 synchronises and updates, 5.00 ms (4 %) of the step",
        "with 10 % more memory: 100 ms (-20.0 %), 2 stages, 8 micro-batches",
        "with unlimited memory: no faster plan",
        "alternative 0: 1 stage, 4 micro-batches: 150 ms (+20.0 %), 2.00 GiB per device",
    ]
    page = dataclasses.replace(plan, certificate=proof).to_html()
    assert "0: 1 stage, 4 micro-batches: 150 ms" in page
    assert "with 10 % more memory: 100 ms" in page
