"""A captured step as plain JAX computes it on one device: what every plan is compared against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from uniap_jax.core.graph import LayerGraph, Step, Value


def reference_results(
    graph: LayerGraph, *, index: int = 0, whole: Sequence[Any] | None = None
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """`(*state leaves, *batch leaves) -> (results, gradients)` of the batch, as plain JAX computes them on one device.

    Args:
        graph: the captured step; of `graph.microbatch(c)` the batch leaves are one micro-batch's.
        index: number of that micro-batch.
        whole: leaves of the whole batch; those the function is called with where None.
    """
    step, count = graph.step, len(graph.step.state)

    def loss(params: Sequence[Any], operands: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, list[Any]]:
        values: dict[int, Any] = {}
        for layer in graph.layers:
            inputs = [params[i] for i in layer.params]
            for i in layer.operands:
                operand = graph.operands[i]
                source = {"state": operands, "batch": batch, "index": [np.int32(index)]}[operand.kind]
                inputs.append(source[operand.leaf])
            inputs += [values[i] for i in layer.reads]
            values.update(zip(layer.writes, jax.core.eval_jaxpr(layer.jaxpr.jaxpr, (), *inputs), strict=True))
        results = [values[i] for i in graph.results]
        return results[0], results

    def both(*leaves: Any) -> tuple[list[Any], list[Any]]:
        batch = leaves[count:] if whole is None else whole
        outs = jax.core.eval_jaxpr(step.before.jaxpr, step.before.consts, *leaves[:count], *batch)
        params, operands = outs[: len(graph.params)], outs[len(graph.params) :]
        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(params, operands, leaves[count:])
        return results, grads

    return both


def reference_gradients(
    graph: LayerGraph, *, index: int = 0, whole: Sequence[Any] | None = None
) -> Callable[..., tuple[Any, list[Any]]]:
    """`(*state leaves, *batch leaves) -> (loss, gradients)`; arguments as of `reference_results`."""
    both = reference_results(graph, index=index, whole=whole)

    def gradients(*leaves: Any) -> tuple[Any, list[Any]]:
        results, grads = both(*leaves)
        return results[0], grads

    return gradients


def with_gradients(graph: LayerGraph) -> LayerGraph:
    """The same step on flat leaves, returning (*its outputs, loss, *gradients in the order of the parameters).

    Called as `step(state leaves, batch leaves)`.
    """
    step = _with_gradients(graph, graph.step)
    if (rows := graph.step.by_rows) is not None:
        more = tuple((len(rows.step.outputs) + i,) for i in range(1 + len(graph.params)))
        inner = _with_gradients(graph, rows.step)
        step = replace(step, by_rows=replace(rows, step=inner, outputs=(*rows.outputs, *more)))
    return replace(graph, step=step, microbatch=lambda count: replace(graph.microbatch(count), step=step))


def _with_gradients(graph: LayerGraph, step: Step) -> Step:
    count, results = len(graph.params), len(graph.results)
    extra = 1 + count

    def update(*args: Any) -> list[Any]:
        grads = args[len(args) - count :]
        loss = args[len(args) - count - results]
        return [*jax.core.eval_jaxpr(step.update.jaxpr, step.update.consts, *args), loss, *grads]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in step.update.in_avals]
    loss_value = graph.values[graph.results[0]]
    outputs = (Value(shape=(), dtype=loss_value.dtype, name="loss"), *graph.params)

    return replace(
        step,
        update=jax.make_jaxpr(update)(*shapes),
        outputs=(*step.outputs, *outputs),
        output_leaf=(*step.output_leaf, *([None] * extra)),
        flatten=lambda state, batch: (list(state), list(batch)),
        unflatten=lambda outputs, *_: list(outputs),
        state_result=list,
    )
