"""Watches a running step for stages that have become slow, and moves to a better plan when that is asked or pays."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from uniap_jax.core.costs import CostModel
from uniap_jax.core.errors import ExecutionError
from uniap_jax.core.plan import Plan
from uniap_jax.core.schedule import gpipe
from uniap_jax.core.slowed import price, slowed
from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.single import SingleStage
from uniap_jax.runtime.stopwatch import Reading, Stopwatch

log = logging.getLogger("uniap_jax")

EVERY = 20
"""One step in this many is followed, and the one before it for where it starts."""
WINDOW = 5
"""Readings whose median counts: one odd step is not a drift."""
THRESHOLD = 1.5
"""A stage that takes this many times what is expected has drifted."""
SETTLED = 1.25
"""It has recovered below this; between the two it stays what it was."""
LEAST_GAIN = 0.05
"""Share of a step's time that a new plan has to save to be proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A stage that takes longer than it should.

    Attributes:
        stage: its number.
        expected_s: forward and backward of a micro-batch: the plan's times at the speed the stages had at first.
        measured_s: the same as measured, median of the last readings.
    """

    stage: int
    expected_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        """How many times longer."""
        return self.measured_s / self.expected_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Another plan, on the devices as they are now.

    Attributes:
        plan: the plan.
        now_s: seconds per step of the plan in force at the measured speeds.
        then_s: of the proposed one.
    """

    plan: Plan
    now_s: float
    then_s: float

    @property
    def gain_s(self) -> float:
        """Seconds saved per step."""
        return self.now_s - self.then_s


Replan = Callable[[Plan, tuple[float, ...]], Proposal | None]
"""From the plan in force and how many times longer each device takes, in its numbering, to the best plan there."""


def replanner(model: Callable[[], CostModel], solve: Callable[[CostModel], Plan]) -> Replan:
    """A way to plan for devices that have become slower.

    Args:
        model: prices plans on the devices as they were.
        solve: finds the best plan under a cost model.
    """

    def replan(plan: Plan, factors: tuple[float, ...]) -> Proposal | None:
        now = slowed(model(), factors)
        present = price(now, plan)
        if present is None:
            return None
        best = solve(now)
        return Proposal(plan=best, now_s=present, then_s=best.prediction.step_time_s)

    return replan


class Monitor:
    """Follows one step in `every`, compares stages with the plan, and switches plans when told.

    The threads that wait for arrays are the monitor's own; the loop that trains waits for nothing.

    Args:
        step: to follow.
        replan: finds a plan for devices that have become slower.
        compile: programs for a plan of the same graph.
        every: one step in this many is followed.
        window: readings whose median counts.
        threshold: times longer from which a stage has drifted.
        adopt: told of the step that has been switched to.

    Raises:
        ExecutionError: the stages run in one program, so none is slow alone.
    """

    def __init__(
        self,
        step: ParallelStep,
        *,
        replan: Replan | None = None,
        compile: Callable[[Plan], ParallelStep] | None = None,
        every: int = EVERY,
        window: int = WINDOW,
        threshold: float = THRESHOLD,
        adopt: Callable[[ParallelStep], None] | None = None,
    ) -> None:
        self._replan, self._compile, self._adopt = replan, compile, adopt
        self._every, self._window, self._threshold = every, window, threshold
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._follow(step)

    def _follow(self, step: ParallelStep) -> None:
        run = step.executor
        if not isinstance(run, SingleStage | Pipeline):
            raise ExecutionError(
                f"the {step.plan.num_stages} stages of this plan run in step inside one program, so none of them can "
                "be timed alone; monitor plans with executor='stages'",
                executor=step.plan.executor,
            )
        if jax.process_count() > 1 and isinstance(run, Pipeline):
            raise ExecutionError(
                f"the {step.plan.num_stages} stages of this plan run in {jax.process_count()} processes, none of which "
                "sees when the others' work is done; monitor plans inside one process",
                processes=jax.process_count(),
            )
        self._step, self._run = step, run
        plan = step.plan
        self._schedule = run.schedule if isinstance(run, Pipeline) else gpipe(1, 1)
        self._calls = self._open = 0
        self._lead: Stopwatch | None = None
        self._readings: deque[Reading] = deque(maxlen=self._window)
        self._expected: tuple[float, ...] = ()
        self._drifting: set[int] = set()
        self._predicted = plan.prediction.stage_time_s if plan.num_stages > 1 else ()
        run.observe = self._begin

    # ---- readings ------------------------------------------------------------------------------------------------

    def _begin(self) -> Stopwatch | None:
        """The stopwatch of a step that is followed, or that comes just before one."""
        number = self._calls
        self._calls += 1
        counts, leads = number > 0 and (number + 1) % self._every == 0, (number + 2) % self._every == 0
        if not counts and not leads:
            self._lead = None
            return None
        with self._lock:
            self._open += 1
        self._lead = Stopwatch(number, self._schedule, self._take if counts else self._skip, previous=self._lead)
        return self._lead

    def _take(self, reading: Reading) -> None:
        with self._idle:
            self.observe(reading)
        self._skip(reading)

    def _skip(self, _: Reading) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def observe(self, reading: Reading) -> None:
        """Takes a reading into account; logs a stage when it begins and when it ceases to drift."""
        self._readings.append(reading)
        if len(self._readings) < self._window:
            return
        if not self._expected:
            self._expected = expected_times(self._predicted, self._medians())
            return
        for drift in self._compared():
            if drift.stage not in self._drifting and drift.factor > self._threshold:
                self._drifting.add(drift.stage)
                log.warning(
                    "stage %d takes %.1f times what is expected: %.2f ms for a micro-batch, expected %.2f ms",
                    drift.stage,
                    drift.factor,
                    1e3 * drift.measured_s,
                    1e3 * drift.expected_s,
                )
            elif drift.stage in self._drifting and drift.factor < min(SETTLED, self._threshold):
                self._drifting.discard(drift.stage)
                log.info("stage %d takes %.1f times what is expected again", drift.stage, drift.factor)

    def _medians(self) -> tuple[float, ...]:
        times = zip(*(r.stage_time_s for r in self._readings), strict=True)
        return tuple(statistics.median(t) for t in times)

    def _compared(self) -> list[Drift]:
        pairs = zip(self._expected, self._medians(), strict=True)
        return [Drift(stage=s, expected_s=e, measured_s=m) for s, (e, m) in enumerate(pairs)]

    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns when every step that was followed has been read; for the end of a run and for tests."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0, timeout_s)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The last ones, oldest first."""
        with self._lock:
            return tuple(self._readings)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """Stages that take too long now."""
        with self._lock:
            return tuple(d for d in (self._compared() if self._expected else ()) if d.stage in self._drifting)

    @property
    def step(self) -> ParallelStep:
        """The step that is followed: the one to call."""
        return self._step

    # ---- another plan --------------------------------------------------------------------------------------------

    def propose(self) -> Proposal | None:
        """The best plan for the devices as they are; None where no stage drifts, or nothing better is found.

        Raises:
            ExecutionError: the monitor was made without a way to plan.
        """
        drifts = self.drifts
        if not drifts:
            return None
        if self._replan is None:
            raise ExecutionError("this monitor only reports: it was made without `replan`, the way to find a plan")
        devices = self._step.plan.stage_devices
        factors = [1.0] * (1 + max(d for stage in devices for d in stage))
        for drift in drifts:
            for device in devices[drift.stage]:
                factors[device] = drift.factor
        found = self._replan(self._step.plan, tuple(factors))
        if found is None or found.gain_s < LEAST_GAIN * found.now_s:
            return None
        log.info(
            "a plan with %d stages and %d micro-batches would take %.2f ms a step instead of %.2f ms",
            found.plan.num_stages,
            found.plan.num_microbatches,
            1e3 * found.then_s,
            1e3 * found.now_s,
        )
        return found

    def switch(self, proposal: Proposal, *args: Any) -> tuple[ParallelStep, Any]:
        """Moves to a proposed plan.

        Args:
            proposal: from `propose`.
            *args: those of the next call of the step.

        Returns:
            The step to call from now on, and the state laid out for it, equal to the one given. The state given is
            not used up.
        """
        if self._compile is None:
            raise ExecutionError("this monitor only reports: it was made without `compile`, the way to run a plan")
        started = time.perf_counter()
        step = self._compile(proposal.plan)
        state = step.place(*args)
        self.close()
        self._follow(step)
        if self._adopt is not None:
            self._adopt(step)
        log.info("switched plans in %.1f s", time.perf_counter() - started)
        return step, state

    def at_checkpoint(
        self, remaining_steps: int, *args: Any, switch_cost_s: float | None = None
    ) -> tuple[ParallelStep, Any] | None:
        """Moves to a better plan where it saves more over the rest of the run than it costs to move.

        Args:
            remaining_steps: how many calls are still to come.
            *args: those of the next call.
            switch_cost_s: seconds to compile and move; by default what compiling the present programs took.

        Returns:
            As `switch`, or None where the plan stays.
        """
        proposal = self.propose()
        cost = self._run.build_s if switch_cost_s is None else switch_cost_s
        if proposal is None or proposal.gain_s * remaining_steps <= cost:
            return None
        return self.switch(proposal, *args)

    def close(self) -> None:
        """Follows no further step."""
        self._run.observe = lambda: None


def expected_times(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """The plan's times at the speed of these stages: one factor for all, that of the lower median stage.

    Half of the stages or more run at the speed they are planned for, in units of the machine; the others have drifted
    from the start. Without predictions the first readings are what is expected.

    Args:
        predicted: [stages] seconds; empty or zeros where nothing is predicted.
        measured: [stages] seconds.
    """
    if len(predicted) != len(measured) or not all(p > 0 for p in predicted):
        return tuple(measured)
    ratios = sorted(m / p for m, p in zip(measured, predicted, strict=True))
    speed = ratios[(len(ratios) - 1) // 2]
    return tuple(p * speed for p in predicted)
