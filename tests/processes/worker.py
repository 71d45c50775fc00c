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
from typing import Any

import jax
import numpy as np

import uniform_support as support
from uniap_jax.core.graph import LayerGraph
from uniap_jax.frontend import trace
from uniap_jax.runtime import compile as compile_plan
from uniap_jax.runtime.processes import Group, agree_on_plan, agree_on_program, connect, global_batch, local_rows
from uniap_jax.runtime.uniform import compile_uniform

STEPS = 20


def rows_of(graph: LayerGraph, batch: list[np.ndarray], shardings: Any) -> list[jax.Array]:
    """The global batch from the rows this process has to read, which are fewer than all."""
    mine = [local_rows(v, s) for v, s in zip(graph.step.batch, shardings, strict=True)]
    assert all(len(rows) < len(x) for rows, x in zip(mine, batch, strict=True))
    local = [np.asarray(x)[rows] for x, rows in zip(batch, mine, strict=True)]
    return global_batch(local, graph.step.batch, shardings)


def one_stage(group: Group, graph: LayerGraph, batch: list[np.ndarray], state: Any) -> list[float]:
    """P = 1: data ways over all processes."""

    def make() -> Any:
        return support.pinned(graph, 1, 2, "data=4", "gpipe", stages=[0] * len(graph.layers))

    plan = agree_on_plan(group, make, fingerprint=graph.fingerprint)
    step = compile_plan(graph, plan)
    agree_on_program(group, step.lower())
    tree = jax.tree.structure(state)
    leaves = jax.tree.leaves(step.place(state, batch_tree(batch)))
    rows = rows_of(graph, batch, step.batch_shardings)

    def run(leaves: list[Any]) -> list[Any]:
        new, metrics = step(jax.tree.unflatten(tree, leaves), batch_tree(rows))
        return [*jax.tree.leaves(new), metrics["loss"]]

    return train(group, leaves, run)


def batch_tree(leaves: list[Any]) -> dict[str, Any]:
    """The batch of `support.residual` from its leaves."""
    return dict(zip(("x", "y"), leaves, strict=True))


def equal_stages(
    group: Group, graph: LayerGraph, batch: list[np.ndarray], state: Any, before: Callable[[int], None] = lambda n: None
) -> list[float]:
    """A stage or more on every process."""

    def make() -> Any:
        return support.pinned(graph, group.size, 2, f"data={jax.device_count() // group.size}", "one_f_one_b")

    plan = agree_on_plan(group, make, fingerprint=graph.fingerprint)
    program = compile_uniform(graph, plan, jax.devices(), donated=[i for i in graph.step.output_leaf if i is not None])
    agree_on_program(group, program.lower())
    leaves: list[Any] = program.create(lambda: support.residual(aux=False)[0])
    rows = rows_of(graph, batch, program.batch_shardings)

    def run(leaves: list[Any]) -> list[Any]:
        outputs = program(leaves, rows)
        places = graph.step.output_leaf
        return [*(outputs[places.index(i)] for i in range(len(leaves))), outputs[places.index(None)]]

    return train(group, leaves, run, before)


def train(
    group: Group,
    leaves: list[Any],
    run: Callable[[list[Any]], list[Any]],
    before: Callable[[int], None] = lambda n: None,
) -> list[float]:
    """Losses of some steps; `run(leaves) -> (*leaves, loss)`."""
    losses = []
    for number in range(STEPS):
        before(number)
        group.enter(number)
        *leaves, loss = run(leaves)
        losses.append(float(loss))
    return losses


def misbehave(scenario: str, rank: int) -> Callable[[int], None]:
    """What the last rank does at step 3, in scenarios that are about it."""

    def before(number: int) -> None:
        if rank == jax.process_count() - 1 and number == 3:
            if scenario == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if scenario == "starve":
                time.sleep(3600)
            if scenario == "raise":
                raise ValueError("no more data")

    return before


def main() -> None:
    scenario, rank, size, coordinator, line, timeout = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jax.distributed.initialize(coordinator, int(size), int(rank), cluster_detection_method="deactivate")
    state, step, batch = support.residual(aux=scenario == "differ" and rank == "1")
    graph = trace(step, state, batch)
    leaves = [batch["x"], batch["y"]]
    with connect(line, timeout_s=float(timeout)) as group:
        if scenario == "one_stage":
            losses = one_stage(group, graph, leaves, state)
        else:
            losses = equal_stages(group, graph, leaves, state, misbehave(scenario, int(rank)))
    print(json.dumps({"rank": int(rank), "losses": losses, "devices": jax.device_count()}), flush=True)
    os._exit(0)  # what is tested is done; JAX's own farewell between processes is not


if __name__ == "__main__":
    main()
