"""Stages hold what the schedule says, residuals hold no parameters, and arrays travel without a stop at the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import uniform_support
from runtime_support import (
    BATCH,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Decoder,
    assert_as_one_device,
    decoder_state,
    decoder_step,
    make_plan,
    numbers,
    token_batch,
)
from uniap_jax import frontend, runtime
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.sharding import make_mesh
from uniap_jax.runtime.activity import active_values, wanted_reads
from uniap_jax.runtime.homes import lay_out
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.stages import stage_specs
from uniap_jax.runtime.transfer import express, ways_of, wire

TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(decoder_step, decoder_state(TX), token_batch())


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_live_microbatches_are_those_of_the_schedule(graph: LayerGraph, schedule: str) -> None:
    plan = make_plan(graph, stages=4, microbatches=4, schedule=schedule)
    step = runtime.compile(graph, plan)
    pipeline = step.executor
    assert isinstance(pipeline, Pipeline)
    peaks = [0] * 4

    def watch(stage: int, task: Any, live: int) -> None:
        peaks[stage] = max(peaks[stage], live)

    pipeline.watch = watch
    step(decoder_state(TX), token_batch())
    assert tuple(peaks) == pipeline.schedule.in_flight == ((4, 4, 4, 4) if schedule == "gpipe" else (4, 3, 2, 1))


def test_nothing_of_a_step_stays_alive(graph: LayerGraph) -> None:
    batch = token_batch()
    step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=4))
    state, metrics = step(step.place(decoder_state(TX), batch), batch)
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    before = len(jax.live_arrays())
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    assert len(jax.live_arrays()) == before


def held_bytes(step: runtime.ParallelStep, stage: int) -> tuple[int, set[tuple[int, ...]]]:
    """Bytes and shapes of what a stage keeps per micro-batch besides its own inputs."""
    pipeline = step.executor
    assert isinstance(pipeline, Pipeline)
    built = pipeline.built.stages[stage]
    outs = jax.tree.leaves(built.forward.lowered.out_info)
    kept = [outs[i] for i in built.kept]
    return sum(int(np.prod(o.shape)) * o.dtype.itemsize for o in kept), {tuple(o.shape) for o in kept}


def live_bytes(device: jax.Device) -> int:
    here = [a for a in jax.live_arrays() if device in a.sharding.device_set]  # looking at shards would make arrays
    return sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in here)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_live_bytes_are_those_of_the_schedule(graph: LayerGraph, schedule: str) -> None:
    """At its worst a stage holds gradients and what is in flight, and beside it no more than comes in and goes out."""
    step, batch = runtime.compile(graph, make_plan(graph, stages=4, microbatches=4, schedule=schedule)), token_batch()
    pipeline, devices = step.executor, jax.devices()[:4]
    assert isinstance(pipeline, Pipeline)
    state, _ = step(step.place(decoder_state(TX), batch), batch)
    before, peaks = [live_bytes(d) for d in devices], [0] * 4

    def watch(stage: int, task: Any, live: int) -> None:
        peaks[:] = [max(p, live_bytes(d)) for p, d in zip(peaks, devices, strict=True)]

    pipeline.watch = watch
    jax.block_until_ready(step(state, batch))
    for stage, (built, spec) in enumerate(zip(pipeline.built.stages, pipeline.built.specs, strict=True)):
        flying, held = pipeline.schedule.in_flight[stage], held_bytes(step, stage)[0]
        gradients = sum(graph.params[p].nbytes for p in spec.params)
        stream = BATCH // 4 * TOKENS * WIDTH * 4
        at_the_doors = 4 * stream * (len(spec.reads) + len(spec.writes)) + sum(v.nbytes for v in graph.step.batch)
        table = 2 * VOCABULARY * WIDTH * 4  # the shared one, sent to the stage that has it not
        least = gradients + (flying - 1) * held
        assert least <= peaks[stage] - before[stage] <= least + held + at_the_doors + table + 64 * len(built.needs)


def test_residuals_hold_no_parameters() -> None:
    model = Decoder(dtype=jnp.bfloat16)
    state = decoder_state(TX, model)
    graph = frontend.trace(decoder_step, state, token_batch())
    step = runtime.compile(graph, make_plan(graph, stages=2, strategies="fsdp=2"))
    for stage in (0, 1):
        _, shapes = held_bytes(step, stage)
        assert not shapes & {tuple(p.shape) for p in graph.params if len(p.shape) > 1}


def test_keeping_inputs_keeps_less(graph: LayerGraph) -> None:
    sizes = {}
    for keep in ("all", "dots", "inputs"):
        plan = make_plan(graph, stages=2, strategies=f"data=1,keep={keep}")
        sizes[keep] = held_bytes(runtime.compile(graph, plan), 0)[0]
    assert sizes["inputs"] < sizes["dots"] < sizes["all"]
    assert sizes["inputs"] <= 3 * 8 * 4 * 16 * 4  # the stream between the layers of the stage


@pytest.mark.parametrize("strategy", ["data=2,keep=inputs", "fsdp=2,keep=inputs", "tensor=2,keep=inputs"])
def test_what_a_stage_reads_is_not_kept_in_another_shape(graph: LayerGraph, strategy: str) -> None:
    """Of the second stage's two layers the first keeps nothing: it reads what the stage holds anyway."""
    plan = make_plan(graph, stages=2, microbatches=2, schedule="gpipe", strategies=strategy)
    assert len(plan.stage_layers(1)) == 2
    stream = graph.values[graph.layers[plan.stage_layers(1)[0]].reads[0]].nbytes // 2
    assert held_bytes(runtime.compile(graph, plan), 1)[0] == stream


def test_parameters_and_moments_lie_on_their_stage_alone(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2, strategies="data=2"))
    for value, sharding in zip(graph.step.state, step.in_shardings, strict=True):
        ids = {d.id for d in sharding.device_set}
        if len(value.shape) > 0:
            assert ids in ({0, 1}, {2, 3})
        else:
            assert ids == {0, 1, 2, 3}


def test_a_shared_table_has_one_home(graph: LayerGraph) -> None:
    layout = lay_out(graph, make_plan(graph, stages=2), jax.devices())
    shared = [p for p, home in enumerate(layout.params) if len(home.stages) > 1]
    assert [graph.params[p].name for p in shared] == ["[0].params['Embed_0']['embedding']"]
    assert layout.params[shared[0]].stage == 0


def skipping_step(state: Any, batch: Any) -> Any:
    """The first activation is read on every later stage; a mask and an integer cross as well."""

    def loss_fn(params: Any) -> Any:
        x = jnp.tanh(batch @ params["a"])
        mask = x > 0
        first = x
        for name in ("b", "c", "d"):
            x = jnp.tanh(x @ params[name]) + first * 0.5
        place = jnp.argmax(first, axis=1)
        return jnp.mean(jnp.where(mask, x, 0.1 * x) ** 2) + 0.01 * jnp.mean(jnp.take_along_axis(x, place[:, None], 1))

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss, "grads": grads}


def skipping_state() -> Any:
    key = jax.random.key(0)
    return {n: 0.3 * jax.random.normal(jax.random.fold_in(key, i), (16, 16)) for i, n in enumerate("abcd")}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_values_that_skip_stages(stages: int, microbatches: int) -> None:
    batch = np.random.RandomState(3).randn(8, 16).astype(np.float32)
    graph = frontend.trace(skipping_step, skipping_state(), batch)
    assert len(graph.layers) >= stages
    assert_as_one_device(
        skipping_step, skipping_state, batch, graph=graph, stages=stages, microbatches=microbatches, strategies="data=2"
    )


def test_masks_and_integers_get_no_gradient() -> None:
    batch = np.ones((8, 16), np.float32)
    graph = frontend.trace(skipping_step, skipping_state(), batch)
    active = active_values(graph)
    for i, value in enumerate(graph.values):
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            assert i not in active
    everything = wanted_reads(graph, range(len(graph.layers)), {graph.results[0]})
    assert all(jnp.issubdtype(graph.values[v].dtype, jnp.inexact) for v in everything)


def test_specs_of_the_stages(graph: LayerGraph) -> None:
    specs = stage_specs(lay_out(graph, make_plan(graph, stages=2, strategies="data=2"), jax.devices()))
    assert specs[0].writes == specs[1].reads == specs[1].wanted == specs[0].active
    assert [s.has_loss for s in specs] == [False, True]
    assert specs[0].returns == dict.fromkeys(specs[0].writes, (1,))


@pytest.mark.parametrize(
    ("count", "ways", "expected"),
    [
        (4, (2, 1), PartitionSpec(("x0",), None)),
        (4, (4,), PartitionSpec(("x0", "x1"))),
        (4, (2, 2), PartitionSpec(("x0",), ("x1",))),
        (6, (2,), None),
        (6, (3,), PartitionSpec(("x0",))),
    ],
)
def test_layouts_that_a_mesh_can_express(count: int, ways: tuple[int, ...], expected: Any) -> None:
    mesh = make_mesh(jax.devices()[:count])
    assert express(mesh, ways) == expected
    if expected is not None:
        assert ways_of(mesh, expected, len(ways)) == ways


@pytest.mark.parametrize(
    ("here", "there", "cut"),
    [
        ((4, ("x0", "x1")), (4, ("x0",)), 4),
        ((4, ("x0",)), (4, ("x0", "x1")), 4),
        ((4, ("x0", "x1")), (2, ("x0",)), 2),
        ((2, ("x0",)), (4, ("x0", "x1")), 2),
        ((3, ("x0",)), (4, ("x0", "x1")), 1),
        ((1, ()), (4, ("x0", "x1")), 1),
    ],
)
def test_both_ends_agree_on_shards(here: Any, there: Any, cut: int) -> None:
    devices = jax.devices()
    source = NamedSharding(make_mesh(devices[: here[0]]), PartitionSpec(here[1] or None))
    target = NamedSharding(make_mesh(devices[4 : 4 + there[0]]), PartitionSpec(there[1] or None))
    leave, (arrive,) = wire(2, source, [target])
    shards = [sorted(set(map(str, s.devices_indices_map((12, 3)).values()))) for s in (leave, arrive)]
    assert shards[0] == shards[1]
    assert len(shards[0]) == cut
    sent = jax.device_put(jax.device_put(np.arange(36.0).reshape(12, 3), leave), arrive)
    np.testing.assert_array_equal(sent, np.arange(36.0).reshape(12, 3))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_case_14_a_pipeline_with_one_microbatch(schedule: str) -> None:
    assert_as_one_device(decoder_step, lambda: decoder_state(TX), token_batch(), stages=2, schedule=schedule)


def test_schedules_give_equal_bits(graph: LayerGraph) -> None:
    found = []
    for schedule in ("gpipe", "one_f_one_b"):
        step = runtime.compile(graph, make_plan(graph, stages=2, microbatches=4, schedule=schedule))
        found.append(jax.device_get(step(decoder_state(TX), token_batch())[0].params))
    assert jax.tree.all(jax.tree.map(np.array_equal, *found))


@pytest.mark.parametrize(
    ("sizes", "strategies"),
    [((6, 2), ("data=6", "data=3,fsdp=2", "fsdp=2", "tensor=2")), ((4, 2), ("data=2,tensor=2", "fsdp=4", "data=2"))],
    ids=["six and two", "four and two"],
)
def test_stages_of_different_sizes(sizes: tuple[int, int], strategies: tuple[str, ...]) -> None:
    first, second = sizes
    devices = (range(first), range(first, first + second))
    step, _ = assert_as_one_device(
        decoder_step,
        lambda: decoder_state(TX),
        token_batch(24),
        stages=2,
        microbatches=2,
        strategies=strategies,
        stage_devices=devices,
    )
    held = [{d.id for s in step.in_shardings if len(s.device_set) == n for d in s.device_set} for n in sizes]
    assert held == [set(d) for d in devices]


def test_state_is_brought_to_the_layout_in_which_a_stage_reads_it() -> None:
    """Counts of a scanned `nnx.Rngs` are stored as the weights beside them, and read whole."""
    built = uniform_support.nnx_stack()
    case = uniform_support.make_case(built)
    plan = make_plan(case.graph, stages=2, strategies=("data=4", "fsdp=2,tensor=2", "data=2,tensor=2"))
    step = runtime.compile(case.graph, plan)
    state = [jax.device_put(x, s) for x, s in zip(case.state, step.in_shardings, strict=True)]
    outputs = step.executor(state, case.batch)
    for expected, found in zip(numbers(case.outputs), numbers(outputs), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-5)
