"""The ticks of one program for all stages, as they are compiled for their memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cost_support
import uniap_jax
from uniap_jax.core.cluster import load_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.equal_body import body_of
from uniap_jax.core.equal_stages import find_run, ticking_run
from uniap_jax.core.profile import Footprint
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.profiler.footprint import Footprints, by_variety, replicas_of, ticked_replica
from uniap_jax.profiler.order import by_value, entries
from uniap_jax.profiler.piece import piece_of
from uniap_jax.profiler.programs import Case
from uniap_jax.profiler.ticks import compile_ticks
from uniap_jax.profiler.window import Neighbourhood, footprint, ticks_need

BLOCKS, WIDTH, BATCH = 8, 8, 12


def masked(params, x, mask):
    """Blocks that read one mask; where it comes from has a parameter, so it has a gradient too."""
    shared = jnp.tanh(mask * params["gate"])
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w) * shared
    return x


def looped(params, x, mask):
    """The same as a loop."""
    shared = jnp.tanh(mask * params["gate"])
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) * shared, None), x, jnp.stack(params["blocks"]))
    return x


def traced(model):
    rng = np.random.default_rng(0)
    params = {
        "gate": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
        "blocks": [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(BLOCKS)],
    }
    batch = {name: rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for name in ("x", "mask")}

    def train_step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(model(p, batch["x"], batch["mask"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return uniap_jax.trace(train_step, params, batch)


@pytest.fixture(scope="module")
def graph():
    return traced(masked)


@pytest.mark.parametrize(
    ("model", "strategy"), [(masked, "data=2"), (masked, "fsdp=2"), (masked, "data=2,keep=inputs"), (looped, "fsdp=2")]
)
def test_ticks_compute_what_equal_layers_compute(model, strategy):
    """Three micro-batches through the layers of a stage: results, sums and gradients of what was read, exactly."""
    graph, ticks = traced(model), 3
    run = find_run(graph, 2)
    assert run.is_loop == (model is looped)
    body, depth, mesh = body_of(graph.microbatch(ticks), run), run.count // 2, make_mesh(jax.devices()[:2])
    assert depth >= 2
    piece = piece_of([Case(graph=body.graph, layer=body.layer, strategy=parse_strategy(strategy), mesh=mesh)])
    program = compile_ticks(body, parse_strategy(strategy), mesh, layers=depth, ticks=ticks)
    rng = np.random.default_rng(1)

    def arrays(places, number):
        return [np.asarray(rng.normal(size=(number, *x.shape.shape)), x.shape.dtype) for x in places]

    weights, sums = arrays(piece.params, depth), arrays(piece.sums, depth)
    reads, back = arrays(piece.reads, ticks), arrays(piece.writes, ticks)
    shardings = program.compiled.input_shardings[0]
    given = jax.tree.map(jax.device_put, ([*weights], [], [*reads], [*back], [*sums]), tuple(map(list, shardings)))
    found = [np.asarray(x) for x in program.compiled(*given)]

    assert sorted(map(str, body.chain)) == ["0", "None"]
    (moved,) = [i for i, out in enumerate(body.chain) if out is not None]
    (common,) = [i for i, out in enumerate(body.chain) if out is None]

    def stage(weights, x, shared):
        held = {moved: x, common: shared}
        for layer in range(depth):
            ((held[moved],), _) = piece.run([w[layer] for w in weights], [], [held[0], held[1]])
        return held[moved]

    left, total, entered, shared = [], [0.0 for _ in weights], [], []
    for t in range(ticks):
        out, pull = jax.vjp(stage, weights, reads[moved][t], reads[common][t])
        grads, x, s = pull(back[0][t])
        total = [a + b for a, b in zip(total, grads, strict=True)]
        left, entered, shared = [*left, out], [*entered, x], [*shared, s]
    wanted = [np.stack(left), *(s + t for s, t in zip(sums, total, strict=True)), np.stack(entered), np.stack(shared)]
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def test_ticks_are_asked_for_where_their_layout_decides():
    """On TPUs, for the layers of the run, as many as a stage has, and last of all."""
    graph = cost_support.graph()
    cluster = load_cluster("v5e:2x4")
    assert ticking_run(graph, "cpu", 2) is None
    assert ticking_run(graph, "tpu", 1) is None
    run = ticking_run(graph, "tpu", 2)
    assert run == find_run(graph, 2)
    describer = Describer(graph, cluster)
    found = entries(describer, num_stages=(1, 2), num_microbatches=(1, 4), keeps=("all",))
    ticked = {e: ticked_replica(e, graph, {2: run}) for e in found}
    for entry, replica in ticked.items():
        alike = graph.layers[entry.layer].signature == graph.layers[run.first].signature
        assert (replica is not None) == (entry.num_stages == 2 and alike)
        if replica is not None:
            assert (replica.way.depth, replica.way.ticks) == (run.count // 2, entry.num_microbatches + 1)
            assert replicas_of(entry, graph, "tpu", {2: run})[-1] == replica
    sought = by_variety(by_value(found, describer), graph, "tpu", {2: run})
    late = [one.key.way.depth > 0 for one in sought]
    assert late == sorted(late)
    assert sum(late) == len({r for r in ticked.values() if r is not None})


def test_what_a_tick_keeps_is_a_share_of_all(graph):
    run = find_run(graph, 2)
    cut = graph.microbatch(3)
    entry = next(
        e
        for e in entries(Describer(graph, load_cluster("v5e:2x2")), num_stages=2, num_microbatches=3, keeps=("all",))
        if graph.layers[e.layer].signature == graph.layers[run.first].signature and str(e.strategy) == "data=2"
    )
    replica = ticked_replica(entry, graph, {2: run})
    mesh = make_mesh(jax.devices()[:2])
    need = ticks_need(body_of(cut, run), replica.way, mesh)
    found = footprint(Neighbourhood(alone=(run.first,)), replica.way, lambda layers: need, None, None)
    assert found == Footprint(kept_bytes=need.own / (run.slots(2) * 4), transient_bytes=0.0, memory_origin="compiled")
    assert need.own > 0
    known = Footprints(None, {replica: found})
    assert known.has(replica)
    assert not known.has(replace(replica, way=replace(replica.way, ticks=5)))
