"""Compiled programs against the plan: layouts, collectives, memory, and reshardings that went through full copies."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from uniap_jax.core.plan import Plan
from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.pipeline import Pipeline, Programs
from uniap_jax.runtime.programs import Program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FULL_COPY = "Involuntary full rematerialization"
MEMORY_TOLERANCE = 0.10
"""Relative difference of compiled and predicted peak memory above which `Verification.ok` is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What the compiler made of one program.

    Attributes:
        name: of the program.
        stage: whose devices run it.
        peak_bytes: arguments + temporaries + outputs - aliases, per device.
        collectives: number of each kind.
        full_copies: reshardings that replicate an array on the way, as the compiler reports them.
    """

    name: str
    stage: int
    peak_bytes: int
    collectives: dict[str, int] = field(default_factory=dict)
    full_copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The programs of a step against its plan.

    Attributes:
        programs: facts of each.
        compiled_bytes: per stage, peak memory per device as compiled.
        predicted_bytes: per stage, as the plan expects; empty where it expects nothing.
        memory_rel_error: the worst stage's |compiled - predicted| / predicted; None where nothing is predicted.
        problems: one sentence each.
    """

    programs: tuple[ProgramFacts, ...]
    compiled_bytes: tuple[int, ...]
    predicted_bytes: tuple[float, ...]
    memory_rel_error: float | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as planned."""
        return not self.problems


def verify(step: ParallelStep, *, tolerance: float = MEMORY_TOLERANCE, full_copies: bool = True) -> Verification:
    """Compares the compiled programs of a step with its plan.

    Args:
        step: compiled where it has not been yet.
        tolerance: relative difference of peak memory that is let pass.
        full_copies: whether to compile every program once more and read the compiler's warnings.
    """
    facts = tuple(_facts(step.plan, p, full_copies=full_copies) for p in step.programs)
    compiled = _stage_peaks(step, facts)
    predicted = tuple(float(b) for b in step.plan.prediction.peak_bytes)
    errors = [abs(c - p) / p for c, p in zip(compiled, predicted, strict=False) if p > 0]
    return Verification(
        programs=facts,
        compiled_bytes=compiled,
        predicted_bytes=predicted,
        memory_rel_error=max(errors) if errors else None,
        problems=tuple(_problems(step, facts, compiled, predicted, tolerance)),
    )


def _problems(
    step: ParallelStep,
    facts: Sequence[ProgramFacts],
    compiled: Sequence[int],
    predicted: Sequence[float],
    tolerance: float,
) -> Iterator[str]:
    for stage, (have, want) in enumerate(zip(compiled, predicted, strict=False)):
        if want > 0 and abs(have - want) > tolerance * want:
            yield (
                f"stage {stage} needs {have / 2**20:.1f} MiB per device as compiled, {want / 2**20:.1f} MiB were "
                f"predicted ({100 * (have - want) / want:+.0f} %, tolerance {100 * tolerance:.0f} %)"
            )
    for fact in facts:
        for line in fact.full_copies:
            yield f"{fact.name} reshards through a full copy: {line}"
        for kind in sorted(set(fact.collectives) - foreseen(step.plan, fact.stage)):
            yield f"{fact.name} has {fact.collectives[kind]} {kind} that no strategy of stage {fact.stage} asks for"
    for program in step.programs:
        yield from _layout_problems(step, program)


def foreseen(plan: Plan, stage: int) -> set[str]:
    """Kinds of collectives that the strategies of a stage ask for."""
    strategies = {plan.layers[i].strategy for i in plan.stage_layers(stage)}
    kinds: set[str] = set()
    if any(s.num_devices > 1 for s in strategies):
        kinds.add("all-reduce")
    if any(s.fsdp > 1 for s in strategies):
        kinds |= {"all-gather", "reduce-scatter"}
    if any(s.tensor > 1 for s in strategies):
        kinds |= {"all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    if len({(s.data, s.fsdp, s.tensor) for s in strategies}) > 1:  # neighbours that cut the batch in other ways
        kinds |= {"all-gather", "all-to-all", "collective-permute"}
    if plan.num_microbatches > 1 and plan.num_stages == 1 and kinds:  # the batch is cut into micro-batches once
        kinds |= {"all-gather", "all-to-all", "collective-permute"}
    return kinds


def _layout_problems(step: ParallelStep, program: Program) -> Iterator[str]:
    """State leaves that a program returns in another layout than planned."""
    if program.name != "train_step":
        return
    for position, leaf in enumerate(step.graph.step.output_leaf):
        if leaf is None:
            continue
        have, want = program.output_shardings[position], step.in_shardings[leaf]
        value = step.graph.step.state[leaf]
        if not have.is_equivalent_to(want, len(value.shape)):
            yield f"{value.name} comes out as {have}, planned as {want}"


_COLLECTIVE = re.compile(rf"\b({'|'.join(KINDS)})(?:-start)?\(")


def count_collectives(text: str) -> dict[str, int]:
    """Collectives of each kind in a compiled program's text."""
    found: dict[str, int] = {}
    for kind in _COLLECTIVE.findall(text):
        found[kind] = found.get(kind, 0) + 1
    return found


def peak_bytes(program: Program) -> int:
    """Arguments + temporaries + outputs - aliases of one device."""
    memory = program.compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _facts(plan: Plan, program: Program, *, full_copies: bool) -> ProgramFacts:
    return ProgramFacts(
        name=program.name,
        stage=_stage_of(plan, program),
        peak_bytes=peak_bytes(program),
        collectives=count_collectives(program.compiled.as_text()),
        full_copies=_full_copies(program) if full_copies else (),
    )


def _stage_of(plan: Plan, program: Program) -> int:
    found = re.search(r"stage_(\d+)", program.name)
    return min(int(found.group(1)), plan.num_stages - 1) if found else 0


def _full_copies(program: Program) -> tuple[str, ...]:
    """What the compiler says about reshardings that replicate an array, one line each."""
    with _standard_error() as lines:
        program.lowered.compile()
    return tuple(dict.fromkeys(line.strip()[:300] for line in lines if FULL_COPY in line))


@contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Lines that the process's native code writes to standard error, then given back to it."""
    lines: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            written = file.read()
            lines.extend(written.decode(errors="replace").splitlines())
    others = [line for line in lines if FULL_COPY not in line]
    if others:
        os.write(2, ("\n".join(others) + "\n").encode())


# ---- memory of a stage -----------------------------------------------------------------------------------------------


def _shard_bytes(shape: Sequence[int], dtype: Any, sharding: Any) -> int:
    itemsize = getattr(dtype, "itemsize", 4)
    return int(np.prod(sharding.shard_shape(tuple(shape)), dtype=np.int64)) * int(itemsize)


def _stage_peaks(step: ParallelStep, facts: Sequence[ProgramFacts]) -> tuple[int, ...]:
    run = step._run
    if not isinstance(run, Pipeline):  # one program, on all devices alike
        return (max(f.peak_bytes for f in facts),) * step.plan.num_stages
    return tuple(_stage_peak(step, run, stage) for stage in range(step.plan.num_stages))


def _stage_peak(step: ParallelStep, run: Pipeline, stage: int) -> int:
    """Peak of one device: state, gradients, what is in flight, and the largest program's own needs."""
    programs = run._programs
    built = programs.stages[stage]
    device = next(iter(built.grads)).mesh.devices.flat[0] if built.grads else None
    state = sum(
        _shard_bytes(v.shape, v.dtype, s)
        for v, s in zip(step.graph.step.state, step.in_shardings, strict=True)
        if device is None or device in s.device_set
    )
    outs = jax.tree.leaves(built.forward.lowered.out_info)
    held = sum(_shard_bytes(outs[i].shape, outs[i].dtype, built.forward.output_shardings[i]) for i in built.kept)
    reads = (
        sum(
            _shard_bytes(step.graph.values[v].shape, step.graph.values[v].dtype, a)
            for v, a in zip(built.spec.reads, built.spec.arrives, strict=True)
        )
        // step.plan.num_microbatches
    )
    flying = run.schedule.in_flight[stage]
    gradients = _gradient_bytes(programs, stage)
    passes = max(_own(p) for p in (built.forward, built.backward))
    finish = max((_own(p) for p in programs.update.programs if f"stage_{stage}" in p.name), default=0)
    return state + gradients + max(flying * (held + reads) + passes, finish)


def _own(program: Program) -> int:
    """What a program needs beside its arguments."""
    memory = program.compiled.memory_analysis()
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def _gradient_bytes(programs: Programs, stage: int) -> int:
    built = programs.stages[stage]
    if built.zeros is None:
        return 0
    return int(built.zeros.compiled.memory_analysis().output_size_in_bytes)
