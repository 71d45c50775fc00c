"""One program for all stages: pipelines whose stages hold the same number of equal layers.

The whole step is one jit over a mesh (stage, x0, x1, ...). Inside, `jax.shard_map` is manual over `stage` alone: every
stage runs the same code on its share of the stacked layers and hands activations to its neighbour by `ppermute`. One
compilation, whose time does not depend on the number of layers, and any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.equal_stages import loop_layer
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jax_compat import ClosedJaxpr
from uniap_jax.core.jaxprs import open_jaxpr
from uniap_jax.core.plan import Plan
from uniap_jax.core.rewrite_layout import tensor_laid_out
from uniap_jax.core.sharding import axis_sizes, layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.flow import leaf_params, update_flow
from uniap_jax.runtime.programs import Program, build, shape_of
from uniap_jax.runtime.state import check_created, loose
from uniap_jax.runtime.uniform_layer import differentiate
from uniap_jax.runtime.uniform_loop import Pipeline, loss_and_grads
from uniap_jax.runtime.uniform_outer import OuterLayers, with_stage_dim
from uniap_jax.runtime.uniform_pass import STAGE
from uniap_jax.runtime.uniform_run import Run, stacked_run, uniform_range
from uniap_jax.runtime.uniform_scan import split_scan
from uniap_jax.runtime.uniform_stage import StageTicks

__all__ = ["UniformProgram", "compile_uniform", "stage_mesh"]


class UniformProgram:
    """A planned step as one program; compiled at its first use.

    Args:
        graph: of the whole batch.
        pipeline: loss and gradients.
        state_shardings: of every state leaf.
        batch_shardings: of every batch leaf.
        grad_shardings: of every parameter's gradient, as the update reads it.
        donated: state leaves whose buffers are given up.
    """

    def __init__(
        self,
        graph: LayerGraph,
        pipeline: Pipeline,
        *,
        state_shardings: Sequence[NamedSharding],
        batch_shardings: Sequence[NamedSharding],
        grad_shardings: Sequence[NamedSharding],
        donated: Sequence[int] = (),
    ) -> None:
        self.graph = graph
        self.pipeline = pipeline
        self.state_shardings = tuple(state_shardings)
        self.batch_shardings = tuple(batch_shardings)
        self._grad_shardings = tuple(grad_shardings)
        self._donated = tuple(donated)
        self._kept = tuple(i for i in range(len(graph.step.state)) if i not in set(donated))
        self._program: Program | None = None

    @property
    def mesh(self) -> Mesh:
        """(stage, x0, x1, ...), axes Auto."""
        return self.pipeline.stages.mesh

    @property
    def programs(self) -> tuple[Program, ...]:
        """The one program, compiled at its first use."""
        if self._program is None:
            self._program = self._build()
        return (self._program,)

    @property
    def is_built(self) -> bool:
        """Whether the program has been compiled."""
        return self._program is not None

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed leaves."""
        (program,) = self.programs
        return program([state[i] for i in self._donated], [state[i] for i in self._kept], list(batch))  # type: ignore[no-any-return]

    def create(self, create_state: Callable[..., Any], args: Sequence[Any] = ()) -> list[jax.Array]:
        """State leaves made where they live: no device, and no process, ever holds more than its share.

        Args:
            create_state: returns the step's non-batch argument.
            args: its arguments.

        Raises:
            PlanMismatchError: it returns other leaves than the plan was made for.
        """
        check_created(self.graph.step.state, create_state, args)

        def leaves(*args: Any) -> list[Any]:
            return jax.tree.leaves(create_state(*args))

        with jax.set_mesh(self.mesh):
            return list(jax.jit(leaves, out_shardings=list(self.state_shardings))(*loose(args)))

    def lower(self) -> Any:
        """The program before compilation, a `jax.stages.Lowered`; nothing is compiled or run."""
        function, inputs, outputs = self._whole()
        with jax.set_mesh(self.mesh):
            return jax.jit(function, out_shardings=outputs, donate_argnums=(0,)).lower(*inputs)

    def _build(self) -> Program:
        function, inputs, outputs = self._whole()
        return build("train_step", function, inputs, mesh=self.mesh, outputs=outputs, donate=(0,))

    def _whole(self) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
        """The step as a function of (donated leaves, kept leaves, batch leaves), their shapes, shardings of outputs."""
        step, shardings = self.graph.step, self.state_shardings
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        outputs = [shardings[leaf] if leaf is not None else everywhere for leaf in step.output_leaf]

        def whole(donated: list[Any], kept: list[Any], batch: list[Any]) -> list[Any]:
            leaves = dict(zip((*self._donated, *self._kept), (*donated, *kept), strict=True))
            return self._train_step([leaves[i] for i in range(len(leaves))], batch)

        inputs = [
            [shape_of(step.state[i], shardings[i]) for i in self._donated],
            [shape_of(step.state[i], shardings[i]) for i in self._kept],
            [shape_of(v, s) for v, s in zip(step.batch, self.batch_shardings, strict=True)],
        ]
        return whole, inputs, outputs

    def _train_step(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        step, count = self.graph.step, len(self.graph.params)
        ready = _evaluate(step.before, *state, *batch)
        results, grads = loss_and_grads(self.pipeline, ready[:count], ready[count:], batch)
        grads = [
            g if g.dtype == jax.dtypes.float0 else jax.lax.with_sharding_constraint(g, s)
            for g, s in zip(grads, self._grad_shardings, strict=True)
        ]
        return _evaluate(step.update, *state, *batch, *results, *grads)


def _evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    return list(jax.core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr.consts, *args))


def stage_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """The mesh (stage, x0, x1, ...) of a plan whose stages have equally many devices.

    Raises:
        StrategyError: they have not.
    """
    sizes = [len(d) for d in plan.stage_devices]
    if len(set(sizes)) > 1:
        raise StrategyError(
            f"stages have {sizes} devices; one program needs the same number on every stage, use executor='stages'",
            devices=tuple(sizes),
        )
    shape = [p for _, p in axis_sizes(sizes[0])] or [1]
    grid = np.asarray([[devices[d] for d in stage] for stage in plan.stage_devices], dtype=object)
    return Mesh(grid.reshape(len(sizes), *shape), (STAGE, *(f"x{i}" for i in range(len(shape)))))


def compile_uniform(
    graph: LayerGraph, plan: Plan, devices: Sequence[Any], *, donated: Sequence[int] = ()
) -> UniformProgram:
    """A plan of several stages as one program.

    Args:
        graph: of the whole batch, the one the plan was made for.
        plan: with at least two stages that hold the same number of equal layers.
        devices: in the plan's numbering; of this process, of several, or of a described topology.
        donated: state leaves whose buffers are given up.

    Raises:
        StrategyError: the plan's stages are not equal, or its layers cannot share one body; says which and why.
        TraceError: the batch must not be split into the plan's micro-batches.
    """
    if plan.num_stages < 2:
        raise StrategyError(
            "a plan of one stage is one program already; use executor='stages'", num_stages=plan.num_stages
        )
    for choice in plan.layers:
        if choice.strategy.sequence_ways * choice.strategy.expert * choice.strategy.context > 1:
            raise StrategyError(
                f"layer {choice.name} has strategy {choice.strategy}; one program for all stages splits batch and "
                "tensor dimensions only: use data, fsdp and tensor, or executor='stages'",
                strategy=str(choice.strategy),
            )
    mesh = stage_mesh(plan, devices)
    micro = graph if plan.num_microbatches == graph.num_microbatches else graph.microbatch(plan.num_microbatches)
    parts = _parts(micro, plan)
    pipeline = _pipeline(parts, plan, mesh)
    return _program(graph, pipeline, tuple(donated))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """Layers before, in and after the run: [0, first), [first, last), [last, ...); their strategies."""

    graph: LayerGraph
    first: int
    last: int
    strategies: tuple[Strategy, ...]
    run: Run


def _parts(graph: LayerGraph, plan: Plan) -> _Parts:
    """Equal layers where the plan has them, else a loop over layers.

    Raises:
        StrategyError: neither is there.
    """
    strategies = tuple(choice.strategy for choice in plan.layers)
    looped = loop_layer(graph, plan.num_stages)
    try:
        first, last = uniform_range(graph, plan)
    except StrategyError:
        if looped is None:
            raise
        cut = split_scan(graph, looped, strategies[looped], plan.num_stages)
        chosen = tuple(strategies[i] for i in cut.origin)
        return _Parts(graph=cut.graph, first=cut.first, last=cut.last, strategies=chosen, run=cut.run)
    share = (last - first) // plan.num_stages
    run = stacked_run(graph, graph.layers[first:last], strategies[first : first + share])
    return _Parts(graph=graph, first=first, last=last, strategies=strategies, run=run)


def _pipeline(parts: _Parts, plan: Plan, mesh: Mesh) -> Pipeline:
    graph, run = parts.graph, parts.run
    weights = {"stacked": run.stacked, "shared": run.shared}
    trained = [weights[kind][i].trained if kind in weights else kind == "slot" for kind, i in run.sources]
    again = [kind != "slot" or run.slots[i].kind == "relay" for kind, i in run.sources]
    layers = [differentiate(run.body, keep=g.strategy.keep, trained=trained, shared=again) for g in run.groups]
    stages = StageTicks(mesh=mesh, run=run, layers=tuple(layers), num_microbatches=plan.num_microbatches)
    ranges = (range(parts.first), range(parts.last, len(graph.layers)))
    before, after = (_outer(graph, mesh, indices, parts.strategies) for indices in ranges)
    specs: dict[int, PartitionSpec] = {}
    grads: dict[int, PartitionSpec] = {}
    for outer in (before, after):
        for layer_, sharding in zip(outer.layers, outer.shardings, strict=True):
            for p, compute, grad in zip(layer_.params, sharding.params, sharding.grads, strict=True):
                specs.setdefault(p, compute)
                grads.setdefault(p, with_stage_dim(graph.params[p].shape, grad, dict(mesh.shape)))
    return Pipeline(
        graph=graph,
        schedule=plan.schedule,
        stages=stages,
        before=before,
        after=after,
        outer_specs=specs,
        outer_grads=grads,
    )


def _outer(graph: LayerGraph, mesh: Mesh, indices: range, choices: Sequence[Strategy]) -> OuterLayers:
    strategies = tuple(choices[i] for i in indices)
    layers = tuple(tensor_laid_out(graph, graph.layers[i], s, mesh) for i, s in zip(indices, strategies, strict=True))
    shardings = tuple(layer_sharding(graph, layer, s) for layer, s in zip(layers, strategies, strict=True))
    return OuterLayers(graph=graph, mesh=mesh, layers=layers, shardings=shardings, strategies=strategies)


# ---- where the state lives -------------------------------------------------------------------------------------


def _program(graph: LayerGraph, pipeline: Pipeline, donated: tuple[int, ...]) -> UniformProgram:
    mesh = pipeline.stages.mesh
    homes = _param_homes(pipeline)
    step = graph.step
    own = {leaf: p for p, leaf in enumerate(step.param_leaf) if leaf is not None}
    belongs = leaf_params(graph, update_flow(graph))
    state = []
    for leaf, p in enumerate(belongs):
        spec = PartitionSpec()
        if p is not None and leaf in own:
            spec = homes[p][0]
        elif p is not None and graph.params[p].shape == step.state[leaf].shape:
            spec = homes[p][1]
        state.append(NamedSharding(mesh, spec))
    return UniformProgram(
        graph,
        pipeline,
        state_shardings=state,
        batch_shardings=_batch_shardings(graph, mesh),
        grad_shardings=[NamedSharding(mesh, homes[p][1]) for p in range(len(graph.params))],
        donated=donated,
    )


def _param_homes(pipeline: Pipeline) -> dict[int, tuple[PartitionSpec, PartitionSpec]]:
    """For each parameter, its layout between steps and that of optimizer state of its shape; split over stages too."""
    graph, mesh, run = pipeline.graph, pipeline.stages.mesh, pipeline.stages.run
    found: dict[int, tuple[PartitionSpec, PartitionSpec]] = {}
    for outer in (pipeline.before, pipeline.after):
        for layer, sharding in zip(outer.layers, outer.shardings, strict=True):
            for p, stored, optimizer in zip(layer.params, sharding.stored, sharding.optimizer, strict=True):
                found.setdefault(p, (stored, optimizer))
    stacked = {p: home for p, home in run.homes.items() if p not in found or home[2]}
    sizes = dict(mesh.shape)

    def split(p: int, spec: PartitionSpec) -> PartitionSpec:
        return with_stage_dim(graph.params[p].shape, spec, sizes)

    homes = {}
    for p in range(len(graph.params)):
        stored, optimizer, whole = stacked.get(p, (*found.get(p, (PartitionSpec(), PartitionSpec())), False))
        homes[p] = (stored, optimizer) if whole else (split(p, stored), split(p, optimizer))
    return homes


def _batch_shardings(graph: LayerGraph, mesh: Mesh) -> list[NamedSharding]:
    """Rows over all devices where they divide, stage by stage: a process feeds rows that follow each other."""
    axes = tuple(mesh.axis_names)
    specs = [PartitionSpec(axes) if v.shape[0] % mesh.size == 0 else PartitionSpec() for v in graph.step.batch]
    return [NamedSharding(mesh, s) for s in specs]
