"""From a plan to programs that run it. One door: `compile`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from uniap_jax.core.errors import ExecutionError, PlanMismatchError, StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.runtime.executable import Homes, ParallelStep
from uniap_jax.runtime.homes import Layout, lay_out
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.presence import owners
from uniap_jax.runtime.shelves import Shelf, shelves
from uniap_jax.runtime.shelves import create as create_stacked
from uniap_jax.runtime.single import SingleStage, batch_shardings
from uniap_jax.runtime.stacked import StackedPipeline
from uniap_jax.runtime.state import create
from uniap_jax.runtime.uniform import compile_uniform

__all__ = ["ParallelStep", "compile"]


def compile(
    graph: LayerGraph, plan: Plan, *, devices: Sequence[Any] | None = None, donate: bool = True
) -> ParallelStep:
    """Programs that run a plan; they are compiled at their first use.

    Args:
        graph: of the whole batch, the one the plan was made for.
        plan: from the planner, a file, or pinned.
        devices: in the plan's numbering; `jax.devices()` by default.
        donate: whether state leaves that the step replaces give up their buffers to it.

    Raises:
        PlanMismatchError: the plan is for another model, batch or number of devices.
        StrategyError: a strategy is illegal for its layer, or the stages of one program are not equal.
        ExecutionError: stages with a program each, and a process of this job has none of their devices.
        TraceError: the batch must not be split into the plan's micro-batches.
    """
    available = list(jax.devices() if devices is None else devices)
    _check(graph, plan, len(available))
    donated = sorted(leaf for leaf in graph.step.output_leaf if leaf is not None) if donate else []
    if plan.executor == "program" and plan.num_stages > 1:
        return _one_program(graph, plan, available, donated)
    used = [available[d] for stage in plan.stage_devices for d in stage]
    rows = graph.step.by_rows
    if plan.num_stages > 1:
        _check_processes(used, plan.num_stages, unfolded=rows is not None)
    stacked = () if rows is None else tuple(group for group in rows.leaves if len(group) > 1)
    layout = lay_out(graph.by_rows, plan, available, stacked=stacked)
    places = () if rows is None else shelves(graph, layout)
    homes = Homes(
        plan=plan,
        state_shardings=tuple(s.sharding for s in places) or layout.state_shardings,
        batch_shardings=batch_shardings(layout),
        create=partial(create_stacked, layout, places) if places else partial(create, layout),
        device=layout.meshes[0].devices.flat[0],
        places_batch=plan.num_stages == 1,
    )
    return ParallelStep(graph, homes, _run(graph, layout, places, donated), donated=donated)


def _run(graph: LayerGraph, layout: Layout, places: Sequence[Shelf], donated: Sequence[int]) -> SingleStage | Pipeline:
    if layout.plan.num_stages == 1:
        return SingleStage(layout, donated, graph.step, places)
    return StackedPipeline(graph, layout, places, donated) if places else Pipeline(layout, donated)


def _one_program(graph: LayerGraph, plan: Plan, devices: Sequence[Any], donated: Sequence[int]) -> ParallelStep:
    if graph.step.by_rows is not None:
        raise StrategyError(
            "one program for equal stages takes a loop over layers as it is, and here it was unfolded; trace with "
            "unfold_scans=False, or plan with executor='stages'",
            executor=plan.executor,
        )
    run = compile_uniform(graph, plan, devices, donated=donated)
    homes = Homes(
        plan=plan,
        state_shardings=run.state_shardings,
        batch_shardings=run.batch_shardings,
        create=run.create,
        device=run.mesh.devices.flat[0],
        places_batch=True,
    )
    return ParallelStep(graph, homes, run, donated=donated)


def _check_processes(used: Sequence[Any], num_stages: int, *, unfolded: bool) -> None:
    if unfolded and len(owners(used)) > 1:
        raise ExecutionError(
            f"the plan has {num_stages} stages over devices of {len(owners(used))} processes, and layers of an "
            "unfolded loop, whose stacked leaves are taken apart inside one process only; trace with "
            "unfold_scans=False, or plan with num_stages=1",
            num_stages=num_stages,
            processes=tuple(sorted(owners(used))),
        )
    without = sorted(set(range(jax.process_count())) - owners(used))
    if without:
        raise ExecutionError(
            f"the plan has {num_stages} stages with a program each, and no device of process "
            f"{', '.join(map(str, without))} (of {jax.process_count()}), which could not read its metrics; start only "
            "the processes that the plan uses, or plan for all of their devices",
            num_stages=num_stages,
            processes=tuple(without),
        )


def _check(graph: LayerGraph, plan: Plan, num_devices: int) -> None:
    if plan.graph_fingerprint and plan.graph_fingerprint != graph.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another model or another cut of it (fingerprint {plan.graph_fingerprint[:12]}, "
            f"this graph has {graph.fingerprint[:12]}); solve again for this model, or trace with unfold_scans as then",
            expected=plan.graph_fingerprint,
            got=graph.fingerprint,
        )
    if len(plan.layers) != len(graph.layers):
        raise PlanMismatchError(
            f"the plan has {len(plan.layers)} layers, the model {len(graph.layers)}; solve again for this model",
            expected=len(plan.layers),
            got=len(graph.layers),
        )
    if plan.batch_size != graph.batch_size:
        raise PlanMismatchError(
            f"the plan was made for batch {plan.batch_size}, the step was traced with {graph.batch_size}; solve again, "
            f"or feed batches of {plan.batch_size}",
            expected=plan.batch_size,
            got=graph.batch_size,
        )
    highest = max(d for stage in plan.stage_devices for d in stage)
    if highest >= num_devices:
        raise PlanMismatchError(
            f"the plan uses {plan.num_devices} devices (up to number {highest}), here are {num_devices}; solve again "
            f"for {num_devices}, or, on a CPU, start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={highest + 1} NPROC=64",
            needed=highest + 1,
            available=num_devices,
        )
    for writer, reader, _ in graph.edges:
        early, late = plan.layers[writer].stage, plan.layers[reader].stage
        if early > late:
            raise PlanMismatchError(
                f"layer {reader} on stage {late} reads from layer {writer} on the later stage {early}; stages follow "
                "the order of the layers",
                layer=reader,
            )
