"""Pipeline schedules as frozen data: what every stage does, in which order. Imports no JAX.

The runtime drives a schedule, the cost model prices it; both read the same tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Task:
    """One pass of one micro-batch through one chunk of a stage.

    Attributes:
        kind: "forward" or "backward".
        microbatch: from 0.
        chunk: of the stage's layers, from 0; more than one only in interleaved schedules.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{chunk}({self.microbatch})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A task as simulated.

    Attributes:
        stage: of the plan: where stages are interleaved, one of the pieces of the model.
        task: what ran.
        start_s: seconds from the start of the step.
        end_s: seconds from the start of the step.
    """

    stage: int
    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of work on every set of devices.

    A set of devices holds `num_chunks` stages of the plan, P apart: chunk k of set s is stage k * P + s, for P sets.
    Everywhere but in `tasks`, stages are those of the plan.

    Attributes:
        name: "gpipe", "one_f_one_b" or "interleaved".
        num_microbatches: c.
        tasks: per set of devices, in the order they run.
        num_chunks: stages per set of devices; more than one only in interleaved schedules.

    Raises:
        ValueError: a stage does not run every micro-batch forward and then backward exactly once, or the stages
            would wait for each other for ever; the message names the tasks that wait.
    """

    name: str
    num_microbatches: int
    tasks: tuple[tuple[Task, ...], ...]
    num_chunks: int = 1

    def __post_init__(self) -> None:
        wanted = sorted(
            Task(kind=kind, microbatch=m, chunk=k)
            for kind in (FORWARD, BACKWARD)
            for m in range(self.num_microbatches)
            for k in range(self.num_chunks)
        )
        for stage, tasks in enumerate(self.tasks):
            if sorted(tasks) != wanted:
                odd = sorted(set(tasks) ^ set(wanted)) or sorted(t for t in set(tasks) if tasks.count(t) > 1)
                raise ValueError(
                    f"stage {stage} of schedule {self.name} must run each of {self.num_microbatches} micro-batches "
                    "once forward and once backward per chunk; missing, unknown or repeated: "
                    f"{', '.join(map(str, odd))}"
                )
        self.simulate()  # raises where the stages deadlock

    @property
    def num_stages(self) -> int:
        """Of the plan."""
        return len(self.tasks) * self.num_chunks

    def stage_of(self, place: int, task: Task) -> int:
        """The plan's stage that a set of devices runs in a task."""
        return task.chunk * len(self.tasks) + place

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches that are forward and not yet backward."""
        places = len(self.tasks)
        return tuple(
            _peak([t for t in self.tasks[stage % places] if t.chunk == stage // places])
            for stage in range(self.num_stages)
        )

    def held(self, place: int, each: Sequence[float]) -> float:
        """The most that a set of devices holds at once.

        Args:
            place: which set.
            each: [stages] what one micro-batch in flight holds on a stage.
        """
        total = most = 0.0
        for task in self.tasks[place]:
            total += each[self.stage_of(place, task)] * (1 if task.kind == FORWARD else -1)
            most = max(most, total)
        return most

    @property
    def turns_at_once(self) -> bool:
        """Whether the last stage runs every backward right after its forward."""
        tasks, last = self.tasks[-1], self.num_chunks - 1
        turned = [
            t
            for t, following in pairwise(tasks)
            if t.chunk == last and following == Task(kind=BACKWARD, microbatch=t.microbatch, chunk=last)
            if t.kind == FORWARD
        ]
        return len(turned) == self.num_microbatches

    def simulate(
        self,
        forward_s: Sequence[float] | None = None,
        backward_s: Sequence[float] | None = None,
        link_s: Sequence[float] | None = None,
    ) -> tuple[Event, ...]:
        """Runs the schedule with given times; devices work through their tasks in order and wait for their inputs.

        Args:
            forward_s: [stages] seconds of one micro-batch; 1 where not given.
            backward_s: [stages] likewise; 2 where not given.
            link_s: [stages - 1] seconds from a stage to the next, and back; 0 where not given.

        Returns:
            Events by start, then end, then stage.

        Raises:
            ValueError: the stages deadlock.
        """
        num_stages = self.num_stages
        times = {
            FORWARD: tuple(forward_s) if forward_s is not None else (1.0,) * num_stages,
            BACKWARD: tuple(backward_s) if backward_s is not None else (2.0,) * num_stages,
        }
        links = tuple(link_s) if link_s is not None else (0.0,) * (num_stages - 1)
        for name, given, count in (("forward_s", times[FORWARD], num_stages), ("link_s", links, num_stages - 1)):
            if len(given) != count:
                raise ValueError(f"{name} has {len(given)} entries, expected {count} for {num_stages} stages")
        done: dict[tuple[int, Task], float] = {}
        position, free = [0] * len(self.tasks), [0.0] * len(self.tasks)
        events: list[Event] = []
        progress = True
        while progress:
            progress = False
            for place, tasks in enumerate(self.tasks):
                while position[place] < len(tasks):
                    task = tasks[position[place]]
                    stage = self.stage_of(place, task)
                    ready = self._ready(stage, task, done, links)
                    if ready is None:
                        break
                    start = max(free[place], ready)
                    free[place] = done[stage, task] = start + times[task.kind][stage]
                    events.append(Event(stage=stage, task=task, start_s=start, end_s=free[place]))
                    position[place] += 1
                    progress = True
        rows = zip(self.tasks, position, strict=True)
        waiting = [f"stage {s}: {tasks[p]}" for s, (tasks, p) in enumerate(rows) if p < len(tasks)]
        if waiting:
            raise ValueError(f"schedule {self.name} deadlocks; waiting for ever: {'; '.join(waiting)}")
        return tuple(sorted(events, key=lambda e: (e.start_s, e.end_s, e.stage)))

    def makespan(
        self,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        link_s: Sequence[float] | None = None,
    ) -> float:
        """Seconds from the first forward to the last backward; arguments as in `simulate`."""
        return max(e.end_s for e in self.simulate(forward_s, backward_s, link_s))

    def needs(self, stage: int, task: Task) -> tuple[tuple[int, Task], ...]:
        """(stage, task) that must have ended before this one, on its own stage or a neighbour."""
        return tuple(self._needs(stage, task))

    def _needs(self, stage: int, task: Task) -> Iterator[tuple[int, Task]]:
        if task.kind == FORWARD and stage > 0:
            yield self._on(stage - 1, task.kind, task)
        if task.kind == BACKWARD:
            yield self._on(stage, FORWARD, task)
            if stage < self.num_stages - 1:
                yield self._on(stage + 1, task.kind, task)

    def _on(self, stage: int, kind: str, task: Task) -> tuple[int, Task]:
        return stage, Task(kind=kind, microbatch=task.microbatch, chunk=stage // len(self.tasks))

    def _ready(
        self, stage: int, task: Task, done: dict[tuple[int, Task], float], links: tuple[float, ...]
    ) -> float | None:
        """When the inputs of a task are there, or None where one of them has not been scheduled yet."""
        ready = 0.0
        for source, needed in self._needs(stage, task):
            if (source, needed) not in done:
                return None
            link = links[min(source, stage)] if source != stage else 0.0
            ready = max(ready, done[source, needed] + link)
        return ready


def _peak(tasks: Sequence[Task]) -> int:
    live = peak = 0
    for task in tasks:
        live += 1 if task.kind == FORWARD else -1
        peak = max(peak, live)
    return peak


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward (Huang et al., 2019); c micro-batches in flight on every stage.

    Backward runs in the order of the micro-batches, so that gradients add up in the same order as under 1F1B.
    """
    row = tuple(Task(kind=kind, microbatch=m) for kind in (FORWARD, BACKWARD) for m in range(num_microbatches))
    return Schedule(name="gpipe", num_microbatches=num_microbatches, tasks=(row,) * num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn after a warm-up (PipeDream-flush, Narayanan et al., 2021).

    Stage s holds at most min(P - s, c) micro-batches.
    """
    rows = tuple(
        _alternate(
            [Task(kind=FORWARD, microbatch=m) for m in range(num_microbatches)],
            [Task(kind=BACKWARD, microbatch=m) for m in range(num_microbatches)],
            warmup=num_stages - stage - 1,
        )
        for stage in range(num_stages)
    )
    return Schedule(name="one_f_one_b", num_microbatches=num_microbatches, tasks=rows)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, Narayanan et al., 2021): each stage holds `num_chunks` chunks of layers.

    Raises:
        ValueError: the micro-batches do not come in groups of P, which the interleaving needs.
    """
    if num_microbatches % num_stages:
        raise ValueError(
            f"interleaved 1F1B needs micro-batches in groups of the {num_stages} stages, got {num_microbatches}; "
            f"use {num_microbatches // num_stages * num_stages or num_stages}"
        )
    groups = range(0, num_microbatches, num_stages)
    forward = [(m + g, k) for g in groups for k in range(num_chunks) for m in range(num_stages)]
    backward = [(m + g, k) for g in groups for k in reversed(range(num_chunks)) for m in range(num_stages)]
    rows = tuple(
        _alternate(
            [Task(kind=FORWARD, microbatch=m, chunk=k) for m, k in forward],
            [Task(kind=BACKWARD, microbatch=m, chunk=k) for m, k in backward],
            warmup=_interleaved_warmup(num_stages, num_chunks, stage),
        )
        for stage in range(num_stages)
    )
    return Schedule(name="interleaved", num_microbatches=num_microbatches, tasks=rows, num_chunks=num_chunks)


def _interleaved_warmup(num_stages: int, num_chunks: int, stage: int) -> int:
    if num_chunks == 1:
        return num_stages - stage - 1
    return (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages


def _alternate(forward: list[Task], backward: list[Task], *, warmup: int) -> tuple[Task, ...]:
    warmup = min(warmup, len(forward))
    steady = [t for pair in zip(forward[warmup:], backward, strict=False) for t in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


def make_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of a plan.

    Args:
        name: of the schedule.
        num_stages: of the plan.
        num_microbatches: c.
        num_chunks: stages that share a set of devices.

    Raises:
        ValueError: an unknown name, with the known ones; stages that share devices under a schedule for which they
            may not, or that do not divide evenly among the sets of devices.
    """
    known = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}
    if name == "interleaved":
        if num_stages % num_chunks:
            raise ValueError(f"{num_stages} stages do not divide into {num_chunks} per set of devices")
        return interleaved(num_stages // num_chunks, num_microbatches, num_chunks)
    if name not in known:
        raise ValueError(f"schedule {name!r} is unknown; use one of {', '.join(known)}, interleaved")
    if num_chunks > 1:
        raise ValueError(f"schedule {name!r} wants devices of its own for every stage; use 'interleaved'")
    return known[name](num_stages, num_microbatches)
