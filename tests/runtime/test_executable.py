"""A planned step behaves as the user's own: state, donation, placement, second calls."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from runtime_support import decoder_state, decoder_step, make_plan, numbers, run_steps, token_batch, worst
from uniap_jax import frontend, runtime
from uniap_jax.core.errors import ExecutionError, PlanMismatchError
from uniap_jax.core.graph import LayerGraph

PLANS: list[dict[str, Any]] = [
    {"strategies": "fsdp=2,tensor=2", "microbatches": 2},
    {"stages": 2, "strategies": "fsdp=2", "microbatches": 2},
]
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(decoder_step, decoder_state(TX), token_batch())


@pytest.fixture(scope="module", params=PLANS, ids=["one stage", "two stages"])
def step(request: pytest.FixtureRequest, graph: LayerGraph) -> runtime.ParallelStep:
    return runtime.compile(graph, make_plan(graph, **request.param))


@pytest.fixture
def compilations() -> Any:
    """Backend compilations since the test began."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_second_call_compiles_nothing(step: runtime.ParallelStep, compilations: list[str]) -> None:
    batch = token_batch()
    state, _ = step(step.place(decoder_state(TX), batch), batch)
    before = len(compilations)
    for _ in range(2):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    assert len(compilations) == before


def test_outputs_lie_as_planned(step: runtime.ParallelStep) -> None:
    batch = token_batch()
    state, _ = step(decoder_state(TX), batch)
    for leaf, want in zip(jax.tree.leaves(state), step.in_shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim)
    if step.plan.num_stages == 2:
        devices = {d.id for d in state.params["Block_2"]["Dense_0"]["kernel"].sharding.device_set}
        assert devices == set(step.plan.stage_devices[1])


def test_unplaced_state_is_placed_once_with_one_line(
    step: runtime.ParallelStep, caplog: pytest.LogCaptureFixture
) -> None:
    batch = token_batch()
    with caplog.at_level(logging.INFO, logger="uniap_jax"):
        state, _ = step(decoder_state(TX), batch)
        step(state, batch)
    lines = [r.getMessage() for r in caplog.records if "placed" in r.getMessage()]
    assert len(lines) == 1
    assert "step.place(state, batch)" in lines[0]


def test_case_38_a_key_committed_elsewhere_is_placed() -> None:
    def noisy(state: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            return jnp.mean((batch @ w + jax.random.normal(state["key"], (4,))) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": state["w"] - 0.1 * grads, "key": jax.random.split(state["key"])[0]}, loss

    batch = np.ones((8, 6), np.float32)
    state = {"w": jnp.ones((6, 4)), "key": jax.random.key(3)}
    graph = frontend.trace(noisy, state, batch)
    planned = runtime.compile(graph, make_plan(graph, strategies="data=4"))
    expected, want = run_steps(jax.jit(lambda *a: noisy(*a)), state, batch, 2)
    committed = {**state, "key": jax.device_put(state["key"], jax.devices()[3])}
    got_state, got = run_steps(planned, committed, batch, 2)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert worst(numbers(got_state), numbers(expected)) < 1e-6


def test_case_33_a_state_given_up_is_named(step: runtime.ParallelStep) -> None:
    batch = token_batch()
    state = step.place(decoder_state(TX), batch)
    step(state, batch)
    with pytest.raises(ExecutionError, match="was given up to an earlier call") as caught:
        step(state, batch)
    assert caught.value.leaf.startswith("[0].")


def test_the_users_own_arrays_survive_placement(step: runtime.ParallelStep) -> None:
    batch, mine = token_batch(), decoder_state(TX)
    step(step.place(mine, batch), batch)
    step(mine, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine.params))
    host = jax.device_get(mine)
    kept = jax.tree.map(np.array, host)
    step(host, batch)
    assert worst(host, kept) == 0.0


def test_without_donation_a_state_can_be_used_twice(graph: LayerGraph) -> None:
    batch = token_batch()
    planned = runtime.compile(graph, make_plan(graph, stages=2), donate=False)
    state = planned.place(decoder_state(TX), batch)
    first, second = planned(state, batch), planned(state, batch)
    assert worst(first, second) == 0.0


class Averaged(TrainState):
    ema: Any = None


def averaged_step(state: Any, batch: Any) -> Any:
    state, metrics = decoder_step(state, batch)
    return state.replace(ema=jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, state.ema, state.params)), metrics


@pytest.mark.parametrize("stages", [1, 2])
def test_case_32_one_array_at_two_places(stages: int, caplog: pytest.LogCaptureFixture) -> None:
    batch, plain = token_batch(), decoder_state(optax.sgd(0.1))
    state = Averaged.create(apply_fn=plain.apply_fn, params=plain.params, tx=plain.tx, ema=plain.params)
    graph = frontend.trace(averaged_step, state, batch)
    planned = runtime.compile(graph, make_plan(graph, stages=stages))
    placed = planned.place(state, batch)
    twice = placed.replace(ema=placed.params)
    with caplog.at_level(logging.WARNING, logger="uniap_jax"):
        got, _ = planned(twice, batch)
    expected, _ = jax.jit(lambda *a: averaged_step(*a))(state, batch)
    assert worst(got, expected) < 2e-6
    (line,) = [r.getMessage() for r in caplog.records]
    assert "[0].ema['Block_0']['Dense_0']['bias'] is [0].params['Block_0']['Dense_0']['bias']" in line


@pytest.mark.parametrize("plan", PLANS)
def test_case_27_under_a_mesh_of_the_users(graph: LayerGraph, plan: dict[str, Any]) -> None:
    batch = token_batch()
    start = decoder_state(TX)
    expected, _ = jax.jit(lambda *a: decoder_step(*a))(start, batch)
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        planned = runtime.compile(graph, make_plan(graph, **plan))
        state = planned.place(start, batch)
        for k in range(2):
            state, metrics = planned(state, {k: jnp.asarray(v) for k, v in batch.items()})
            if k == 0:
                assert worst(state.params, expected.params) < 2e-4
    assert np.isfinite(float(metrics["loss"]))


def test_case_16_a_state_created_sharded(step: runtime.ParallelStep) -> None:
    batch, template = token_batch(), decoder_state(TX)

    def create_state(key: jax.Array) -> Any:
        model = template.apply_fn.__self__
        params = model.init(key, jnp.asarray(batch["x"]), train=False)["params"]
        return TrainState.create(apply_fn=template.apply_fn, params=params, tx=TX).replace(step=jnp.int32(0))

    state = step.init(create_state, jax.random.key(5))
    for leaf, want in zip(jax.tree.leaves(state), step.in_shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim)
    assert worst(state, create_state(jax.random.key(5))) < 1e-6
    _, metrics = step(state, batch)
    assert np.isfinite(float(metrics["loss"]))


def test_creating_another_state_is_refused(step: runtime.ParallelStep) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        step.init(lambda: {"w": jnp.ones(3)})
    assert caught.value.got == 1


def test_case_34_evaluation_between_steps(graph: LayerGraph) -> None:
    batch = token_batch()
    planned = runtime.compile(graph, make_plan(graph, strategies="fsdp=4"))

    @jax.jit
    def evaluate(params: Any, tokens: jax.Array) -> jax.Array:
        return decoder_state(TX).apply_fn({"params": params}, tokens, train=False).sum()

    state = planned.place(decoder_state(TX), batch)
    for _ in range(2):
        state, _ = planned(state, batch)
        assert np.isfinite(float(evaluate(state.params, batch["x"])))


def test_case_34_evaluation_of_a_gathered_pipeline_state(graph: LayerGraph) -> None:
    batch = token_batch()
    planned = runtime.compile(graph, make_plan(graph, stages=2, strategies="fsdp=2"))
    state = planned.place(decoder_state(TX), batch)
    for _ in range(2):
        state, _ = planned(state, batch)
        whole = planned.gather(state.params)
        assert {d for x in jax.tree.leaves(whole) for d in x.sharding.device_set} == {jax.devices()[0]}
        assert worst(whole, state.params) == 0.0


def test_metrics_of_different_stages_can_be_used_together(graph: LayerGraph) -> None:
    planned = runtime.compile(graph, make_plan(graph, stages=2))
    state, metrics = planned(decoder_state(TX), token_batch())
    assert np.isfinite(float(metrics["loss"] + optax.tree.norm(metrics["grads"]) + state.step))


def test_abstract_state(step: runtime.ParallelStep) -> None:
    shapes = step.abstract_state()
    state = step.place(decoder_state(TX), token_batch())
    assert jax.tree.structure(shapes.params) == jax.tree.structure(state.params)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


def test_lowered_programs_and_their_memory(step: runtime.ParallelStep) -> None:
    names = [p.name for p in step.programs]
    lowered, memory = step.lower(), step.memory_analysis()
    if step.plan.num_stages == 1:
        assert names == ["train_step"]
        assert "train_step" in lowered.as_text()
        assert memory.argument_size_in_bytes > 0
    else:
        assert {"stage_0_backward", "stage_1_forward_backward", "update_0_join", "update_1_stage_1"} <= set(names)
        assert set(memory) == set(names)


def test_a_batch_on_the_devices_is_taken_as_it_is(step: runtime.ParallelStep) -> None:
    batch = token_batch()
    expected, _ = step(decoder_state(TX), batch)
    for placed in (jax.device_put(batch, step.batch_sharding), jax.device_put(batch, jax.devices()[5])):
        got, _ = step(decoder_state(TX), placed)
        assert worst(got, expected) == 0.0


def test_two_equal_calls_give_equal_bits(step: runtime.ParallelStep) -> None:
    first = step(decoder_state(TX), token_batch())
    assert worst(first, step(decoder_state(TX), token_batch())) == 0.0


def test_plan_of_another_model(graph: LayerGraph) -> None:
    import dataclasses

    plan = make_plan(graph)
    other = dataclasses.replace(plan, graph_fingerprint="0" * 32)
    with pytest.raises(PlanMismatchError, match="another model"):
        runtime.compile(graph, other)
    with pytest.raises(PlanMismatchError, match="batch 16") as caught:
        runtime.compile(graph, dataclasses.replace(plan, batch_size=16))
    assert (caught.value.expected, caught.value.got) == (16, 8)
    with pytest.raises(PlanMismatchError) as caught:
        runtime.compile(graph, make_plan(graph, strategies="data=8"), devices=jax.devices()[:4])
    assert (caught.value.needed, caught.value.available) == (8, 4)


def test_a_state_of_another_shape_is_named(step: runtime.ParallelStep) -> None:
    state = decoder_state(TX)
    odd = state.replace(params={**state.params, "LayerNorm_0": {"bias": jnp.ones(3), "scale": jnp.ones(16)}})
    with pytest.raises(PlanMismatchError, match="LayerNorm_0") as caught:
        step(odd, token_batch())
    assert "bias" in caught.value.leaf


def test_zero_stages_shard_what_they_say(graph: LayerGraph) -> None:
    def pieces(strategy: str) -> tuple[int, int]:
        planned = runtime.compile(graph, make_plan(graph, strategies=strategy))
        state = planned.place(decoder_state(TX), token_batch())
        kernel = state.params["Block_0"]["Dense_0"]["kernel"]
        moment = next(x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape)
        return kernel.size // kernel.addressable_data(0).size, moment.size // moment.addressable_data(0).size

    assert pieces("data=4") == (1, 1)
    assert pieces("fsdp=4,zero=1") == (1, 4)
    assert pieces("fsdp=4") == (4, 4)


def test_a_spec_is_on_our_own_mesh(step: runtime.ParallelStep) -> None:
    assert all(isinstance(s, NamedSharding) for s in step.in_shardings)
    assert isinstance(step.batch_sharding.spec, PartitionSpec)
