import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniap_jax.core import serialize
from uniap_jax.core.errors import PlanMismatchError, ProfileError
from uniap_jax.core.plan import Alternative, Binding, Certificate, LayerPlan, Plan, Prediction, WhatIf
from uniap_jax.core.profile import Key, LayerCost, LinkFit, Profile, Rates
from uniap_jax.core.serialize import load, plan_from_json, plan_to_json, profile_from_json, profile_to_json, save
from uniap_jax.core.strategy import Strategy, enumerate_strategies

TWO = (Strategy(data=2, tensor=2), Strategy(fsdp=4, keep="inputs"))


def plan(strategies=TWO):
    return Plan(
        num_stages=2,
        num_microbatches=2,
        schedule="one_f_one_b",
        batch_size=8,
        stage_devices=((0, 1, 2, 3), (4, 5, 6, 7)),
        layers=tuple(LayerPlan(name=f"layer {i}", stage=i, strategy=s) for i, s in enumerate(strategies)),
        prediction=Prediction(step_time_s=0.5, stage_time_s=(0.1, 0.2), link_time_s=(0.01,), peak_bytes=(1.0, 2.0)),
        certificate=Certificate(status="optimal", bound_s=0.5, baselines=(("fsdp", 0.7), ("tensor", None))),
        graph_fingerprint="abc",
        device_kind="cpu",
    )


def explained():
    """A plan whose certificate says why, with an alternative of one stage."""
    other = Alternative(
        what="1 stage, 1 micro-batch",
        num_stages=1,
        num_microbatches=1,
        schedule="gpipe",
        stage_devices=((0, 1, 2, 3, 4, 5, 6, 7),),
        layers=tuple(LayerPlan(name=f"layer {i}", stage=0, strategy=Strategy(data=8)) for i in range(2)),
        prediction=Prediction(step_time_s=0.8),
        bound_s=0.75,
    )
    why = Certificate(
        status="optimal",
        bound_s=0.5,
        binding=(Binding(kind="memory", index=1, seconds=0.1, share=0.98),),
        what_ifs=(WhatIf(what="10 % more memory", step_time_s=0.45, bound_s=0.45, num_stages=2, num_microbatches=4),),
        alternatives=(other,),
    )
    return replace(plan(), certificate=why)


def profile():
    key = Key(signature="s", strategy="data=2", samples=4)
    cost = LayerCost(forward_s=1.0, backward_s=2.0, sync_s=0.1, kept_bytes=3.0, transient_bytes=4.0, origin="measured")
    link = LinkFit(kind="all_reduce", size=2, stride=1, alpha_s=1e-5, beta_s_per_byte=1e-9)
    return Profile(
        source="measured",
        graph_fingerprint="abc",
        device_kind="cpu",
        num_devices=2,
        batch_size=8,
        entries=((key, cost),),
        links=(link,),
        rates=Rates(update_bytes_per_s=1e9, dispatch_s=1e-4, contention=((2, 1.8),)),
    )


def edited(data, path, value):
    found = json.loads(json.dumps(data))
    *parents, last = path
    at = found
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return found


@given(st.lists(st.sampled_from(enumerate_strategies(4, keeps=("all", "inputs"))), min_size=2, max_size=2))
def test_plans_survive_the_round_trip(strategies):
    found = plan(strategies)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(found)))) == found


def test_why_a_plan_survives_the_round_trip():
    found = plan_from_json(json.loads(json.dumps(plan_to_json(explained()))))
    assert found == explained()
    other = found.with_alternative(0)
    assert (other.num_stages, other.prediction.step_time_s, other.certificate.gap) == (1, 0.8, pytest.approx(0.375))
    assert plan_from_json(plan_to_json(other)) == other


def test_an_impossible_alternative_is_named():
    path = ["certificate", "alternatives", 0, "layers", 1, "stage"]
    with pytest.raises(PlanMismatchError) as error:
        plan_from_json(edited(plan_to_json(explained()), path, 3))
    assert error.value.field == "certificate.alternatives[0].layers[1].stage"


def test_profiles_survive_the_round_trip(tmp_path):
    save(profile(), tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile()
    assert profile_from_json(profile_to_json(profile())) == profile()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["colour"], "red", "colour"),
        (["version"], 2, "version"),
        (["layers"], None, "layers"),
        (["layers", 0, "stage"], "first", "layers[0].stage"),
        (["layers", 1, "stage"], 5, "layers[1].stage"),
        (["layers", 1, "stage"], 0, "layers"),
        (["layers", 1, "strategy", "data"], 0, "layers[1].strategy"),
        (["layers", 1, "strategy", "fsdp"], 2, "layers[1].strategy"),
        (["layers", 1, "strategy", "ways"], 2, "layers[1].strategy.ways"),
        (["num_microbatches"], 3, "num_microbatches"),
        (["num_stages"], 3, "num_stages"),
        (["schedule"], "zigzag", "schedule"),
        (["stage_devices", 1, 0], 0, "stage_devices"),
        (["certificate", "status"], "great", "certificate.status"),
        (["prediction", "step_time_s"], -1.0, "prediction.step_time_s"),
        (["prediction", "step_time_s"], float("nan"), "prediction.step_time_s"),
        (["certificate", "gap"], float("inf"), "certificate.gap"),
        (["prediction", "peak_bytes"], [1.0], "prediction.peak_bytes"),
        (["format"], "uniap-profile", "format"),
    ],
)
def test_the_first_wrong_field_of_a_plan_is_named(path, value, field):
    with pytest.raises(PlanMismatchError) as error:
        plan_from_json(edited(plan_to_json(plan()), path, value))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (["entries", 0, 1, "forward_s"], -1.0, "entries[0][1]"),
        (["links", 0, "kind"], "gossip", "links[0]"),
        (["num_devices"], None, "num_devices"),
        (["rates", "speed"], 1.0, "rates.speed"),
        (["source"], "guessed", ""),
    ],
)
def test_the_first_wrong_field_of_a_profile_is_named(path, value, field):
    with pytest.raises(ProfileError) as error:
        profile_from_json(edited(profile_to_json(profile()), path, value))
    assert error.value.field == field


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "plan.json"
    save(plan(), path)
    assert load(path) == plan()
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]  # nothing half-written stays
    for text in ("not json", "[]", '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(PlanMismatchError):
            load(path)
    monkeypatch.setattr(serialize, "MAX_BYTES", 1)
    with pytest.raises(PlanMismatchError) as error:
        load(path)
    assert error.value.field == "size"


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save(plan(), path)
    before = path.read_bytes()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(serialize.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        save(copy.deepcopy(plan()), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_plan_files_need_no_jax(root):
    code = (
        "import sys, types\n"
        f"package = types.ModuleType('uniap_jax'); package.__path__ = [{str(root / 'uniap_jax')!r}]\n"
        "sys.modules['uniap_jax'] = package\n"
        "import uniap_jax.core.serialize, uniap_jax.core.cluster\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
