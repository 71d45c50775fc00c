"""Plans of unfolded loops: turns on several stages, with strategies of their own; the state as the user has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import uniform_support as support
from runtime_support import GRAD_ATOL, numbers, run_steps, worst
from uniap_jax import runtime
from uniap_jax.check import check_plan
from uniap_jax.core.errors import ExecutionError, StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.frontend import trace
from uniap_jax.runtime.executable import ParallelStep
from uniap_jax.runtime.verify import verify

LAYERS = 4


def unfolded(built: tuple[Any, Any, Any]) -> tuple[LayerGraph, tuple[Any, Any]]:
    state, step, batch = built
    return trace(step, state, batch, unfold_scans=True), (state, batch)


def turns(graph: LayerGraph) -> list[int]:
    """Layers that read a row."""
    assert graph.step.by_rows is not None
    rows = {p for group in graph.step.by_rows.params for p in group}
    return [layer.index for layer in graph.layers if rows & {*layer.params}]


def plan_of(
    graph: LayerGraph, stages: int, pieces: int, *strategies: str, counts: tuple[int, ...] = (), schedule: str = ""
) -> Plan:
    """Turns spread evenly, or `counts` of them on each stage; strategies in turn; the rest with the nearest turn."""
    of_turns = [s for s, n in enumerate(counts or (LAYERS // stages,) * stages) for _ in range(n)]
    where = dict(zip(turns(graph), of_turns, strict=True))
    first, last = min(where), max(where)
    placed = [where[min(max(u, first), last)] for u in range(len(graph.layers))]
    plan = support.pinned(graph, stages, pieces, strategies[0], schedule or "one_f_one_b", stages=placed)
    chosen = [parse_strategy(strategies[i % len(strategies)]) for i in range(len(plan.layers))]
    return replace(plan, layers=tuple(replace(x, strategy=s) for x, s in zip(plan.layers, chosen, strict=True)))


@pytest.mark.parametrize(
    ("stages", "pieces", "strategies"),
    [(1, 2, ("fsdp=2,tensor=2", "fsdp=2,tensor=2,keep=inputs")), (2, 2, ("fsdp=2", "fsdp=2,keep=inputs"))],
)
def test_a_linen_loop_with_remat_and_dropout(stages: int, pieces: int, strategies: tuple[str, ...]) -> None:
    graph, args = unfolded(support.gpt(scan=True, remat=True))
    report = check_plan(graph, plan_of(graph, stages, pieces, *strategies), args, steps=2)
    assert report.ok, report


@pytest.mark.parametrize("how", [{}, {"reverse": True}, {"batched": True}])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_plain_loop_a_turn_a_stage(how: dict[str, bool], schedule: str) -> None:
    graph, args = unfolded(support.plain_scan(**how))
    report = check_plan(graph, plan_of(graph, 4, 2, "data=2", schedule=schedule), args, steps=2)
    assert report.ok, report
    assert report.state_abs_diff <= 1e-3


@pytest.mark.parametrize("stages", [1, 2])
def test_an_nnx_loop_whose_statistics_and_keys_change(stages: int) -> None:
    state, train_step, batch = support.nnx_stack()
    graph = trace(train_step, state, batch, unfold_scans=True)
    step = runtime.compile(graph, plan_of(graph, stages, 1, "data=2"))
    placed = step.place(state, batch)
    for _ in range(2):
        placed, metrics = step(placed, batch)
        expected, want = train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-5)
    found = [jax.tree.leaves(jax.device_get(x)) for x in map(_arrays, (placed, expected))]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _arrays(state: Any) -> Any:
    from flax import nnx

    return numbers(nnx.state(state))


def trained(graph: LayerGraph, args: tuple[Any, Any], plan: Plan) -> tuple[ParallelStep, Any, list[Any]]:
    step = runtime.compile(graph, plan)
    state, found = run_steps(step, step.place(*args), args[1], 2)
    return step, state, found


def test_a_stacked_leaf_is_one_array_over_the_stages() -> None:
    state, train_step, batch = support.plain_scan()
    graph, args = unfolded((state, train_step, batch))
    step, ours, found = trained(graph, args, plan_of(graph, 2, 2, "fsdp=2"))
    expected, wanted = run_steps(jax.jit(train_step), state, batch, 2)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    assert worst(ours, expected) <= 1e-4
    assert worst(found, wanted) <= 1e-4
    (params, moments) = ours
    for leaf in (params["w"], moments[0].trace["w"]):
        assert leaf.shape == (LAYERS, 16, 16)
        assert leaf.sharding.spec == PartitionSpec("stage", "x0", None)
        assert [s.data.shape for s in leaf.addressable_shards] == [(2, 8, 16)] * 4
        assert len(leaf.devices()) == 4
    assert [s.is_equivalent_to(x.sharding, x.ndim) for s, x in _pairs(step, ours)].count(False) == 0
    assert "apart" in "".join(p.name for p in step.programs)
    whole = step.jit(lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(p)))(params)
    np.testing.assert_allclose(whole, sum(float(x.sum()) for x in jax.tree.leaves(step.gather(params))), rtol=1e-5)


def _pairs(step: ParallelStep, state: Any) -> Any:
    return zip(step.in_shardings, jax.tree.leaves(state), strict=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_state_made_in_place_is_the_same(stages: int) -> None:
    state, _, batch = built = support.plain_scan()
    graph, _ = unfolded(built)
    step = runtime.compile(graph, plan_of(graph, stages, 1, "fsdp=2"))
    made = step.init(lambda: state)
    assert worst(made, state) == 0.0
    for sharding, leaf in _pairs(step, made):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert jax.tree.map(np.shape, step.abstract_state()) == jax.tree.map(np.shape, state)
    step(made, batch)


@pytest.mark.parametrize("donate", [True, False])
def test_a_leaf_is_given_up_or_kept_as_asked(donate: bool) -> None:
    state, train_step, batch = built = support.plain_scan()
    graph, _ = unfolded(built)
    step = runtime.compile(graph, plan_of(graph, 2, 1, "data=2"), donate=donate)
    first = step.place(state, batch)
    step(first, batch)
    if donate:
        assert first[0]["w"].is_deleted()
        with pytest.raises(ExecutionError, match="given up"):
            step(first, batch)
    else:
        again, _ = step(first, batch)
        expected, _ = jax.jit(train_step)(state, batch)
        assert worst(again, expected) <= 20 * GRAD_ATOL


def test_compiled_once() -> None:
    built = support.plain_scan()
    graph, args = unfolded(built)
    step = runtime.compile(graph, plan_of(graph, 2, 1, "data=2"))
    state, _ = run_steps(step, step.place(*args), args[1], 1)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.programs.Program, "__init__", lambda *a: pytest.fail("compiled again"))
        run_steps(step, state, args[1], 2)


def test_verify_reads_the_programs() -> None:
    graph, _ = unfolded(support.plain_scan())
    for stages in (1, 2):
        found = verify(runtime.compile(graph, plan_of(graph, stages, 1, "fsdp=2")))
        assert not [p for p in found.problems if "comes out" in p], found.problems


def test_what_no_array_can_be_is_refused() -> None:
    graph, _ = unfolded(support.plain_scan())
    with pytest.raises(StrategyError, match=r"3 on stage 0, 1 on stage 1.*every stage as many") as unequal:
        runtime.compile(graph, plan_of(graph, 2, 1, "data=2", counts=(3, 1)))
    assert "'w'" in unequal.value.leaf
    with pytest.raises(StrategyError, match="stored in 2 ways"):
        runtime.compile(graph, plan_of(graph, 1, 1, "data=2", "fsdp=2"))
    with pytest.raises(StrategyError, match="unfold_scans=False"):
        runtime.compile(graph, replace(plan_of(graph, 2, 1, "data=2"), executor="program"))
    plan = plan_of(graph, 2, 1, "data=2")
    with pytest.raises(StrategyError, match="on the same devices"):
        runtime.compile(graph, replace(plan, stage_devices=((0, 1), (0, 1))))
    uneven = tuple(replace(x, strategy=Strategy(data=1)) if x.stage else x for x in plan.layers)
    with pytest.raises(StrategyError, match="other sizes"):
        runtime.compile(graph, replace(plan, stage_devices=((0, 1), (2,)), layers=uneven))
