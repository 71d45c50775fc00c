"""Plans tried out: compiled, held against the memory there is, and run some times on copies of what is trained."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE
from uniap_jax.core.errors import ExecutionError, StrategyError
from uniap_jax.core.examples import example
from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_bytes, format_seconds
from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.stage_memory import stage_peaks

log = logging.getLogger("uniap_jax")

FAILURES = (ExecutionError, StrategyError, jax.errors.JaxRuntimeError)
"""What a plan that cannot be compiled or run raises."""
ROUNDS = 5
"""Rows of steps of each plan, in turns."""
ENOUGH_S = 60.0
"""After so long no further round is begun."""

WARM_STEPS, TIMED_STEPS = 2, 3
"""Steps of a row. Training repeats one step: one that follows a step of another plan finds none of its memory at hand,
and has been seen to take a third longer for it."""


class Trial:
    """A step with a state of its own.

    Args:
        step: what is run.
        state: leaves to start from, in flat order; they are copied. Shapes do too.
        batch: leaves of every step's batch; likewise.
    """

    def __init__(self, step: ParallelStep, state: Sequence[Any], batch: Sequence[Any]) -> None:
        self._step = step
        self._state = step.place_leaves([_own(x) for x in state])
        self._batch = [_real(x) for x in batch]

    def seconds(self) -> float:
        """Of a step, on average over a row of steps."""
        return row_seconds(self.once)

    def once(self) -> None:
        """A step that has ended; its state is that of the next."""
        outputs = jax.block_until_ready(self._step.on_leaves(self._state, self._batch))
        for leaf, value in zip(self._step.graph.step.output_leaf, outputs, strict=True):
            if leaf is not None:
                self._state[leaf] = value


def row_seconds(once: Callable[[], None]) -> float:
    """Of a step among its like, on average over a row of steps.

    Args:
        once: runs a step to its end.
    """
    for _ in range(WARM_STEPS):
        once()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        once()
    return (time.perf_counter() - start) / TIMED_STEPS


def _own(leaf: Any) -> Any:
    """A leaf whose buffer the step may take."""
    real = _real(leaf)
    return real.copy() if isinstance(real, jax.Array | np.ndarray) else real


def _real(leaf: Any) -> Any:
    return example(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """A plan that was tried out.

    Attributes:
        plan: the decisions.
        step: its programs; None where they do not compile.
        seconds: of a step, the median of several rows; 0 where it was not run.
        problem: why it is no choice; "" where it is one.
    """

    plan: Plan
    step: ParallelStep | None = None
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        told = f"P={self.plan.num_stages} c={self.plan.num_microbatches}"
        predicted = format_seconds(self.plan.prediction.step_time_s)
        if self.problem:
            return f"{told}: {self.problem}"
        return f"{told}: {format_seconds(self.seconds)}, {predicted} predicted" if self.seconds else f"{told}: fits"


def try_out(
    plans: Sequence[Plan], compiled: Callable[[Plan], ParallelStep], leaves: tuple[Sequence[Any], Sequence[Any]] | None
) -> tuple[Tried, ...]:
    """Compiles plans, and runs in turns those that fit.

    States are placed and dropped row by row: no two plans' states are on the devices at once.

    Args:
        plans: of one step.
        compiled: the programs of a plan.
        leaves: of state and batch, arrays or shapes; None where the devices are not here and nothing can run.

    Returns:
        one entry for each plan.
    """
    tried = [_fitting(plan, compiled) for plan in plans]
    if leaves is not None and sum(not t.problem for t in tried) > 1:
        tried = _timed(tried, *leaves)
    for one in tried:
        log.info("tried out %s", one)
    return tuple(tried)


def _timed(tried: Sequence[Tried], state: Sequence[Any], batch: Sequence[Any]) -> list[Tried]:
    """Those without a problem with the median of their rows, or with the problem that they ran into."""
    found, started = list(tried), time.monotonic()
    seconds: list[list[float]] = [[] for _ in tried]
    for _ in range(ROUNDS):
        for i, one in enumerate(found):
            if one.step is None or one.problem:
                continue
            try:
                seconds[i].append(Trial(one.step, state, batch).seconds())
            except FAILURES as error:
                found[i] = replace(one, problem=str(error).splitlines()[0])
        if time.monotonic() - started > ENOUGH_S:
            break
    return [replace(t, seconds=statistics.median(s)) if s else t for t, s in zip(found, seconds, strict=True)]


def _fitting(plan: Plan, compiled: Callable[[Plan], ParallelStep]) -> Tried:
    try:
        step = compiled(plan)
        peaks = stage_peaks(step)
    except FAILURES as error:
        return Tried(plan=plan, problem=str(error).splitlines()[0])
    for stage, (peak, limit) in enumerate(zip(peaks, plan.prediction.capacity_bytes, strict=False)):
        if peak > limit * (1 + MEMORY_TOLERANCE):
            needs = f"stage {stage} needs {format_bytes(peak)} of {format_bytes(limit)} as compiled"
            return Tried(plan=plan, step=step, problem=needs)
    return Tried(plan=plan, step=step)
