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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from uniap_jax.core.schedule import BACKWARD, FORWARD, Schedule
from uniap_jax.core.timeline import schedule_of
from uniap_jax.runtime.feed import Begin, Feeder, Held, Leaves, Shared
from uniap_jax.runtime.homes import REPLICATED, Layout
from uniap_jax.runtime.loss import accumulator_dtype
from uniap_jax.runtime.programs import Program, build, shape_of
from uniap_jax.runtime.replicas import Replicas, replicas_of
from uniap_jax.runtime.stage_programs import (
    StageForward,
    build_backward,
    build_forward,
    build_whole,
    result_shardings,
)
from uniap_jax.runtime.stages import StageSpec, stage_specs
from uniap_jax.runtime.stopwatch import Stopwatch
from uniap_jax.runtime.transfer import Move, Outbox
from uniap_jax.runtime.update import Update
from uniap_jax.runtime.update_split import Piece, split_update
from uniap_jax.runtime.ways import routes


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """What one step holds on one stage.

    Attributes:
        inputs: of the forward program, with what is the same for every micro-batch in its place.
        totals: gradients so far.
        rows: per micro-batch, its rows of the batch.
        results: per result of the stage, the micro-batches' pieces.
        arrived: per micro-batch whose values from earlier stages come in, its inputs.
        returned: per micro-batch, cotangents from later stages, as the backward program takes them.
        kept: per micro-batch in flight, what its backward wants: inputs and residuals, or the cotangents themselves.
    """

    inputs: list[Any]
    totals: list[Any]
    rows: list[list[Any]]
    results: list[list[Any]]
    arrived: dict[int, list[Any]] = field(default_factory=dict)
    returned: dict[int, list[list[Any]]] = field(default_factory=dict)
    kept: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)

    def taking(self, microbatch: int) -> list[Any]:
        """Inputs of a micro-batch, to be filled."""
        if microbatch not in self.arrived:
            self.arrived[microbatch] = list(self.inputs)
        return self.arrived[microbatch]


class Programs:
    """Everything a pipeline runs, compiled.

    Args:
        layout: graph under its plan.
        pieces: of the update.
        donated: state leaves whose buffers are given up.
        schedule: that they run under.
        pool: compiles in the background.
    """

    def __init__(
        self,
        layout: Layout,
        pieces: Sequence[Piece],
        donated: Sequence[int],
        schedule: Schedule,
        pool: Executor | None = None,
    ) -> None:
        graph = layout.graph
        self.specs = stage_specs(layout)
        self.leaves = Leaves(layout)
        self.begin = [Begin(layout, spec, self.leaves) for spec in self.specs]
        home = {
            p: sharding
            for begin in self.begin
            for p, sharding in zip(begin.params, begin.shardings[: len(begin.params)], strict=True)
        }
        self.shared = Shared(layout, home, self.specs)
        self.feeder = Feeder(layout, self.specs, pool)
        self.routes = [routes(layout, self.specs, self.feeder, spec, pool) for spec in self.specs]
        begun = [
            (build_whole if schedule.turns_at_once and spec is self.specs[-1] else build_forward)(
                layout, spec, self._params(spec, home), pool
            )
            for spec in self.specs
        ]
        ending = [(spec, replicas_of(layout, spec.stage)) for spec in self.specs]
        self.combine = [_build_combine(layout, spec, replicas, pool) for spec, replicas in ending]
        self.stages = [build_backward(layout, s, pool) if isinstance(s, StageForward) else s for s in begun]
        self.returns, parts = self._gradient_ways(layout)
        shapes = {
            k: shape_of(graph_whole(layout, k), sharding)
            for spec, replicas in ending
            for k, sharding in zip(spec.results, _whole_shardings(layout, spec, replicas), strict=True)
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
        """Those on devices of this process, in the order in which a step meets them."""
        moves = (*self.leaves.moves, *self.shared.there.values(), *self.returns.values())
        found = (
            *(p for b in self.begin for p in b.programs),
            *self.feeder.programs,
            *(p for m in moves for p in m.programs),
            *(p for w in self.routes for p in w.programs),
            *(p for s in self.stages for p in (s.zeros, s.forward, s.backward, s.reduce) if p is not None),
            *(p for p in self.combine if p is not None),
            *self.update.programs,
        )
        return tuple(p for p in found if p.is_here)


def graph_whole(layout: Layout, result: int) -> Any:
    """Shape of a whole-batch result: as the update reads it."""
    graph = layout.graph
    first = len(graph.step.state) + len(graph.step.batch)
    aval = graph.step.update.in_avals[first + result]
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _whole_shardings(layout: Layout, spec: StageSpec, replicas: Replicas) -> list[NamedSharding]:
    """Layout of whole-batch results: lists over examples stay split, the rest is replicated."""
    pieces = zip(spec.results, result_shardings(layout, spec, replicas), strict=True)
    single = layout.plan.num_microbatches == 1
    return [
        s if single or layout.graph.reductions[k] == "concat" else layout.on(spec.stage, REPLICATED) for k, s in pieces
    ]


def _build_combine(layout: Layout, spec: StageSpec, replicas: Replicas, pool: Executor | None) -> Program | None:
    """From the micro-batches' results to the whole batch's; None where there is nothing to do."""
    graph, c = layout.graph, layout.plan.num_microbatches
    if not spec.results or c == 1:
        return None
    names = [graph.results[k] for k in spec.results]

    def whole(pieces: list[list[Any]]) -> list[Any]:
        return [replicas.whole(graph, v, jnp.stack(found)) for v, found in zip(names, pieces, strict=True)]

    def leaving(value: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        found = graph.values[value]
        return jax.ShapeDtypeStruct(replicas.result_shape(value, found.shape), found.dtype, sharding=sharding)

    shapes = [[leaving(v, s)] * c for v, s in zip(names, result_shardings(layout, spec, replicas), strict=True)]
    return build(
        f"stage_{spec.stage}_results",
        whole,
        [shapes],
        mesh=layout.meshes[spec.stage],
        outputs=_whole_shardings(layout, spec, replicas),
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
        plan, self.schedule = layout.plan, schedule_of(layout.plan)
        self._order = self.schedule.simulate()
        self._pieces = split_update(layout.graph, plan, layout.update, layout.params, layout.leaves)
        self._built: Programs | None = None
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
                self._built = Programs(self._layout, self._pieces, self._donated, self.schedule, pool)
            self.build_s = time.perf_counter() - started
        return self._built

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program, compiled at the first use."""
        return self.built.all

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed state leaves and any batch leaves."""
        programs, outbox, stopwatch = self.built, Outbox(), self.observe()
        held = programs.leaves.of(state)
        live = self._start(programs, held, batch)
        for event in self._order:
            stage, task = event.stage, event.task
            outbox.turn((stage, task.kind, task.microbatch), event.start_s, event.end_s)
            run = self._forward if task.kind == FORWARD else self._backward
            made = run(programs, live, stage, task.microbatch, outbox)
            if stopwatch is not None:
                stopwatch(stage, task, _unshared(made))
            if self.watch is not None:
                self.watch(stage, task, len(live[stage].kept))
        if stopwatch is not None:
            stopwatch.finish()
        results = self._results(programs, live)
        grads = self._grads(programs, live)
        del live
        return programs.update(state, held, batch, results, grads)

    def _start(self, programs: Programs, state: Held, batch: Sequence[Any]) -> list[_Live]:
        begun = [begin(state, batch) for begin in programs.begin]
        params: dict[int, Any] = {}
        for begin, arrays in zip(programs.begin, begun, strict=True):
            params.update(zip(begin.params, arrays, strict=False))
        there, rows = programs.shared.there, programs.feeder(batch)
        live = []
        for built, begin, arrays in zip(programs.stages, programs.begin, begun, strict=True):
            spec = built.spec
            brought = [there[p, spec.stage](params[p]) if (p, spec.stage) in there else params[p] for p in spec.params]
            inputs = [*brought, *([None] * (len(spec.operands) + len(spec.reads)))]
            own = programs.feeder.state_positions[spec.stage]
            for position, array in zip(own, arrays[len(begin.params) :], strict=True):
                inputs[len(brought) + position] = array
            totals = built.zeros() if built.zeros is not None else []
            results: list[list[Any]] = [[] for _ in spec.results]
            live.append(_Live(inputs=inputs, totals=totals, rows=rows[spec.stage], results=results))
        return live

    def _forward(
        self, programs: Programs, live: list[_Live], stage: int, m: int, outbox: Outbox
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        here, built, routed = live[stage], programs.stages[stage], programs.routes[stage]
        inputs = here.taking(m)
        del here.arrived[m]
        for position, array in zip(routed.rows, here.rows[m], strict=True):
            inputs[position] = array
        here.rows[m] = []
        for position in routed.numbers:
            inputs[position] = programs.feeder.numbers[stage][m]
        if built.backward is None:
            results, here.totals, back = built.forward(inputs, here.totals)
            here.kept[m] = ([], back)
            for held, piece in zip(here.results, results, strict=True):
                held.append(piece)
            return [*results, *back], here.totals
        made = built.forward(inputs)
        here.kept[m] = ([inputs[i] for i in built.needs], [made[i] for i in built.kept])
        first = len(built.spec.writes)
        for held, piece in zip(here.results, made[first : first + len(here.results)], strict=True):
            held.append(piece)
        for route in routed.forward:
            box = live[route.stage].taking(m)
            outbox.post((route.stage, FORWARD, m), made[route.source], route.way, (box, route.place[0]))
        return made, ()

    def _backward(
        self, programs: Programs, live: list[_Live], stage: int, m: int, outbox: Outbox
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        here, built, routed = live[stage], programs.stages[stage], programs.routes[stage]
        inputs, back = here.kept.pop(m)
        if built.backward is not None:
            here.totals, back = built.backward(inputs, back, here.returned.pop(m, []), here.totals)
        for route in routed.backward:
            parts = live[route.stage].returned.setdefault(m, [[None] * n for n in programs.routes[route.stage].parts])
            write, part = route.place
            outbox.post((route.stage, BACKWARD, m), back[route.source], route.way, (parts[write], part))
        return back, here.totals

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
