"""Compiled programs are compared with the plan, and differences are told."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax
import pytest

from runtime_support import decoder_state, decoder_step, make_plan, token_batch
from uniap_jax import frontend, runtime
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Prediction
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.stage_memory import stage_peaks
from uniap_jax.runtime.verify import count_collectives, foreseen, place, places, verify, warn

TX = optax.adamw(1e-3)
KIND = "Involuntary full rematerialization"


def quiet_step(state: Any, batch: Any) -> Any:
    state, metrics = decoder_step(state, batch)
    return state, metrics["loss"]


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(quiet_step, decoder_state(TX), token_batch())


@pytest.mark.parametrize(
    "plan",
    [
        {"strategies": "data=4"},
        {"strategies": "fsdp=4"},
        {"strategies": ("data=4", "data=2,tensor=2"), "microbatches": 2},
        {"stages": 2, "strategies": "data=2", "microbatches": 2},
        {"stages": 2, "strategies": "tensor=2"},
    ],
    ids=str,
)
def test_case_22_no_collective_that_the_plan_did_not_foresee(graph: LayerGraph, plan: dict[str, Any]) -> None:
    step = runtime.compile(graph, make_plan(graph, **plan))
    found = verify(step)
    assert found.ok, found.problems
    assert found.memory_rel_error is None
    assert [s.stage for s in found.stages] == list(range(step.plan.num_stages))
    assert all(s.compiled_bytes > 0 for s in found.stages)
    assert {p.name for p in found.programs} == {p.name for p in step.programs}


def test_a_stage_of_one_device_talks_to_nobody(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=2))
    assert not any(p.collectives for p in verify(step, full_copies=False).programs)


def test_a_wrong_prediction_is_told_with_its_layers(graph: LayerGraph, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(graph, strategies="data=2")
    (right,) = stage_peaks(runtime.compile(graph, plan))
    for peak, error in ((right, 0.0), (right * 1.5, 0.5)):
        told = dataclasses.replace(plan, prediction=Prediction(step_time_s=1.0, peak_bytes=(float(peak),)))
        caplog.clear()
        found = warn(runtime.compile(graph, told), tolerance=0.2)
        assert found.ok is (error == 0.0)
        assert found.memory_rel_error == pytest.approx(error, abs=1e-6)
        assert [r.getMessage() for r in caplog.records] == [f"not as planned: {p}" for p in found.problems]
    assert "50 % apart, tolerance 20 %" in found.problems[0]
    assert place(graph, 0) in found.problems[0]
    assert "runtime_support.py:" in found.problems[0]
    assert found.to_dict()["stages"][0]["rel_error"] == pytest.approx(0.5)


def test_schedules_differ_by_what_is_in_flight(graph: LayerGraph) -> None:
    first, last = (
        stage_peaks(runtime.compile(graph, make_plan(graph, stages=2, microbatches=4, schedule=s)))
        for s in ("gpipe", "one_f_one_b")
    )
    # four against two on the first stage, four against one on the second
    assert first[0] > last[0]
    assert first[1] > last[1]


def test_the_batch_counts_where_it_is_read(graph: LayerGraph) -> None:
    """Its rows are sent to their stages once per step, and stay there."""
    step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=4))
    executor = step.executor
    assert isinstance(executor, Pipeline)
    whole = stage_peaks(step)
    executor.built.feeder.rows = [[], []]
    without = stage_peaks(step)
    read = [
        {graph.operands[o].leaf for o in s.operands if graph.operands[o].kind == "batch"} for s in executor.built.specs
    ]
    assert any(read)
    for stage, leaves in enumerate(read):
        ways = step.plan.layers[step.plan.stage_layers(stage)[0]].strategy.batch_ways
        assert whole[stage] - without[stage] == sum(graph.step.batch[i].nbytes for i in leaves) / ways


def test_case_23_a_line_of_the_compiler_is_mapped_to_its_layers(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, strategies=("data=4", "data=2,tensor=2")))
    text = step.programs[0].compiled.as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line]
    told = places(graph, reduced)
    named = [i for i in range(len(graph.layers)) if place(graph, i) in told]
    assert named
    assert all(graph.layers[i].source in told for i in named)
    line = f'{KIND} for HLO operation: %copy = f32[8] copy(%x), metadata={{op_name="jit(train_step)/layer_2/dot"}}'
    assert places(graph, [line]) == place(graph, 2)
    assert places(graph, ["%x = f32[] add(%a, %b)"]).startswith("no layer")


def test_collectives_are_counted_by_kind() -> None:
    text = """
      %a = f32[8] all-reduce(f32[8] %x), replica_groups={{0,1}}
      %b = (f32[4], f32[8]) all-gather-start(f32[4] %y)
      %c = f32[8] all-gather-done((f32[4], f32[8]) %b)
      %d = f32[8] add(f32[8] %all-reduce.1, f32[8] %c)
    """
    assert count_collectives(text) == {"all-reduce": 1, "all-gather": 1}


def test_what_is_foreseen(graph: LayerGraph) -> None:
    assert foreseen(make_plan(graph, strategies="data=4"), 0) == {"all-reduce"}
    assert foreseen(make_plan(graph, stages=2), 0) == set()
    assert "reduce-scatter" in foreseen(make_plan(graph, strategies="fsdp=4"), 0)
