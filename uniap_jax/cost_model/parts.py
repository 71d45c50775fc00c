"""What the predicted peak of each stage is made of, for people; the search needs the sum only."""

from __future__ import annotations

from dataclasses import replace

from uniap_jax.core.costs import Candidate
from uniap_jax.core.plan import MemoryParts, Plan
from uniap_jax.core.sharding import axis_sizes, layer_sharding, shard_bytes
from uniap_jax.cost_model.assemble import TableModel
from uniap_jax.cost_model.pipeline import flights
from uniap_jax.cost_model.state import state_bytes


def with_memory_parts(model: TableModel, plan: Plan) -> Plan:
    """The plan with its predicted peaks taken apart; unchanged where one program holds all stages."""
    if len(plan.prediction.peak_bytes) != plan.num_stages or (plan.executor == "program" and plan.num_stages > 1):
        return plan
    parts = tuple(_parts(model, plan, stage) for stage in range(plan.num_stages))
    return replace(plan, prediction=replace(plan.prediction, memory=parts))


def _parts(model: TableModel, plan: Plan, stage: int) -> MemoryParts:
    """Parts of one stage, in the order in which they are certain; they add up to the peak.

    State and gradients follow from shapes and layouts. The tables count gradients and kept values together where they
    take each other's place, so each part here is at most what those before it leave of the peak.
    """
    graph, state = model.graph, state_bytes(model.graph)
    parameters = optimizer = gradients = activations = 0.0
    seen: set[int] = set()
    candidate = Candidate(num_stages=plan.num_stages, num_microbatches=plan.num_microbatches, schedule=plan.schedule)
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
        cost = model.layer_cost(index, strategy, num_microbatches=plan.num_microbatches)
        activations += cost.kept_bytes * flights(candidate, stage)
    left, found = plan.prediction.peak_bytes[stage], []
    for size in (parameters, optimizer, gradients, activations):
        found.append(min(size, left))
        left -= found[-1]
    return MemoryParts(
        parameters=found[0], optimizer=found[1], gradients=found[2], activations=found[3], transients=left
    )
