"""What the search lists: few strategies, none whose absence changes the optimum."""

from __future__ import annotations

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniap_jax
from uniap_jax.core.cluster import load_cluster
from uniap_jax.core.errors import InfeasibleError
from uniap_jax.core.searched import StrategySpace, all_strategies, same_as, searched_strategies
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.cost_model.assemble import TableModel

B, S, E, F, H, X = 8, 8, 16, 64, 4, 4
KEEPS = ("all", "inputs")


def attention(p, x):
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, p[n]) for n in ("q", "k", "v"))
    say = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bqhd,hde->bqe", jnp.einsum("bhqk,bkhd->bqhd", say, v), p["o"])


def network(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def mixture(p, x):
    say = jax.nn.softmax(x @ p["router"])
    h = jax.nn.gelu(jnp.einsum("bse,xef->bsxf", x, p["up"]))
    return x + jnp.einsum("bsx,bsxe->bse", say, jnp.einsum("bsxf,xfe->bsxe", h, p["down"]))


HEADS = dict.fromkeys("qkv", (E, H, E // H)) | {"o": (H, E // H, E)}
DENSE = [(attention, HEADS), (network, {"up": (E, F), "down": (F, E)})]
EXPERTS = [(attention, HEADS), (mixture, {"router": (E, X), "up": (X, E, F), "down": (X, F, E)})]


def traced(blocks, shape=(B, S, E)):
    tx = optax.adam(1e-2)

    def step(state, x):
        def loss(params):
            y = x
            for (f, _), p in zip(blocks, params, strict=True):
                y = f(p, y)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, opt = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    params = [{n: jax.ShapeDtypeStruct(s, np.float32) for n, s in shapes.items()} for _, shapes in blocks]
    return uniap_jax.trace(step, (params, jax.eval_shape(tx.init, params)), jax.ShapeDtypeStruct(shape, np.float32))


@pytest.fixture(scope="module")
def dense():
    return traced(DENSE)


@pytest.fixture(scope="module")
def experts():
    return traced(EXPERTS)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_at_most_forty_on_eight_devices_and_every_other_has_its_reason(name, request):
    found = searched_strategies(request.getfixturevalue(name), 8, keeps=KEEPS)
    assert len(found.listed) <= 40
    assert len(found.listed) + sum(n for n, _ in found.left_out) == len(all_strategies(8, keeps=KEEPS))
    assert {s.zero for s in found.listed if s.fsdp > 1} == {2, 3}
    assert any(s.sequence for s in found.listed)
    assert any(s.expert > 1 for s in found.listed) == (name == "experts")


def test_note_counts_what_is_left_out(dense):
    space = StrategySpace(dense, KEEPS)
    count = len(space.strategies(4))
    assert space.note(4).startswith(f"{count} strategies are searched on 4 devices; ")
    assert "left out: ZeRO 1 does what ZeRO 2 does and holds more" in space.note(4)


def test_what_is_asked_for_by_name_is_listed_too(dense):
    wanted = parse_strategy("context=2,fsdp=2,zero=1")
    assert wanted not in StrategySpace(dense, KEEPS).strategies(4)
    assert wanted in StrategySpace(dense, KEEPS).asking(wanted).strategies(4)


def test_fsdp_that_finds_nothing_to_split_is_data():
    layer_graph = traced([(lambda p, x: x * p["a"], {"a": (3,)[:0]}), *DENSE])
    whole = [g for g in layer_graph.layers if all(layer_graph.params[p].shape == () for p in g.params)]
    for layer in whole:
        assert same_as(layer_graph, layer, parse_strategy("data=2,fsdp=4")) == parse_strategy("data=8")
    split = next(g for g in layer_graph.layers if any(layer_graph.params[p].size > 1 for p in g.params))
    assert same_as(layer_graph, split, parse_strategy("fsdp=8")) is None


class Everything(StrategySpace):
    """Lists all strategies and leaves out nothing."""

    def strategies(self, num_devices):
        return all_strategies(num_devices, keeps=KEEPS)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_the_optimum_is_that_of_the_full_space(name, request):
    """On four devices: the fastest plan, and the least memory that any plan fits in."""
    graph, cluster = request.getfixturevalue(name), load_cluster("h100:4")

    def optimum(kind, limit):
        costs = TableModel(graph, replace(cluster, memory_limit=limit), None, keeps=KEEPS)
        costs._space = kind(costs.graph, KEEPS)
        plan = uniap_jax.solve(costs, num_stages=1, num_microbatches=1, baselines=False)
        assert plan.certificate.status == "optimal"
        return plan.prediction.step_time_s

    def least(kind):
        with pytest.raises(InfeasibleError) as refused:
            optimum(kind, 1)
        return refused.value.needed_bytes

    needed = least(Everything)
    assert least(StrategySpace) == needed
    assert optimum(StrategySpace, "90%") == pytest.approx(optimum(Everything, "90%"), rel=1e-9)


WIDE = dict.fromkeys("qkv", (1024, 16, 64)) | {"o": (16, 64, 1024)}
LARGE = {
    "dense": [(attention, WIDE), (network, {"up": (1024, 4096), "down": (4096, 1024)})],
    "experts": [
        (attention, WIDE),
        (mixture, {"router": (1024, 8), "up": (8, 1024, 4096), "down": (8, 4096, 1024)}),
    ],
}


@pytest.mark.parametrize("name", LARGE)
def test_the_optimum_is_that_of_the_full_space_where_memory_is_tight(name):
    """Between the least memory that any plan fits in and what the fastest plan needs; four micro-batches."""
    graph, cluster = traced(LARGE[name], (16, 512, 1024)), load_cluster("h100:4")
    models = {}
    for kind in (StrategySpace, Everything):
        models[kind] = TableModel(graph, cluster, None, keeps=KEEPS)
        models[kind]._space = kind(models[kind].graph, KEEPS)

    def optimum(kind, limit):
        costs = copy.copy(models[kind])
        costs.cluster = replace(cluster, memory_limit=limit)
        plan = uniap_jax.solve(costs, num_stages=1, num_microbatches=4, baselines=False, why=False, executor="stages")
        return plan.prediction

    with pytest.raises(InfeasibleError) as refused:
        optimum(Everything, 1)
    least, most = refused.value.needed_bytes, optimum(Everything, "90%").peak_bytes[0]
    for share in (0.02, 0.05, 0.5):
        limit = int(least + share * (most - least))
        found, best = (optimum(kind, limit).step_time_s for kind in (StrategySpace, Everything))
        assert found == pytest.approx(best, rel=1e-9), share
