"""Plans of unfolded loops are searched as they can be run: one layout for all rows, equally many on every stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import uniap_jax
from uniap_jax import runtime
from uniap_jax.check import check_plan
from uniap_jax.core.cluster import load_cluster
from uniap_jax.core.costs import Assignment, Candidate, evaluate
from uniap_jax.core.errors import InfeasibleError, StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.slowed import price
from uniap_jax.core.strategy import Strategy, storage
from uniap_jax.cost_model.rows import RowModel

LAYERS, WIDTH, HIDDEN, BATCH = 4, 16, 64, 64


def build(layers: int = LAYERS, twice: bool = False) -> tuple[Any, Any, Any]:
    """State, train step and batch of a `lax.scan` over residual blocks, or of two of them."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32) * 0.1

    params = {"up": weight(layers, WIDTH, HIDDEN), "down": weight(layers, HIDDEN, WIDTH), "in": weight(WIDTH, WIDTH)}
    if twice:
        params |= {"up2": weight(layers, WIDTH, HIDDEN), "down2": weight(layers, HIDDEN, WIDTH)}
    tx = optax.adam(1e-2)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            def turn(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ own[0]) @ own[1], None

            x, _ = lax.scan(turn, batch["x"] @ params["in"], (params["up"], params["down"]))
            if twice:
                x, _ = lax.scan(turn, x, (params["up2"], params["down2"]))
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    batch = {"x": weight(BATCH, WIDTH), "y": weight(BATCH, WIDTH)}
    return {"params": params, "opt": tx.init(params)}, train_step, batch


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    state, step, batch = build()
    return uniap_jax.trace(step, state, batch, unfold_scans=True)


def turns(graph: LayerGraph) -> list[int]:
    assert graph.step.by_rows is not None
    rows = {p for group in graph.step.by_rows.params for p in group}
    return [layer.index for layer in graph.layers if rows & {*layer.params}]


def model_of(graph: LayerGraph, devices: int, memory: int | None = None) -> RowModel:
    found = uniap_jax.estimate(graph, load_cluster(f"h100:{devices}", memory_limit=memory or "90%"))
    assert isinstance(found, RowModel)
    return found


def check_possible(graph: LayerGraph, plan: Plan) -> None:
    """What one array asks of a plan; the runtime is asked too."""
    chosen = [plan.layers[u] for u in turns(graph)]
    assert len({storage(x.strategy) for x in chosen}) == 1
    assert set(Counter(x.stage for x in chosen).values()) == {len(chosen) // plan.num_stages}
    runtime.compile(graph, plan)


def test_every_way_to_store_rows_is_a_candidate(graph: LayerGraph) -> None:
    costs = model_of(graph, 4)
    for candidate in costs.candidates():
        strategies = costs.strategies(candidate.num_stages)
        assert candidate.storage in {storage(s) for s in strategies}
        tables = costs.tables(candidate)
        for u in turns(graph):
            allowed = [strategies[k] for k in np.flatnonzero(tables.allowed[u])]
            assert {storage(s) for s in allowed} <= {candidate.storage}
    assert {c.num_stages for c in costs.candidates()} == {1, 2, 4}


def test_stages_that_do_not_divide_the_loop_are_not_searched() -> None:
    state, step, batch = build(layers=3)
    costs = model_of(uniap_jax.trace(step, state, batch, unfold_scans=True), 4)
    assert {c.num_stages for c in costs.candidates()} == {1}
    state, step, batch = build(twice=True)  # the rows of the first loop's last turns come after the second's first
    costs = model_of(uniap_jax.trace(step, state, batch, unfold_scans=True), 4)
    assert {c.num_stages for c in costs.candidates()} == {1}


def halfway(graph: LayerGraph, devices: int, share: float, **options: Any) -> RowModel:
    """A memory limit between what the leanest plan needs (0) and what the fastest one takes (1)."""
    free = uniap_jax.solve(model_of(graph, devices), executor="stages", baselines=False, **options)
    with pytest.raises(InfeasibleError) as none:
        uniap_jax.solve(model_of(graph, devices, 1000), executor="stages", **options)
    most, least = max(free.prediction.peak_bytes), none.value.needed_bytes
    return model_of(graph, devices, int(least + share * (most - least)) + 1)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_the_optimum_is_that_of_trying_everything(graph: LayerGraph, share: float) -> None:
    options = {"executor": "stages", "baselines": False, "why": False, "num_microbatches": 1}
    costs = halfway(graph, 2, share, num_microbatches=1)
    plan = uniap_jax.solve(costs, **options)
    every = uniap_jax.solve(costs, engine="brute_force", **options)
    assert plan.certificate.status == every.certificate.status == "optimal"
    assert plan.prediction.step_time_s == pytest.approx(every.prediction.step_time_s, rel=1e-9)
    check_possible(graph, plan)


@pytest.mark.parametrize("engine", ["interval", "hybrid", "miqp"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_engines_keep_rows_together(graph: LayerGraph, engine: str, stages: int) -> None:
    costs = model_of(graph, 4)
    free = uniap_jax.solve(costs, num_stages=stages, num_microbatches=1, executor="stages", baselines=False)
    costs = halfway(graph, 4, 0.4, num_stages=stages, num_microbatches=1)
    plan = uniap_jax.solve(costs, engine=engine, num_stages=stages, num_microbatches=1, executor="stages")
    check_possible(graph, plan)
    assert plan.prediction.step_time_s >= free.prediction.step_time_s * (1 - 1e-9)
    assert all(t is None or t >= plan.prediction.step_time_s * (1 - 1e-9) for _, t in plan.certificate.baselines)
    unlimited = [x for x in plan.certificate.what_ifs if x.what == "unlimited memory"]
    assert all(x.step_time_s >= free.prediction.step_time_s * (1 - 1e-9) for x in unlimited)


def test_turns_recompute_one_by_one_where_memory_is_short(graph: LayerGraph) -> None:
    """Under a limit between all turns keeping everything and none, some recompute: a loop as one layer cannot."""
    plan = uniap_jax.solve(halfway(graph, 1, 0.5, num_microbatches=1), num_microbatches=1, executor="stages")
    assert {plan.layers[u].strategy.keep for u in turns(graph)} == {"all", "inputs"}
    state, _, batch = build()
    assert check_plan(graph, plan, (state, batch), steps=1).ok


def test_a_strategy_asked_for_is_that_of_every_turn(graph: LayerGraph) -> None:
    costs = model_of(graph, 4)
    for wanted in (Strategy(data=4), Strategy(fsdp=2, tensor=2), Strategy(tensor=4)):
        plan = uniap_jax.solve(costs, strategy=wanted, num_stages=1, executor="stages")
        assert {plan.layers[u].strategy for u in turns(graph)} == {wanted}
    plan = uniap_jax.solve(costs, pin={graph.layers[turns(graph)[1]].name: "tensor=2,keep=inputs"}, num_stages=2)
    chosen = [plan.layers[u].strategy for u in turns(graph)]
    assert chosen[1].keep == "inputs"
    assert {storage(s) for s in chosen} == {"tensor=2"}
    names = [graph.layers[u].name for u in turns(graph)]
    with pytest.raises(InfeasibleError):
        uniap_jax.solve(costs, pin={names[0]: "data=4", names[1]: "tensor=4"}, num_stages=1)


def test_a_baseline_of_one_strategy_has_it_in_every_turn(graph: LayerGraph) -> None:
    plan = uniap_jax.solve(model_of(graph, 4), executor="stages")
    alone = [
        uniap_jax.solve(model_of(graph, 4), strategy=Strategy(data=4, keep=keep), num_stages=1, executor="stages")
        for keep in ("all", "inputs")
    ]
    told = dict(plan.certificate.baselines)["data_parallel"]
    assert told == pytest.approx(min(x.prediction.step_time_s for x in alone), rel=1e-9)
    known = {(x.num_stages, x.num_microbatches, x.schedule) for x in plan.certificate.searched}
    assert len(known) == len(plan.certificate.searched)


def test_the_referee_refuses_a_turn_on_another_stage(graph: LayerGraph) -> None:
    costs = model_of(graph, 2)
    tables = costs.tables(Candidate(num_stages=2, num_microbatches=1, schedule="one_f_one_b", storage="data=1"))
    rows = turns(graph)
    stage = [0 if u <= rows[0] else 1 for u in range(len(graph.layers))]
    found = evaluate(tables, Assignment(stage=tuple(stage), strategy=(0,) * len(stage)))
    assert f"layer {rows[1]} lies on stage 1 and must lie on 0" in found.violations


def test_taking_rows_apart_is_priced(graph: LayerGraph) -> None:
    costs = model_of(graph, 1)
    layer, strategy = graph.layers[turns(graph)[1]], Strategy()
    state = 3 * 2 * WIDTH * HIDDEN * 4  # two matrices, two moments each
    extra = costs.update_s(layer, strategy) - super(RowModel, costs).update_s(layer, strategy)
    assert extra == pytest.approx(4 * state / costs.update_bytes_per_s)
    candidate = costs.candidates()[0]
    with_copies = costs.tables(candidate).memory_bytes[layer.index, 0, 0]
    without = super(RowModel, costs).tables(replace(candidate, storage="")).memory_bytes[layer.index, 0, 0]
    assert with_copies - without == pytest.approx(2 * WIDTH * HIDDEN * 4)


def test_one_program_takes_the_loop_as_it_is(graph: LayerGraph) -> None:
    costs = model_of(graph, 4)
    with pytest.raises(StrategyError, match="unfold_scans=False"):
        uniap_jax.solve(costs, num_stages=2, executor="program")
    plan = uniap_jax.solve(costs, num_stages=2)
    assert any("one program for equal stages was not considered" in note for note in plan.certificate.notes)


def test_a_plan_is_priced_again_for_slower_devices(graph: LayerGraph) -> None:
    costs = model_of(graph, 4)
    plan = uniap_jax.solve(costs, num_stages=2, executor="stages", baselines=False, why=False)
    assert price(costs, plan) == pytest.approx(plan.prediction.step_time_s, rel=1e-9)


def test_many_layers_are_searched_in_seconds() -> None:
    state, step, batch = build(layers=48)
    graph = uniap_jax.trace(step, state, batch, unfold_scans=True)
    assert len(graph.unique) <= 4
    plan = uniap_jax.solve(uniap_jax.estimate(graph, load_cluster("h100:8")), executor="stages", why=False)
    assert plan.certificate.status == "optimal"
