"""One rank of a job of several processes: `worker.py SCENARIO RANK SIZE COORDINATOR LINE TIMEOUT`.

Says what it found as one JSON object on standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax

import uniap_jax as uniap
import uniform_support as support
from uniap_jax.core.errors import ExecutionError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy
from uniap_jax.frontend import trace
from uniap_jax.runtime.processes import Group, agree_on_plan, agree_on_program, connect, global_batch, local_rows

STEPS = 20


def rows_of(graph: LayerGraph, batch: list[np.ndarray], shardings: Any) -> list[jax.Array]:
    """The global batch from the rows this process has to read, which are fewer than all."""
    mine = [local_rows(v, s) for v, s in zip(graph.step.batch, shardings, strict=True)]
    assert sum(map(len, mine)) < sum(map(len, batch))
    local = [np.asarray(x)[rows] for x, rows in zip(batch, mine, strict=True)]
    return global_batch(local, graph.step.batch, shardings)


def batch_tree(leaves: list[Any]) -> dict[str, Any]:
    """The batch of `support.residual` from its leaves."""
    return dict(zip(("x", "y"), leaves, strict=True))


def parallelized(group: Group | None, batch: list[np.ndarray], step: Any, **pins: Any) -> list[float]:
    """`parallelize` plans, compares and watches; the state is made in place, rows are read where they are needed."""
    planned = uniap.parallelize(step, source="described", num_microbatches=2, processes=group, **pins)
    state = planned.init(lambda: support.residual(aux=False)[0], batch=batch_tree(batch))
    rows = batch_tree(rows_of(planned.graph, batch, planned.batch_shardings))
    losses = []
    for _ in range(STEPS):
        state, metrics = planned(state, rows)
        losses.append(float(metrics["loss"]))
    if planned.plan.executor == "stages" and planned.plan.num_stages > 1:
        check_refusals(planned, state)
    return losses


def check_refusals(planned: Any, state: Any) -> None:
    """What would show a process a part of the work, or wait for others that are not asked."""
    alone = replace(planned.plan, stage_devices=((0,), (1,)))
    for attempt in (
        planned.monitor,
        lambda: planned.gather(state),
        lambda: planned.jit(lambda state: state)(state),
        lambda: uniap.compile_plan(planned.graph, alone),
    ):
        try:
            attempt()
        except ExecutionError:
            continue
        raise AssertionError(f"{attempt} was not refused")


def equal(graph: LayerGraph, size: int) -> Plan:
    """As many equal stages as processes, in one program."""
    plan = support.pinned(graph, size, 2, f"data={jax.device_count() // size}", "one_f_one_b")
    return replace(plan, executor="program")


def unequal(graph: LayerGraph, stage_devices: tuple[tuple[int, ...], ...], schedule: str) -> Plan:
    """Stages with a program each, on 1 or 2 devices, of 1 to 4 layers; the first two layers are on the first."""
    count = len(stage_devices)
    stages = [0 if i < 2 else min(count - 1, 1 + i // 5) for i in range(len(graph.layers))]
    return Plan(
        num_stages=count,
        num_microbatches=4,
        schedule=schedule,
        batch_size=graph.batch_size,
        stage_devices=stage_devices,
        layers=tuple(
            LayerPlan(name=layer.name, stage=s, strategy=Strategy(data=len(stage_devices[s])))
            for layer, s in zip(graph.layers, stages, strict=True)
        ),
        prediction=Prediction(step_time_s=0.0),
        certificate=Certificate(status="pinned"),
        graph_fingerprint=graph.fingerprint,
    )


def pinned(group: Group, scenario: str, graph: LayerGraph) -> Plan:
    """The plan that a scenario runs."""
    if scenario.startswith("spanning"):  # the second of three stages has a device of each process
        return unequal(graph, ((0,), (1, 2), (3,)), "one_f_one_b")
    if scenario.startswith("unequal"):
        return unequal(graph, ((0, 1), (2,)), "gpipe")
    return equal(graph, group.size)


def trained(
    group: Group, graph: LayerGraph, plan: Plan, batch: list[np.ndarray], before: Callable[[int], None]
) -> list[float]:
    """A plan's run by the verbs one after another."""
    step = uniap.compile_plan(graph, agree_on_plan(group, lambda: plan, fingerprint=graph.fingerprint))
    agree_on_program(group, {p.name: p.lowered for p in step.programs})
    state = step.init(lambda: support.residual(aux=False)[0])
    rows = batch_tree(rows_of(graph, batch, step.batch_shardings))
    losses = []
    for number in range(STEPS):
        before(number)
        group.enter(number)
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
    return losses


def saved_and_restored(folder: str, batch: list[np.ndarray], step: Any, executor: str) -> list[float]:
    """Half of the steps, a checkpoint written by all processes, read back by all, and the other half."""
    planned = uniap.parallelize(step, source="described", num_stages=2, executor=executor)
    state = planned.init(lambda: support.residual(aux=False)[0], batch=batch_tree(batch))
    rows = batch_tree(rows_of(planned.graph, batch, planned.batch_shardings))
    losses = []
    for number in range(STEPS):
        if number == STEPS // 2:
            with orbax.StandardCheckpointer() as checkpointer:
                checkpointer.save(Path(folder) / "half", planned.spread(state))
                checkpointer.wait_until_finished()
                state = checkpointer.restore(Path(folder) / "half", planned.abstract_state())
        state, metrics = planned(state, rows)
        losses.append(float(metrics["loss"]))
    return losses


def misbehave(scenario: str, rank: int) -> Callable[[int], None]:
    """What the last rank does at step 3, in scenarios that are about it."""

    def before(number: int) -> None:
        if rank == jax.process_count() - 1 and number == 3:
            if scenario.endswith("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario.endswith("starve"):
                time.sleep(3600)
            if scenario.endswith("raise"):
                raise ValueError("no more data")

    return before


def main() -> None:
    scenario, rank, size, coordinator, line, timeout = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jax.distributed.initialize(coordinator, int(size), int(rank), cluster_detection_method="deactivate")
    masked, scenario = scenario.startswith("masked_"), scenario.removeprefix("masked_")
    state, step, batch = support.residual(aux=scenario == "differ" and rank == "1", masked=masked)
    graph = trace(step, state, batch)
    leaves = [batch["x"], batch["y"]]
    if scenario == "alone":  # without lines of our own
        losses = parallelized(None, leaves, step, num_stages=1, strategy="data=4")
    elif scenario.startswith("checkpoint"):
        losses = saved_and_restored(line, leaves, step, scenario.removeprefix("checkpoint_"))
    else:
        with connect(line, timeout_s=float(timeout)) as group:
            if scenario == "one_stage":
                losses = parallelized(group, leaves, step, num_stages=1, strategy="data=4")
            elif scenario == "auto":
                losses = parallelized(group, leaves, step, num_stages=2)
            elif scenario == "planned_stages":
                losses = parallelized(group, leaves, step, num_stages=2, executor="stages")
            else:
                plan = pinned(group, scenario, graph)
                losses = trained(group, graph, plan, leaves, misbehave(scenario, int(rank)))
    print(json.dumps({"rank": int(rank), "losses": losses, "devices": jax.device_count()}), flush=True)
    sys.stdin.read()  # until the test has seen the ranks above end
    os._exit(0)  # what is tested is done; JAX's own farewell between processes is not


if __name__ == "__main__":
    main()
