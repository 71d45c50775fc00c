"""Loss and gradients of the whole batch by one program: the ticks of GPipe and 1F1B.

All stages tick together. GPipe: c + P - 1 ticks forward, as many back in the opposite order. 1F1B: c + 2(P - 1) ticks,
each a forward and a backward pass; stage s pulls back micro-batch tick - 2(P - 1) + s, so that a micro-batch waits at
most 2(P - 1) ticks and memory does not grow with c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from uniap_jax.core.graph import LayerGraph
from uniap_jax.runtime.loss import accumulator_dtype, combine
from uniap_jax.runtime.programs import is_differentiable
from uniap_jax.runtime.uniform_outer import OuterLayers, constrain_all, micro_operands
from uniap_jax.runtime.uniform_stage import STAGE, StageTicks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """Everything that computes loss and gradients.

    Attributes:
        graph: as one micro-batch sees it.
        schedule: "gpipe" or "one_f_one_b".
        stages: the run.
        before: layers before it.
        after: layers after it.
        outer_specs: for each parameter of `before` and `after`, layout as they compute with it.
        outer_grads: for each, layout of its gradient's sum.
    """

    graph: LayerGraph
    schedule: str
    stages: StageTicks
    before: OuterLayers
    after: OuterLayers
    outer_specs: dict[int, PartitionSpec]
    outer_grads: dict[int, PartitionSpec]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Arrays that are the same in every tick.

    Attributes:
        weights: stacked [P, layers of a stage, ...] and shared inputs of the run.
        outer: parameters of the other layers, by position in the graph.
        state: state operands.
        rows: leaves of the batch, [c, B/c, ...], by position.
    """

    weights: tuple[list[Any], list[Any]]
    outer: dict[int, Any]
    state: tuple[Any, ...]
    rows: dict[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sums:
    """What adds up over micro-batches.

    Attributes:
        run: gradients of the run's weights.
        outer: gradients of the other parameters, by position.
        results: [c, ...] of each result.
    """

    run: tuple[list[Any], list[Any]]
    outer: dict[int, Any]
    results: list[Any]


jax.tree_util.register_dataclass(Sums, data_fields=["run", "outer", "results"], meta_fields=[])


def loss_and_grads(
    pipeline: Pipeline, params: Sequence[Any], state: Sequence[Any], batch: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of the whole batch.

    Args:
        pipeline: what runs.
        params: in the graph's order.
        state: state operands.
        batch: leaves of the whole batch.
    """
    run = pipeline.stages.run
    weights, pull = _weights(pipeline, params, state)
    specs = pipeline.outer_specs
    used = constrain_all([params[p] for p in specs], pipeline.stages.mesh, list(specs.values()))
    outer = dict(zip(specs, used, strict=True))
    inputs = Inputs(weights=weights, outer=outer, state=tuple(state), rows=_rows(pipeline, batch))
    sums = _gpipe(pipeline, inputs) if pipeline.schedule == "gpipe" else _one_f_one_b(pipeline, inputs)
    grads = {p: g.astype(params[p].dtype) for p, g in sums.outer.items()}
    for p, g in zip(run.params, pull(sums.run), strict=True):
        grads[p] = grads[p] + g if p in grads else g
    graph = pipeline.graph
    results = [
        combine(r, how, graph.values[v].batch_dim)
        for r, how, v in zip(sums.results, graph.reductions, graph.results, strict=True)
    ]
    return results, [grads[p] if p in grads else _no_gradient(x) for p, x in enumerate(params)]


def _no_gradient(x: Any) -> Any:
    """Of a parameter that no layer reads, or that has none, as `jax.grad` returns it."""
    return jnp.zeros_like(x) if is_differentiable(x.dtype) else jnp.zeros(x.shape, jax.dtypes.float0)


# ---- the run's weights -----------------------------------------------------------------------------------------


def _weights(pipeline: Pipeline, params: Sequence[Any], state: Sequence[Any]) -> Any:
    """Inputs of the run that are made once per step, and the way their gradients go back to parameters."""
    stages = pipeline.stages
    run, mesh, count = stages.run, stages.mesh, stages.num_stages

    def make(*chosen: Any) -> tuple[Any, Any]:
        stacked, shared = run.prologue(chosen, state)
        own = [stacked[i] for i in stages.trained_stacked]
        common = [shared[i] for i in stages.trained_shared]
        return (own, common), (stacked, shared)

    _, pull, (stacked, shared) = jax.vjp(make, *(params[p] for p in run.params), has_aux=True)
    specs = [PartitionSpec(STAGE, None, *w.stored) for w in run.stacked]
    folded = [x.reshape(count, run.count // count, *x.shape[1:]) for x in stacked]
    weights = (
        constrain_all(folded, mesh, specs),
        constrain_all(shared, mesh, [w.stored for w in run.shared]),
    )

    def back(totals: tuple[list[Any], list[Any]]) -> tuple[Any, ...]:
        own = [
            t.reshape(run.count, *t.shape[2:]).astype(run.stacked[i].dtype)
            for t, i in zip(totals[0], stages.trained_stacked, strict=True)
        ]
        common = [
            t.sum(axis=0).astype(run.shared[i].dtype) for t, i in zip(totals[1], stages.trained_shared, strict=True)
        ]
        return tuple(pull((own, common)))

    return weights, back


# ---- one micro-batch outside the run ---------------------------------------------------------------------------


def _rows(pipeline: Pipeline, batch: Sequence[Any]) -> dict[int, Any]:
    """[B, ...] to [c, B/c, ...]: the rows of every micro-batch spread over the batch axes."""
    graph, mesh = pipeline.graph, pipeline.stages.mesh
    c = pipeline.stages.num_microbatches
    found = {}
    for operand in graph.operands:
        if operand.kind == "batch":
            leaf = batch[operand.leaf]
            whole = lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec()))
            found[operand.leaf] = whole.reshape(c, leaf.shape[0] // c, *leaf.shape[1:])
    return found


def _enter(pipeline: Pipeline, inputs: Inputs, index: Any, outer: dict[int, Any]) -> list[Any]:
    """Slots of a micro-batch as they enter the run."""
    operands = micro_operands(pipeline.graph, inputs.state, inputs.rows, index)
    values = pipeline.before.run(outer, operands, {})
    return [
        jnp.zeros(s.shape, s.dtype) if s.value is None else lax.convert_element_type(values[s.value], s.dtype)
        for s in pipeline.stages.run.slots
    ]


def _enter_backward(pipeline: Pipeline, inputs: Inputs, index: Any, grads: list[Any]) -> dict[int, Any]:
    """Gradients of the parameters before the run."""
    chosen = pipeline.before.params
    if not chosen:
        return {}
    slots = pipeline.stages.run.slots
    moving = [i for i in pipeline.stages.moving if slots[i].value is not None]
    wanted = [g for i, g in zip(pipeline.stages.moving, grads, strict=True) if slots[i].value is not None]

    def entered(params: list[Any]) -> list[Any]:
        found = _enter(pipeline, inputs, index, {**inputs.outer, **dict(zip(chosen, params, strict=True))})
        return [found[i] for i in moving]

    _, pull = jax.vjp(entered, [inputs.outer[p] for p in chosen])
    return dict(zip(chosen, pull(wanted)[0], strict=True))


def _leave(
    pipeline: Pipeline, inputs: Inputs, index: Any, slots: list[Any]
) -> tuple[list[Any], dict[int, Any], list[Any]]:
    """Results of a micro-batch, gradients of the parameters after the run and of the slots that left it."""
    graph, stages, chosen = pipeline.graph, pipeline.stages, pipeline.after.params
    operands = micro_operands(graph, inputs.state, inputs.rows, index)
    moving = stages.moving

    def loss(params: list[Any], moved: list[Any]) -> tuple[Any, list[Any]]:
        full = dict(enumerate(slots)) | dict(zip(moving, moved, strict=True))
        values = {v: full[s] if n is None else full[s][n] for v, (s, n) in stages.run.leaving.items()}
        outer = {**inputs.outer, **dict(zip(chosen, params, strict=True))}
        values = pipeline.after.run(outer, operands, values)
        results = [values[v] for v in graph.results]
        return results[0], results

    params, moved = [inputs.outer[p] for p in chosen], [slots[i] for i in moving]
    value, pull, results = jax.vjp(loss, params, moved, has_aux=True)
    weight = 1.0 / stages.num_microbatches if graph.reductions[0] == "mean" else 1.0
    grads, back = pull(jnp.full(value.shape, weight, value.dtype))
    return results, dict(zip(chosen, grads, strict=True)), back


def _start(pipeline: Pipeline) -> Sums:
    graph, mesh, c = pipeline.graph, pipeline.stages.mesh, pipeline.stages.num_microbatches
    params = {p: graph.params[p] for p in pipeline.outer_grads}
    zeros = [jnp.zeros(v.shape, accumulator_dtype(v.dtype)) for v in params.values()]
    outer = dict(zip(params, constrain_all(zeros, mesh, list(pipeline.outer_grads.values())), strict=True))
    results = [jnp.zeros((c, *graph.values[v].shape), graph.values[v].dtype) for v in graph.results]
    return Sums(run=pipeline.stages.zero_totals(), outer=outer, results=results)


def _added(pipeline: Pipeline, total: dict[int, Any], new: dict[int, Any], valid: Any) -> dict[int, Any]:
    found = dict(total)
    for p, g in new.items():
        found[p] = total[p] + jnp.where(valid, g, jnp.zeros_like(g)).astype(total[p].dtype)
    pinned = constrain_all(list(found.values()), pipeline.stages.mesh, [pipeline.outer_grads[p] for p in found])
    return dict(zip(found, pinned, strict=True))


def _recorded(total: list[Any], new: list[Any], index: Any, valid: Any) -> list[Any]:
    """Results with those of one micro-batch written in."""

    def one(stack: Any, x: Any) -> Any:
        old = lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(stack, jnp.where(valid, x, old).astype(stack.dtype), index, 0)

    return [one(t, x) for t, x in zip(total, new, strict=True)]


# ---- ticks -----------------------------------------------------------------------------------------------------


def _forward_tick(
    pipeline: Pipeline, inputs: Inputs, tick: Any, held: list[Any], sums: Sums
) -> tuple[list[Any], Sums, list[Any], list[Any]]:
    """Micro-batch `tick` enters, micro-batch tick - (P - 1) leaves: held, sums, gradients that leave, kept."""
    stages = pipeline.stages
    last = stages.num_microbatches - 1
    fed = _enter(pipeline, inputs, jnp.clip(tick, 0, last), inputs.outer)
    held, leaving, kept = stages.forward(inputs.weights, inputs.rows, fed, held, tick)
    number = tick - (stages.num_stages - 1)
    valid, index = (number >= 0) & (number <= last), jnp.clip(number, 0, last)
    results, grads, back = _leave(pipeline, inputs, index, leaving)
    sums = Sums(
        run=sums.run,
        outer=_added(pipeline, sums.outer, grads, valid),
        results=_recorded(sums.results, results, index, valid),
    )
    return held, sums, back, kept


def _backward_tick(
    pipeline: Pipeline,
    inputs: Inputs,
    kept: list[Any],
    fed: list[Any],
    held: list[Any],
    sums: Sums,
    tick: Any,
    index: Any,
) -> tuple[list[Any], Sums]:
    """Gradients enter the last stage and leave the first."""
    stages = pipeline.stages
    held, leaving, run = stages.backward(inputs.weights, inputs.rows, kept, fed, held, sums.run, tick, index)
    number = index(tick, 0)
    valid = (number >= 0) & (number < stages.num_microbatches)
    grads = _enter_backward(pipeline, inputs, jnp.clip(number, 0, stages.num_microbatches - 1), leaving)
    return held, Sums(run=run, outer=_added(pipeline, sums.outer, grads, valid), results=sums.results)


def _gpipe(pipeline: Pipeline, inputs: Inputs) -> Sums:
    stages = pipeline.stages
    ticks = jnp.arange(stages.num_microbatches + stages.num_stages - 1, dtype=jnp.int32)

    def forward(carry: tuple[list[Any], Sums], tick: Any) -> Any:
        held, sums, back, kept = _forward_tick(pipeline, inputs, tick, *carry)
        return (held, sums), (back, kept)

    def backward(carry: tuple[list[Any], Sums], past: tuple[Any, Any, Any]) -> Any:
        tick, kept, fed = past
        return _backward_tick(pipeline, inputs, kept, fed, *carry, tick, lambda t, stage: t - stage), None

    start = (stages.zero_held(range(len(stages.run.slots))), _start(pipeline))
    (_, sums), (back, kept) = lax.scan(forward, start, ticks)
    # tick t of the way back undoes tick t of the way there: micro-batch t - s on stage s; what left the last stage in
    # that tick comes back to it
    (_, sums), _ = lax.scan(backward, (stages.zero_held(stages.moving), sums), (ticks, kept, back), reverse=True)
    return sums


def _one_f_one_b(pipeline: Pipeline, inputs: Inputs) -> Sums:
    stages = pipeline.stages
    p, c = stages.num_stages, stages.num_microbatches
    depth = min(2 * p - 1, c + 1)
    trash = depth - 1 if depth == c + 1 else None

    def slot_of(index: Any) -> Any:
        """Where a micro-batch waits: no other that is alive shares the place; bubbles write where nothing is read."""
        if trash is None:
            return index % depth
        return jnp.where((index >= 0) & (index < c), index, trash)

    def returning(tick: Any, stage: Any) -> Any:
        return tick - 2 * (p - 1) + stage

    def body(carry: Any, tick: Any) -> Any:
        held, handed, waiting, sums = carry
        held, sums, fed, kept = _forward_tick(pipeline, inputs, tick, held, sums)
        at = jnp.arange(p, dtype=jnp.int32)
        waiting = stages.store(waiting, kept, slot_of(tick - at))
        kept = stages.fetch(waiting, slot_of(returning(tick, at)))
        handed, sums = _backward_tick(pipeline, inputs, kept, fed, handed, sums, tick, returning)
        return (held, handed, waiting, sums), None

    start = (
        stages.zero_held(range(len(stages.run.slots))),
        stages.zero_held(stages.moving),
        stages.zero_waiting(depth),
        _start(pipeline),
    )
    (_, _, _, sums), _ = lax.scan(body, start, jnp.arange(c + 2 * (p - 1), dtype=jnp.int32))
    return sums
