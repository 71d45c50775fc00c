"""A plan in the words of MaxText, Flax and JaxPP."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from uniap_jax.core.errors import PlanMismatchError
from uniap_jax.core.exports import MESH_AXES, mesh_shape
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy, parse_strategy


def uniform(strategy: str, *, stages: int = 1, microbatches: int = 1, batch: int = 64, layers: int = 4) -> Plan:
    split = parse_strategy(strategy)
    size = split.num_devices
    return Plan(
        num_stages=stages,
        num_microbatches=microbatches,
        schedule="one_f_one_b",
        batch_size=batch,
        stage_devices=tuple(tuple(range(i * size, (i + 1) * size)) for i in range(stages)),
        layers=tuple(LayerPlan(name=f"block_{i}", stage=i * stages // layers, strategy=split) for i in range(layers)),
        prediction=Prediction(step_time_s=1.0),
        certificate=Certificate(status="pinned"),
    )


def test_layers_that_differ_are_refused_until_one_is_named(plan: Plan) -> None:
    for export in (plan.to_logical_axis_rules, plan.to_maxtext, plan.to_jaxpp_stages):
        with pytest.raises(PlanMismatchError, match="layer=0") as caught:
            export()
        assert caught.value.strategies == ("data=4", "data=2,tensor=2")
    assert mesh_shape(plan, 1)["tensor"] == 2
    assert mesh_shape(plan, 0)["data"] == 4
    with pytest.raises(PlanMismatchError) as caught:
        plan.to_maxtext(layer=4)
    assert caught.value.layer == 4


def test_flax_rules_name_only_axes_that_split_something() -> None:
    rules = dict(uniform("fsdp=2,tensor=4").to_logical_axis_rules())
    assert rules["batch"] == "fsdp"
    assert rules["embed"] == "fsdp"
    assert rules["mlp"] == rules["heads"] == rules["vocab"] == "tensor"
    assert rules["layers"] is rules["length"] is rules["kv"] is None
    assert dict(uniform("data=2,fsdp=2", stages=2).to_logical_axis_rules()) | {
        "batch": ("data", "fsdp"),
        "layers": "stage",
    } == dict(uniform("data=2,fsdp=2", stages=2).to_logical_axis_rules())


@pytest.mark.parametrize("strategy", ["fsdp=4,zero=1", "tensor=2,sequence"])
def test_what_rules_cannot_say_is_refused(strategy: str) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        uniform(strategy).to_logical_axis_rules()
    assert caught.value.strategy == strategy


def degrees(settings: dict[str, Any], network: str) -> dict[str, int]:
    return {
        key.removeprefix(f"{network}_").removesuffix("_parallelism"): value
        for key, value in settings.items()
        if key.startswith(f"{network}_") and value > 1
    }


def test_maxtext_settings_of_one_stage() -> None:
    settings = uniform("data=2,fsdp=4,tensor=2,keep=inputs", microbatches=2, batch=128).to_maxtext(num_slices=2)
    assert degrees(settings, "dcn") == {"data": 2}
    assert degrees(settings, "ici") == {"fsdp": 4, "tensor": 2}
    assert settings["gradient_accumulation_steps"] == 2
    assert settings["per_device_batch_size"] * 2 * 16 == 128  # per accumulation step
    assert settings["remat_policy"] == "full"
    rules = dict(settings["logical_axis_rules"])
    assert rules["activation_batch"] == ["data", "fsdp"]
    assert rules["mlp"] == ["tensor"]
    assert rules["layers"] == []


def test_maxtext_settings_of_a_pipeline() -> None:
    settings = uniform("tensor=2,sequence", stages=2, microbatches=4).to_maxtext(num_slices=2)
    assert degrees(settings, "dcn") == {"pipeline": 2}
    assert degrees(settings, "ici") == {"tensor_sequence": 2}
    assert settings["num_pipeline_microbatches"] == 4
    assert settings["num_layers_per_pipeline_stage"] == 2
    assert "gradient_accumulation_steps" not in settings
    assert dict(settings["logical_axis_rules"])["layers"] == ["stage"]
    assert dict(settings["logical_axis_rules"])["activation_norm_length"] == ["tensor_sequence"]


def test_maxtext_counts_neither_embedding_nor_head() -> None:
    plan = uniform("data=2", stages=2, microbatches=2, layers=6)
    names = ("embed", "block_0", "block_1", "block_2", "block_3", "head")
    layers = tuple(dataclasses.replace(one, name=name) for one, name in zip(plan.layers, names, strict=True))
    named = dataclasses.replace(plan, layers=layers)
    assert named.to_maxtext()["num_layers_per_pipeline_stage"] == 2  # of 4 decoder layers
    uneven = tuple(dataclasses.replace(one, stage=int(i > 3)) for i, one in enumerate(layers))
    with pytest.raises(PlanMismatchError) as caught:
        dataclasses.replace(plan, layers=uneven).to_maxtext()
    assert caught.value.stages == (3, 1)


MAXTEXT_KEYS = """
    per_device_batch_size remat_policy shard_optimizer_over_data num_layers_per_pipeline_stage
    num_pipeline_microbatches gradient_accumulation_steps logical_axis_rules
"""
MAXTEXT_AXES = """
    diloco data fsdp fsdp_transpose sequence context tensor tensor_sequence autoregressive pipeline expert
"""
MAXTEXT_RULES = """
    circular_repeats activation_embed_and_logits_batch activation_vocab vocab embed_vocab activation_batch_attn
    activation_input_length_attn activation_heads activation_kv_heads activation_length_attn activation_q_length
    activation_kv_length activation_embed_attn activation_kv activation_kv_batch heads q_heads kv_heads qkv kv
    activation_batch_moe activation_length_moe activation_norm_length_moe activation_embed_moe activation_mlp_moe
    activation_exp exp mlp_moe embed_moe activation_mlp activation_batch activation_length activation_norm_length
    activation_embed activation_stage mlp embed norm layers
"""
"""Of MaxText's src/maxtext/configs/base.yml, commit 000b810bb1d98e8c0b0d55fc43fb3979fd35db15."""


@pytest.mark.parametrize(
    "plan",
    [
        uniform("data=2,fsdp=4,tensor=2,keep=dots", microbatches=2),
        uniform("expert=2,context=2,tensor=2,sequence", stages=2, microbatches=2),
        uniform("fsdp=4,zero=1"),
    ],
)
def test_maxtext_knows_every_name(plan: Plan) -> None:
    settings = plan.to_maxtext()
    degree_names = {f"{net}_{axis}_parallelism" for net in ("ici", "dcn") for axis in MAXTEXT_AXES.split()}
    assert set(settings) <= {*MAXTEXT_KEYS.split(), *degree_names}
    assert {name for name, _ in settings["logical_axis_rules"]} <= set(MAXTEXT_RULES.split())


def test_maxtext_has_zero_1_and_3() -> None:
    settings = uniform("fsdp=4,zero=1").to_maxtext()
    assert settings["shard_optimizer_over_data"] is True
    assert degrees(settings, "ici") == {"data": 4}
    with pytest.raises(PlanMismatchError, match="zero=1"):
        uniform("fsdp=4,zero=2").to_maxtext()


@pytest.mark.parametrize(("stages", "microbatches", "layers"), [(2, 3, 4), (2, 4, 5)])
def test_maxtext_wants_equal_stages_and_full_rounds(stages: int, microbatches: int, layers: int) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        uniform("data=2", stages=stages, microbatches=microbatches, batch=24, layers=layers).to_maxtext()
    assert caught.value.num_microbatches == microbatches
    assert sum(caught.value.stages) == layers


@pytest.mark.parametrize("slices", [0, 3, 16])
def test_slices_that_do_not_fit_are_refused(slices: int) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        uniform("data=4,tensor=2").to_maxtext(num_slices=slices)
    assert caught.value.num_slices == slices


def test_jaxpp_enters_the_plans_stages() -> None:
    plan = uniform("data=2,tensor=2", stages=2, microbatches=4, layers=5)
    stages = plan.to_jaxpp_stages()
    assert stages.schedule == "Std1F1B"
    assert stages.num_microbatches == 4
    assert stages.mesh_axes == (("mpmd", 2), ("data", 2), ("fsdp", 1), ("expert", 1), ("context", 1), ("tensor", 2))
    stage, cut = 0, []
    for index in range(5):  # a model that calls pipeline_enter_stage where it is told to
        stage += index in stages.enter_before
        cut.append(stage)
    assert tuple(cut) == tuple(layer.stage for layer in plan.layers)
    assert stages.layer_names == tuple(plan.layers[i].name for i in stages.enter_before)
    assert dataclasses.replace(plan, schedule="gpipe").to_jaxpp_stages().schedule == "GPipe"


def test_every_degree_of_a_strategy_has_an_axis() -> None:
    split = Strategy(data=2, fsdp=3, expert=5, context=7, tensor=11)
    plan = uniform(str(split))
    assert mesh_shape(plan) == dict(zip(MESH_AXES, (1, 2, 3, 5, 7, 11), strict=True))
    assert degrees(plan.to_maxtext(), "ici") == {"data": 2, "fsdp": 3, "expert": 5, "context": 7, "tensor": 11}
