"""Where every array of the state lives between steps, under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jax_compat import Literal, Var
from uniap_jax.core.jaxprs import live_eqns, variables
from uniap_jax.core.plan import Plan
from uniap_jax.core.sharding import LayerSharding, layer_sharding, make_mesh
from uniap_jax.runtime.flow import Flow, before_flow, leaf_params, update_flow

REPLICATED = PartitionSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamHome:
    """Where one parameter lives: the first stage that reads it.

    Attributes:
        stage: of the first layer that reads it; 0 where none does.
        computed: layout as that layer computes with it.
        stored: layout between steps.
        grads: layout of its gradient.
        optimizer: layout of optimizer state of its shape.
        stages: every stage that reads it, the home first.
    """

    stage: int
    computed: PartitionSpec = REPLICATED
    stored: PartitionSpec = REPLICATED
    grads: PartitionSpec = REPLICATED
    optimizer: PartitionSpec = REPLICATED
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafHome:
    """Where one leaf of the state lives.

    Attributes:
        stage: its stage, or None where every device of the plan holds a copy.
        spec: layout on the stage's sub-mesh.
    """

    stage: int | None
    spec: PartitionSpec = REPLICATED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A graph under a plan, laid out on devices.

    Attributes:
        graph: as one micro-batch sees it.
        plan: the decisions.
        meshes: per stage.
        world: all devices of the plan, in stage order, along one axis; what belongs to no stage is replicated here.
        layers: layout of every layer's arrays.
        params: home of every parameter.
        leaves: home of every state leaf.
        before: the part of the step before the loss.
        update: the part after it.
    """

    graph: LayerGraph
    plan: Plan
    meshes: tuple[Mesh, ...]
    world: Mesh
    layers: tuple[LayerSharding, ...]
    params: tuple[ParamHome, ...]
    leaves: tuple[LeafHome, ...]
    before: Flow
    update: Flow

    def on(self, stage: int | None, spec: PartitionSpec = REPLICATED) -> NamedSharding:
        """A layout on a stage's sub-mesh, or on all devices."""
        return NamedSharding(self.world if stage is None else self.meshes[stage], spec)

    @property
    def state_shardings(self) -> tuple[NamedSharding, ...]:
        """Of every state leaf."""
        return tuple(self.on(home.stage, home.spec) for home in self.leaves)

    @property
    def rows_read(self) -> dict[int, set[int]]:
        """For each leaf of the batch that `before` reads whole, the stages it does that for."""
        found = _read_by(self.graph, self.plan, self.params, self.before)
        return {leaf: stages for (kind, leaf), stages in found.items() if kind == "batch"}

    def stage_of(self, layer: int) -> int:
        """Stage of a layer."""
        return self.plan.layers[layer].stage


def lay_out(
    graph: LayerGraph, plan: Plan, devices: Sequence[Any], *, stacked: Sequence[tuple[int, ...]] = ()
) -> Layout:
    """Lays a checked plan on devices.

    Args:
        graph: of the whole batch.
        plan: made for it.
        devices: in the plan's numbering.
        stacked: leaves that are rows of one array.
    """
    micro = graph if plan.num_microbatches == graph.num_microbatches else graph.microbatch(plan.num_microbatches)
    meshes = tuple(make_mesh([devices[d] for d in stage]) for stage in plan.stage_devices)
    world = meshes[0] if plan.num_stages == 1 else Mesh([devices[d] for s in plan.device_sets for d in s], ("all",))
    layers = tuple(
        layer_sharding(micro, layer, choice.strategy) for layer, choice in zip(micro.layers, plan.layers, strict=True)
    )
    params = _param_homes(micro, plan, layers)
    before, update = before_flow(graph), update_flow(graph)
    return Layout(
        graph=micro,
        plan=plan,
        meshes=meshes,
        world=world,
        layers=layers,
        params=params,
        leaves=_leaf_homes(micro, plan, params, before, update, stacked),
        before=before,
        update=update,
    )


def _param_homes(graph: LayerGraph, plan: Plan, layers: Sequence[LayerSharding]) -> tuple[ParamHome, ...]:
    homes: dict[int, ParamHome] = {}
    readers: dict[int, list[int]] = {}
    for layer, choice, sharding in zip(graph.layers, plan.layers, layers, strict=True):
        for position, p in enumerate(layer.params):
            readers.setdefault(p, []).append(choice.stage)
            if p not in homes or choice.stage < homes[p].stage:
                homes[p] = ParamHome(
                    stage=choice.stage,
                    computed=sharding.params[position],
                    stored=sharding.stored[position],
                    grads=sharding.grads[position],
                    optimizer=sharding.optimizer[position],
                )
    return tuple(
        ParamHome(
            stage=h.stage,
            computed=h.computed,
            stored=h.stored,
            grads=h.grads,
            optimizer=h.optimizer,
            stages=tuple(sorted(set(readers.get(p, [])))),
        )
        for p, h in ((p, homes.get(p, ParamHome(stage=0))) for p in range(len(graph.params)))
    )


def _leaf_homes(
    graph: LayerGraph,
    plan: Plan,
    params: Sequence[ParamHome],
    before: Flow,
    update: Flow,
    stacked: Sequence[tuple[int, ...]],
) -> tuple[LeafHome, ...]:
    """Parameters at home, what belongs to them with them, what one stage reads there, the rest everywhere."""
    step = graph.step
    own = {leaf: p for p, leaf in enumerate(step.param_leaf) if leaf is not None}
    belongs = leaf_params(graph, update)
    homes: list[LeafHome | None] = [None] * len(step.state)
    for leaf, p in enumerate(belongs):
        if p is None:
            continue
        home, same = params[p], graph.params[p].shape == step.state[leaf].shape
        spec = home.stored if leaf in own else home.optimizer if same else REPLICATED
        homes[leaf] = LeafHome(stage=home.stage, spec=spec)
    if plan.num_stages == 1:
        return tuple(h or LeafHome(stage=0) for h in homes)
    votes = {leaf: stages for (kind, leaf), stages in _read_by(graph, plan, params, before).items() if kind == "state"}
    for leaf, stages in _met_by(update, graph, plan, params, homes).items():
        votes.setdefault(leaf, set()).update(stages)
    alone = {leaf: next(iter(stages)) for leaf, stages in votes.items() if len(stages) == 1}
    for rows in stacked:
        if not in_equal_parts([alone.get(leaf) for leaf in rows]):
            alone = {leaf: stage for leaf, stage in alone.items() if leaf not in rows}
    return tuple(h or LeafHome(stage=alone.get(leaf)) for leaf, h in enumerate(homes))


def in_equal_parts(stages: Sequence[int | None]) -> bool:
    """Whether neighbours share a place, and every place has equally many: then their rows make one array."""
    places = list(dict.fromkeys(stages))
    return list(stages) == [place for place in places for _ in range(len(stages) // len(places))] and (
        len(places) == 1 or None not in places
    )


def operand_stages(graph: LayerGraph, plan: Plan) -> dict[int, set[int]]:
    """For each operand, the stages whose layers read it."""
    found: dict[int, set[int]] = {}
    for layer, choice in zip(graph.layers, plan.layers, strict=True):
        for i in layer.operands:
            found.setdefault(i, set()).add(choice.stage)
    return found


def _read_by(
    graph: LayerGraph, plan: Plan, params: Sequence[ParamHome], before: Flow
) -> dict[tuple[str, int], set[int]]:
    """For each leaf of state and batch that `before` reads, the stages it does that for."""
    count = len(graph.params)
    wanted: list[tuple[Any, set[int]]] = [(before.outvars[p], {home.stage}) for p, home in enumerate(params)]
    stages = operand_stages(graph, plan)
    for i, operand in enumerate(graph.operands):
        if operand.kind == "state" and i in stages:
            wanted.append((before.outvars[count + operand.leaf], stages[i]))
    found: dict[tuple[str, int], set[int]] = {}
    for atom, readers in wanted:
        for var in live_eqns(before.eqns, [atom])[1]:
            if var in before.sources:
                found.setdefault(before.sources[var], set()).update(readers)
    return found


def result_stages(graph: LayerGraph, plan: Plan) -> tuple[int, ...]:
    """Stage that computes each result."""
    producer = graph.producer
    return tuple(plan.layers[producer[v]].stage for v in graph.results)


def _met_by(
    flow: Flow, graph: LayerGraph, plan: Plan, params: Sequence[ParamHome], homes: Sequence[LeafHome | None]
) -> dict[int, set[int]]:
    """Leaves without a home, and the stages whose arrays they meet on the way through the update."""
    results = result_stages(graph, plan)
    stage: dict[Var, int | None] = {}
    loose: dict[Var, frozenset[int]] = {}
    for var, (kind, i) in flow.sources.items():
        if kind == "grad":
            stage[var] = params[i].stage
        elif kind == "result":
            stage[var] = results[i]
        elif kind == "state":
            known = homes[i]
            stage[var] = known.stage if known is not None else None
            loose[var] = frozenset({i}) if known is None else frozenset()
    votes: dict[int, set[int]] = {}
    for eqn in flow.eqns:
        inputs = variables(eqn.invars)
        met = {s for s in map(stage.get, inputs) if s is not None}
        free = frozenset[int]().union(*(loose.get(v, frozenset()) for v in inputs))
        for leaf in free if met else ():
            votes.setdefault(leaf, set()).update(met)
        for out in eqn.outvars:
            stage[out] = next(iter(met)) if len(met) == 1 else None
            loose[out] = frozenset() if met else free
    for atom, replaced in zip(flow.outvars, graph.step.output_leaf, strict=True):
        if replaced is not None and homes[replaced] is None and not isinstance(atom, Literal):
            computed = stage.get(atom)
            if computed is not None:
                votes.setdefault(replaced, set()).add(computed)
    return votes
