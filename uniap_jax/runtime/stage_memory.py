"""Memory of compiled programs and of the stages that run them, per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.programs import Program
from uniap_jax.runtime.stage_programs import StagePrograms


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
    """Per stage, the most bytes that a device of it holds during a step; 0 for stages of other processes."""
    run = step.executor
    if isinstance(run, Pipeline):
        return tuple(_stage_peak(step, run, stage) for stage in range(step.plan.num_stages))
    return (max(program_bytes(p)["peak_bytes"] for p in step.programs),) * step.plan.num_stages


def _stage_peak(step: ParallelStep, run: Pipeline, stage: int) -> int:
    """State, batch, gradients, what is in flight, and the largest program's own needs; stages may share devices."""
    programs, sharing = run.built, len(run.schedule.tasks)
    mine = programs.stages[stage % sharing :: sharing]
    if not mine[0].forward.is_here:
        return 0
    device = jax.tree.leaves(mine[0].forward.output_shardings)[0].mesh.devices.flat[0]
    state = sum(
        shard_bytes(v.shape, v.dtype, s)
        for v, s in zip(step.graph.step.state, step.in_shardings, strict=True)
        if device in s.device_set
    )
    each = [_held_bytes(b) + _read_bytes(step, b) if b.forward.is_here else 0 for b in programs.stages]
    flying = run.schedule.held(stage % sharing, each)
    passes = max(_own(b.forward) - _held_bytes(b) for b in mine)  # what a forward leaves is in flight already
    passes = max(passes, *(_own(b.backward) for b in mine if b.backward is not None), 0)
    names = tuple(f"_stage_{b.spec.stage}" for b in mine)
    last = [p for p in programs.update.programs if p.is_here and p.name.endswith(names)]
    finish = max(map(_own, [*last, *(b.reduce for b in mine if b.reduce is not None)]), default=0)
    gradients = sum(program_bytes(b.zeros)["output_bytes"] for b in mine if b.zeros is not None)
    rows = [x for b in mine for x in programs.feeder.rows[b.spec.stage]]
    batch = step.plan.num_microbatches * sum(shard_bytes(x.shape, x.dtype, x.sharding) for x in rows)
    return state + batch + gradients + max(int(flying) + passes, finish)


def _held_bytes(built: StagePrograms) -> int:
    """What a forward leaves for its backward."""
    outs, layouts = map(jax.tree.leaves, (built.forward.lowered.out_info, built.forward.output_shardings))
    return sum(shard_bytes(outs[i].shape, outs[i].dtype, layouts[i]) for i in built.kept)


def _read_bytes(step: ParallelStep, built: StagePrograms) -> int:
    """What one micro-batch brings in from earlier stages."""
    values = step.graph.values
    found = (
        shard_bytes(values[v].shape, values[v].dtype, a)
        for v, a in zip(built.spec.reads, built.spec.arrives, strict=True)
    )
    return sum(n // step.plan.num_microbatches for n in found)


def shard_bytes(shape: Sequence[int], dtype: Any, sharding: Any) -> int:
    """Bytes of one device's part of an array."""
    itemsize = getattr(dtype, "itemsize", 4)
    return int(np.prod(sharding.shard_shape(tuple(shape)), dtype=np.int64)) * int(itemsize)


def _own(program: Program) -> int:
    """What a program needs beside its arguments."""
    sizes = program_bytes(program)
    return sizes["peak_bytes"] - sizes["argument_bytes"]
