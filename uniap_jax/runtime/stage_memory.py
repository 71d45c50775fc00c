"""Memory of compiled programs and of the stages that run them, per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.pipeline import Pipeline, Programs
from uniap_jax.runtime.programs import Program


def program_bytes(program: Program) -> dict[str, int]:
    """Bytes of one device in a compiled program; the peak is arguments + temporaries + outputs - aliases."""
    memory = program.compiled.memory_analysis()
    sizes = {
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "alias_bytes": int(memory.alias_size_in_bytes),
    }
    own = sizes["output_bytes"] + sizes["temp_bytes"] - sizes["alias_bytes"]
    return {**sizes, "peak_bytes": sizes["argument_bytes"] + own}


def stage_peaks(step: ParallelStep) -> tuple[int, ...]:
    """Per stage, the most bytes that a device of it holds during a step."""
    run = step.executor
    if isinstance(run, Pipeline):
        return tuple(_stage_peak(step, run, stage) for stage in range(step.plan.num_stages))
    return (max(program_bytes(p)["peak_bytes"] for p in step.programs),) * step.plan.num_stages


def _stage_peak(step: ParallelStep, run: Pipeline, stage: int) -> int:
    """State, gradients, what is in flight, and the largest program's own needs."""
    programs, graph = run.built, step.graph
    built = programs.stages[stage]
    device = built.forward.output_shardings[0].mesh.devices.flat[0]
    state = sum(
        shard_bytes(v.shape, v.dtype, s)
        for v, s in zip(graph.step.state, step.in_shardings, strict=True)
        if device in s.device_set
    )
    outs = jax.tree.leaves(built.forward.lowered.out_info)
    held = sum(shard_bytes(outs[i].shape, outs[i].dtype, built.forward.output_shardings[i]) for i in built.kept)
    reads = sum(
        shard_bytes(graph.values[v].shape, graph.values[v].dtype, a) // step.plan.num_microbatches
        for v, a in zip(built.spec.reads, built.spec.arrives, strict=True)
    )
    flying = run.schedule.in_flight[stage]
    passes = max(_own(built.forward) - held, _own(built.backward))  # what a forward leaves is in flight already
    last = [p for p in programs.update.programs if f"stage_{stage}" in p.name]
    finish = max(map(_own, [*last, *([] if built.reduce is None else [built.reduce])]), default=0)
    return state + _gradient_bytes(programs, stage) + max(flying * (held + reads) + passes, finish)


def shard_bytes(shape: Sequence[int], dtype: Any, sharding: Any) -> int:
    """Bytes of one device's part of an array."""
    itemsize = getattr(dtype, "itemsize", 4)
    return int(np.prod(sharding.shard_shape(tuple(shape)), dtype=np.int64)) * int(itemsize)


def _own(program: Program) -> int:
    """What a program needs beside its arguments."""
    sizes = program_bytes(program)
    return sizes["peak_bytes"] - sizes["argument_bytes"]


def _gradient_bytes(programs: Programs, stage: int) -> int:
    zeros = programs.stages[stage].zeros
    return 0 if zeros is None else program_bytes(zeros)["output_bytes"]
