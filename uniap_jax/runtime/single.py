"""One stage: the whole step is one compiled program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from uniap_jax.core.graph import Step
from uniap_jax.core.jax_compat import ClosedJaxpr
from uniap_jax.core.jaxprs import open_jaxpr, variables
from uniap_jax.core.schedule import BACKWARD, FORWARD, Task
from uniap_jax.runtime.homes import REPLICATED, Layout
from uniap_jax.runtime.loss import accumulator_dtype, gradient_weight
from uniap_jax.runtime.programs import Program, build, constrain, shape_of
from uniap_jax.runtime.replicas import replicas_of, run_stage
from uniap_jax.runtime.shelves import Shelf, apart, together
from uniap_jax.runtime.stopwatch import Stopwatch


def batch_shardings(layout: Layout) -> tuple[NamedSharding, ...]:
    """Of every leaf of the whole batch: as the first layer that reads it has it, by its rows.

    Over several processes a leaf that several stages read is on all devices: no stage then waits for another's rows.
    """
    specs: dict[int, tuple[int, PartitionSpec]] = {}
    readers = layout.rows_read
    for layer, sharding in zip(layout.graph.layers, layout.layers, strict=True):
        for position, o in enumerate(layer.operands):
            operand = layout.graph.operands[o]
            if operand.kind == "batch":
                stage = layout.stage_of(layer.index)
                specs.setdefault(operand.leaf, (stage, sharding.operands[position]))
                readers.setdefault(operand.leaf, set()).add(stage)
    flow = layout.update
    read = {*variables(flow.outvars), *(v for eqn in flow.eqns for v in variables(eqn.invars))}
    for var, (kind, i) in flow.sources.items():
        if kind == "batch" and var in read:
            readers.setdefault(i, set()).update(range(layout.plan.num_stages))
    shared = {i for i, stages in readers.items() if len(stages) > 1 and jax.process_count() > 1}
    count = len(layout.graph.step.batch)
    return tuple(layout.on(None) if i in shared else layout.on(*specs.get(i, (0, REPLICATED))) for i in range(count))


class SingleStage:
    """Runs a plan of one stage.

    Args:
        layout: graph under its plan; by rows where the step has stacked leaves.
        donated: state leaves whose buffers are given up.
        step: as the user has it.
        shelves: of its stacked leaves, () where it has none.
    """

    def __init__(self, layout: Layout, donated: Sequence[int], step: Step, shelves: Sequence[Shelf] = ()) -> None:
        self._layout, self._step, self._shelves = layout, step, tuple(shelves)
        self._donated = tuple(donated)
        self._kept = tuple(i for i in range(len(step.state)) if i not in set(donated))
        self._program: Program | None = None
        self.build_s = 0.0
        self.observe: Callable[[], Stopwatch | None] = lambda: None

    @property
    def is_built(self) -> bool:
        """Whether the program has been compiled."""
        return self._program is not None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The one program, compiled at its first use."""
        if self._program is None:
            started = time.perf_counter()
            self._program = self._build()
            self.build_s = time.perf_counter() - started
        return (self._program,)

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed leaves."""
        (program,) = self.programs
        stopwatch = self.observe()
        outputs: list[Any] = program([state[i] for i in self._donated], [state[i] for i in self._kept], list(batch))
        if stopwatch is not None:
            self._time(stopwatch, outputs)
        return outputs

    def _time(self, stopwatch: Stopwatch, outputs: Sequence[Any]) -> None:
        """The whole step counts as the forward of one micro-batch; its backward takes no time."""
        returned = {i for i, leaf in enumerate(self._step.output_leaf) if leaf is not None}
        own = [x for i, x in enumerate(outputs) if i not in returned]
        ready = own[0] if own else jnp.copy(min(outputs, key=lambda x: x.size))
        for kind in (FORWARD, BACKWARD):
            stopwatch(0, Task(kind=kind, microbatch=0), ready)
        stopwatch.finish()

    def _build(self) -> Program:
        layout, step, shelves = self._layout, self._step, self._shelves
        shardings = tuple(s.sharding for s in shelves) or layout.state_shardings
        outputs = [
            shardings[leaf] if leaf is not None else layout.on(0) if not out.shape else None
            for out, leaf in zip(step.outputs, step.output_leaf, strict=True)
        ]

        def whole(donated: list[Any], kept: list[Any], batch: list[Any]) -> list[Any]:
            leaves = dict(zip((*self._donated, *self._kept), (*donated, *kept), strict=True))
            state = [leaves[i] for i in range(len(leaves))]
            if step.by_rows is None:
                return train_step(layout, state, batch)
            return together(step.by_rows.outputs, train_step(layout, apart(shelves, state), batch))

        return build(
            "train_step",
            whole,
            [
                [shape_of(step.state[i], shardings[i]) for i in self._donated],
                [shape_of(step.state[i], shardings[i]) for i in self._kept],
                [shape_of(v, s) for v, s in zip(step.batch, batch_shardings(layout), strict=True)],
            ],
            mesh=layout.meshes[0],
            outputs=outputs,
            donate=(0,),
        )


def _evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    return list(jax.core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr.consts, *args))


def train_step(layout: Layout, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    """The step as a function of flat leaves: before, loss and gradients, update."""
    step, count = layout.graph.step, len(layout.graph.params)
    ready = _evaluate(step.before, *state, *batch)
    results, grads = loss_and_grads(layout, ready[:count], ready[count:], batch)
    return _evaluate(step.update, *state, *batch, *results, *grads)


def loss_and_grads(
    layout: Layout, params: Sequence[Any], state_operands: Sequence[Any], batch: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of the whole batch, over its micro-batches in turn.

    Args:
        layout: graph under a plan of one stage.
        params: in the graph's order.
        state_operands: what `before` computed after the parameters.
        batch: leaves of the whole batch.
    """
    graph, c, mesh = layout.graph, layout.plan.num_microbatches, layout.meshes[0]
    replicas = replicas_of(layout, 0)
    homes = list(enumerate(layout.params))
    ready = [replicas.view(i, p, mesh, h.stored) for p, (i, h) in zip(params, homes, strict=True)]
    specs = [replicas.spec(i, h.grads) for i, h in homes]

    def loss(params: Sequence[Any], batch: Sequence[Any], index: Any) -> tuple[Any, list[Any]]:
        operands = {
            i: state_operands[o.leaf] if o.kind == "state" else batch[o.leaf] if o.kind == "batch" else index
            for i, o in enumerate(graph.operands)
        }
        values = run_stage(layout, replicas, range(len(graph.layers)), dict(enumerate(params)), operands, {})
        results = [values[v] for v in graph.results]
        return replicas.result(graph, graph.results[0], results[0]), results

    def one(batch: Sequence[Any], index: Any) -> tuple[list[Any], list[Any]]:
        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(list(ready), batch, index)
        return results, [constrain(g, mesh, s) for g, s in zip(grads, specs, strict=True)]

    if c == 1:
        return one(batch, jnp.int32(0))
    stacked, totals = _accumulate(layout, ready, specs, [_split(layout, x, i) for i, x in enumerate(batch)], one)
    results = [replicas.whole(graph, v, r) for v, r in zip(graph.results, stacked, strict=True)]
    found = zip(totals, params, homes, strict=True)
    return results, [constrain(replicas.summed(i, t), mesh, h.grads).astype(p.dtype) for t, p, (i, h) in found]


def _split(layout: Layout, leaf: Any, position: int) -> Any:
    """[B, ...] to [c, B/c, ...]: the rows of every micro-batch spread over all devices of the batch axes."""
    c, mesh = layout.plan.num_microbatches, layout.meshes[0]
    spec = batch_shardings(layout)[position].spec
    whole = constrain(leaf, mesh, REPLICATED)
    return constrain(whole.reshape(c, leaf.shape[0] // c, *leaf.shape[1:]), mesh, PartitionSpec(None, *spec))


def _accumulate(
    layout: Layout, params: Sequence[Any], specs: Sequence[PartitionSpec], pieces: Sequence[Any], one: Any
) -> tuple[list[Any], list[Any]]:
    """Results of every micro-batch, and the sum of their gradients in the accumulators' dtypes."""
    mesh, weight = layout.meshes[0], gradient_weight(layout)

    def body(total: list[Any], piece: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        results, grads = one(piece[1], piece[0])
        added = [t + weight * g.astype(t.dtype) for t, g in zip(total, grads, strict=True)]
        return [constrain(a, mesh, s) for a, s in zip(added, specs, strict=True)], results

    zeros = [
        constrain(jnp.zeros(p.shape, accumulator_dtype(p.dtype)), mesh, s) for p, s in zip(params, specs, strict=True)
    ]
    index = jnp.arange(layout.plan.num_microbatches, dtype=jnp.int32)
    total, stacked = lax.scan(body, zeros, (index, list(pieces)))
    return list(stacked), list(total)
