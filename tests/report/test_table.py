"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
import io

from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy
from uniap_jax.report.difference import plan_difference
from uniap_jax.report.table import format_flops, print_difference, print_plan

PLAN = Plan(
    num_stages=2,
    num_microbatches=4,
    schedule="gpipe",
    batch_size=16,
    stage_devices=((0, 1), (2, 3)),
    layers=tuple(LayerPlan(name=f"[bold]Block_{i}", stage=i // 2, strategy=Strategy(data=2)) for i in range(4)),
    prediction=Prediction(
        step_time_s=0.125, stage_time_s=(0.02, 0.03), peak_bytes=(2.0**30, 2.0**20), capacity_bytes=(2.0**31, 2.0**31)
    ),
    certificate=Certificate(status="optimal", bound_s=0.125, engine="interval", seconds=0.5, candidates=3),
)


def with_layer(plan: Plan, index: int, **changes: object) -> Plan:
    layers = list(plan.layers)
    layers[index] = dataclasses.replace(layers[index], **changes)
    return dataclasses.replace(plan, layers=tuple(layers))


def printed(function: object, *args: object) -> str:
    stream = io.StringIO()
    function(*args, stream)  # type: ignore[operator]
    return stream.getvalue()


def test_plan_table_shows_every_column_and_takes_names_literally() -> None:
    text = printed(print_plan, PLAN)
    for fact in (
        "stage",
        "devices",
        "strategy",
        "memory",
        "[bold]Block_0",
        "20.0 ms",
        "1.00 GiB of 2.00 GiB",
        "optimal",
    ):
        assert fact in text
    assert "\x1b" not in text


def test_equal_plans_have_no_difference() -> None:
    assert plan_difference(PLAN, PLAN) == ()
    assert "equal" in printed(print_difference, PLAN, PLAN)


def test_difference_joins_layers_that_differ_in_the_same_way() -> None:
    other = with_layer(with_layer(PLAN, 1, strategy=Strategy(tensor=2)), 2, strategy=Strategy(tensor=2), stage=0)
    other = dataclasses.replace(other, num_microbatches=8)
    found = {d.what: (d.first, d.second) for d in plan_difference(PLAN, other)}
    assert found == {
        "micro-batches": ("4", "8"),
        "layer 1": ("stage 0, data=2", "stage 0, tensor=2"),
        "layer 2": ("stage 1, data=2", "stage 0, tensor=2"),
    }


def test_difference_tells_predictions_and_models() -> None:
    other = dataclasses.replace(
        PLAN, graph_fingerprint="b", prediction=dataclasses.replace(PLAN.prediction, step_time_s=0.25)
    )
    found = {d.what: (d.first, d.second) for d in plan_difference(PLAN, other)}
    assert found == {"model": ("", "b"), "step time": ("125 ms", "250 ms")}


def test_flops() -> None:
    assert [format_flops(f) for f in (12, 1.5e3, 2e6, 3.25e9, 4e12)] == [
        "12 FLOP",
        "1.5 kFLOP",
        "2 MFLOP",
        "3.25 GFLOP",
        "4 TFLOP",
    ]
