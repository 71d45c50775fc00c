import itertools
from dataclasses import replace

import numpy as np
import pytest

import cost_support
import uniap_jax
from uniap_jax.core.cluster import load_cluster, local_cluster
from uniap_jax.core.costs import Assignment, Candidate, evaluate
from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.profile import Footprint, Key, LayerCost, Profile
from uniap_jax.core.schedule import make_schedule
from uniap_jax.core.strategy import Strategy
from uniap_jax.cost_model import estimate
from uniap_jax.cost_model.memory import Held, beside_state
from uniap_jax.cost_model.pipeline import busy_factor, flights, turns_at_once
from uniap_jax.cost_model.reshard import bundles, reshard_seconds
from uniap_jax.cost_model.state import state_bytes

PARAMS = 2 * cost_support.WIDTH * cost_support.HIDDEN * 4  # bytes of one block


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


@pytest.fixture(scope="module")
def model(graph):
    return estimate(graph, load_cluster("h100:8"))


def test_candidates_divide_devices_batch_and_layers(graph, model):
    found = {(c.num_stages, c.num_microbatches) for c in model.candidates()}
    stages = [p for p in (1, 2, 4, 8) if p <= len(graph.layers)]
    assert found == set(itertools.product(stages, (1, 2, 4, 8)))


@pytest.mark.parametrize(("stages", "pieces"), [(3, 1), (8, 1), (1, 3)])
def test_impossible_candidates_are_refused(model, stages, pieces):
    with pytest.raises(ValueError, match="use one of"):
        model.tables(Candidate(num_stages=stages, num_microbatches=pieces))


def test_every_table_is_finite_and_prices_every_uniform_plan(model):
    for candidate in model.candidates():
        tables = model.tables(candidate)
        for name in ("time_s", "iteration_time_s", "memory_bytes", "reshard_s", "cross_stage_s", "relay_s"):
            table = getattr(tables, name)
            assert np.isfinite(table).all(), name
            assert (table >= 0).all(), name
        stage = tuple(u * candidate.num_stages // tables.num_layers for u in range(tables.num_layers))
        for k in np.flatnonzero(tables.allowed.all(axis=0)):
            assert evaluate(tables, Assignment(stage=stage, strategy=(int(k),) * tables.num_layers)).feasible


def test_state_is_read_from_the_real_tree(graph):
    state = state_bytes(graph)
    assert sum(state.param) == 3 * PARAMS
    assert sum(state.optimizer) == 2 * 3 * PARAMS  # Adam's two moments
    assert state.other == 4  # the step count


def test_memory_of_parameters_by_hand(graph):
    """Between data parallelism and FSDP of one layer lies exactly the state that FSDP splits."""
    model = estimate(graph, load_cluster("h100:8"))
    candidate = Candidate(num_stages=4, num_microbatches=1)
    tables = model.tables(candidate)
    data, fsdp = (tables.strategies.index(s) for s in (Strategy(data=2), Strategy(fsdp=2)))
    costs = [model.layer_cost(1, s) for s in (Strategy(data=2), Strategy(fsdp=2))]
    kept = costs[0].kept_bytes - costs[1].kept_bytes
    working = costs[0].transient_bytes - costs[1].transient_bytes  # a layer a stage: it carries all of its own
    difference = tables.memory_bytes[1, 1, data] - tables.memory_bytes[1, 1, fsdp]
    assert difference == pytest.approx(4 * PARAMS / 2 + kept + working)


def test_kept_values_grow_with_what_is_in_flight(model):
    ahead = model.tables(Candidate(num_stages=4, num_microbatches=8, schedule="one_f_one_b"))
    all_of_them = model.tables(Candidate(num_stages=4, num_microbatches=8, schedule="gpipe"))
    k = ahead.strategies.index(Strategy(tensor=2))
    kept = model.layer_cost(1, ahead.strategies[k], num_microbatches=8).kept_bytes
    for i in range(3):  # under 1F1B the last stage is one program for both directions, and keeps otherwise
        grown = all_of_them.memory_bytes[1, i, k] - ahead.memory_bytes[1, i, k]
        assert grown == pytest.approx(kept * (8 - (4 - i)))


def test_a_last_stage_that_turns_at_once_holds_what_one_program_holds(graph):
    """Under 1F1B forward and backward of the last stage are one program, and keep otherwise than two."""
    cluster, strategy = load_cluster("h100:8"), Strategy(data=2)
    candidate = Candidate(num_stages=4, num_microbatches=4, schedule="one_f_one_b")
    described = estimate(graph, cluster)
    split, whole = (described.stage_cost(1, strategy, candidate, stage) for stage in (2, 3))
    assert split.kept_bytes != whole.kept_bytes

    turned = Footprint(kept_bytes=10.0, transient_bytes=20.0, marginal_bytes=40.0)
    key = Key(signature=graph.layers[1].signature, strategy=str(strategy), samples=graph.batch_size // 4)
    measured = estimate(
        graph,
        cluster,
        Profile(
            source="measured",
            graph_fingerprint=graph.fingerprint,
            device_kind=described.device_kind,
            num_devices=8,
            batch_size=graph.batch_size,
            entries=((key, replace(split, turned=turned, origin="measured", runs=3)),),
        ),
    )
    tables = measured.tables(candidate)
    k = tables.strategies.index(strategy)
    # beside the state what a layer adds to one program, and working memory
    assert tables.memory_bytes[1, 3, k] == pytest.approx(3 * PARAMS + 40.0 + 20.0)
    assert measured.stage_cost(1, strategy, replace(candidate, schedule="gpipe"), 3).kept_bytes == split.kept_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("stages", "pieces"), [(2, 1), (2, 4), (4, 2), (4, 8)])
def test_what_turns_at_once_is_what_the_schedule_turns(schedule, stages, pieces):
    candidate = Candidate(num_stages=stages, num_microbatches=pieces, schedule=schedule)
    turned = [turns_at_once(candidate, stage) for stage in range(stages)]
    assert turned == [False] * (stages - 1) + [make_schedule(schedule, stages, pieces).turns_at_once]


def test_flights():
    one = Candidate(num_stages=4, num_microbatches=2, schedule="one_f_one_b")
    assert [flights(one, i) for i in range(4)] == [2, 2, 2, 1]
    assert flights(Candidate(num_stages=4, num_microbatches=6, schedule="gpipe"), 3) == 6
    assert flights(Candidate(num_stages=1, num_microbatches=6), 0) == 1


def test_stages_on_shared_cores_wait_for_nobody_while_others_idle():
    """With slowdown P the pipeline takes c times the work of all stages, however deep it is: cores are never idle."""
    for stages, pieces in ((2, 1), (4, 4), (8, 3)):
        candidate = Candidate(num_stages=stages, num_microbatches=pieces)
        factor = busy_factor(candidate, float(stages))
        assert factor * (stages + pieces - 1) == pytest.approx(pieces)
        assert busy_factor(candidate, 1.0) == 1.0
    assert busy_factor(Candidate(num_stages=1, num_microbatches=4), 2.0) == 1.0


def test_resharding_is_free_between_equal_batch_ways_and_gathers_otherwise(graph, model):
    bundle = bundles(graph)[0]
    links = model.links
    ways = [(8, 1), (4, 1), (1, 1), (4, 2)]
    table = reshard_seconds(bundle, ways, 8, links, 1.0)
    assert np.diagonal(table).tolist() == [0.0] * 4
    nbytes = cost_support.BATCH * cost_support.WIDTH * 4
    assert table[0, 1] == pytest.approx(links.time_s("all_gather", nbytes / 4, 2, 1))
    assert table[1, 0] == table[0, 1]  # the gradient takes the same way back
    assert table[0, 2] == pytest.approx(links.time_s("all_gather", nbytes, 8, 1))
    assert table[1, 3] == pytest.approx(links.time_s("all_gather", nbytes / 4, 2, 1))  # the sequence is split too


def test_a_value_with_many_readers_is_one_tensor():
    import jax
    import jax.numpy as jnp

    def step(state, batch):
        def loss(p):
            memory = jnp.tanh(batch @ p["a"]) @ p["b"]
            x = memory
            for name in ("c", "d", "e"):
                x = x + jnp.tanh((x * memory) @ p[name]) @ p[name].T
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    graph = uniap_jax.trace(step, dict.fromkeys("abcde", shape), jax.ShapeDtypeStruct((8, 16), jnp.float32))
    skips = [b for b in bundles(graph) if len(b.readers) > 1]
    assert skips
    tables = estimate(graph, load_cluster("h100:2")).tables(Candidate(num_stages=2, num_microbatches=1))
    assert tables.edge_tensor is not None
    assert len(set(tables.edge_tensor)) < len(tables.edges)


def test_illegal_strategies_say_why(model):
    assert model.reason(1, Strategy(data=8)) == ""
    why = model.reason(1, Strategy(data=8), num_microbatches=2)
    assert "does not divide" in why
    tables = model.tables(Candidate(num_stages=1, num_microbatches=2))
    assert not tables.allowed[1, tables.strategies.index(Strategy(data=8))]


def with_one_entry(graph, strategy, *, samples=cost_support.BATCH, sync_s=0.5, origin="measured"):
    """A model on the devices here that knows three seconds of one kind of layer, and describes the rest."""
    cluster = local_cluster()
    cost = LayerCost(forward_s=1.0, backward_s=2.0, sync_s=sync_s, kept_bytes=64.0, transient_bytes=0.0, origin=origin)
    profile = Profile(
        source="measured",
        graph_fingerprint=graph.fingerprint,
        device_kind=cluster.kind,
        num_devices=8,
        batch_size=cost_support.BATCH,
        entries=((Key(signature=graph.layers[1].signature, strategy=str(strategy), samples=samples), cost),),
    )
    return estimate(graph, cluster, profile)


def test_measured_numbers_replace_described_ones(graph):
    model = with_one_entry(graph, "data=8")
    tables = model.tables(Candidate(num_stages=1, num_microbatches=1))
    k = tables.strategies.index(Strategy(data=8))
    assert tables.time_s[1, 0, k] == pytest.approx(3.5)
    assert tables.time_s[2, 0, k] == tables.time_s[1, 0, k]  # an equal layer
    assert model.source == "measured"


@pytest.mark.parametrize(
    ("strategy", "per_step"), [(Strategy(data=4), True), (Strategy(fsdp=4), False), (Strategy(data=2, tensor=2), False)]
)
def test_gradients_meet_once_per_step_where_the_runtime_adds_them_up_apart(graph, strategy, per_step):
    def tables(sync_s):
        model = with_one_entry(graph, strategy, samples=cost_support.BATCH // 2, sync_s=sync_s)
        return model.tables(Candidate(num_stages=2, num_microbatches=2))

    without, with_sync = tables(0.0), tables(0.5)
    column = without.strategies.index(strategy)
    per_piece = with_sync.time_s[1, 0, column] - without.time_s[1, 0, column]
    once = with_sync.iteration_time_s[1, 0, column] - without.iteration_time_s[1, 0, column]
    assert (per_piece > 0.3, once > 0.3) == (not per_step, per_step)
    assert min(per_piece, once) == pytest.approx(0.0)


def test_a_profile_of_another_model_is_refused(graph):
    cluster = local_cluster()
    other = Profile(
        source="described", graph_fingerprint="other", device_kind=cluster.kind, num_devices=8, batch_size=8
    )
    with pytest.raises(ProfileError) as error:
        estimate(graph, cluster, other)
    assert error.value.field == "graph_fingerprint"


def test_a_strategy_that_ran_out_of_memory_is_not_allowed(graph):
    model = with_one_entry(graph, "data=8", origin="does_not_fit")
    tables = model.tables(Candidate(num_stages=1, num_microbatches=1))
    k = tables.strategies.index(Strategy(data=8))
    assert not tables.allowed[1, k]
    assert tables.allowed[0, k]


def test_counts_are_affine_between_the_traced_batches(graph):
    """A micro-batch described from the two traces equals one traced by itself."""
    describer = Describer(graph, load_cluster("h100:8"))
    half = Describer(graph.microbatch(1), load_cluster("h100:8"))
    told = describer.cost(describer.graph.layers[1], Strategy(), samples=4, fused=False)
    from dims_support import measure_work

    traced = measure_work(graph.microbatch(2).layers[1], keep="all", tensor=1)
    assert told.kept_bytes == pytest.approx(traced.kept + traced.kept_split)
    assert half.splits == (1, 2, 4, 8)


def test_what_is_computed_again_takes_time_and_saves_no_memory_in_one_program_on_cpus(graph):
    describer, layer = Describer(graph, local_cluster()), graph.layers[1]
    plain, again = (
        describer.cost(layer, Strategy(data=4, keep=keep), samples=cost_support.BATCH, fused=True)
        for keep in ("all", "inputs")
    )
    assert again.time_s > plain.time_s
    assert (again.kept_bytes, again.transient_bytes) == (plain.kept_bytes, plain.transient_bytes)


@pytest.mark.parametrize("name", ["h100:8x8", "v5p:4x4x4"])
def test_large_machines_are_described_in_moments(graph, name):
    model = estimate(graph, load_cluster(name))
    tables = model.tables(Candidate(num_stages=2, num_microbatches=1))
    assert tables.num_strategies >= 21 * 2  # every data, fsdp and tensor degree, with and without recompute


def test_numbers_faster_than_the_peak_are_set_apart(graph):
    cluster = load_cluster("h100:8")
    layer, base = graph.layers[1], Describer(graph, cluster)
    least = base.parts(layer, Strategy(data=8), samples=cost_support.BATCH, fused=True).flops_s

    def model(seconds, origin="measured"):
        cost = LayerCost(
            forward_s=seconds, backward_s=0.0, sync_s=0.0, kept_bytes=0.0, transient_bytes=0.0, origin=origin
        )
        key = Key(signature=layer.signature, strategy="data=8", samples=cost_support.BATCH)
        profile = Profile(
            source="measured",
            graph_fingerprint=graph.fingerprint,
            device_kind=cluster.kind,
            num_devices=8,
            batch_size=cost_support.BATCH,
            entries=((key, cost),),
        )
        return estimate(graph, cluster, profile)

    slow, fast = model(least), model(0.3 * least)  # flops_s is at 55 % of the peak
    assert slow.layer_cost(1, Strategy(data=8)).origin == "measured"
    assert fast.layer_cost(1, Strategy(data=8)).origin == "described"
    assert any("faster than possible" in note and "data=8" in note for note in fast.notes)
    assert not any("faster than possible" in note for note in slow.notes)


def test_memory_of_one_program_and_of_stages_by_hand():
    cost = LayerCost(forward_s=1.0, backward_s=2.0, sync_s=0.0, kept_bytes=100.0, transient_bytes=0.0)
    held = Held(state=1.0, grads=5.0, full_grads=40.0)
    one, many = Candidate(num_stages=1, num_microbatches=1), Candidate(num_stages=1, num_microbatches=4)
    assert beside_state(cost, held, one, "cpu") == (0.0, 140.0)
    assert beside_state(cost, held, one, "tpu") == (0.0, 100.0)
    assert beside_state(cost, held, many, "gpu") == (5.0, 140.0)
    told = replace(cost, marginal_bytes=120.0)  # the compiler's slope holds gradients and accumulators
    assert beside_state(told, held, many, "cpu") == (0.0, 120.0)
    pipeline = Candidate(num_stages=2, num_microbatches=1)
    assert beside_state(cost, held, pipeline, "cpu") == (5.0, 100.0)
    assert beside_state(cost, held, Candidate(num_stages=2, num_microbatches=4), "cpu") == (45.0, 100.0)
    assert beside_state(told, held, pipeline, "cpu") == (120.0, 100.0)  # what is in flight is told apart
