"""The one-program step compiled by the real TPU compiler for sixteen chips that are not there."""

from __future__ import annotations

import re
from typing import Any

import pytest

import uniap_jax as uniap
import uniform_support as support
from uniap_jax.frontend import trace
from uniap_jax.runtime.uniform import UniformProgram, compile_uniform
from uniap_jax.runtime.verify import verify

pytest.importorskip("libtpu", reason="the TPU compiler comes with jax[tpu]")


def topology(name: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        from jax.experimental import topologies

        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


@pytest.fixture(scope="module")
def chips() -> list[Any]:
    return topology("v5e:4x4")


def program(chips: list[Any], *, scan: bool, schedule: str, strategy: str = "data=2,tensor=2") -> UniformProgram:
    state, step, batch = support.gpt(scan=scan, remat=scan, dropout=0.0 if scan else 0.1, batch=32)
    graph = trace(step, state, batch)
    stages = [0, 0, 3] if scan else None
    return compile_uniform(graph, support.pinned(graph, 4, 4, strategy, schedule, stages=stages), chips)


def check(step: UniformProgram) -> None:
    compiled = step.programs[0].compiled
    text = compiled.as_text()
    assert re.search(r"collective-permute-start", text)  # to the next stage, while computation goes on
    assert "all-reduce" in text
    memory = compiled.memory_analysis()
    state = sum(v.nbytes for v in step.graph.step.state)
    assert memory.argument_size_in_bytes < state
    assert memory.temp_size_in_bytes > 0
    assert [s.spec for s in compiled.output_shardings[:1]] == [step.state_shardings[0].spec]


@pytest.mark.parametrize(
    ("scan", "schedule"),
    [
        (True, "one_f_one_b"),
        (True, "gpipe"),
        pytest.param(False, "one_f_one_b", marks=pytest.mark.slow),
    ],
)
def test_equal_stages_compile_for_sixteen_tpu_chips(chips: list[Any], scan: bool, schedule: str) -> None:
    check(program(chips, scan=scan, schedule=schedule))


def test_equal_stages_compile_for_a_cube_of_tpu_chips() -> None:
    devices = topology("v5p:2x2x4")
    assert len(devices) == 16
    check(program(devices, scan=True, schedule="one_f_one_b"))


def test_equal_stages_lower_for_sixteen_tpu_chips(chips: list[Any]) -> None:
    step = program(chips, scan=True, schedule="one_f_one_b")
    assert step.mesh.shape == {"stage": 4, "x0": 2, "x1": 2}
    assert "collective_permute" in step.lower().as_text()


def test_a_plan_for_a_pod_is_found_and_verified(chips: list[Any]) -> None:
    state, step, batch = support.gpt(scan=True, remat=True, dropout=0.0, batch=32)
    graph = trace(step, state, batch)
    plan = uniap.solve(uniap.estimate(graph, uniap.load_cluster("v5e:4x4")), executor="program", num_stages=4)
    assert plan.executor == "program"
    found = verify(uniap.compile_plan(graph, plan, devices=chips), full_copies=False, tolerance=float("inf"))
    assert found.ok, found.problems
    assert len(found.stages) == 4
    assert found.programs[0].axes["collective-permute over stage"] >= 2
