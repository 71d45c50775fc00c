import importlib.util
from dataclasses import replace

import jax
import pytest

import cost_support
from uniap_jax.core.absent import stage_devices
from uniap_jax.core.cluster import load_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Links
from uniap_jax.profiler import profile
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.compiled import Compiler, measure_cycle, program_seconds
from uniap_jax.profiler.hlo import Collective, Kernel, Program
from uniap_jax.profiler.order import entries

tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler comes with jax[tpu]")
cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the compiler of NVIDIA cards comes with jax[cuda13]"
)


@pytest.fixture(scope="module")
def graph():
    return cost_support.graph()


def kernel(**numbers):
    given = {"opcode": "fusion", "flops": 0.0, "nbytes": 0.0, "cycles": 0.0, "dtype": "bf16", "times": 1.0}
    return Kernel(**(given | numbers))


def test_cycles_or_memory_whichever_takes_longer():
    cluster = load_cluster("v5e:2x2")
    bandwidth = cluster.memory_bandwidth_bytes_per_s * cluster.memory_efficiency
    slow = Program(kernels=(kernel(cycles=1e6, nbytes=1e3, times=2.0), kernel(nbytes=5e3)))
    assert program_seconds(slow, cluster, Links(cluster), 1e-9).kernels_s == pytest.approx(2e-3)
    wide = Program(kernels=(kernel(cycles=1.0, nbytes=1e9),))
    assert program_seconds(wide, cluster, Links(cluster), 1e-9).kernels_s == pytest.approx(1e9 / bandwidth)


def test_without_cycles_every_kernel_is_a_roofline():
    cluster = load_cluster("h100:8")
    flops, nbytes = kernel(flops=1e12, nbytes=1.0), kernel(nbytes=1e9, times=3.0)
    seconds = program_seconds(Program(kernels=(flops, nbytes)), cluster, Links(cluster), 0.0).kernels_s
    rate, bandwidth = 989.5e12 * cluster.matmul_efficiency, 3.35e12 * cluster.memory_efficiency
    assert seconds == pytest.approx(1e12 / rate + 3 * 1e9 / bandwidth + 4 * cluster.op_overhead_s)


def test_collectives_beside_kernels_cost_what_reaches_past_them():
    cluster, links = replace(load_cluster("v5e:2x2"), overlap_slowdown=1.0), Links(load_cluster("v5e:2x2"))
    one = links.time_s("all_gather", 1e6, 4, 1)

    def added(hidden, cycles):
        gather = Collective(kind="all_gather", nbytes=1e6, size=4, stride=1, times=2.0, hidden=hidden)
        program = Program(kernels=(kernel(cycles=cycles),), collectives=(gather,))
        return program_seconds(program, cluster, links, 1e-9).collectives_s

    assert added(False, 1e6) == pytest.approx(2 * one)
    assert added(True, 1e9) == 0.0
    assert added(True, one * 1e9) == pytest.approx(one)


@tpu
def test_layers_compiled_for_chips_that_are_not_here(graph, tmp_path):
    cluster = load_cluster("v5e:2x2")
    given = {"source": "compiled", "num_stages": (1, 2), "num_microbatches": 1, "keeps": ("all",)}
    found = profile(graph, cluster, cache_dir=tmp_path, budget_s=30.0, **given)
    assert found.source == "compiled"
    assert found.counts()["compiled"] >= 3
    assert set(found.counts()) <= {"compiled", "scaled"}
    cost = next(c for _, c in found.entries if c.origin == "compiled")
    assert cost.time_s > 0
    assert cost.runs == 0
    again = profile(graph, cluster, cache_dir=tmp_path, budget_s=0.0, **given)
    assert again.entries == found.entries


@tpu
def test_the_compilers_cycle_is_the_chips_clock(tmp_path):
    """v5e runs at 1.5 GHz: 197 TFLOP/s in four 128 × 128 arrays."""
    cluster = load_cluster("v5e:2x2")
    cycle_s = measure_cycle(cluster, stage_devices(cluster, 4), Cache(tmp_path))
    assert cycle_s == pytest.approx(1 / 1.5e9, rel=0.1)


@tpu
def test_what_the_compiler_cannot_fit_is_a_fact_other_failures_are_notes(graph, tmp_path, monkeypatch):
    cluster = load_cluster("v5e:2x2")
    describer = Describer(graph, cluster)
    entry = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[0]
    devices = {4: stage_devices(cluster, 1)}
    for message, origin in (("RESOURCE_EXHAUSTED: 9 GiB", "does_not_fit"), ("INTERNAL: broken", None)):
        compiler = Compiler(describer=describer, devices=devices, cycle_s=1e-9, cache=Cache(tmp_path / message[:4]))

        def fail(case, arrays, message=message):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr("uniap_jax.profiler.probe.compile_fused", fail)
        cost = compiler.measure(entry)
        assert (cost.origin if cost else None) == origin
        assert bool(compiler.notes) == (origin is None)


@cuda
def test_layers_compiled_for_cards_that_are_not_here(graph, tmp_path):
    given = {"source": "compiled", "num_stages": (1, 2), "num_microbatches": 1, "keeps": ("all",)}
    found = profile(graph, load_cluster("h100:1x4"), cache_dir=tmp_path, budget_s=20.0, **given)
    assert found.source == "compiled"
    assert found.counts()["compiled"] >= 3
    assert not [n for n in found.notes if "could not be compiled" in n or "is described:" in n]
    assert all(c.time_s > 0 and c.transient_bytes >= 0 for _, c in found.entries)


@cuda
def test_cards_have_no_cycles(tmp_path):
    cluster = load_cluster("h100:1x8")
    assert measure_cycle(cluster, stage_devices(cluster, 8), Cache(tmp_path)) == 0.0
