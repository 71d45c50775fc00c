"""A plan used without its runtime: Flax's rules, plain jit, orbax's arguments, data iterators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding

import uniap_jax as uniap
from uniap_jax.core.exports import mesh_shape
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.runtime import ParallelStep

WIDTH, BATCH = 16, 8


class Block(nn.Module):
    """A feed-forward block with logical names, as T5X and Flax's examples write them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        up = self.param("up", nn.with_logical_partitioning(init, ("embed", "mlp")), (WIDTH, 4 * WIDTH))
        down = self.param("down", nn.with_logical_partitioning(init, ("mlp", "embed")), (4 * WIDTH, WIDTH))
        x = nn.with_logical_constraint(x, ("batch", "embed"))
        return x + jnp.tanh(x @ up) @ down


class Model(nn.Module):
    """Two blocks and a mean."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Block()(Block()(x)).mean(-1)


def train_step(state: train_state.TrainState, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    """One step on a squared error."""

    def loss_fn(params: Any) -> jax.Array:
        return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


MODEL, TX = Model(), optax.sgd(0.1, momentum=0.9)


def make_state() -> train_state.TrainState:
    """Parameters without their boxes, and momentum."""
    params = nn.unbox(MODEL.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"])
    return train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def rows(seed: int) -> dict[str, np.ndarray]:
    """A batch as a data iterator gives it."""
    x = np.random.default_rng(seed).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": x.sum(-1)}


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return uniap.trace(train_step, make_state(), rows(0))


def planned(graph: LayerGraph, strategy: str) -> ParallelStep:
    """The step under a pinned strategy, one stage, all devices."""
    costs = uniap.estimate(graph, uniap.local_cluster())
    plan = uniap.solve(costs, num_stages=1, num_microbatches=1, strategy=parse_strategy(strategy))
    return uniap.compile_plan(graph, plan, donate=False)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses of three steps under plain `jax.jit` on one device."""
    state, losses = make_state(), []
    for seed in range(3):
        state, metrics = jax.jit(train_step)(state, rows(seed))
        losses.append(float(metrics["loss"]))
    return losses


def test_logical_axis_rules_split_a_flax_model_as_the_plan_does(graph: LayerGraph, alone: list[float]) -> None:
    plan = planned(graph, "fsdp=2,tensor=4").plan
    shape = mesh_shape(plan, 0)
    mesh = Mesh(np.asarray(jax.devices()).reshape(tuple(shape.values())), tuple(shape))
    rules = plan.to_logical_axis_rules(layer=0)
    boxed = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    state = make_state()
    state = state.replace(params=jax.device_put(state.params, shardings))
    up = state.params["Block_0"]["up"]
    assert up.sharding.shard_shape(up.shape) == (WIDTH // 2, 4 * WIDTH // 4)
    losses = []
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        for seed in range(3):
            state, metrics = jax.jit(train_step)(state, rows(seed))
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_shardings_serve_plain_jit(graph: LayerGraph, alone: list[float]) -> None:
    step = planned(graph, "fsdp=8")
    shardings = step.shardings()
    state = make_state()
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    batch = dict.fromkeys(rows(0), step.batch_sharding)
    compiled = jax.jit(train_step, in_shardings=(shardings, batch), out_shardings=(shardings, None))
    losses = []
    for seed in range(3):
        state, metrics = compiled(state, rows(seed))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    kernel = state.params["Block_1"]["down"]
    assert kernel.sharding.shard_shape(kernel.shape) == (4 * WIDTH // 8, WIDTH)
    state, _ = step(state, rows(3))  # and back under the plan: everything lies where it is wanted
    assert state.params["Block_1"]["down"].sharding == kernel.sharding


@pytest.mark.filterwarnings("ignore")  # the checkpoint library's own
def test_orbax_restores_to_where_the_plan_wants_it(graph: LayerGraph, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    step = planned(graph, "fsdp=4,tensor=2")
    params = make_state().params
    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(1, args=ocp.args.StandardSave(params))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(step.abstract_state().params))
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(step.shardings().params), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def test_a_data_iterator_places_batches_ahead_of_the_step(graph: LayerGraph, alone: list[float]) -> None:
    step = planned(graph, "data=8")

    def placed(batches: Iterator[dict[str, np.ndarray]]) -> Iterator[Any]:
        for batch in batches:
            yield jax.tree.map(lambda x: jax.device_put(x, step.batch_sharding), batch)

    state, losses = step.place(make_state(), rows(0)), []
    for batch in placed(rows(seed) for seed in range(3)):
        assert batch["x"].sharding.shard_shape(batch["x"].shape) == (1, WIDTH)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_grain_feeds_a_planned_step(graph: LayerGraph) -> None:
    grain = pytest.importorskip("grain.python")
    examples = [{"x": rows(i)["x"][0], "y": rows(i)["y"][0]} for i in range(2 * BATCH)]
    step = planned(graph, "data=8")
    data = grain.MapDataset.source(examples).batch(BATCH).to_iter_dataset()
    state, losses = step.place(make_state(), rows(0)), []
    for batch in data.map(lambda batch: jax.device_put(batch, step.batch_sharding)):
        assert isinstance(batch["x"].sharding, NamedSharding)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert len(losses) == 2
    first = {name: np.stack([e[name] for e in examples[:BATCH]]) for name in ("x", "y")}
    np.testing.assert_allclose(losses[0], float(train_step(make_state(), first)[1]["loss"]), rtol=1e-5)
