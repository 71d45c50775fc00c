"""Equal stages as one program: the same numbers as one device, one compilation, memory of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import uniform_support as support
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.frontend import trace
from uniap_jax.runtime.uniform import compile_uniform


def check(case: support.Case, plan: Any) -> support.Difference:
    found = support.difference(case, plan)
    assert found.loss <= support.LOSS_TOLERANCE
    assert found.grad <= support.GRAD_TOLERANCE, found.leaf
    assert found.output <= 1e-3  # AdamW after one step: a gradient near zero turns rounding into a step of lr
    return found


@pytest.fixture(scope="module")
def gpt() -> support.Case:
    return support.make_case(support.gpt())


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "strategy", "schedule"),
    [(4, 4, "fsdp=2", "one_f_one_b"), (2, 2, "data=2,tensor=2,keep=inputs", "gpipe")],
)
def test_gpt_with_dropout_and_tied_embeddings_equals_one_device(
    gpt: support.Case, num_stages: int, num_microbatches: int, strategy: str, schedule: str
) -> None:
    check(gpt, support.pinned(gpt.graph, num_stages, num_microbatches, strategy, schedule))


def test_remat_blocks() -> None:
    case = support.make_case(support.gpt(remat=True, layers=2))
    check(case, support.pinned(case.graph, 2, 2, "fsdp=2,tensor=2", "one_f_one_b"))


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "strategy", "schedule"),
    [
        (4, 4, "data=2", "gpipe"),
        (2, 8, "data=1", "one_f_one_b"),  # more micro-batches than places where they wait
        (4, 2, "tensor=2", "one_f_one_b"),  # fewer
        (2, 2, "fsdp=4,zero=1,keep=dots", "gpipe"),
        (2, 2, "fsdp=4,zero=2,keep=inputs", "one_f_one_b"),
        (4, 1, "fsdp=2", "one_f_one_b"),
    ],
)
def test_residual_layers_equal_one_device(num_stages: int, num_microbatches: int, strategy: str, schedule: str) -> None:
    case = support.make_case(support.residual(aux=False))
    check(case, support.pinned(case.graph, num_stages, num_microbatches, strategy, schedule))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("aux", [False, True])
def test_relayed_shared_and_collected_values(schedule: str, aux: bool) -> None:
    case = support.make_case(support.residual(aux=aux))
    found = check(case, support.pinned(case.graph, 4, 2, "data=2", schedule))
    kinds = {s.kind for s in found.program.pipeline.stages.run.slots}
    assert kinds == ({"chain", "relay", "extra"} if aux else {"chain", "relay"})
    assert len(found.program.pipeline.stages.run.shared) == 1


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_what_a_bubble_computes_is_left_out(schedule: str) -> None:
    case = support.make_case(support.residual(aux=False, bad=True))
    check(case, support.pinned(case.graph, 2, 4, "data=2", schedule))


def test_bfloat16_layers() -> None:
    case = support.make_case(support.residual(aux=False, dtype=jnp.bfloat16))
    found = support.difference(case, support.pinned(case.graph, 4, 2, "fsdp=2", "one_f_one_b"))
    assert found.loss <= 2e-2
    assert found.grad <= 2e-2, found.leaf


def test_state_is_split_over_stages(gpt: support.Case) -> None:
    graph = gpt.graph
    program = compile_uniform(graph, support.pinned(graph, 4, 4, "data=2", "gpipe"), jax.devices())
    total = split = 0
    for value, sharding in zip(graph.step.state, program.state_shardings, strict=True):
        total += value.nbytes
        split += int(np.prod(sharding.shard_shape(value.shape))) * value.nbytes // max(value.size, 1)
    assert split < 1.05 * total / 4


def following(graph: Any, leaves: list[Any], outputs: list[Any]) -> tuple[list[Any], float]:
    """State leaves after a step, and its loss: the only output that replaces no leaf."""
    after = list(leaves)
    for leaf, out in zip(graph.step.output_leaf, outputs, strict=True):
        if leaf is not None:
            after[leaf] = out
    return after, float(outputs[graph.step.output_leaf.index(None)])


def test_three_steps_of_one_compiled_program() -> None:
    case = support.make_case(support.gpt(layers=2))
    graph = case.graph
    plan = support.pinned(graph, 2, 2, "data=2", "one_f_one_b")
    step, leaves, expected = jax.jit(graph.step.flat), case.state, []
    for _ in range(3):
        leaves, loss = following(graph, leaves, step(*leaves, *case.batch))
        expected.append(loss)
    replaced = [leaf for leaf in graph.step.output_leaf if leaf is not None]
    program = compile_uniform(graph, plan, jax.devices(), donated=replaced)
    leaves = [jax.device_put(x, s) for x, s in zip(case.state, program.state_shardings, strict=True)]
    losses = []
    for _ in range(3):  # compiled ahead of time: a leaf that came back elsewhere would raise, not compile again
        leaves, loss = following(graph, leaves, program(leaves, case.batch))
        losses.append(loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[2] < losses[1] < losses[0]


def temporary_bytes(schedule: str, num_microbatches: int) -> int:
    state, step, batch = support.residual(aux=False, rows=2 * num_microbatches)
    graph = trace(step, state, batch)
    plan = support.pinned(graph, 4, num_microbatches, "data=2", schedule)
    return int(compile_uniform(graph, plan, jax.devices()).programs[0].compiled.memory_analysis().temp_size_in_bytes)


def test_memory_of_one_f_one_b_does_not_grow_with_microbatches() -> None:
    rows = (32 - 8) * 2 * (8 + 4) * 4  # bytes of the micro-batches that were added: the batch itself is there whole
    assert temporary_bytes("one_f_one_b", 32) - temporary_bytes("one_f_one_b", 8) <= rows
    assert temporary_bytes("gpipe", 32) - temporary_bytes("gpipe", 8) > 4 * rows


def test_what_is_kept_between_forward_and_backward(gpt: support.Case) -> None:
    graph = gpt.graph
    kept = {}
    for keep in ("all", "dots", "inputs"):
        plan = support.pinned(graph, 4, 4, f"data=2,keep={keep}", "gpipe")
        layer = compile_uniform(graph, plan, jax.devices()).pipeline.stages.layers[0]
        kept[keep] = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in layer.kept)
        shapes = [tuple(a.shape) for a in layer.kept]
        weights = {v.shape for v in graph.params if len(v.shape) == 2}
        assert not weights & set(shapes)  # parameters are handed in again
        assert (support.SEQUENCE, support.SEQUENCE) not in shapes  # the mask is made again
    assert kept["inputs"] == 2 * support.SEQUENCE * support.WIDTH * 4
    assert kept["inputs"] < kept["dots"] < kept["all"]


def test_unequal_stages_say_which(gpt: support.Case) -> None:
    graph = gpt.graph
    plan = support.pinned(graph, 4, 4, "data=2", "gpipe", stages=[0, 0, 1, 1, 2, 3])
    with pytest.raises(StrategyError) as error:
        compile_uniform(graph, plan, jax.devices())
    assert error.value.stage == 3
    plan = support.pinned(graph, 4, 4, "data=2", "gpipe")
    layers = list(plan.layers)
    layers[3] = replace(layers[3], strategy=parse_strategy("tensor=2"))
    with pytest.raises(StrategyError) as error:
        compile_uniform(graph, replace(plan, layers=tuple(layers)), jax.devices())
    assert error.value.stage == layers[3].stage
    assert "tensor=2" in str(error.value)
    assert "data=2" in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "schedule"),
    [
        ("data=4,keep=inputs", "data=4", "one_f_one_b"),
        ("fsdp=2,tensor=2", "data=4,keep=dots", "gpipe"),
        ("data=2,tensor=2", "fsdp=4,zero=2,keep=inputs", "one_f_one_b"),
    ],
)
def test_slots_of_a_stage_have_strategies_of_their_own(first: str, second: str, schedule: str) -> None:
    case = support.make_case(support.residual(aux=True))
    plan = support.pinned(case.graph, 2, 2, first, schedule)
    kind = max((x.signature for x in case.graph.layers), key=[x.signature for x in case.graph.layers].count)
    equal = [x.index for x in case.graph.layers if x.signature == kind]
    layers = list(plan.layers)
    for i in equal[1::2]:  # the second of each stage
        layers[i] = replace(layers[i], strategy=parse_strategy(second))
    found = check(case, replace(plan, layers=tuple(layers)))
    assert [str(g.strategy) for g in found.program.pipeline.stages.run.groups] == [first, second]


def test_unequal_devices_and_one_stage_are_refused(gpt: support.Case) -> None:
    graph = gpt.graph
    plan = support.pinned(graph, 2, 2, "data=2", "gpipe")
    with pytest.raises(StrategyError) as error:
        compile_uniform(graph, replace(plan, stage_devices=((0, 1), (2, 3, 4, 5))), jax.devices())
    assert error.value.devices == (2, 4)
    with pytest.raises(StrategyError) as error:
        compile_uniform(graph, replace(plan, num_stages=1), jax.devices())
    assert error.value.num_stages == 1
    with pytest.raises(StrategyError) as error:
        compile_uniform(graph, support.pinned(graph, 2, 2, "data=2,context=2", "gpipe"), jax.devices())
    assert error.value.strategy == "data=2,context=2"
