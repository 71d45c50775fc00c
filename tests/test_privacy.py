"""Plans and profiles hold nothing of the person or the host they come from, and on request nothing of the devices."""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path

import jax
import pytest

import uniap_jax as uniap
from uniap_jax.cli.steps import load_build
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Profile
from uniap_jax.core.serialize import plan_from_json, plan_to_json, profile_to_json, redacted


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Profile, Path]:
    """A plan and a profile of a step whose file lies in a folder with a telling name."""
    folder = tmp_path_factory.mktemp("telling_folder")
    (folder / "step.py").write_text("from uniap_jax.demo_gpt import build_tiny as build\n")
    state, train_step, batch = load_build(f"{folder}/step.py:build")()
    graph = uniap.trace(train_step, state, batch)
    cluster = uniap.local_cluster(jax.devices()[:2])
    profile = uniap.profile(graph, cluster, source="described", cache_dir=folder / "cache")
    plan = uniap.solve(uniap.estimate(graph, cluster, profile), num_stages=1)
    return plan, profile, folder


def texts(made: tuple[Plan, Profile, Path]) -> list[str]:
    plan, profile, _ = made
    page = re.sub(r"<(style|script)>.*?</\1>", "", plan.to_html(), flags=re.DOTALL)
    return [json.dumps(plan_to_json(plan)), json.dumps(profile_to_json(profile)), page, str(plan)]


def test_no_paths_no_user_no_host(made: tuple[Plan, Profile, Path]) -> None:
    for text in texts(made):
        assert "telling_folder" not in text
        for name in {getpass.getuser(), socket.gethostname(), socket.getfqdn()} - {"localhost"}:
            assert not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), name
        for path in (str(Path.home()), str(Path.cwd())):
            assert path not in text


def test_redacted_files_say_nothing_of_the_devices(made: tuple[Plan, Profile, Path]) -> None:
    plan, profile, _ = made
    kind = jax.devices()[0].device_kind
    assert plan.device_kind == profile.device_kind == kind
    bare = redacted(plan)
    assert isinstance(bare, Plan)
    assert (bare.device_kind, bare.certificate.notes) == ("", ())
    assert redacted(profile).device_kind == ""
    assert json.dumps(plan_to_json(bare)).count(f'"{kind}"') == 0
    assert plan_from_json(plan_to_json(bare)).layers == plan.layers
