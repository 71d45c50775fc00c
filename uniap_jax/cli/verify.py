"""`plan --verify`: compiles the plan and puts the memory of its programs beside the prediction."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from uniap_jax.core.graph import Value
from uniap_jax.core.plan import Plan
from uniap_jax.core.schedule import make_schedule
from uniap_jax.runtime import ParallelStep


def verify(step: ParallelStep) -> dict[str, Any]:
    """Predicted and compiled peak bytes of each stage's devices.

    A program's own peak is arguments + temporaries + outputs - aliases. A stage of a pipeline holds more than the
    program that runs: the state it keeps, the gradients so far, and what the micro-batches in flight have left.

    Returns:
        `programs` with the bytes of each, `stages` with both peaks and their relative difference, and
        `memory_rel_error`, the worst of them.
    """
    programs = {p.name: program_bytes(p.compiled.memory_analysis()) for p in step.programs}
    plan = step.plan
    if "stage_0_forward" not in programs:  # one program runs the whole step, on all devices alike
        peaks = [max(p["peak_bytes"] for p in programs.values())] * plan.num_stages
    else:
        resident = [resident_bytes(step.graph.step.state, step.in_shardings, devices) for devices in _devices(step)]
        peaks = [stage_peak(plan, stage, programs, resident[stage]) for stage in range(plan.num_stages)]
    stages = [
        {"stage": i, "predicted_bytes": p, "compiled_bytes": c, "rel_error": abs(p - c) / c}
        for i, (p, c) in enumerate(zip(plan.prediction.peak_bytes, peaks, strict=True))
    ]
    return {
        "programs": [{"name": name, **sizes} for name, sizes in programs.items()],
        "stages": stages,
        "memory_rel_error": max(s["rel_error"] for s in stages),
    }


def program_bytes(analysis: Any) -> dict[str, float]:
    """Bytes of one device in a compiled program, from its `memory_analysis()`."""
    sizes = {
        "argument_bytes": float(analysis.argument_size_in_bytes),
        "output_bytes": float(analysis.output_size_in_bytes),
        "temp_bytes": float(analysis.temp_size_in_bytes),
        "alias_bytes": float(analysis.alias_size_in_bytes),
    }
    peak = sizes["argument_bytes"] + sizes["output_bytes"] + sizes["temp_bytes"] - sizes["alias_bytes"]
    return {**sizes, "peak_bytes": peak}


def stage_peak(plan: Plan, stage: int, programs: Mapping[str, Mapping[str, float]], resident: float) -> float:
    """Most bytes on a device of a stage: in a forward, in a backward, or in the update.

    Args:
        plan: with several stages.
        stage: which.
        programs: bytes of each program by name.
        resident: bytes of the state that the stage's devices keep.
    """
    in_flight = make_schedule(plan.schedule, plan.num_stages, plan.num_microbatches).in_flight[stage]
    forward, backward = programs[f"stage_{stage}_forward"], programs[f"stage_{stage}_backward"]
    totals = programs.get(f"stage_{stage}_zeros", {}).get("output_bytes", 0.0)
    left = in_flight * forward["output_bytes"]
    grads = totals or backward["output_bytes"] - backward["alias_bytes"]
    updates = [p for name, p in programs.items() if re.fullmatch(rf"update_\d+_stage_{stage}", name)]
    return max(
        resident + totals + left + forward["temp_bytes"],
        resident + totals + left + backward["temp_bytes"] + backward["output_bytes"] - backward["alias_bytes"],
        *(resident + grads + p["temp_bytes"] + p["output_bytes"] - p["alias_bytes"] for p in updates),
    )


def resident_bytes(state: Sequence[Value], shardings: Sequence[Any], devices: frozenset[Any]) -> float:
    """Bytes of the state on one device of a stage."""
    total = 0.0
    for value, sharding in zip(state, shardings, strict=True):
        if devices & sharding.device_set:
            share = math.prod(sharding.shard_shape(value.shape)) / max(value.size, 1)
            total += value.nbytes * share
    return total


def _devices(step: ParallelStep) -> list[frozenset[Any]]:
    """The devices of each stage, read off its forward program's inputs."""
    found = []
    for stage in range(step.plan.num_stages):
        program = next(p for p in step.programs if p.name == f"stage_{stage}_forward")
        found.append(frozenset(program.output_shardings[0].device_set))
    return found
