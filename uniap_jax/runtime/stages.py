"""The stages of a plan: what each reads and writes, and in which layouts values travel between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import NamedSharding

from uniap_jax.runtime.activity import active_values, wanted_reads
from uniap_jax.runtime.homes import Layout, operand_stages
from uniap_jax.runtime.transfer import wire


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSpec:
    """What one stage reads and writes; positions refer to the graph.

    Attributes:
        stage: its number.
        layers: in trace order.
        params: it computes with.
        operands: it reads.
        reads: values from earlier stages.
        wanted: those of `reads` that a gradient flows back through.
        writes: values for later stages.
        active: those of `writes` that gradients come back for.
        results: positions in `graph.results` that it computes.
        has_loss: whether the loss is among them.
        arrives: layout in which each of `reads` arrives.
        leaves: layout in which each of `writes` leaves.
        readers: for each of `writes`, (stage, layout there) of those that read it.
        returns: for each of `active`, the stages that send a gradient back for it.
    """

    stage: int
    layers: tuple[int, ...]
    params: tuple[int, ...]
    operands: tuple[int, ...]
    reads: tuple[int, ...]
    wanted: tuple[int, ...]
    writes: tuple[int, ...]
    active: tuple[int, ...]
    results: tuple[int, ...]
    has_loss: bool
    arrives: tuple[NamedSharding, ...]
    leaves: tuple[NamedSharding, ...]
    readers: tuple[tuple[tuple[int, NamedSharding], ...], ...]
    returns: dict[int, tuple[int, ...]]


def stage_specs(layout: Layout) -> tuple[StageSpec, ...]:
    """The stages of a plan, with the layouts in which values travel between them."""
    graph, plan = layout.graph, layout.plan
    producer = graph.producer
    stage_of = [choice.stage for choice in plan.layers]
    layers = [plan.stage_layers(s) for s in range(plan.num_stages)]
    reads = [
        tuple(dict.fromkeys(v for i in layers[s] for v in graph.layers[i].reads if stage_of[producer[v]] != s))
        for s in range(plan.num_stages)
    ]
    writes = [
        tuple(
            v for i in layers[s] for v in graph.layers[i].writes if any(v in reads[t] for t in range(s + 1, len(reads)))
        )
        for s in range(plan.num_stages)
    ]
    active = active_values(graph)
    wanted: list[tuple[int, ...]] = [()] * plan.num_stages
    for s in reversed(range(plan.num_stages)):
        sought = {v for t in range(s + 1, plan.num_stages) for v in wanted[t]} | {graph.results[0]}
        found = wanted_reads(graph, layers[s], sought)
        wanted[s] = tuple(v for v in reads[s] if v in found and v in active)
    travel = {v: _travel(layout, v, [t for t in range(len(reads)) if v in reads[t]]) for w in writes for v in w}
    operands = operand_stages(graph, plan)
    loss_stage = stage_of[producer[graph.results[0]]]
    return tuple(
        StageSpec(
            stage=s,
            layers=layers[s],
            params=tuple(sorted({p for i in layers[s] for p in graph.layers[i].params})),
            operands=tuple(o for o in range(len(graph.operands)) if s in operands.get(o, ())),
            reads=reads[s],
            wanted=wanted[s],
            writes=writes[s],
            active=tuple(v for v in writes[s] if any(v in w for w in wanted)),
            results=tuple(k for k, v in enumerate(graph.results) if stage_of[producer[v]] == s),
            has_loss=s == loss_stage,
            arrives=tuple(travel[v][1][s] for v in reads[s]),
            leaves=tuple(travel[v][0] for v in writes[s]),
            readers=tuple(tuple(travel[v][1].items()) for v in writes[s]),
            returns={v: t for v in writes[s] if (t := tuple(i for i, w in enumerate(wanted) if v in w))},
        )
        for s in range(plan.num_stages)
    )


def _travel(layout: Layout, value: int, readers: Sequence[int]) -> tuple[NamedSharding, dict[int, NamedSharding]]:
    """Layouts in which a value leaves its stage and arrives on others, from what the layers at both ends want."""
    graph = layout.graph
    writer = graph.layers[graph.producer[value]]
    source = layout.on(layout.stage_of(writer.index), layout.layers[writer.index].writes[writer.writes.index(value)])
    targets = []
    for stage in readers:
        reader = next(graph.layers[i] for i in layout.plan.stage_layers(stage) if value in graph.layers[i].reads)
        targets.append(layout.on(stage, layout.layers[reader.index].reads[reader.reads.index(value)]))
    leave, arrive = wire(len(graph.values[value].shape), source, targets)
    return leave, dict(zip(readers, arrive, strict=True))
