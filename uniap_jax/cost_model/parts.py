"""What the predicted peak of each stage is made of, for people; the search needs the sum only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Candidate
from uniap_jax.core.plan import MemoryParts, Plan
from uniap_jax.core.plan_text import format_bytes
from uniap_jax.core.sharding import axis_sizes, layer_sharding, shard_bytes
from uniap_jax.core.strategy import Strategy
from uniap_jax.cost_model.assemble import TableModel
from uniap_jax.cost_model.pipeline import FloatArray, flights, holds_as_one, working_share
from uniap_jax.cost_model.state import state_bytes


def with_memory_parts(model: TableModel, plan: Plan) -> Plan:
    """The plan with its predicted peaks as its layers add up, and taken apart.

    The tables spread working memory and what arrives at a stage over its layers, for sums are all that they can hold.
    Here a stage has the working memory of its largest layer, and what it really reads; the certificate says so where
    that is over the limit. Unchanged where one program holds all stages.
    """
    if len(plan.prediction.peak_bytes) != plan.num_stages or (plan.executor == "program" and plan.num_stages > 1):
        return plan
    peaks = tuple(_peak(model, plan, stage) for stage in range(plan.num_stages))
    plan = replace(plan, prediction=replace(plan.prediction, peak_bytes=peaks))
    parts = tuple(_parts(model, plan, stage) for stage in range(plan.num_stages))
    notes = (*plan.certificate.notes, *_over(plan))
    return replace(
        plan,
        prediction=replace(plan.prediction, memory=parts),
        certificate=replace(plan.certificate, notes=notes),
    )


def _over(plan: Plan) -> list[str]:
    """A sentence for each stage whose peak is over its limit."""
    limits = zip(plan.prediction.peak_bytes, plan.prediction.capacity_bytes, strict=True)
    return [
        f"stage {i} needs {format_bytes(peak)} of {format_bytes(limit)} with its largest layer's working memory, which "
        "the tables spread over its layers: check it with --verify, or lower the memory limit and plan again"
        for i, (peak, limit) in enumerate(limits)
        if peak > limit * (1 + MEMORY_TOLERANCE)
    ]


def _peak(model: TableModel, plan: Plan, stage: int) -> float:
    """Bytes of one device of a stage: the tables' sum, with working memory and reads as the stage has them."""
    layers = plan.stage_layers(stage)
    strategies = [plan.layers[u].strategy for u in layers]
    columns = {s: _working(model, s, Candidate.of(plan), stage) for s in set(strategies)}
    shares = {s: working_share(columns[s], model.graph, Candidate.of(plan))[:, 0] for s in set(strategies)}
    spread = sum(float(shares[s][u]) for u, s in zip(layers, strategies, strict=True))
    costs = [model.stage_cost(u, s, Candidate.of(plan), stage) for u, s in zip(layers, strategies, strict=True)]
    working = max(c.transient_bytes for c in costs) + costs[0].leading_bytes
    if len(costs) == 1 and costs[0].alone_bytes:
        working = costs[0].alone_bytes - costs[0].marginal_bytes
    return plan.prediction.peak_bytes[stage] - spread + working + _arriving(model, plan, stage)


def _working(model: TableModel, strategy: Strategy, candidate: Candidate, stage: int) -> FloatArray:
    """[layers, 1] working memory under a strategy, as the tables have it."""
    found = [
        0.0
        if model.reason(u, strategy, num_microbatches=candidate.num_microbatches)
        else model.stage_cost(u, strategy, candidate, stage).working_bytes
        for u in range(len(model.graph.layers))
    ]
    return np.array(found)[:, None]


def _arriving(model: TableModel, plan: Plan, stage: int) -> float:
    """Bytes in flight of what a stage reads from others, where its layers are priced as if one followed another.

    What a forward leaves where it does not keep all is what the layer reads, so that is in its price.
    """
    mine, graph, candidate = plan.stage_layers(stage), model.graph, Candidate.of(plan)
    written = {v for u in mine for v in graph.layers[u].writes}
    total, seen = 0.0, set[int]()
    for u in mine:
        layer, strategy = graph.layers[u], plan.layers[u].strategy
        cost = model.stage_cost(u, strategy, candidate, stage)
        if not cost.marginal_bytes or (strategy.keep != "all" and not holds_as_one(candidate, stage, strategy, cost)):
            continue
        specs, sizes = layer_sharding(graph, layer, strategy).reads, dict(axis_sizes(strategy.num_devices))
        for v, spec in zip(layer.reads, specs, strict=True):
            if v not in written and v not in seen:
                seen.add(v)
                cut = plan.num_microbatches if graph.values[v].batch_dim is not None else 1
                total += shard_bytes(graph.values[v], spec, sizes) / cut
    return total * flights(candidate, stage)


def _parts(model: TableModel, plan: Plan, stage: int) -> MemoryParts:
    """Parts of one stage, in the order in which they are certain; they add up to the peak.

    State and gradients follow from shapes and layouts. The tables count gradients and kept values together where they
    take each other's place, so each part here is at most what those before it leave of the peak.
    """
    graph, state = model.graph, state_bytes(model.graph)
    parameters = optimizer = gradients = activations = 0.0
    seen: set[int] = set()
    candidate = Candidate.of(plan)
    for index in plan.stage_layers(stage):
        layer, strategy = graph.layers[index], plan.layers[index].strategy
        sharding = layer_sharding(model.graph, layer, replace(strategy, keep="all"))
        sizes = dict(axis_sizes(strategy.num_devices))
        for position, p in enumerate(layer.params):
            if p in seen:
                continue
            seen.add(p)
            value = graph.params[p]
            stored, grads, moments = (
                shard_bytes(value, specs[position], sizes) / max(value.nbytes, 1)
                for specs in (sharding.stored, sharding.grads, sharding.optimizer)
            )
            parameters += (state.param[p] or state.work[p]) * stored
            optimizer += state.optimizer[p] * moments
            gradients += state.work[p] * grads
        cost = model.stage_cost(index, strategy, candidate, stage)
        activations += cost.kept_bytes * flights(candidate, stage)
    left, found = plan.prediction.peak_bytes[stage], []
    for size in (parameters, optimizer, gradients, activations):
        found.append(min(size, left))
        left -= found[-1]
    return MemoryParts(
        parameters=found[0], optimizer=found[1], gradients=found[2], activations=found[3], transients=left
    )
