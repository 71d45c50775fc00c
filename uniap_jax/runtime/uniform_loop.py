"""Loss and gradients of the whole batch by one program: the ticks of GPipe and 1F1B.

All stages tick together, c + P - 1 times forward and as often back. GPipe: first the one, then, in opposite order, the
other. 1F1B: P - 1 ticks forward, c of both, P - 1 back; stage s pulls back micro-batch tick - 2(P - 1) + s, so that a
micro-batch waits at most 2(P - 1) ticks and memory does not grow with c.
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
from uniap_jax.runtime.uniform_pass import STAGE
from uniap_jax.runtime.uniform_stage import StageTicks, Weights


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
        weights: stacked [P, layers of a group, ...], group by group, and shared inputs of the run.
        outer: parameters of the other layers, by position in the graph.
        state: state operands.
        rows: leaves of the batch, [c, B/c, ...], by position.
    """

    weights: Weights
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

    run: Weights
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
    sizes = [g.size for g in run.groups]
    starts = [sum(sizes[:i]) for i in range(1, len(sizes))]
    folded = [x.reshape(count, run.count // count, *x.shape[1:]) for x in stacked]
    pieces = zip(*(jnp.split(x, starts, axis=1) if starts else [x] for x in folded), strict=True)
    own = [
        constrain_all(list(piece), mesh, [PartitionSpec(STAGE, None, *w.stored) for w in group.stacked])
        for piece, group in zip(pieces, run.groups, strict=True)
    ]
    weights = (own or [[]], constrain_all(shared, mesh, [w.stored for w in run.shared]))

    def back(totals: Weights) -> tuple[Any, ...]:
        joined = [jnp.concatenate(t, axis=1) if starts else t[0] for t in zip(*totals[0], strict=True)]
        own = [
            t.reshape(run.count, *t.shape[2:]).astype(run.stacked[i].dtype)
            for t, i in zip(joined, stages.trained_stacked, strict=True)
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
    """What of a micro-batch enters the run: of every slot that holds a value from the start."""
    operands = micro_operands(pipeline.graph, inputs.state, inputs.rows, index)
    values = pipeline.before.run(outer, operands, {})
    slots = pipeline.stages.run.slots
    return [lax.convert_element_type(values[s.value], s.dtype) for s in slots if s.value is not None]


def _filled(pipeline: Pipeline, entering: list[Any]) -> list[Any]:
    """All slots at the entry of the run; those that collect from its layers are zero."""
    values = iter(entering)
    return [jnp.zeros(s.shape, s.dtype) if s.value is None else next(values) for s in pipeline.stages.run.slots]


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
        full = _filled(pipeline, found)
        return [full[i] for i in moving]

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


def _added(pipeline: Pipeline, total: dict[int, Any], new: dict[int, Any]) -> dict[int, Any]:
    found = total | {p: total[p] + g.astype(total[p].dtype) for p, g in new.items()}
    pinned = constrain_all(list(found.values()), pipeline.stages.mesh, [pipeline.outer_grads[p] for p in found])
    return dict(zip(found, pinned, strict=True))


def _left(pipeline: Pipeline, inputs: Inputs, index: Any, leaving: list[Any], sums: Sums) -> tuple[Sums, list[Any]]:
    """Sums with a micro-batch that has left the run, and the gradients that it sends back."""
    results, grads, back = _leave(pipeline, inputs, index, leaving)
    recorded = [
        lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)
        for stack, x in zip(sums.results, results, strict=True)
    ]
    return Sums(run=sums.run, outer=_added(pipeline, sums.outer, grads), results=recorded), back


# ---- ticks -----------------------------------------------------------------------------------------------------


def _gpipe(pipeline: Pipeline, inputs: Inputs) -> Sums:
    """Layers outside the run see every micro-batch once, in loops of their own."""
    stages, weights, rows = pipeline.stages, inputs.weights, inputs.rows
    fill, last = stages.num_stages - 1, stages.num_microbatches - 1
    pieces, ticks = jnp.arange(last + 1, dtype=jnp.int32), jnp.arange(last + 1 + fill, dtype=jnp.int32)

    def enter(_: None, index: Any) -> tuple[None, list[Any]]:
        return None, _enter(pipeline, inputs, index, inputs.outer)

    def forward(held: list[Any], tick: Any) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        fed = _filled(pipeline, _pick(entering, jnp.minimum(tick, last)))
        held, leaving, kept = stages.forward(weights, rows, fed, held, tick)
        return held, (leaving, kept)

    def leave(sums: Sums, piece: tuple[Any, list[Any]]) -> tuple[Sums, list[Any]]:
        return _left(pipeline, inputs, *piece, sums)

    def backward(carry: tuple[list[Any], Any], past: tuple[Any, list[Any]]) -> tuple[tuple[list[Any], Any], list[Any]]:
        (held, totals), (tick, kept) = carry, past
        # tick t of the way back undoes tick t of the way there: micro-batch t - s on stage s
        fed = _pick(back, jnp.maximum(tick - fill, 0))
        held, returned, totals = stages.backward(
            weights, rows, kept, fed, held, totals, tick, lambda tick, stage: tick - stage
        )
        return (held, totals), returned

    def enter_backward(outer: dict[int, Any], piece: tuple[Any, list[Any]]) -> tuple[dict[int, Any], None]:
        return _added(pipeline, outer, _enter_backward(pipeline, inputs, *piece)), None

    _, entering = lax.scan(enter, None, pieces)
    _, (leaving, kept) = lax.scan(forward, stages.zero_held(range(len(stages.run.slots))), ticks)
    sums, back = lax.scan(leave, _start(pipeline), (pieces, [x[fill:] for x in leaving]))
    start = (stages.zero_held(stages.moving), sums.run)
    (_, totals), returned = lax.scan(backward, start, (ticks, kept), reverse=True)
    outer, _ = lax.scan(enter_backward, sums.outer, (pieces, [x[: last + 1] for x in returned]))
    return Sums(run=totals, outer=outer, results=sums.results)


def _pick(stacks: Sequence[Any], index: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in stacks]


def _one_f_one_b(pipeline: Pipeline, inputs: Inputs) -> Sums:
    """No tick computes what every stage would throw away: three loops, over ticks that run forward, both ways, back."""
    stages, weights, rows = pipeline.stages, inputs.weights, inputs.rows
    p, c = stages.num_stages, stages.num_microbatches
    at, slots = jnp.arange(p, dtype=jnp.int32), stages.run.slots
    depth = min(2 * p - 1, c + 1)
    trash = depth - 1 if depth == c + 1 else None

    def place_of(index: Any) -> Any:
        """Where a micro-batch waits: no other that is alive shares the place; bubbles write where nothing is read."""
        if trash is None:
            return index % depth
        return jnp.where((index >= 0) & (index < c), index, trash)

    def returning(tick: Any, stage: Any) -> Any:
        return tick - 2 * (p - 1) + stage

    def forward(held: list[Any], waiting: list[Any], tick: Any) -> tuple[list[Any], list[Any], list[Any]]:
        fed = _filled(pipeline, _enter(pipeline, inputs, jnp.minimum(tick, c - 1), inputs.outer))
        held, leaving, kept = stages.forward(weights, rows, fed, held, tick)
        return held, stages.store(waiting, kept, place_of(tick - at)), leaving

    def backward(
        waiting: list[Any], fed: list[Any], handed: list[Any], sums: Sums, tick: Any
    ) -> tuple[list[Any], Sums]:
        kept = stages.fetch(waiting, place_of(returning(tick, at)))
        handed, returned, run = stages.backward(weights, rows, kept, fed, handed, sums.run, tick, returning)
        number = returning(tick, 0)
        grads = _enter_backward(pipeline, inputs, jnp.maximum(number, 0), returned)
        grads = {i: jnp.where(number >= 0, g, jnp.zeros_like(g)) for i, g in grads.items()}
        return handed, Sums(run=run, outer=_added(pipeline, sums.outer, grads), results=sums.results)

    def first(carry: tuple[list[Any], list[Any]], tick: Any) -> tuple[tuple[list[Any], list[Any]], None]:
        held, waiting, _ = forward(*carry, tick)
        return (held, waiting), None

    def middle(carry: Any, tick: Any) -> tuple[Any, None]:
        held, waiting, handed, sums = carry
        held, waiting, leaving = forward(held, waiting, tick)
        sums, fed = _left(pipeline, inputs, tick - (p - 1), leaving, sums)
        handed, sums = backward(waiting, fed, handed, sums, tick)
        return (held, waiting, handed, sums), None

    def final(carry: tuple[list[Any], Sums], tick: Any) -> tuple[tuple[list[Any], Sums], None]:
        nothing = [jnp.zeros(slots[i].shape, slots[i].dtype) for i in stages.moving]
        return backward(waiting, nothing, *carry, tick), None

    start = (stages.zero_held(range(len(slots))), stages.zero_waiting(depth))
    (held, waiting), _ = lax.scan(first, start, jnp.arange(p - 1, dtype=jnp.int32))
    both = (held, waiting, stages.zero_held(stages.moving), _start(pipeline))
    (_, waiting, handed, sums), _ = lax.scan(middle, both, jnp.arange(p - 1, c + p - 1, dtype=jnp.int32))
    (_, sums), _ = lax.scan(final, (handed, sums), jnp.arange(c + p - 1, c + 2 * (p - 1), dtype=jnp.int32))
    return sums
