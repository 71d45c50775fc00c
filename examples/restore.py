"""Saves a state under one plan and goes on under another, on other numbers of stages and devices, with orbax.

python examples/restore.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from gpt import DEFAULT_TEXT, batches, create_state, train_step

import uniap_jax as uniap


def arrays(state: Any) -> dict[str, Any]:
    """What is worth saving of a TrainState: its arrays, without the functions."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state, "rng": state.rng}


def planned(devices: int, batch: Any, sizes: tuple[int, int, int], **pins: Any) -> Any:
    """The step of gpt.py on some of the devices, planned from shapes alone."""
    shapes = jax.eval_shape(lambda: create_state(*sizes))
    graph, chosen = uniap.trace(train_step, shapes, batch), jax.devices()[:devices]
    plan = uniap.solve(uniap.estimate(graph, uniap.local_cluster(chosen)), **pins)
    return uniap.compile_plan(graph, plan, devices=chosen)


def main(folder: str = "", steps: int = 3, sizes: tuple[int, int, int] = (4, 128, 4)) -> list[float]:
    data, losses = batches(DEFAULT_TEXT), []
    batch = next(data)
    path = Path(folder or tempfile.mkdtemp()).absolute() / "checkpoint"

    first = planned(8, batch, sizes, num_stages=2)
    state = first.init(lambda: create_state(*sizes))
    for _ in range(steps):
        state, metrics = first(state, batch)
        losses.append(float(metrics["loss"]))
        batch = next(data)

    second = planned(4, batch, sizes, num_stages=1)
    with ocp.CheckpointManager(path) as manager:
        manager.save(steps, args=ocp.args.StandardSave(arrays(state)))
        manager.wait_until_finished()
        # abstract_state() has shape, dtype and sharding of every leaf under the second plan: that is all orbax needs
        wanted = second.abstract_state()
        restored = manager.restore(steps, args=ocp.args.StandardRestore(arrays(wanted)))
    state = wanted.replace(**restored)
    for _ in range(steps):
        state, metrics = second(state, batch)
        losses.append(float(metrics["loss"]))
        batch = next(data)

    for plan in (first.plan, second.plan):
        print(plan, end="\n\n")
    print("losses:", *(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
