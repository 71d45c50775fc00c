"""Gradients of data-parallel layers meet once per step, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from runtime_support import Decoder, assert_as_one_device, decoder_state, decoder_step, make_plan, token_batch
from uniap_jax import frontend, runtime
from uniap_jax.core.graph import LayerGraph
from uniap_jax.runtime.homes import lay_out
from uniap_jax.runtime.replicas import Ways, _as_seen, replicas_of
from uniap_jax.runtime.verify import count_collectives

TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return frontend.trace(decoder_step, decoder_state(TX), token_batch())


def collectives(step: runtime.ParallelStep) -> dict[str, dict[str, int]]:
    return {p.name: count_collectives(p.compiled.as_text()) for p in step.programs}


def test_no_micro_batch_of_a_stage_reduces(graph: LayerGraph) -> None:
    step = runtime.compile(graph, make_plan(graph, stages=2, strategies="data=2", microbatches=2))
    found = collectives(step)
    assert found["stage_0_forward"] == found["stage_0_backward"] == found["stage_1_forward_backward"] == {}
    for stage in (0, 1):
        assert set(found[f"stage_{stage}_reduce"]) == {"all-reduce"}
    assert "all-reduce" in found["stage_1_results"]  # of the loss, a mean over the replicas


def test_no_micro_batch_of_one_stage_reduces(graph: LayerGraph) -> None:
    """The loop over the micro-batches holds no collective at all: the loss too meets after it."""
    plan = make_plan(graph, strategies="data=4", microbatches=2)
    (program,) = runtime.compile(graph, plan).programs
    computations = program.compiled.as_text().split("\n\n")
    with_reduce = [c.strip().split("(")[0].strip() for c in computations if " all-reduce(" in c]
    assert len(with_reduce) == 1
    assert with_reduce[0].startswith("ENTRY")


@pytest.mark.parametrize(
    "plan",
    [
        {"strategies": "data=4", "microbatches": 2},
        {"strategies": ("data=4", "data=2,fsdp=2"), "microbatches": 2},
        {"strategies": ("data=2,fsdp=2,zero=1", "data=2,fsdp=2,keep=inputs"), "microbatches": 4},
        {"stages": 2, "strategies": ("data=4", "data=2,fsdp=2,zero=2"), "microbatches": 2},
    ],
    ids=str,
)
def test_numbers_are_those_of_one_device(plan: dict[str, Any]) -> None:
    state, batch = decoder_state(TX, Decoder(dropout=0.4)), token_batch(16)
    graph = frontend.trace(decoder_step, state, batch)
    layout = lay_out(graph, make_plan(graph, **plan), jax.devices())
    found = [replicas_of(layout, s) for s in range(plan.get("stages", 1))]
    assert {i for r in found for i in r.layers} == set(range(len(graph.layers)))
    assert all(r.params for r in found)
    assert_as_one_device(decoder_step, lambda: state, batch, graph=graph, **plan)


def test_one_row_each() -> None:
    state = decoder_state(TX, Decoder(dropout=0.4))
    assert_as_one_device(decoder_step, lambda: state, token_batch(), strategies="data=4", microbatches=2)


def test_a_batch_that_cannot_be_cut_so_finely_stays_whole(graph: LayerGraph) -> None:
    assert _as_seen(graph, 3) is None
    seen = _as_seen(graph, 8)
    assert seen is not None
    assert [layer.params for layer in seen.layers] == [layer.params for layer in graph.layers]


def test_layouts_of_a_replica() -> None:
    ways = Ways(count=2, axes=("x0",))
    assert ways.inside(PartitionSpec(None, ("x0", "x1"))) == PartitionSpec(None, ("x1",))
    assert ways.inside(PartitionSpec("x0")) == PartitionSpec(None)
    assert ways.lead(PartitionSpec(None, "x1")) == PartitionSpec(("x0",), None, ("x1",))


@pytest.mark.parametrize("plan", [{"strategies": "data=4"}, {"strategies": "fsdp=4", "microbatches": 2}], ids=str)
def test_where_nothing_is_put_off(graph: LayerGraph, plan: dict[str, Any]) -> None:
    found = replicas_of(lay_out(graph, make_plan(graph, **plan), jax.devices()), 0)
    assert not found.layers
    assert not found.params


def test_layers_that_split_otherwise_reduce_at_once(graph: LayerGraph) -> None:
    """The table is read by layers of both kinds, so its gradient is not kept apart."""
    plan = make_plan(graph, strategies=("data=4", "data=2,tensor=2"), microbatches=2)
    found = replicas_of(lay_out(graph, plan, jax.devices()), 0)
    assert {i for i, layer in enumerate(plan.layers) if layer.strategy.tensor == 1} == set(found.layers)
    assert 0 < len(found.params) < len(graph.params)
    assert_as_one_device(
        decoder_step,
        lambda: decoder_state(TX),
        token_batch(),
        strategies=("data=4", "data=2,tensor=2"),
        microbatches=2,
    )


def test_results_without_rows_stay_apart(graph: LayerGraph) -> None:
    """The decoder gives its loss, and a number for each example."""
    found = replicas_of(lay_out(graph, make_plan(graph, strategies="data=4", microbatches=2), jax.devices()), 0)
    loss, each = graph.results
    assert graph.values[each].batch_dim == 0
    assert set(found.results) == {loss}


def test_convolutions_stay_whole() -> None:
    model = nn.Sequential([nn.Conv(4, (3,)), nn.relu, nn.Conv(2, (3,))])
    batch = np.ones((8, 6, 3), np.float32)
    start = model.init(jax.random.key(0), batch)

    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, batch) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    graph = frontend.trace(train_step, start, batch)
    plan = make_plan(graph, strategies="data=2", microbatches=2)
    mapped = replicas_of(lay_out(graph, plan, jax.devices()), 0).layers
    convolved = {i for i, layer in enumerate(graph.layers) if "conv_general_dilated" in str(layer.jaxpr)}
    assert convolved
    assert not convolved & set(mapped)
    assert_as_one_device(train_step, lambda: start, batch, strategies="data=2", microbatches=2)
