"""One program behind `parallelize` and `check`: found by the planner, run as the user's own step."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import uniap_jax as uniap
import uniform_support as support
from uniap_jax.check import CheckReport, check_plan
from uniap_jax.core.errors import ExecutionError, PlanMismatchError, StrategyError
from uniap_jax.core.serialize import plan_from_json, plan_to_json
from uniap_jax.runtime.mesh_axes import collectives_by_axis
from uniap_jax.runtime.verify import verify


def checked(built: tuple[Any, Any, Any], **pins: Any) -> CheckReport:
    """Plans one program for several stages and trains two steps beside one device."""
    state, step, batch = built
    graph = uniap.trace(step, state, batch)
    plan = uniap.solve(uniap.estimate(graph), executor="program", **pins)
    assert plan.executor == "program"
    assert plan.num_stages > 1
    assert plan_from_json(plan_to_json(plan)) == plan
    report = check_plan(graph, plan, (state, batch), steps=2)
    assert report.ok, (report.loss_rel_diff, report.grad_rel_diff, report.grad_leaf)
    return report


def test_unrolled_gpt_with_dropout() -> None:
    checked(support.gpt(layers=2), num_stages=2, num_microbatches=2)


def test_linen_scan_with_remat_and_dropout() -> None:
    checked(support.gpt(layers=4, scan=True, remat=True), num_stages=4, num_microbatches=1)


def test_nnx_scan_with_statistics_that_change() -> None:
    checked(support.nnx_stack(), num_stages=2, num_microbatches=1)


@pytest.fixture(scope="module")
def ready() -> Any:
    state, step, batch = support.residual(aux=False)
    planned = uniap.parallelize(
        step, executor="program", num_stages=2, num_microbatches=2, strategy="fsdp=4", source="described"
    )
    return planned, planned.place(state, batch), state, batch


def test_the_step_is_the_users_own(ready: Any, caplog: pytest.LogCaptureFixture) -> None:
    planned, placed, state, batch = ready
    assert planned.plan.executor == "program"
    losses = []
    new = placed
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            if number == 2:
                jax.config.update("jax_log_compiles", True)
            new, metrics = planned(new, batch)
            losses.append(float(metrics["loss"]))
    jax.config.update("jax_log_compiles", False)
    assert not [r for r in caplog.records if "Compiling" in r.message]
    assert losses[2] < losses[0]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    with pytest.raises(ExecutionError):  # given up to the first call
        planned(placed, batch)
    (program,) = planned.programs
    assert planned.memory_analysis().temp_size_in_bytes > 0
    whole = planned.gather(new)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(whole))
    assert program.name == "train_step"


def test_state_made_in_place_is_the_same(ready: Any) -> None:
    planned, _, state, _ = ready
    made = planned.init(lambda: support.residual(aux=False)[0])
    for a, b, described in zip(
        jax.tree.leaves(made), jax.tree.leaves(state), jax.tree.leaves(planned.abstract_state()), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.sharding.is_equivalent_to(described.sharding, a.ndim)
    with pytest.raises(PlanMismatchError):
        planned.init(lambda: support.residual(aux=False)[0][0])


def test_verification_counts_collectives_by_axis(ready: Any) -> None:
    planned, _, state, batch = ready
    graph = uniap.trace(support.residual(aux=False)[1], state, batch)
    step = uniap.compile_plan(graph, planned.plan)
    found = verify(step, full_copies=False, tolerance=10.0)
    assert found.ok, found.problems
    assert len(found.stages) == 2
    axes = found.programs[0].axes
    assert axes["collective-permute over stage"] >= 2  # forward and back
    assert any("x0" in what for what in axes)


def test_groups_of_devices_are_read_in_every_notation() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "x0"))
    text = """
      a = f32[2] all-reduce(b), replica_groups={{0,1,2,3},{4,5,6,7}}
      c = f32[2] all-gather-start(d), replica_groups=[4,2]<=[2,4]T(1,0)
      e = f32[2] collective-permute(f), source_target_pairs={{0,4},{1,5}}
      g = f32[2] all-reduce(h), replica_groups={}
    """
    assert collectives_by_axis(text, mesh) == {
        "all-gather over stage": 1,
        "all-reduce over stage, x0": 1,
        "all-reduce over x0": 1,
        "collective-permute over stage": 1,
    }


def test_a_model_without_equal_stages_is_refused() -> None:
    state, step, batch = support.residual(aux=False)
    planned = uniap.parallelize(step, executor="program", num_stages=8, source="described")
    with pytest.raises(StrategyError) as error:
        planned.place(state, batch)
    assert error.value.num_stages == 8


def test_example_plans_for_a_pod_that_is_not_here(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "examples"))
    sizes = {"depth": 4, "width": 64, "heads": 4, "vocabulary": 64, "sequence": 16, "size": 16}
    importlib.import_module("plan_tpu_pod").main("v5e:4x4", compiles=False, **sizes)
    shown = capsys.readouterr().out
    assert "4 stages" in shown
    assert "one program" in shown
    assert "TPU v5 lite" in shown
