"""Several stages: one program per stage and direction, issued by the host in the order of a schedule.

Nothing here waits for a device: programs and copies are queued, and arrays are let go as soon as the schedule has no
more use for them, so that what is live on a stage is what the schedule says is in flight there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from uniap_jax.core.schedule import BACKWARD, FORWARD, Schedule, make_schedule
from uniap_jax.runtime.feed import Begin, Feeder, Leaves, Shared
from uniap_jax.runtime.homes import REPLICATED, Layout
from uniap_jax.runtime.loss import accumulator_dtype, combine
from uniap_jax.runtime.programs import Program, build, shape_of
from uniap_jax.runtime.stage_programs import build_backward, build_forward, result_shardings
from uniap_jax.runtime.stages import StageSpec, stage_specs
from uniap_jax.runtime.stopwatch import Stopwatch
from uniap_jax.runtime.transfer import Move, Outbox
from uniap_jax.runtime.update import Update
from uniap_jax.runtime.update_split import Piece, split_update


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """What one step holds on one stage.

    Attributes:
        inputs: parameters, then state operands made by `before`, ready for every micro-batch.
        arrived: per micro-batch, values from earlier stages.
        returned: per micro-batch, cotangents from later stages, by value.
        kept: per micro-batch in flight, inputs and residuals for its backward.
        totals: gradients so far.
        results: per result of the stage, the micro-batches' pieces.
    """

    params: list[Any]
    state: list[Any]
    totals: list[Any]
    arrived: dict[int, dict[int, Any]] = field(default_factory=dict)
    returned: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    kept: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    results: list[list[Any]] = field(default_factory=list)


class _Fed:
    """Rows of the batch on the stages that read them; a micro-batch's go to all stages in one call."""

    __slots__ = ("_feeder", "_pieces", "_placed")

    def __init__(self, feeder: Feeder, batch: Sequence[Any]) -> None:
        self._feeder, self._pieces = feeder, feeder.split(batch)
        self._placed: dict[int, list[list[Any]]] = {}

    def take(self, stage: int, microbatch: int) -> list[Any]:
        """A stage's rows, held here no longer."""
        if microbatch not in self._placed:
            self._placed[microbatch] = self._feeder.place(self._pieces, microbatch)
        rows, self._placed[microbatch][stage] = self._placed[microbatch][stage], []
        return rows


class Programs:
    """Everything a pipeline runs, compiled.

    Args:
        layout: graph under its plan.
        pieces: of the update.
        donated: state leaves whose buffers are given up.
        pool: compiles in the background.
    """

    def __init__(
        self, layout: Layout, pieces: Sequence[Piece], donated: Sequence[int], pool: Executor | None = None
    ) -> None:
        graph = layout.graph
        self.specs = stage_specs(layout)
        self.writer = {v: spec.stage for spec in self.specs for v in spec.writes}
        self.origin = {v: s for spec in self.specs for v, s in zip(spec.writes, spec.leaves, strict=True)}
        self.leaves = Leaves(layout)
        self.begin = [Begin(layout, spec, self.leaves) for spec in self.specs]
        home = {
            p: sharding
            for begin in self.begin
            for p, sharding in zip(begin.params, begin.shardings[: len(begin.params)], strict=True)
        }
        self.shared = Shared(layout, home, self.specs)
        self.feeder = Feeder(layout, self.specs)
        forwards = [build_forward(layout, spec, self._params(spec, home), pool) for spec in self.specs]
        self.combine = [_build_combine(layout, spec, pool) for spec in self.specs]
        self.stages = [build_backward(layout, forward, pool) for forward in forwards]
        self.returns, parts = self._gradient_ways(layout)
        shapes = {
            k: shape_of(graph_whole(layout, k), sharding)
            for spec in self.specs
            for k, sharding in zip(spec.results, _whole_shardings(layout, spec), strict=True)
        }
        results = [shapes[k] for k in range(len(graph.results))]
        self.update = Update(layout, pieces, self.leaves, results, parts, donated, pool)

    def _params(self, spec: StageSpec, home: dict[int, NamedSharding]) -> dict[int, NamedSharding]:
        there = self.shared.there
        return {p: there[p, spec.stage].arrives if (p, spec.stage) in there else home[p] for p in spec.params}

    def _gradient_ways(self, layout: Layout) -> tuple[dict[tuple[int, int], Move], list[list[jax.ShapeDtypeStruct]]]:
        """Moves of shared parameters' gradients to their home, and per parameter the shapes that meet there."""
        moves: dict[tuple[int, int], Move] = {}
        parts: list[list[jax.ShapeDtypeStruct]] = [[] for _ in layout.graph.params]
        single = layout.plan.num_microbatches == 1
        for stage in self.stages:
            for p, sharding in zip(stage.spec.params, stage.grads, strict=True):
                value, home = layout.graph.params[p], layout.params[p]
                dtype = value.dtype if single else accumulator_dtype(value.dtype)
                shape = jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding)
                if stage.spec.stage != home.stage:
                    move = Move(f"gradient_{p}_from_stage_{stage.spec.stage}", shape, layout.on(home.stage, home.grads))
                    moves[p, stage.spec.stage] = move
                    shape = jax.ShapeDtypeStruct(value.shape, dtype, sharding=move.arrives)
                parts[p].append(shape)
        return moves, parts

    @property
    def all(self) -> tuple[Program, ...]:
        """In the order in which a step meets them."""
        moves = (*self.shared.there.values(), *self.returns.values())
        return (
            *(p for b in self.begin for p in b.programs),
            *(m.program for m in moves if m.program is not None),
            *(p for s in self.stages for p in (s.zeros, s.forward, s.backward, s.reduce) if p is not None),
            *(p for p in self.combine if p is not None),
            *self.update.programs,
        )


def graph_whole(layout: Layout, result: int) -> Any:
    """Shape of a whole-batch result: as the update reads it."""
    graph = layout.graph
    first = len(graph.step.state) + len(graph.step.batch)
    aval = graph.step.update.in_avals[first + result]
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _whole_shardings(layout: Layout, spec: StageSpec) -> list[NamedSharding]:
    """Layout of whole-batch results: lists over examples stay split, the rest is replicated."""
    pieces = zip(spec.results, result_shardings(layout, spec), strict=True)
    single = layout.plan.num_microbatches == 1
    return [
        s if single or layout.graph.reductions[k] == "concat" else layout.on(spec.stage, REPLICATED) for k, s in pieces
    ]


def _build_combine(layout: Layout, spec: StageSpec, pool: Executor | None) -> Program | None:
    """From the micro-batches' results to the whole batch's; None where there is nothing to do."""
    graph, c = layout.graph, layout.plan.num_microbatches
    if not spec.results or c == 1:
        return None
    values = [graph.values[graph.results[k]] for k in spec.results]
    how = [graph.reductions[k] for k in spec.results]

    def whole(pieces: list[list[Any]]) -> list[Any]:
        return [combine(jnp.stack(p), h, v.batch_dim) for p, h, v in zip(pieces, how, values, strict=True)]

    shapes = [[shape_of(v, s)] * c for v, s in zip(values, result_shardings(layout, spec), strict=True)]
    return build(
        f"stage_{spec.stage}_results",
        whole,
        [shapes],
        mesh=layout.meshes[spec.stage],
        outputs=_whole_shardings(layout, spec),
        pool=pool,
    )


def _unshared(made: tuple[Sequence[Any], Sequence[Any]]) -> Any:
    """An output of a task that no later program takes over; of the accumulators, which one does, a copy."""
    own, taken = made
    return own[0] if own else jnp.copy(min(taken, key=lambda x: x.size))


class Pipeline:
    """Runs a plan of several stages.

    Args:
        layout: graph under its plan.
        donated: state leaves whose buffers are given up.

    Raises:
        ExecutionError: the optimizer joins large arrays of several stages.
    """

    def __init__(self, layout: Layout, donated: Sequence[int]) -> None:
        self._layout, self._donated = layout, tuple(donated)
        plan = layout.plan
        self.schedule: Schedule = make_schedule(plan.schedule, plan.num_stages, plan.num_microbatches)
        self._order = self.schedule.order
        self._pieces = split_update(layout.graph, plan, layout.update, layout.params, layout.leaves)
        self._built: Programs | None = None
        self._outbox = Outbox()
        self.build_s = 0.0
        self.watch: Callable[[int, Any, int], None] | None = None
        self.observe: Callable[[], Stopwatch | None] = lambda: None

    @property
    def is_built(self) -> bool:
        """Whether the programs have been compiled."""
        return self._built is not None

    @property
    def built(self) -> Programs:
        """Every program by its role, compiled at the first use."""
        if self._built is None:
            started = time.perf_counter()
            workers = min(os.cpu_count() or 1, 2 * self._layout.plan.num_stages)
            with ThreadPoolExecutor(workers, thread_name_prefix="uniap_compile") as pool:
                self._built = Programs(self._layout, self._pieces, self._donated, pool)
            self.build_s = time.perf_counter() - started
        return self._built

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program, compiled at the first use."""
        return self.built.all

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed state leaves and any batch leaves."""
        programs = self.built
        live = self._start(programs, state)
        fed = _Fed(programs.feeder, batch)
        self._outbox, stopwatch = Outbox(), self.observe()
        for stage, task in self._order:
            self._outbox.deliver_for((stage, task.kind, task.microbatch))
            run = self._forward if task.kind == FORWARD else self._backward
            made = run(programs, live, stage, task.microbatch, fed)
            if stopwatch is not None:
                stopwatch(stage, task, _unshared(made))
            if self.watch is not None:
                self.watch(stage, task, len(live[stage].kept))
        if stopwatch is not None:
            stopwatch.finish()
        results = self._results(programs, live)
        grads = self._grads(programs, live)
        del live, fed
        return programs.update(state, batch, results, grads)

    def _start(self, programs: Programs, state: Sequence[Any]) -> list[_Live]:
        begun = [begin(state) for begin in programs.begin]
        params: dict[int, Any] = {}
        for begin, arrays in zip(programs.begin, begun, strict=True):
            params.update(zip(begin.params, arrays, strict=False))
        there = programs.shared.there
        return [
            _Live(
                params=[
                    there[p, s.spec.stage](params[p]) if (p, s.spec.stage) in there else params[p]
                    for p in s.spec.params
                ],
                state=arrays[len(begin.params) :],
                totals=s.zeros() if s.zeros is not None else [],
                results=[[] for _ in s.spec.results],
            )
            for s, begin, arrays in zip(programs.stages, programs.begin, begun, strict=True)
        ]

    def _forward(self, programs: Programs, live: list[_Live], stage: int, m: int, fed: _Fed) -> tuple[Any, Any]:
        here, built = live[stage], programs.stages[stage]
        spec = built.spec
        arrived = here.arrived.pop(m, {})
        operands = programs.feeder.operands(fed.take(stage, m), stage, m, here.state)
        inputs = [*here.params, *operands, *(arrived[v] for v in spec.reads)]
        made = built.forward(inputs)
        here.kept[m] = ([inputs[i] for i in built.needs], [made[i] for i in built.kept])
        first = len(spec.writes)
        for held, piece in zip(here.results, made[first : first + len(spec.results)], strict=True):
            held.append(piece)
        for value, array, readers in zip(spec.writes, made, spec.readers, strict=False):
            for target, sharding in readers:
                slot = live[target].arrived.setdefault(m, {})
                self._outbox.post((target, FORWARD, m), array, sharding, partial(slot.__setitem__, value))
        return made, ()

    def _backward(self, programs: Programs, live: list[_Live], stage: int, m: int, _: _Fed) -> tuple[Any, Any]:
        here, built = live[stage], programs.stages[stage]
        spec = built.spec
        inputs, held = here.kept.pop(m)
        back = here.returned.pop(m, {})
        totals, wanted = built.backward(inputs, held, [back[v] for v in spec.active], here.totals)
        here.totals = totals
        for value, array in zip(spec.wanted, wanted, strict=True):
            target = programs.writer[value]
            slot = live[target].returned.setdefault(m, {}).setdefault(value, [])
            self._outbox.post((target, BACKWARD, m), array, programs.origin[value], slot.append)
        return wanted, totals

    def _results(self, programs: Programs, live: list[_Live]) -> list[Any]:
        results: dict[int, Any] = {}
        for here, built, combined in zip(live, programs.stages, programs.combine, strict=True):
            whole = combined(here.results) if combined is not None else [pieces[0] for pieces in here.results]
            results.update(zip(built.spec.results, whole, strict=True))
        return [results[k] for k in range(len(results))]

    def _grads(self, programs: Programs, live: list[_Live]) -> list[list[Any]]:
        """Per parameter its parts, all at home, in the order of the stages."""
        parts: list[list[Any]] = [[] for _ in self._layout.graph.params]
        for here, built in zip(live, programs.stages, strict=True):
            totals = here.totals if built.reduce is None else built.reduce(here.totals)
            for p, total in zip(built.spec.params, totals, strict=True):
                move = programs.returns.get((p, built.spec.stage))
                parts[p].append(total if move is None else move(total))
        return parts
