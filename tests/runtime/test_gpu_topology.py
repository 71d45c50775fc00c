"""Whole plans compiled by the real GPU compiler for cards that are not there."""

from __future__ import annotations

from typing import Any

import pytest

import uniap_jax as uniap
import uniform_support as support
from uniap_jax import demo_gpt
from uniap_jax.core.absent import absent_devices
from uniap_jax.runtime.verify import Verification, verify

pytest.importorskip("jax_cuda13_plugin", reason="the compiler of NVIDIA cards comes with jax[cuda13]")


def verified(model: tuple[Any, Any, Any], topology: str, **pins: Any) -> tuple[Any, Verification]:
    state, step, batch = model
    graph, cluster = uniap.trace(step, state, batch), uniap.load_cluster(topology)
    plan = uniap.solve(uniap.estimate(graph, cluster), why=False, baselines=False, **pins)
    devices = absent_devices(cluster, plan.num_parts)
    compiled = uniap.compile_plan(graph, plan, devices=devices)
    return compiled, verify(compiled, full_copies=False, tolerance=float("inf"))


@pytest.mark.parametrize("strategy", ["data=4", "fsdp=4", "data=2,tensor=2"])
def test_one_stage(strategy: str) -> None:
    _, found = verified(support.residual(aux=False), "h100:1x4", num_stages=1, num_microbatches=1, strategy=strategy)
    assert found.ok, found.problems
    (program,) = found.programs
    assert program.sizes["alias_bytes"] > 0  # the state's buffers are taken
    assert "all-reduce" in program.collectives
    assert ("reduce-scatter" in program.collectives) == (strategy == "fsdp=4")  # unlike on CPUs, a real one


@pytest.mark.parametrize("model", [support.residual(aux=False), support.gpt(layers=2, dropout=0.1)])
def test_a_pipeline_of_programs_between_nodes(model: tuple[Any, Any, Any]) -> None:
    """Each stage is a topology of its own; what crosses is no program, and dropout's numbers are placed by a step."""
    _, found = verified(model, "a100-80g:2x2", num_stages=2, num_microbatches=4, executor="stages")
    assert found.ok, found.problems
    assert len(found.stages) == 2
    assert all(s.compiled_bytes > 0 for s in found.stages)
    assert {p.stage for p in found.programs} == {0, 1}


def test_equal_stages_in_one_program() -> None:
    """The hand-over to the next stage runs beside the work, and its groups are read as axes of the mesh."""
    model = support.residual(aux=False)
    step, found = verified(model, "h100:1x4", num_stages=2, num_microbatches=2, executor="program", strategy="data=2")
    assert found.ok, found.problems
    (program,) = found.programs
    assert program.axes["collective-permute over stage"] >= 2
    assert not any(axes.endswith("over one device") for axes in program.axes)
    assert "collective-permute-start" in step.programs[0].compiled.as_text()


def test_a_replica_among_others_needs_what_one_alone_needs() -> None:
    """The loss of a micro-batch is not summed over devices inside the loop.

    With that one collective there the compiler orders a loop that recomputes for speed, and this one needs 1.8 times
    as much.
    """

    def temporaries(topology: str, strategy: str, batch: int) -> int:
        size = demo_gpt.Size(num_layers=3, width=128, num_heads=4, sequence=128, batch=batch)
        pins = {"num_stages": 1, "num_microbatches": 2, "strategy": strategy}
        _, found = verified(demo_gpt.build(size=size), topology, **pins)
        return found.programs[0].sizes["temp_bytes"]

    alone = temporaries("h100:1x1", "keep=inputs", 8)
    assert temporaries("h100:1x2", "data=2,keep=inputs", 16) <= 1.1 * alone
