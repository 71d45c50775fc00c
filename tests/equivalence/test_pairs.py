"""Every pair of (strategies, stages, micro-batches, schedule, library, peculiarity) gives one device's numbers.

Loss, gradients, reported values and state of every step are compared; the combinations are a covering array.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import towers
from covering import cover, pairs_of
from runtime_support import BF16_RTOL, GRAD_ATOL, LOSS_RTOL, make_plan, numbers, run_steps, worst
from uniap_jax import frontend, runtime
from uniap_jax.core.graph import LayerGraph

STEPS = 2
STATISTICS_ATOL = 3 * GRAD_ATOL
"""Ahead of a batch normalisation gradients cancel: one device's own are up to 3e-6 from those in 64 bits."""
TWO = {
    "data": "data=2",
    "fsdp": "fsdp=2",
    "tensor": "tensor=2",
    "mixture": ("data=2", "fsdp=2,zero=1,keep=inputs", "tensor=2", "fsdp=2,zero=2,keep=dots"),
}
FOUR = {**{k: f"{k}=4" for k in ("data", "fsdp", "tensor")}, "mixture": ("data=2,tensor=2", "fsdp=4,keep=inputs")}

FACTORS: dict[str, tuple[Any, ...]] = {
    "feature": towers.FEATURES,
    "strategies": tuple(TWO),
    "stages": (1, 2, 4),
    "schedule": ("gpipe", "one_f_one_b", "interleaved"),
    "microbatches": (1, 2),
    "library": ("linen", "nnx"),
}


def allowed(setting: dict[str, Any]) -> bool:
    """What there is: one stage has no schedule, and interleaving takes a micro-batch per set of devices, here two.

    Statistics are the whole batch's, so such a model is not cut into micro-batches.
    """
    whole = setting["microbatches"] == 1 or setting["feature"] != "batch_stats"
    if setting["schedule"] == "interleaved" and (setting["stages"], setting["microbatches"]) != (4, 2):
        return False
    return whole and (setting["stages"] > 1 or setting["schedule"] == "one_f_one_b")


CELLS = cover(FACTORS, allowed)


@functools.cache
def example(library: str, feature: str) -> tuple[towers.Example, LayerGraph, Any, list[Any]]:
    """A step, its graph, and what one device makes of it."""
    found = towers.build(library, feature)
    graph = frontend.trace(found.train_step, found.make_state(), towers.batch())
    state, metrics = run_steps(jax.jit(found.train_step), found.make_state(), towers.batch(), STEPS)
    return found, graph, jax.device_get(numbers(state)), metrics


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c.values())))
def test_as_one_device(cell: dict[str, Any]) -> None:
    found, graph, expected_state, expected = example(cell["library"], cell["feature"])
    strategies = (FOUR if cell["stages"] == 1 else TWO)[cell["strategies"]]
    plan = make_plan(
        graph,
        stages=cell["stages"],
        microbatches=cell["microbatches"],
        schedule=cell["schedule"],
        strategies=strategies,
        stage_devices=((0, 1), (2, 3)) * 2 if cell["schedule"] == "interleaved" else None,
    )
    assert len({layer.stage for layer in plan.layers}) == cell["stages"]
    step = runtime.compile(graph, plan)
    batch = towers.batch()
    state, metrics = run_steps(step, step.place(found.make_state(), batch), batch, STEPS)
    low = cell["feature"] == "bf16"
    exact = STATISTICS_ATOL if cell["feature"] == "batch_stats" else GRAD_ATOL
    for got, want in zip(jax.tree.leaves(metrics), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        rtol, atol = (BF16_RTOL, BF16_RTOL) if low else (LOSS_RTOL, exact)
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=rtol, atol=atol)
    assert worst(numbers(state), expected_state) <= (BF16_RTOL if low else exact)


def test_the_cells_hold_every_pair() -> None:
    held = set().union(*(pairs_of(c) for c in CELLS))
    for a, b in (("feature", "strategies"), ("feature", "stages"), ("strategies", "stages"), ("library", "feature")):
        for x in FACTORS[a]:
            for y in FACTORS[b]:
                assert tuple(sorted(((a, x), (b, y)))) in held
    assert all(("microbatches", 2) not in c.items() for c in CELLS if c["feature"] == "batch_stats")
    assert len(CELLS) <= 30
