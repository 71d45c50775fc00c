from dataclasses import replace

import jax
import pytest

import cost_support
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Footprint
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.profiler.footprint import Footprints, Replica, by_variety, replica_of, replicas_of
from uniap_jax.profiler.order import by_value, entries
from uniap_jax.profiler.piece import compile_split, piece_of
from uniap_jax.profiler.programs import Case
from uniap_jax.profiler.window import Way, footprint, neighbourhood, window_need, window_piece
from uniap_jax.runtime import compile as compile_plan
from uniap_jax.runtime.stage_memory import program_bytes


@pytest.fixture(scope="module")
def describer():
    return Describer(cost_support.graph(), local_cluster())


def replica(text="data=1", samples=2, *, layer=0, turned=False, summed=True, mapped=False):
    strategy = parse_strategy(text)
    way = Way(strategy=strategy, samples=samples, turned=turned, only=False, summed=summed, mapped=mapped)
    return Replica(layer=layer, way=way)


def test_one_replica_stands_for_all_data_ways_and_stages(describer):
    """8 samples in 2 micro-batches over 2 devices: one device has 2."""
    found = entries(describer, num_stages="auto", num_microbatches=(2, 4), keeps=("all",))
    alike = [e for e in found if e.layer == 0 and replica_of(e, describer.graph, "cpu") == replica(mapped=True)]
    assert {(e.num_stages, e.num_microbatches, str(e.strategy)) for e in alike} == {(4, 2, "data=2")}
    alone = replica_of(next(e for e in alike), describer.graph, "cpu")
    assert (alone.way.strategy, alone.way.samples, alone.way.local) == (Strategy(), 2, 2.0)
    varied = by_variety(by_value(found, describer), describer.graph, "cpu")
    assert len({one.key for one in varied}) == len(varied) < 2 * len(found)
    # of entries that a plan rests on, both as they are before the last stage and as they are in it
    asked = found[-1]
    both = tuple(replica_of(asked, describer.graph, "cpu", turned=t) for t in (False, True))
    assert replicas_of(asked, describer.graph, "cpu") == both


def test_where_the_batch_cannot_be_split_all_data_ways_are_compiled(describer):
    """Examples that meet a statistic of the whole batch leave no replica to be compiled for itself."""
    whole = replace(describer.graph, split_reason="examples meet a statistic of the whole batch")
    found = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))
    entry = next(e for e in found if str(e.strategy) == "data=8")
    assert replica_of(entry, describer.graph, "cpu").way.strategy == Strategy()
    way = replica_of(entry, whole, "cpu").way
    assert (way.strategy, way.samples, way.local) == (Strategy(data=8), cost_support.BATCH, 1.0)


def test_two_replicas_where_gradients_meet_in_a_gpu_program(describer):
    found = entries(describer, num_stages=1, num_microbatches=(1, 2), keeps=("all",))
    for e in (e for e in found if e.layer == 0):
        alone, gpu = (replica_of(e, describer.graph, platform).way for platform in ("cpu", "gpu"))
        meets = e.strategy.data > 1 and not gpu.mapped
        assert gpu.strategy.data == (2 if meets else 1)
        assert gpu.samples == alone.samples * gpu.strategy.data
        assert gpu.local == alone.local


def test_on_tpus_the_only_program_uses_gradients_up(describer):
    found = entries(describer, num_stages=(1, 2), num_microbatches=(1, 2), keeps=("all",))
    for e in (e for e in found if e.layer == 0):
        assert replica_of(e, describer.graph, "tpu").way.consumed == (e.num_stages == e.num_microbatches == 1)
        assert not replica_of(e, describer.graph, "cpu").way.consumed


def test_two_replicas_where_a_cpu_stage_hands_over_gradients_that_met(describer):
    """What replicas bring to a collective and what they take from it lie beside each other."""
    found = entries(describer, num_stages=(2, 4), num_microbatches=(1, 2), keeps=("all",))
    for e in (e for e in found if e.layer == 0):
        for one in replicas_of(e, describer.graph, "cpu"):
            meets = e.strategy.data > 1 and e.num_microbatches == 1
            assert one.way.strategy.data == (2 if meets else 1)


@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_a_stage_is_compiled_as_the_runtime_runs_it(describer, keep):
    """One replica's programs need the very bytes of the planned stage's."""
    import uniap_jax

    graph = describer.graph
    strategy = Strategy(data=2, keep=keep)
    plan = uniap_jax.solve(
        uniap_jax.estimate(graph, local_cluster()),
        num_stages=4,
        num_microbatches=2,
        strategy=strategy,
        baselines=False,
        why=False,
    )
    step = compile_plan(graph, plan, devices=jax.devices())
    stage = next(s for s in range(4) if [graph.layers[u].signature for u in plan.stage_layers(s)] == [_block(graph)])
    real = {p.name: program_bytes(p) for p in step.programs}
    cut = graph.microbatch(4)
    case = Case(
        graph=cut,
        layer=cut.layers[graph.unique[_block(graph)][0]],
        strategy=Strategy(keep=keep),
        mesh=make_mesh(jax.devices()[:1]),
        mapped=True,
    )
    for way, ours in zip(("forward", "backward"), compile_split(piece_of([case]), None, summed=True), strict=True):
        theirs = real[f"stage_{stage}_{way}"]
        assert ours.memory["temporaries"] == pytest.approx(theirs["temp_bytes"], abs=256), way
        assert ours.memory["outputs"] == pytest.approx(theirs["output_bytes"], abs=256), way


def _block(graph):
    return max(graph.unique, key=lambda signature: len(graph.unique[signature]))


def test_recomputed_layers_are_alive_together(describer):
    """The CPU compiler of jax 0.10 drops the barriers of `jax.checkpoint`: one more layer adds what it computes again.

    That of jax 0.12 computes this layer again in time.
    """
    graph = describer.graph
    first = graph.unique[_block(graph)][0]
    wanted = replica("keep=inputs", 4, layer=first)
    layer, cut = graph.layers[first], graph.microbatch(2)
    way, mesh = wanted.way, make_mesh(jax.devices()[:1])
    told = describer.cost(layer, way.strategy, samples=4, fused=False)
    weights = describer.weights(layer, way.strategy)
    found = footprint(
        neighbourhood(cut, first, way.strategy),
        way,
        lambda layers: window_need(window_piece(cut, layers, way, mesh), way),
        told,
        weights,
    )
    hidden = 4 * cost_support.HIDDEN * 4
    assert found.marginal_bytes >= weights.grads + (hidden if jax.__version_info__ < (0, 11) else 0)
    assert found.kept_bytes <= hidden


def test_between_two_batches_memory_lies_on_their_line_and_alone_is_scaled(describer):
    graph = describer.graph
    entry = next(
        e
        for e in entries(describer, num_stages=4, num_microbatches=1, keeps=("all",))
        if e.layer == 0 and str(e.strategy) == "data=2"
    )
    wanted = replica_of(entry, graph, "cpu")
    told = describer.cost(graph.layers[0], entry.strategy, samples=entry.key.samples, fused=False)
    assert Footprints(describer, {}).of(wanted, told).kept_bytes == told.kept_bytes

    def known(samples, factor):
        one = replace(wanted, way=replace(wanted.way, samples=samples))
        return one, Footprint(kept_bytes=factor, transient_bytes=2 * factor, marginal_bytes=3 * factor)

    ends = dict([known(wanted.way.samples // 2, 100.0), known(2 * wanted.way.samples, 400.0)])
    found = Footprints(describer, ends).of(wanted, told)
    line = {"kept_bytes": 200.0, "transient_bytes": 400.0, "marginal_bytes": 600.0}
    assert found == Footprint(**line, memory_origin="compiled")
    alone = Footprints(describer, dict([known(wanted.way.samples // 2, 100.0)])).of(wanted, told)
    assert alone.kept_bytes == pytest.approx(200.0)  # twice the samples of a layer that keeps activations alone
