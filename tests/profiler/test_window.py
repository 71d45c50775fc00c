"""Windows: what a layer adds to a stage, against stages that are really compiled."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cost_support
import uniap_jax
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import Strategy
from uniap_jax.profiler.window import (
    Neighbourhood,
    Way,
    compiled_as,
    footprint,
    neighbourhood,
    window_facts,
    window_need,
    window_piece,
)

ROWS = 512
WIDTHS = (16, 48, 32, 64, 40)
"""Of a chain in which no two layers are equal."""


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


def unequal():
    """A chain of layers of growing and shrinking width."""
    rng = np.random.default_rng(0)
    pairs = list(itertools.pairwise(WIDTHS))
    params = [
        {
            name: rng.normal(size=size).astype(np.float32) * 0.1
            for name, size in (("in", (a, 2 * b)), ("mid", (2 * b, 2 * b)), ("out", (2 * b, b)), ("skip", (a, b)))
        }
        for a, b in pairs
    ]

    def train_step(params, batch):
        def loss(params):
            x = batch["x"]
            for i, p in enumerate(params):
                x = jnp.sin(jnp.tanh(jnp.sin(x @ p["in"]) @ p["mid"]) @ p["out"]) + jnp.tanh(x @ p["skip"])
                x = uniap_jax.mark_layer(x, f"layer_{i}") if i + 1 < len(params) else x
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return params, train_step, {"x": rng.normal(size=(ROWS, WIDTHS[0])).astype(np.float32)}


@pytest.fixture(scope="module")
def chain():
    params, step, batch = unequal()
    return uniap_jax.trace(step, params, batch)


def way(keep="all", *, samples=ROWS, turned=True, only=True, summed=False):
    return Way(strategy=Strategy(keep=keep), samples=samples, turned=turned, only=only, summed=summed)


def need_of(graph, how):
    """Needs of windows, each compiled once."""
    mesh = make_mesh(jax.devices()[:1])
    return functools.cache(lambda layers: window_need(window_piece(graph, layers, how, mesh), how))


def footprint_of(graph, layer, how, need, **given):
    describer = Describer(graph, local_cluster())
    around = neighbourhood(graph, layer, how.strategy)
    told = describer.cost(graph.layers[layer], how.strategy, samples=how.samples, fused=how.turned)
    weights = describer.weights(graph.layers[layer], how.strategy)
    return footprint(around, how, need, told, weights, **given)


def test_a_layer_lies_beside_its_equal_or_behind_or_before_another(graph, chain):
    blocks = next(group for group in graph.unique.values() if len(group) > 1)
    twins = neighbourhood(graph, blocks[1], Strategy())
    assert twins == Neighbourhood(alone=blocks[1:2], grown=(blocks[:1], blocks[:2]))
    behind = neighbourhood(chain, 2, Strategy())
    assert behind == Neighbourhood(alone=(2,), grown=((1,), (1, 2)))
    assert behind.windows == ((1,), (2,), (1, 2))
    assert neighbourhood(chain, 0, Strategy()) == Neighbourhood(alone=(0,), led=((1,), (0, 1)))
    again = neighbourhood(chain, 2, Strategy(keep="inputs"))
    assert again == Neighbourhood(alone=(2,), grown=((0, 1), (0, 1, 2)), led=((3,), (2, 3)))


@pytest.mark.parametrize("pieces", [1, 2])
def test_one_more_layer_adds_its_gradients_and_what_it_keeps(graph, pieces):
    cut = graph if pieces == 1 else graph.microbatch(pieces)
    block = next(group for group in cut.unique.values() if len(group) > 1)[0]
    rows = cost_support.BATCH // pieces
    how = way(samples=rows, summed=pieces > 1)
    found = footprint_of(cut, block, how, need_of(cut, how))
    weights = 2 * cost_support.WIDTH * cost_support.HIDDEN * 4
    kept = rows * cost_support.HIDDEN * 4  # the activation; the rest is made of it and of the inputs
    assert weights <= found.marginal_bytes <= 3 * weights + 4 * kept
    assert found.transient_bytes < found.marginal_bytes + 4 * weights


@pytest.mark.parametrize(
    ("program", "summed", "keep"),
    [
        ("only", False, "all"),
        ("only", True, "all"),
        ("turned", True, "all"),
        ("split", True, "all"),
        ("turned", False, "inputs"),
        ("split", False, "inputs"),
    ],
)
def test_unequal_layers_add_up_to_the_stage_that_is_compiled(chain, program, summed, keep):
    """No two layers are equal: each is compiled behind those that it really follows."""
    cut = chain.microbatch(2) if summed else chain
    samples = ROWS // (2 if summed else 1)
    how = way(keep, samples=samples, turned=program != "split", only=program == "only", summed=summed)
    stage = tuple(range(0 if how.only else 1, len(cut.layers)))
    need = need_of(cut, how)
    parts = [footprint_of(cut, i, how, need) for i in stage]
    real = need(stage)
    sums = 0.0 if how.only or not summed else sum(cut.params[p].nbytes for i in stage for p in cut.layers[i].params)
    working = max(p.transient_bytes for p in parts) + parts[0].leading_bytes
    told = sum(p.marginal_bytes for p in parts) + working
    held = sum(p.kept_bytes for p in parts) - real.read if program == "split" else 0.0
    returned = 0.0 if how.only else real.returned
    assert told + held == pytest.approx(real.own + real.held + returned + sums, rel=0.08)
    own, lone = need(stage[-1:]), parts[-1]
    one = 0.0 if how.only or not summed else sum(cut.params[p].nbytes for p in cut.layers[-1].params)
    assert lone.alone_bytes == own.own + one + (0.0 if how.only else own.returned)


def test_the_window_of_a_last_stage_is_the_program_of_the_runtime(chain):
    """Forward and backward in one, gradients added to sums that it is given."""
    from uniap_jax.runtime.stage_memory import program_bytes

    plan = uniap_jax.solve(
        uniap_jax.estimate(chain, local_cluster(jax.devices()[:2])),
        num_stages=2,
        num_microbatches=4,
        schedule="one_f_one_b",
        baselines=False,
        why=False,
    )
    step = uniap_jax.compile_plan(chain, plan, devices=jax.devices()[:2])
    real = {p.name: program_bytes(p) for p in step.programs}["stage_1_forward_backward"]
    how = way(samples=ROWS // 4, only=False, summed=True)
    last = tuple(plan.stage_layers(1))
    found = need_of(chain.microbatch(4), how)(last)
    own = real["temp_bytes"] + real["output_bytes"] - real["alias_bytes"]
    assert found.own + found.returned == pytest.approx(own, rel=0.02)


def test_a_gradient_that_the_update_uses_up_leaves_nothing(chain):
    """As on TPUs: such a program needs no more than one that adds each to a sum; clipped together, all are alive."""
    plain, used = way(), replace(way(), consumed=True)
    assert compiled_as(used) == compiled_as(way(only=False, summed=True))
    grads = [4 * sum(int(np.prod(chain.params[p].shape)) for p in layer.params) for layer in chain.layers]
    needs = {how: need_of(chain, compiled_as(how)) for how in (plain, used)}
    for layer in range(1, len(chain.layers)):
        whole, less = (needs[how]((layer - 1, layer)).own for how in (plain, used))
        assert less < whole
        apart = footprint_of(chain, layer, used, needs[used], meeting=False)
        together = footprint_of(chain, layer, used, needs[used], meeting=True)
        assert together.marginal_bytes == max(apart.marginal_bytes, grads[layer])


def test_windows_are_told_apart_by_what_their_memory_depends_on(graph, chain):
    """Equal blocks share them; another neighbour, another batch or another program does not."""
    blocks = next(group for group in graph.unique.values() if len(group) > 1)
    first, second = (window_facts(graph, (i,), way()) for i in blocks[:2])
    assert first == second
    ways = (way(), way("inputs"), way(samples=8), way(turned=False, only=False), way(only=False, summed=True))
    assert len({str(window_facts(chain, (1, 2), w)) for w in ways}) == len(ways)
    assert window_facts(chain, (1,), way()) != window_facts(chain, (2,), way())
    alike = way(), way(only=False)  # without a loop the only stage is one that turns round at once
    assert window_facts(chain, (1,), alike[0]) == window_facts(chain, (1,), alike[1])
    assert replace(alike[0], only=False) == alike[1]
