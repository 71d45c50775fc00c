"""Kinds of models that people train, each under every kind of plan, against one device."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import pytest

import uniap_jax as uniap
from model_kinds import KINDS
from uniap_jax.check import OneDevice, check_plan
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.strategy import parse_strategy

PLANS = (
    (1, "data=8"),
    (1, "fsdp=8"),
    (1, "data=4,tensor=2"),
    (1, "data=8,keep=inputs"),
    (2, "data=4"),
    (2, "fsdp=4"),
)
"""Stages and strategy."""

DEFAULT = {
    ("experts", 1, "data=4,tensor=2"),
    ("nnx_dropout", 2, "data=4"),
    ("lstm", 1, "data=4,tensor=2"),
    ("batch_stats", 2, "data=4"),
    ("own_rules", 1, "fsdp=8"),
    ("checkpointed", 2, "data=4"),
    ("rotary", 1, "data=8,keep=inputs"),
    ("depthwise", 1, "data=4,tensor=2"),
    ("relative", 2, "data=4"),
    ("routed", 1, "data=4,tensor=2"),
    ("translation", 1, "data=4,tensor=2"),
    ("teacher", 2, "fsdp=4"),
}
"""The quick kinds, and every plan once; the other pairs are slow."""

MEETING = ("two_towers", "experts", "batch_stats", "routed")
"""Examples meet in the loss: micro-batches would compute something else, and are refused."""


@lru_cache(maxsize=16)
def traced(name: str) -> tuple[LayerGraph, Any, Any, OneDevice]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, train_step, batch = KINDS[name]()
    graph = uniap.trace(train_step, state, batch)
    return graph, state, batch, OneDevice(graph)


@pytest.mark.parametrize(
    ("name", "stages", "strategy"),
    [
        pytest.param(n, *p, marks=() if (n, *p) in DEFAULT else pytest.mark.slow, id=f"{n}-{p[0]}-{p[1]}")
        for n in KINDS
        for p in PLANS
    ],
)
def test_plan_equals_one_device(name: str, stages: int, strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    graph, state, batch, one_device = traced(name)
    plan = uniap.solve(
        uniap.estimate(graph),
        baselines=False,
        num_stages=stages,
        num_microbatches=1,
        strategy=parse_strategy(strategy),
    )
    report = check_plan(graph, plan, (state, batch), steps=2, one_device=one_device)
    assert report.ok, (report.loss_rel_diff, report.grad_rel_diff, report.grad_leaf)
    captured = capfd.readouterr()
    assert "nvoluntary full rematerialization" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", KINDS)
def test_layers(name: str) -> None:
    graph, *_ = traced(name)
    assert {p for layer in graph.layers for p in layer.params} == set(range(len(graph.params)))
    assert len(graph.layers) >= 3
    assert (graph.split_cause == "statistic") == (name in MEETING), graph.split_reason
    assert bool(graph.split_reason) == (name in MEETING)
