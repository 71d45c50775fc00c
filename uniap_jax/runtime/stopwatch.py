"""Times of stages in one step of a running pipeline, read off the moments at which arrays become ready.

The thread that drives the pipeline only hands over an array per task; threads of their own, one per stage, wait for
the arrays. Nothing is added to the devices' queues, and nothing waits that would not have waited.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from uniap_jax.core.schedule import BACKWARD, FORWARD, Event, Schedule, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one step took.

    Attributes:
        step: its number, from 0.
        stage_time_s: per stage, forward and backward of one micro-batch: medians over the micro-batches.
        events: every pass, in seconds from the start of the first one.
    """

    step: int
    stage_time_s: tuple[float, ...]
    events: tuple[Event, ...] = ()


class Stopwatch:
    """Follows one step.

    Args:
        step: its number.
        schedule: of the pipeline.
        done: called with the reading once the last array is ready, from another thread.
        previous: that of the step before; what it still runs when this one is issued does not count for this one.
    """

    def __init__(
        self,
        step: int,
        schedule: Schedule,
        done: Callable[[Reading], None],
        *,
        previous: Stopwatch | None = None,
    ) -> None:
        self._step, self._schedule, self._done, self._previous = step, schedule, done, previous
        self._issued: dict[tuple[int, Task], float] = {}
        self._ended: dict[tuple[int, Task], float] = {}
        self._issuing = time.perf_counter()
        self._lock, self._waiting = threading.Lock(), schedule.num_stages
        self._finished = threading.Event()
        self._queues: list[SimpleQueue[tuple[Task, Any] | None]] = [SimpleQueue() for _ in range(schedule.num_stages)]
        for stage in range(schedule.num_stages):
            threading.Thread(target=self._follow, args=(stage,), name="uniap_stopwatch", daemon=True).start()

    def __call__(self, stage: int, task: Task, array: Any) -> None:
        """Takes an array that is ready when the task has run; it is held no longer than until then."""
        self._issued[stage, task], self._issuing = self._issuing, time.perf_counter()
        self._queues[stage].put((task, array))

    def finish(self) -> None:
        """No more tasks come."""
        for queue in self._queues:
            queue.put(None)

    def _follow(self, stage: int) -> None:
        while (entry := self._queues[stage].get()) is not None:
            task, array = entry
            array.block_until_ready()
            self._ended[stage, task] = time.perf_counter()
            del entry, array
        with self._lock:
            self._waiting -= 1
            last = self._waiting == 0
        if last:
            before = self._previous.ends() if self._previous is not None else (0.0,) * len(self._schedule.tasks)
            self._previous = None
            events = passes(self._schedule, self._issued, self._ended, before)
            self._finished.set()
            times = stage_times(events, self._schedule.num_stages)
            self._done(Reading(step=self._step, stage_time_s=times, events=events))

    def ends(self) -> tuple[float, ...]:
        """When each set of devices ended its last task; waits for it."""
        self._finished.wait()
        rows = enumerate(self._schedule.tasks)
        return tuple(self._ended[self._schedule.stage_of(place, tasks[-1]), tasks[-1]] for place, tasks in rows)


def passes(
    schedule: Schedule,
    issued: Mapping[tuple[int, Task], float],
    ended: Mapping[tuple[int, Task], float],
    before: Sequence[float],
) -> tuple[Event, ...]:
    """Every pass of a step with its start and end, in seconds from the start of the first one.

    A task starts when it has been issued, the one before it on its devices has ended, and those it needs have ended; so
    the time of a transfer counts for the stage that waits for it.

    Args:
        schedule: of the step.
        issued: when the host began to hand each task to the devices.
        ended: when its results were ready.
        before: per set of devices, when it ended its work of the step before.
    """
    found = []
    for place, tasks in enumerate(schedule.tasks):
        last = before[place]
        for task in tasks:
            stage = schedule.stage_of(place, task)
            needed = [ended[key] for key in schedule.needs(stage, task)]
            start, last = max([last, issued[stage, task], *needed]), ended[stage, task]
            found.append((stage, task, start, max(start, last)))
    first = min(start for _, _, start, _ in found)
    return tuple(Event(stage=i, task=t, start_s=start - first, end_s=end - first) for i, t, start, end in found)


def stage_times(events: Sequence[Event], num_stages: int) -> tuple[float, ...]:
    """Per stage, median forward plus median backward."""

    def median(stage: int, kind: str) -> float:
        return statistics.median(e.end_s - e.start_s for e in events if e.stage == stage and e.task.kind == kind)

    return tuple(median(stage, FORWARD) + median(stage, BACKWARD) for stage in range(num_stages))
