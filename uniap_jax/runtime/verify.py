"""Compiled programs against the plan: layouts, collectives, memory, and reshardings that went through full copies."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jaxprs import open_jaxpr, variables
from uniap_jax.core.plan import Plan
from uniap_jax.runtime.crossing import CROSSING
from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.feed import BEFORE
from uniap_jax.runtime.mesh_axes import collectives_by_axis
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.programs import Program
from uniap_jax.runtime.single import SingleStage
from uniap_jax.runtime.stage_memory import program_bytes, stage_peaks
from uniap_jax.runtime.uniform import UniformProgram

log = logging.getLogger("uniap_jax")

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FULL_COPY = "Involuntary full rematerialization"
MEMORY_TOLERANCE = 0.10
"""Relative error of the predicted peak memory above which `Verification.ok` is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What the compiler made of one program.

    Attributes:
        name: of the program.
        stage: whose devices run it.
        sizes: bytes of one device: arguments, outputs, temporaries, aliases, and the peak they add up to.
        collectives: number of each kind.
        places: per kind, the layers whose work it belongs to, for people.
        axes: of one program for all stages, number of each kind by the mesh axes it goes over.
        full_copies: reshardings that replicate an array on the way: the layer, and what the compiler reports.
    """

    name: str
    stage: int
    sizes: dict[str, int]
    collectives: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    full_copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak of one device of a stage.

    Attributes:
        stage: its number.
        predicted_bytes: as the plan expects; 0 where it expects nothing.
        compiled_bytes: as compiled; 0 where the stage's programs are other processes'.
        rel_error: |predicted - compiled| / compiled; None where nothing is predicted.
    """

    stage: int
    predicted_bytes: float
    compiled_bytes: int
    rel_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The programs of a step against its plan.

    Attributes:
        programs: facts of each.
        stages: memory of each.
        memory_rel_error: of the worst stage; None where nothing is predicted.
        problems: one sentence each.
    """

    programs: tuple[ProgramFacts, ...]
    stages: tuple[StageMemory, ...]
    memory_rel_error: float | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as planned."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `uniap-jax plan --verify --json` prints it."""
        programs = [{**asdict(p), **p.sizes} for p in self.programs]
        return {
            "programs": [{k: v for k, v in p.items() if k != "sizes"} for p in programs],
            "stages": [asdict(s) for s in self.stages],
            "memory_rel_error": self.memory_rel_error,
            "problems": list(self.problems),
        }


def verify(step: ParallelStep, *, tolerance: float = MEMORY_TOLERANCE, full_copies: bool = True) -> Verification:
    """Compares the compiled programs of a step with its plan.

    Args:
        step: compiled where it has not been yet.
        tolerance: relative error of the predicted peak memory that is let pass.
        full_copies: whether to read the compiler's warnings, for which a step that is compiled already is compiled
            once more.
    """
    warned = _warnings(step) if full_copies else ()
    facts = tuple(_facts(step, p, warned) for p in step.programs)
    stages = tuple(_memories(step))
    errors = [s.rel_error for s in stages if s.rel_error is not None]
    return Verification(
        programs=facts,
        stages=stages,
        memory_rel_error=max(errors) if errors else None,
        problems=tuple(_problems(step, facts, stages, tolerance)),
    )


def warn(step: ParallelStep, *, tolerance: float = MEMORY_TOLERANCE) -> Verification:
    """`verify`, with one warning in the log for each thing that is not as planned."""
    found = verify(step, tolerance=tolerance)
    for problem in found.problems:
        log.warning("not as planned: %s", problem)
    return found


def _memories(step: ParallelStep) -> Iterator[StageMemory]:
    predicted = step.plan.prediction.peak_bytes or (0.0,) * step.plan.num_stages
    for stage, (want, have) in enumerate(zip(predicted, stage_peaks(step), strict=True)):
        error = abs(want - have) / have if want > 0 and have > 0 else None
        yield StageMemory(stage=stage, predicted_bytes=float(want), compiled_bytes=have, rel_error=error)


def _problems(
    step: ParallelStep, facts: Sequence[ProgramFacts], stages: Sequence[StageMemory], tolerance: float
) -> Iterator[str]:
    for s in stages:
        if s.rel_error is not None and s.rel_error > tolerance:
            yield (
                f"stage {s.stage} ({_span(step, s.stage)}) needs {s.compiled_bytes / 2**20:.1f} MiB per device as "
                f"compiled, {s.predicted_bytes / 2**20:.1f} MiB were predicted "
                f"({100 * s.rel_error:.0f} % apart, tolerance {100 * tolerance:.0f} %)"
            )
    for fact in facts:
        for line in fact.full_copies:
            yield f"{fact.name} reshards through a full copy in {line}"
        own = {"collective-permute"} if fact.name.startswith(CROSSING) else set[str]()
        if fact.name.endswith(BEFORE) and _meets_ahead(step.graph):
            own = set(KINDS)
        for kind in sorted(set(fact.collectives) - foreseen(step.plan, fact.stage) - own):
            yield (
                f"{fact.name} has {fact.collectives[kind]} {kind} that no strategy of stage {fact.stage} asks for, in "
                f"{fact.places[kind]}"
            )
    for program in step.programs:
        yield from _layout_problems(step, program)


def _meets_ahead(graph: LayerGraph) -> bool:
    """Whether something is made of the whole batch before the loss: its rows come together for that."""
    before = open_jaxpr(graph.step.before)
    rows = set(before.invars[len(graph.step.state) :])
    return any(v in rows for eqn in before.eqns for v in variables(eqn.invars))


def foreseen(plan: Plan, stage: int) -> set[str]:
    """Kinds of collectives that the strategies of a stage ask for."""
    if plan.executor == "program" and plan.num_stages > 1:  # stages gather, spread and hand over on top of them
        return set(KINDS)
    strategies = {plan.layers[i].strategy for i in plan.stage_layers(stage)}
    kinds: set[str] = set()
    if any(s.num_devices > 1 for s in strategies):
        kinds.add("all-reduce")
    if any(s.fsdp > 1 for s in strategies):
        kinds |= {"all-gather", "reduce-scatter"}
    if any(s.tensor * s.expert * s.context > 1 for s in strategies):
        kinds |= {"all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
    if len({(s.batch_ways, s.sequence_ways, s.tensor) for s in strategies}) > 1:  # neighbours cut in other ways
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


# ---- whose work a line is --------------------------------------------------------------------------------------------

_COLLECTIVE = re.compile(rf"\b({'|'.join(KINDS)})(?:-start)?\(")
_LAYER = re.compile(r"\blayer_(\d+)\b")
_PROGRAM = re.compile(r"jit\((\w+)\)")


def _span(step: ParallelStep, stage: int) -> str:
    layers = step.plan.stage_layers(stage)
    if not layers:
        return "its share of a loop"
    first, last = place(step.graph, layers[0]), place(step.graph, layers[-1])
    return first if len(layers) == 1 else f"{first} to {last}"


def place(graph: LayerGraph, layer: int) -> str:
    """A layer for people: number, name and source line."""
    found = graph.layers[layer]
    return f"layer {layer} ({', '.join(filter(None, (found.name, found.source)))})"


def places(graph: LayerGraph, lines: Iterable[str]) -> str:
    """The layers that lines of a compiled program belong to, in order; what belongs to none is the step around them."""
    numbers = sorted({int(n) for line in lines for n in _LAYER.findall(line) if int(n) < len(graph.layers)})
    shown = [place(graph, n) for n in numbers[:3]] + ([f"{len(numbers) - 3} more"] if len(numbers) > 3 else [])
    return ", ".join(shown) or "no layer: the batch's way in, or the optimizer"


def count_collectives(text: str) -> dict[str, int]:
    """Collectives of each kind in a compiled program's text."""
    return {kind: len(lines) for kind, lines in _collective_lines(text).items()}


def _collective_lines(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        for kind in _COLLECTIVE.findall(line):
            found.setdefault(kind, []).append(line)
    return found


def _facts(step: ParallelStep, program: Program, warned: Sequence[str]) -> ProgramFacts:
    text = program.compiled.as_text()
    lines, run = _collective_lines(text), step.executor
    mine = [w for w in warned if (found := _PROGRAM.search(w)) is not None and found.group(1) == program.name]
    return ProgramFacts(
        name=program.name,
        stage=_stage_of(step.plan, program),
        sizes=program_bytes(program),
        collectives=count_collectives(text),
        places={kind: places(step.graph, found) for kind, found in lines.items()},
        axes=collectives_by_axis(text, run.mesh) if isinstance(run, UniformProgram) else {},
        full_copies=tuple(f"{places(step.graph, [line])}: {line.strip()[:300]}" for line in mine),
    )


def _stage_of(plan: Plan, program: Program) -> int:
    found = re.search(r"stage_(\d+)", program.name)
    return min(int(found.group(1)), plan.num_stages - 1) if found else 0


# ---- what the compiler says ------------------------------------------------------------------------------------------


def _warnings(step: ParallelStep) -> tuple[str, ...]:
    """What the compiler says about reshardings that replicate an array, one line each."""
    run = step.executor
    fresh = isinstance(run, SingleStage | Pipeline | UniformProgram) and not run.is_built
    with standard_error() as lines:
        for program in step.programs:  # compiled here where the step is fresh
            if not fresh:
                program.lowered.compile()
    return full_copies(lines)


def full_copies(lines: Iterable[str]) -> tuple[str, ...]:
    """Those of the compiler's lines that tell of a full copy, each once."""
    return tuple(dict.fromkeys(line for line in lines if FULL_COPY in line))


@contextmanager
def standard_error() -> Iterator[list[str]]:
    """Lines that native code writes to standard error, known at the end; all but those of full copies are passed on."""
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
