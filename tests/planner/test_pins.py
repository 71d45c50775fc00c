"""What the user decides is kept, the rest is completed; what cannot be kept is said before anything is searched."""

from dataclasses import replace

import pytest

from benchmarks.chains import LlamaChain, u_net
from uniap_jax.core.errors import InfeasibleError, OptionError
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner import solve
from uniap_jax.planner.pins import read_pins

SMALL = LlamaChain(num_blocks=6, num_devices=8, batch_size=32, memory_gib=20.0)
TIGHT = replace(SMALL, memory_gib=9.0, slow=6e9, node_size=2)
NAMES = ("embed", "block[0].attn", "block[0].mlp", "block[1].attn", "head")


def plan_of(costs, pin, **options):
    return solve(costs, pin=pin, why=False, **options)


def strategies(plan, prefix):
    return {layer.strategy for layer in plan.layers if layer.name.startswith(prefix)}


def test_a_pinned_strategy_is_kept_and_the_rest_completed():
    free, plan = plan_of(SMALL, {}), plan_of(SMALL, {"block_*": "tensor=2", "head": Strategy(fsdp=8)})
    assert {(s.tensor, s.fsdp, s.keep) for s in strategies(plan, "block")} == {(2, 1, "all")}
    assert strategies(plan, "head") == {Strategy(fsdp=8)}
    assert plan.certificate.status == "optimal"
    assert plan.prediction.step_time_s > free.prediction.step_time_s
    assert any("pinned: block_* = tensor=2 (6 layers), head = fsdp=8" in note for note in plan.certificate.notes)


def test_pinning_what_the_solver_chose_changes_nothing():
    free = plan_of(TIGHT, {})
    pin = {layer.name: f"stage={layer.stage},{layer.strategy}" for layer in free.layers}
    again = plan_of(TIGHT, pin)
    assert again.layers == free.layers
    assert again.prediction == free.prediction


@pytest.mark.parametrize("skips", [(), u_net(6)], ids=["chain", "u_net"])
def test_a_pinned_stage_is_kept(skips):
    costs = replace(TIGHT, skips=skips, max_strategies=4, batch_size=8)
    plan = plan_of(costs, {"block_1": 1, "block_4": "stage=-1"}, num_stages=4)
    stage = {layer.name: layer.stage for layer in plan.layers}
    assert (stage["block_1"], stage["block_4"]) == (1, 3)
    assert plan.certificate.status == "optimal"
    assert max(plan.prediction.peak_bytes) <= 9.0 * 1024**3
    assert plan.prediction.step_time_s >= plan_of(costs, {}, num_stages=4).prediction.step_time_s


def test_a_stage_and_a_strategy_at_once():
    plan = plan_of(TIGHT, {"block_2": "stage=1,tensor=2"}, num_stages=2)
    layer = next(layer for layer in plan.layers if layer.name == "block_2")
    assert (layer.stage, layer.strategy) == (1, Strategy(data=2, tensor=2))


def test_pins_go_with_a_strategy_for_the_rest():
    costs = replace(SMALL, memory_gib=60.0)
    plan = plan_of(costs, {"head": "tensor=8"}, strategy=Strategy(data=8), num_stages=1, num_microbatches=1)
    assert strategies(plan, "head") == {Strategy(tensor=8)}
    assert strategies(plan, "block") == {Strategy(data=8)}


def test_names_and_patterns():
    pins = read_pins({"block[0].attn": 0, "*.mlp": "tensor=2", "block*attn": Strategy(data=2)}, NAMES)
    assert [pin.layers for pin in pins] == [(1,), (2,), (1, 3)]


def test_a_pattern_that_matches_nothing_names_close_ones():
    with pytest.raises(OptionError, match="matches none of the 8 layers") as caught:
        plan_of(SMALL, {"block1": "tensor=2"})
    assert caught.value.pin == "block1"
    assert caught.value.possible[0] == "block_1"


@pytest.mark.parametrize("value", [True, 1.5, "", "stage=x", "stage=0,stage=1", "tensor=two", "ways=2"])
def test_values_that_are_neither_stage_nor_strategy(value):
    with pytest.raises(OptionError) as caught:
        plan_of(SMALL, {"head": value})
    assert caught.value.pin == "head"


def test_pins_that_contradict_each_other_name_the_layer():
    with pytest.raises(OptionError, match="contradict") as caught:
        plan_of(SMALL, {"block_*": "tensor=2", "block_3": "data=8"})
    assert caught.value.layer == "block_3"


def test_a_strategy_no_candidate_has_names_near_ones():
    with pytest.raises(OptionError, match="may not take") as caught:
        plan_of(SMALL, {"block_*": "tensor=3"})
    assert caught.value.layer == "block_0"
    assert caught.value.possible
    assert all(isinstance(s, Strategy) for s in caught.value.possible)


def test_a_stage_that_does_not_exist():
    with pytest.raises(OptionError, match="at most 2 stages") as caught:
        plan_of(SMALL, {"head": 5}, num_stages=2)
    assert caught.value.possible == (0, 1)


def test_the_pin_that_leaves_no_plan_is_named():
    """All blocks on one stage, whole on every device: too much memory; without that pin there is a plan."""
    pin = {"block_*": "data=8", "head": "tensor=8"}
    with pytest.raises(InfeasibleError, match="no plan keeps every pin") as caught:
        plan_of(replace(SMALL, memory_gib=9.0), pin, num_stages=1)
    assert caught.value.pins == ("block_*",)
