"""Loops over layers split over stages: parameters keep the user's layout, [layers, ...], one share a stage."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import uniform_support as support
from uniap_jax.core.errors import StrategyError
from uniap_jax.frontend import trace
from uniap_jax.runtime.uniform import compile_uniform


def check(case: support.Case, plan: Any) -> support.Difference:
    found = support.difference(case, plan)
    assert found.loss <= support.LOSS_TOLERANCE
    assert found.grad <= support.GRAD_TOLERANCE, found.leaf
    assert found.output <= 1e-3
    return found


def looped(case: support.Case, num_stages: int, num_microbatches: int, strategy: str, schedule: str) -> Any:
    """The loop and what is before it on the first stage, the rest on the last."""
    loop = next(x.index for x in case.graph.layers if any(e.primitive.name == "scan" for e in x.jaxpr.jaxpr.eqns))
    stages = [0 if layer.index <= loop else num_stages - 1 for layer in case.graph.layers]
    return support.pinned(case.graph, num_stages, num_microbatches, strategy, schedule, stages=stages)


def test_linen_scan_with_remat_and_dropout() -> None:
    case = support.make_case(support.gpt(scan=True, remat=True))
    check(case, looped(case, 4, 1, "data=2", "one_f_one_b"))


def test_linen_scan_in_microbatches() -> None:
    case = support.make_case(support.gpt(scan=True, remat=True, dropout=0.0))
    found = check(case, looped(case, 2, 4, "fsdp=2,tensor=2", "one_f_one_b"))
    stacked = [
        (value, sharding)
        for value, sharding in zip(case.graph.step.state, found.program.state_shardings, strict=True)
        if "blocks" in value.name
    ]
    assert len(stacked) == 3 * 11  # parameters and both moments of AdamW
    assert all(sharding.spec[0] == "stage" for _, sharding in stacked)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_plain_scan_with_all_that_can_hang_on_it(schedule: str) -> None:
    case = support.make_case(support.plain_scan())
    found = check(case, looped(case, 4, 1, "data=2", schedule))
    run = found.program.pipeline.stages.run
    assert {s.kind for s in run.slots} == {"chain", "relay", "extra"}
    w = next(p for p, v in enumerate(case.graph.params) if v.shape == (4, 16, 16))
    leaf = case.graph.step.param_leaf[w]
    assert leaf is not None
    assert found.program.state_shardings[leaf].spec[0] == "stage"


def test_nnx_scan_with_statistics_that_change() -> None:
    case = support.make_case(support.nnx_stack())
    step = case.graph.step
    changed = [v.name for v, leaf in zip(step.outputs, step.output_leaf, strict=True) if leaf is not None]
    assert any("mean" in name for name in changed)
    check(case, looped(case, 2, 1, "data=2", "gpipe"))


def test_loops_that_cannot_be_split_say_why() -> None:
    for built, why in (
        (support.plain_scan(reverse=True), "backwards"),
        (support.plain_scan(batched=True), "computed from the batch"),
    ):
        state, step, batch = built
        graph = trace(step, state, batch)
        plan = support.pinned(graph, 4, 1, "data=2", "gpipe", stages=[0] * len(graph.layers))
        with pytest.raises(StrategyError, match=why):
            compile_uniform(graph, plan, jax.devices())


def test_compile_time_and_program_do_not_grow_with_depth() -> None:
    sizes = []
    for layers in (4, 16):
        state, step, batch = support.gpt(scan=True, dropout=0.0, layers=layers)
        graph = trace(step, state, batch)
        stages = [0] * (len(graph.layers) - 1) + [3]
        plan = support.pinned(graph, 4, 2, "data=2", "one_f_one_b", stages=stages)
        lowered = compile_uniform(graph, plan, jax.devices()).lower()
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[0] == sizes[1]
