import threading
import time
from dataclasses import replace

import jax
import pytest

import cost_support
from uniap_jax import trace
from uniap_jax.core.cluster import load_cluster, local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.profile import Rates
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import Strategy
from uniap_jax.profiler import profile, run, timing
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.measure import Measurer
from uniap_jax.profiler.optimizer import measure_optimizer
from uniap_jax.profiler.order import by_value, described, entries
from uniap_jax.profiler.piece import compile_split, piece_of
from uniap_jax.profiler.probe import COMPILE_S
from uniap_jax.profiler.programs import Arrays, Case, compile_fused
from uniap_jax.profiler.run import run_entries
from uniap_jax.profiler.timing import Timing


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


def measure(graph, folder, **options):
    given = {"num_stages": (1, 2), "num_microbatches": (1, 2), "keeps": ("all",), "budget_s": 60.0}
    return profile(graph, local_cluster(), cache_dir=folder, **(given | options))


def test_measured_then_from_the_cache(graph, tmp_path):
    told = []
    first = measure(graph, tmp_path, progress=lambda done, total, about: told.append((done, total, about)))
    assert first.source == "measured"
    assert first.counts()["measured"] >= 3
    assert set(first.counts()) <= {"measured", "scaled"}
    assert told
    assert told[0][0] == 0
    assert all(done < total for done, total, _ in told)
    cost = next(c for _, c in first.entries if c.origin == "measured")
    assert cost.runs >= 3
    assert cost.time_s > 0

    told.clear()
    again = measure(graph, tmp_path, budget_s=0.0, progress=lambda *a: told.append(a))
    assert not told  # nothing was measured, everything known counts
    assert again.entries == first.entries
    assert again.links == first.links
    assert again.rates == first.rates


def test_no_budget_and_no_cache_describes(graph, tmp_path):
    found = measure(graph, tmp_path, budget_s=0.0)
    assert found.source == "described"
    assert set(found.counts()) == {"described"}


def test_described_compiles_nothing(graph, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr("uniap_jax.profiler.programs.jax.jit", refuse)
    found = profile(graph, load_cluster("h100:8"), source="described")
    assert found.counts() == {"described": len(found.entries)}
    assert found.seconds < 10


def test_devices_that_are_not_here(graph):
    with pytest.raises(ProfileError) as error:
        profile(graph, load_cluster("h100:8"))
    assert error.value.field == "devices"
    with pytest.raises(ProfileError) as error:
        profile(graph, local_cluster(), devices=jax.devices()[:4])
    assert (error.value.wanted, error.value.found) == (8, 4)
    with pytest.raises(ProfileError) as error:
        profile(graph, local_cluster(), source="guessed")
    assert error.value.field == "source"


def test_out_of_memory_is_a_fact_other_failures_are_notes(graph, tmp_path, monkeypatch):
    describer = Describer(graph, local_cluster())
    entry = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[0]
    for message, origin in (("RESOURCE_EXHAUSTED: 9 GiB", "does_not_fit"), ("INTERNAL: broken", None)):
        measurer = Measurer(
            describer=describer, devices=jax.devices(), rates=Rates(), cache=Cache(tmp_path / message[:4])
        )

        def fail(case, arrays, message=message):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr("uniap_jax.profiler.probe.compile_fused", fail)
        cost = measurer.measure(entry)
        assert (cost.origin if cost else None) == origin
        assert bool(measurer.notes) == (origin is None)
        known = measurer.known(entry)
        assert (known.origin if known else None) == origin


@pytest.mark.parametrize(
    "strategy", [Strategy(data=4), Strategy(fsdp=4), Strategy(tensor=4), Strategy(data=2, tensor=2, keep="inputs")]
)
def test_split_programs_keep_what_was_described_beside_what_they_read(graph, strategy):
    describer = Describer(graph, local_cluster())
    case = Case(graph=graph, layer=graph.layers[1], strategy=strategy, mesh=make_mesh(jax.devices()[:4]))
    forward, backward = compile_split(piece_of([case]), Arrays())
    told = describer.cost(graph.layers[1], strategy, samples=cost_support.BATCH, fused=False)
    written = cost_support.BATCH * cost_support.WIDTH * 4 / strategy.batch_ways
    read = written  # as wide; needed for the backward too, and on the stage anyway
    kept = pytest.approx(told.kept_bytes - read, abs=64)  # and a table of pointers
    assert forward.memory["outputs"] - written == kept
    assert len(backward()) == 3  # gradients of two weights and of the input


def test_bytes_and_parameters_of_the_optimizer_are_told_apart(graph):
    """With both, either layout takes what it was measured to take."""
    devices, cluster = jax.devices()[:4], local_cluster(jax.devices()[:4])
    seconds = iter((3e-3, 8e-3))  # split over the devices, and copied to each
    step = graph.step
    moved = 2 * sum(v.nbytes for v in step.state) + sum(p.nbytes for p in graph.params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "uniap_jax.profiler.optimizer.time_program",
            lambda run: (run(), run(), Timing(median_s=next(seconds), spread=0.0, runs=1))[-1],
        )
        rate, leaf = measure_optimizer(graph, cluster, devices, Arrays(), 1e9)
    assert moved / rate + leaf * len(graph.params) == pytest.approx(8e-3)
    assert moved / 4 / rate + leaf * len(graph.params) == pytest.approx(3e-3)


def test_the_two_programs_give_the_results_of_one(graph):
    """What the layer writes too: a forward that nobody reads is dropped, and recomputing it would seem to be free."""
    strategy, mesh = Strategy(data=2, tensor=2), make_mesh(jax.devices()[:4])
    case = Case(graph=graph, layer=graph.layers[1], strategy=strategy, mesh=mesh)
    (both,) = compile_fused(case, Arrays())
    forward, backward = compile_split(piece_of([case]), Arrays())
    whole = both()
    written, *kept = forward()
    inputs, _, cotangents, sums = backward.arguments
    parts = backward.compiled(inputs, kept, cotangents, sums)
    for a, b in zip(whole, [written, *parts], strict=True):
        assert jax.numpy.allclose(a, b, rtol=1e-5, atol=1e-7)


class Probing:
    """What `run_entries` asks of a prober, but for the measuring."""

    def __init__(self, describer):
        self.describer = describer

    def known(self, entry):
        return None

    def expected_s(self, entry):
        return 1.0


def test_what_is_found_comes_in_the_order_of_its_worth_whoever_ends_first(graph):
    """Ties between neighbours go to the first, so the order of threads must not decide them."""
    describer = Describer(graph, local_cluster())
    ranked = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[:2]
    second_is_done = threading.Event()

    class Slow(Probing):
        def measure(self, entry):
            if entry is ranked[0]:
                assert second_is_done.wait(10)
            else:
                second_is_done.set()
            return entry.key

    found = run_entries(ranked, Slow(describer), deadline_s=time.monotonic() + 10, progress=None, workers=2)
    assert list(found) == [e.key for e in ranked]


def timed(describer, takes, clock, begun, expected):
    """A prober whose entries take what they are said to take, on a clock of its own."""

    class Timed(Probing):
        def measure(self, entry):
            begun.append(takes[entry])
            clock[0] += takes[entry]
            return entry.key

        def expected_s(self, entry):
            return expected(entry)

    return Timed(describer)


def test_what_takes_much_of_the_time_that_is_left_waits_for_the_others(graph, monkeypatch):
    describer = Describer(graph, local_cluster())
    ranked = entries(describer, num_stages=1, num_microbatches=(1, 2, 4, 8), keeps=("all",))[:6]
    takes, clock, begun = dict(zip(ranked, [80, 10, 10, 400, 10, 10], strict=True)), [0.0], []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    prober = timed(describer, takes, clock, begun, takes.get)
    found = run_entries(ranked, prober, deadline_s=150.0, progress=None)
    assert begun == [10, 10, 10, 10, 80]
    assert list(found) == [e.key for e in ranked if takes[e] < 400]


def test_only_what_is_asked_for_is_measured(graph, monkeypatch):
    describer = Describer(graph, local_cluster())
    ranked = entries(describer, num_stages=1, num_microbatches=(1, 2, 4, 8), keeps=("all",))[:4]
    takes, clock, begun = dict.fromkeys(ranked, 10), [0.0], []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    prober = timed(describer, takes, clock, begun, takes.get)
    asked = {ranked[1].key, ranked[3].key}
    assert set(run_entries(ranked, prober, deadline_s=100.0, progress=None, only=asked)) == asked
    assert len(begun) == 2


def test_what_was_thought_too_long_is_begun_as_soon_as_it_is_known_better(graph, monkeypatch):
    """Before anything is known the dearest entries are put off; one that is not dear says how dear they are."""
    describer = Describer(graph, local_cluster())
    ranked = entries(describer, num_stages=1, num_microbatches=(1, 2, 4, 8), keeps=("all",))[:4]
    takes, clock, begun = dict(zip(ranked, [20, 4, 5, 6], strict=True)), [0.0], []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    prober = timed(describer, takes, clock, begun, lambda e: takes[e] * (1 if begun else 5))
    run_entries(ranked, prober, deadline_s=100.0, progress=None)
    assert begun == [4, 20, 5, 6]


def test_what_needs_more_memory_than_a_device_has_is_not_run(graph, tmp_path, monkeypatch):
    """Devices of one host would take it from each other, and a layer run for minutes that no plan may use."""
    cluster = local_cluster()
    describer = Describer(graph, replace(cluster, memory_bytes=4096, memory_limit="90%"))
    entry = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[0]
    measurer = Measurer(
        describer=describer, devices=jax.devices(), rates=Rates(), cache=Cache(tmp_path), arrays=Arrays(4096)
    )
    monkeypatch.setattr(timing.time, "perf_counter", lambda: pytest.fail("it was run"))
    assert measurer.measure(entry).origin == "does_not_fit"
    assert measurer.known(entry).origin == "does_not_fit"
    assert measurer.expected_s(entry) < COMPILE_S


def test_what_needs_more_memory_than_a_device_has_comes_last(graph):
    cluster = local_cluster()
    describer = Describer(graph, cluster)
    every = entries(describer, num_stages=1, num_microbatches=(1, 8), keeps=("all",))
    told = {e: described(e, describer) for e in every}
    needs = {e: cost.kept_bytes + cost.transient_bytes for e, cost in told.items()}
    limit = int(sorted(needs.values())[len(needs) // 2])
    ranked = by_value(every, Describer(graph, replace(cluster, memory_bytes=limit)))
    large = [needs[e] > limit for e in ranked]
    assert large == sorted(large)
    assert any(large)


def test_a_share_that_is_none_is_refused(graph):
    with pytest.raises(ProfileError, match="between 0 and 1"):
        profile(graph, local_cluster(), source="described", memory_share=1.5)


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey, lambda n: jax.random.split(jax.random.key(n), 2)])
def test_masks_are_drawn_again_where_the_forward_is_computed_again(key):
    """As in the step, whose keys are computed: from an argument the CPU compiler draws once for both."""

    def one_of(keys):
        return keys[0] if keys.ndim and jax.numpy.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys

    def train_step(state, batch):
        def loss(params):
            x = batch
            for i, w in enumerate(params):
                mask = jax.random.bernoulli(jax.random.fold_in(one_of(state["key"]), i), 0.9, x.shape)
                x = x + jax.numpy.where(mask, jax.numpy.tanh(x @ w), 0.0)
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**state, "params": [p - 0.1 * g for p, g in zip(state["params"], grads, strict=True)]}, value

    state = {"params": [jax.numpy.ones((16, 16))] * 2, "key": key(0)}
    graph = trace(train_step, state, jax.numpy.ones((8, 16)))
    layer = next(x for x in graph.layers if x.params)

    def draws(keep):
        case = Case(graph=graph, layer=layer, strategy=Strategy(keep=keep), mesh=make_mesh(jax.devices()[:1]))
        (both,) = compile_fused(case, None)
        return both.compiled.as_text().count("= u32[8,16]")

    assert draws("inputs") > 1.5 * draws("all") > 0


@pytest.mark.parametrize("strategy", [Strategy(data=4), Strategy(data=2, fsdp=2)])
def test_gradients_of_many_arrays_meet_in_one_collective(graph, strategy):
    """As XLA compiles them; its CPU backend reduces over all batch ways, then slices."""
    layer, describer = graph.layers[1], Describer(graph, local_cluster())
    weights = describer.weights(layer, strategy)
    case = Case(graph=graph, layer=layer, strategy=strategy, mesh=make_mesh(jax.devices()[:4]))
    (both,) = compile_fused(case, None)
    assert weights.count > 1
    assert both.compiled.as_text().count(" all-reduce(") == 1
    told = describer.links.time_s("all_reduce", weights.full_grads, 4, 1)
    assert describer.sync_s(strategy, weights) == pytest.approx(told)
