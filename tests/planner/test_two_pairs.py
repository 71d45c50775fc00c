"""Two pairs of devices with a fast link inside and a slow one between: who must be where is known beforehand."""

from dataclasses import replace

import pytest

from benchmarks.chains import LlamaChain
from uniap_jax.planner import solve

PAIRS = LlamaChain(
    num_blocks=12,
    num_devices=4,
    batch_size=32,
    memory_gib=14e9 / 1024**3,
    hidden=4096,
    sequence=2048,
    node_size=2,
    fast=200e9,
    slow=1.25e9,
    rate=140e12,
    split_loss=0.0,
    ends=False,
)


def test_tensor_inside_pairs_and_two_stages_across():
    plan = solve(PAIRS)
    assert plan.certificate.status == "optimal"
    assert plan.num_stages == 2
    assert plan.stage_devices == ((0, 1), (2, 3))
    assert all(layer.strategy.tensor == 2 for layer in plan.layers)


def test_no_tensor_group_crosses_the_slow_link():
    for memory in (14e9, 20e9, 30e9, 40e9, 80e9):
        plan = solve(replace(PAIRS, memory_gib=memory / 1024**3))
        assert max(layer.strategy.tensor for layer in plan.layers) <= 2


def test_data_parallel_wins_on_uniform_fast_links():
    plan = solve(replace(PAIRS, node_size=4, memory_gib=80.0))
    assert plan.num_stages == 1
    # with its state split or not: both divide the batch and nothing else
    assert all((layer.strategy.batch_ways, layer.strategy.tensor) == (4, 1) for layer in plan.layers)


@pytest.mark.parametrize("engine", ["inter_then_intra", "layerwise_dp"])
def test_baselines_are_not_better_there(engine):
    assert solve(PAIRS, engine=engine).prediction.step_time_s >= solve(PAIRS).prediction.step_time_s * (1 - 1e-9)
