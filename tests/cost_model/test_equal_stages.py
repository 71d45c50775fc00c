"""One program for all stages: which layers it takes, what it costs, when it is chosen, what is said without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import uniform_support as support
from uniap_jax.core.cluster import Cluster, Link
from uniap_jax.core.costs import Candidate
from uniap_jax.core.equal_costs import evaluate_equal
from uniap_jax.core.equal_stages import find_run
from uniap_jax.core.errors import InfeasibleError, OptionError, StrategyError
from uniap_jax.core.profile import Footprint
from uniap_jax.core.strategy import Strategy
from uniap_jax.cost_model import estimate
from uniap_jax.cost_model.equal_stages import TurnCosts, kept_microbatches
from uniap_jax.cost_model.unmeasured import unmeasured
from uniap_jax.frontend import trace
from uniap_jax.planner import solve
from uniap_jax.profiler import profile

CLUSTER = Cluster(
    name="eight",
    num_devices=8,
    kind="cpu",
    platform="cpu",
    memory_bytes=1 << 30,
    peak_flops=(("float32", 1e11),),
    memory_bandwidth_bytes_per_s=1e10,
    links=(Link(name="all", size=8, bandwidth_bytes_per_s=1e9, uplink_bytes_per_s=1e9, latency_s=1e-6),),
)


@pytest.fixture(scope="module")
def graph() -> Any:
    state, step, batch = support.residual(aux=False)
    return trace(step, state, batch)


def test_the_run_is_the_equal_layers_and_stages_follow_it(graph: Any) -> None:
    run = find_run(graph, 2)
    assert run.count == 4
    assert not run.is_loop
    stages = run.stages(len(graph.layers), 2)
    assert [stages[i] for i in range(run.first, run.last)] == [0, 0, 1, 1]
    assert set(stages[: run.first]) == {0}
    assert set(stages[run.last :]) == {1}


def test_a_model_without_equal_layers_is_told_what_comes_nearest(graph: Any) -> None:
    with pytest.raises(StrategyError) as error:
        find_run(graph, 8)
    assert error.value.num_stages == 8
    assert "4 of them" in str(error.value)
    with pytest.raises(StrategyError):
        solve(estimate(graph, CLUSTER), executor="program", num_stages=8)


def test_rows_and_ticks(graph: Any) -> None:
    costs = estimate(graph, CLUSTER)
    run = find_run(graph, 2)
    tables = costs.equal_tables(Candidate(num_stages=2, num_microbatches=2, schedule="gpipe"))
    assert tables.num_rows == len(graph.layers) - 2  # four equal layers are two slots of two stages
    assert [tables.rows[i] - tables.run for i in range(run.first, run.last)] == [0, 1, 0, 1]
    k = tables.strategies.index(Strategy(data=4))
    layer = costs.layer_cost(run.first, Strategy(data=4), num_microbatches=2)
    own = layer.time_s + layer.sync_s
    assert tables.time_s[tables.run, k] == pytest.approx(3 * (own + tables.pass_s[k]))
    assert tables.time_s[tables.run + 1, k] == pytest.approx(3 * own)
    price = evaluate_equal(tables, (k,) * tables.num_rows)
    assert price.feasible
    assert len(price.stage_time_s) == 2
    assert price.step_time_s == pytest.approx(
        3 * (price.stage_time_s[0] + price.link_time_s[0]) + price.iteration_time_s[0]
    )


def test_one_f_one_b_holds_less(graph: Any) -> None:
    gpipe, other = (Candidate(num_stages=4, num_microbatches=8, schedule=s) for s in ("gpipe", "one_f_one_b"))
    assert kept_microbatches(gpipe, in_place=False) == 12
    assert kept_microbatches(other, in_place=False) == 8
    costs = estimate(graph, CLUSTER)
    tables = [costs.equal_tables(c) for c in (gpipe, other)]
    assert (tables[0].memory_bytes >= tables[1].memory_bytes).all()
    run, after = find_run(graph, 4).first, -1
    np.testing.assert_array_equal(tables[0].time_s[run:], tables[1].time_s[run:])
    assert (tables[0].time_s[:run] <= tables[1].time_s[:run]).all()  # what is before the run runs in bubbles too
    assert tables[0].time_s[after].max() > 0


def test_tpus_copy_neither_gradients_nor_parameters_nor_what_is_kept(graph: Any) -> None:
    candidate = Candidate(num_stages=2, num_microbatches=2, schedule="gpipe")
    cpu, tpu = (
        estimate(graph, replace(CLUSTER, platform=platform)).equal_tables(candidate) for platform in ("cpu", "tpu")
    )
    slot, k, scattered = cpu.run + 1, *(cpu.strategies.index(s) for s in (Strategy(data=4), Strategy(fsdp=4)))
    layer = graph.layers[find_run(graph, 2).first]
    weights = sum(graph.params[p].nbytes for p in layer.params)
    kept = estimate(graph, CLUSTER).layer_cost(layer.index, Strategy(data=4), num_microbatches=2).kept_bytes
    assert cpu.allowed[slot, [k, scattered]].all()
    less = cpu.memory_bytes[slot, k] - tpu.memory_bytes[slot, k]
    assert less == pytest.approx(2 * weights + kept)  # a tick's gradients, stacked parameters, what was just made
    whole = cpu.transient_bytes[slot, scattered] - tpu.transient_bytes[slot, scattered]
    assert whole == pytest.approx(weights)  # of one layer, before they are scattered


def test_a_tpu_keeps_what_one_program_keeps_but_for_gathered_parameters(graph: Any) -> None:
    cluster, candidate = replace(CLUSTER, platform="tpu"), Candidate(num_stages=2, num_microbatches=2, schedule="gpipe")
    told = profile(graph, cluster, source="described")
    layer, strategy = graph.layers[find_run(graph, 2).first], Strategy(fsdp=4)
    gathered = sum(graph.params[p].nbytes for p in layer.params)
    kept = estimate(graph, cluster, told).layer_cost(layer.index, strategy, num_microbatches=2).kept_bytes

    def held(turned: Footprint | None) -> float:
        entries = tuple((key, replace(cost, turned=turned)) for key, cost in told.entries)
        tables = estimate(graph, cluster, replace(told, entries=entries)).equal_tables(candidate)
        return float(tables.memory_bytes[tables.run + 1, tables.strategies.index(strategy)])

    places = kept_microbatches(candidate, in_place=True)
    less = Footprint(kept_bytes=gathered + kept / 4, transient_bytes=0.0)
    assert held(None) - held(less) == pytest.approx(places * 3 * kept / 4)
    more = Footprint(kept_bytes=gathered + 2 * kept, transient_bytes=0.0)
    assert held(more) == held(None)


def test_compiled_ticks_are_all_that_a_layer_takes_in_them(graph: Any) -> None:
    cluster, candidate = replace(CLUSTER, platform="tpu"), Candidate(num_stages=2, num_microbatches=2, schedule="gpipe")
    told = profile(graph, cluster, source="described")
    entries = tuple(
        (key, replace(cost, ticking=Footprint(kept_bytes=1e6, transient_bytes=0.0))) for key, cost in told.entries
    )
    tables = estimate(graph, cluster, replace(told, entries=entries)).equal_tables(candidate)
    plain = estimate(graph, cluster, told)
    slot, k = tables.run + 1, tables.strategies.index(Strategy(data=4))
    kept = plain.layer_cost(find_run(graph, 2).first, Strategy(data=4), num_microbatches=2).kept_bytes
    without = plain.equal_tables(candidate).memory_bytes[slot, k]
    assert tables.memory_bytes[slot, k] - without == pytest.approx(3 * (1e6 - kept))
    assert tables.transient_bytes[slot, k] == 0.0
    # other ticks than those of 1F1B: what one of them works with is not a share of what all keep
    other = replace(candidate, schedule="one_f_one_b")
    found = estimate(graph, cluster, replace(told, entries=entries)).equal_tables(other)
    assert found.transient_bytes[slot, k] == plain.equal_tables(other).transient_bytes[slot, k] > 0


def test_a_plan_of_one_program_asks_for_the_ticks_it_rests_on(graph: Any) -> None:
    cluster = replace(CLUSTER, platform="tpu")
    told, run = profile(graph, cluster, source="described"), find_run(graph, 2)

    def asked(executor: str, **ticking: Any) -> set[str]:
        known = {"origin": "compiled", "memory_origin": "compiled", **ticking}
        entries = tuple((key, replace(cost, **known)) for key, cost in told.entries)
        model = estimate(graph, cluster, replace(told, entries=entries, jax_version="0"))
        plan = solve(
            model, num_stages=2, num_microbatches=2, schedule="gpipe", executor=executor, strategy=Strategy(data=4)
        )
        return {key.signature for key in unmeasured(model, plan)}

    assert asked("program") == {graph.layers[run.first].signature}
    assert asked("stages") == set()
    assert asked("program", ticking=Footprint(kept_bytes=1.0, transient_bytes=0.0)) == set()


def test_a_tick_works_with_one_layer_at_a_time(graph: Any) -> None:
    """What its backward takes alone, where a compiler said so; the sums and what is handed on are told apart."""
    candidate, strategy = Candidate(num_stages=2, num_microbatches=2, schedule="gpipe"), Strategy(fsdp=4)
    told, layer = profile(graph, CLUSTER, source="described"), graph.layers[find_run(graph, 2).first]
    known = {"marginal_bytes": 3e6, "transient_bytes": 1e6, "alone_bytes": 5e6}
    entries = tuple((key, replace(cost, **known)) for key, cost in told.entries)
    tables = estimate(graph, CLUSTER, replace(told, entries=entries)).equal_tables(candidate)
    sums = sum(graph.params[p].nbytes for p in layer.params) / 4
    moved = sum(graph.values[v].nbytes for v in layer.reads) / 2 / 4
    working = tables.transient_bytes[tables.run + 1, tables.strategies.index(strategy)]
    assert working == pytest.approx(5e6 - sums - moved)


def test_slots_take_strategies_of_their_own_where_memory_is_short(graph: Any) -> None:
    found = {}
    for limit in range(18000, 23000, 1000):
        try:
            plan = solve(
                estimate(graph, replace(CLUSTER, memory_limit=limit)),
                executor="program",
                num_stages=2,
                num_microbatches=4,
            )
        except InfeasibleError:
            continue
        assert [c.strategy for c in plan.layers[2:4]] == [c.strategy for c in plan.layers[4:6]]
        assert max(plan.prediction.peak_bytes) <= limit * (1 + 1e-6)
        found[limit] = (plan.layers[2].strategy, plan.layers[3].strategy, plan.prediction.step_time_s)
    times = [t for _, _, t in found.values()]
    assert times == sorted(times, reverse=True)
    assert any(a != b for a, b, _ in found.values())


def test_both_executors_are_priced_and_the_plan_says_why(graph: Any) -> None:
    costs = estimate(graph, CLUSTER)
    best = {name: solve(costs, executor=name, num_stages=2) for name in ("auto", "stages", "program")}
    assert best["program"].executor == "program"
    assert best["stages"].executor == "stages"
    times = {name: plan.prediction.step_time_s for name, plan in best.items()}
    assert times["auto"] == min(times.values())
    assert best["auto"].certificate.gap == 0.0
    assert any("program" in note for note in best["auto"].certificate.notes)
    slow = replace(CLUSTER, dispatch_s=1.0)  # a program a stage and micro-batch that take a second to start
    plan = solve(estimate(graph, slow), num_stages=2, num_microbatches=2)
    assert plan.executor == "program"
    assert dict(plan.certificate.baselines)["a_program_for_each_stage"] > plan.prediction.step_time_s
    assert [c.strategy for c in plan.layers[2:4]] == [c.strategy for c in plan.layers[4:6]]


def test_one_program_may_be_a_single_stage(graph: Any) -> None:
    plan = solve(estimate(graph, CLUSTER), executor="program")
    assert plan.num_stages == 1 or plan.executor == "program"


def test_strategies_are_pinned_and_memory_is_kept(graph: Any) -> None:
    costs = estimate(graph, CLUSTER)
    plan = solve(costs, executor="program", num_stages=2, strategy=Strategy(fsdp=4))
    assert {choice.strategy.fsdp for choice in plan.layers} == {4}
    with pytest.raises(InfeasibleError) as error:
        solve(estimate(graph, replace(CLUSTER, memory_limit=1000)), executor="program", num_stages=2)
    assert np.isfinite(error.value.needed_bytes)
    with pytest.raises(OptionError):
        solve(costs, executor="both")
    with pytest.raises(OptionError):
        solve(costs, executor="program", num_stages=3)


def test_weights_cast_in_every_turn_are_copied_once() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            def turn(x: Any, own: Any) -> Any:
                return x + (x.astype(jnp.bfloat16) @ own.astype(jnp.bfloat16)).astype(jnp.float32), None

            return jnp.mean(lax.scan(turn, batch @ params["in"], params["layers"])[0])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"in": jnp.ones((4, 8)), "layers": jnp.ones((4, 8, 8))}
    graph = trace(step, params, np.ones((8, 4), np.float32))
    model = estimate(graph, CLUSTER)
    run = find_run(graph, 2)
    assert run.is_loop
    assert TurnCosts(model, run.first).cast == 0.5


def test_stages_that_only_one_program_may_have_are_refused_for_what_is_wrong() -> None:
    state, step, batch = support.nnx_stack()
    costs = estimate(trace(step, state, batch), CLUSTER)
    with pytest.raises(OptionError, match=r"examples meet .*; use one of 1 micro-batches"):
        solve(costs, num_stages=4, num_microbatches=2)
    assert solve(costs, num_stages=4, num_microbatches=1).executor == "program"
