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
from uniap_jax.runtime.verify import count_collectives, foreseen, verify

TX = optax.adamw(1e-3)


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
    assert len(found.compiled_bytes) == step.plan.num_stages
    assert all(b > 0 for b in found.compiled_bytes)
    assert {p.name for p in found.programs} == {p.name for p in step.programs}


def test_a_stage_of_one_device_talks_to_nobody(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=2))
    assert not any(p.collectives for p in verify(step, full_copies=False).programs)


def test_a_wrong_prediction_is_told(graph: LayerGraph) -> None:
    plan = make_plan(graph, strategies="data=2")
    right = verify(runtime.compile(graph, plan), full_copies=False).compiled_bytes[0]
    for peak, ok in ((right, True), (right * 2, False)):
        told = dataclasses.replace(plan, prediction=Prediction(step_time_s=1.0, peak_bytes=(float(peak),)))
        found = verify(runtime.compile(graph, told), full_copies=False)
        assert found.ok is ok
        assert found.memory_rel_error == pytest.approx(0.0 if ok else 0.5)
    assert "stage 0" in found.problems[0]


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
