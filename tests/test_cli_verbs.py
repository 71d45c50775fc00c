"""Every verb from a shell, on the demo's model at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STEP = ("--step", "uniap_jax.demo_gpt:build_tiny", "--devices", "8")


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "uniap_jax", *argv], cwd=cwd, capture_output=True, text=True, check=False, timeout=280
    )


def answer(*argv: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    """The one object that a verb prints."""
    done = run(*argv, "--json", cwd=cwd)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is (code == 0)
    return found


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two stages, as `plan --out` writes it."""
    folder = tmp_path_factory.mktemp("plans")
    facts = answer("plan", *STEP, "--source", "described", "--stages", "2", "--out", "plan.json", cwd=folder)
    assert facts["status"] == "optimal"
    return folder / "plan.json"


def test_plan_prints_the_file_and_what_people_ask_first(plan_file: Path) -> None:
    saved = json.loads(plan_file.read_text())
    facts = answer("explain", str(plan_file), cwd=plan_file.parent)
    assert {k: facts[k] for k in saved} == saved
    assert facts["step_time_s"] == saved["prediction"]["step_time_s"] > 0
    assert facts["bound_s"] == saved["certificate"]["bound_s"]
    assert facts["gap"] == 0
    assert facts["seconds"] > 0
    assert saved["num_stages"] == 2
    assert sorted(d for stage in saved["stage_devices"] for d in stage) == list(range(8))


def test_explain_tells_how_two_plans_differ_and_writes_page_and_trace(plan_file: Path, tmp_path: Path) -> None:
    saved = json.loads(plan_file.read_text())
    saved["schedule"] = "gpipe" if saved["schedule"] == "one_f_one_b" else "one_f_one_b"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(saved))
    files = ("--html", "plan.html", "--trace", "trace.json")
    facts = answer("explain", str(plan_file), str(other), *files, cwd=tmp_path)
    assert [d["what"] for d in facts["differences"]] == ["schedule"]
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_explain_shows_a_table(plan_file: Path) -> None:
    done = run("explain", str(plan_file), cwd=plan_file.parent)
    assert done.returncode == 0
    for fact in ("stage", "strategy", "memory", "status: optimal", "2 stages", "8 devices"):
        assert fact in done.stdout


def test_plan_keeps_pins_and_lists_alternatives(plan_file: Path, tmp_path: Path) -> None:
    name = json.loads(plan_file.read_text())["layers"][1]["name"]
    pins = ("--pin", f"{name}=data=4", "--pin", f"{name}=-1")
    facts = answer("plan", *STEP, "--source", "described", "--stages", "2", *pins, "--top-k", "2", cwd=tmp_path)
    for found in (facts, *facts["certificate"]["alternatives"]):
        layer = next(layer for layer in found["layers"] if layer["name"] == name)
        assert (layer["stage"], layer["strategy"]["data"]) == (1, 4)
    assert len(facts["certificate"]["alternatives"]) == 1
    assert facts["certificate"]["what_ifs"]


def test_plan_tries_finalists_out(tmp_path: Path) -> None:
    facts = answer("plan", *STEP, "--source", "described", "--finalists", "2", "--out", "plan.json", cwd=tmp_path)
    told = facts["certificate"]["notes"][-1]
    assert "finalists were tried out" in told
    assert told.count("(chosen)") == 1
    assert json.loads((tmp_path / "plan.json").read_text())["certificate"]["notes"][-1] == told


def test_run_tells_how_finalists_fared(tmp_path: Path) -> None:
    done = run("run", *STEP, "--source", "described", "--finalists", "2", "--steps", "1", cwd=tmp_path)
    assert done.returncode == 0
    assert "finalists were tried out" in done.stdout


def test_a_plan_file_with_a_wrong_field_names_it(plan_file: Path, tmp_path: Path) -> None:
    saved = json.loads(plan_file.read_text())
    saved["num_microbatches"] = 3
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(saved))
    facts = answer("explain", str(wrong), cwd=tmp_path, code=3)
    assert facts["error"] == "PlanMismatchError"
    assert facts["fields"]["field"] == "num_microbatches"
    assert answer("explain", "nowhere.json", cwd=tmp_path, code=2)["fields"]["path"] == "nowhere.json"


def test_run_trains_under_a_saved_plan(plan_file: Path, tmp_path: Path) -> None:
    files = ("--html", "plan.html", "--trace", "trace.json")
    facts = answer("run", *STEP, "--plan", str(plan_file), "--steps", "4", *files, cwd=tmp_path)
    losses = [m["loss"] for m in facts["metrics"]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert facts["step_time_s"] > 0
    page = (tmp_path / "plan.html").read_text()
    assert "measured, on the same scale" in page
    assert "peak of a device of stage 1" in page
    passes = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    pieces = facts["plan"]["num_microbatches"]
    assert sum(e["pid"] == 2 for e in passes) == 2 * 2 * pieces  # every pass of both stages, with a clock on it
    assert all(e["dur"] >= 0 for e in passes)


def test_run_refuses_the_plan_of_another_number_of_devices(plan_file: Path, tmp_path: Path) -> None:
    step = ("--step", "uniap_jax.demo_gpt:build_tiny", "--devices", "4")
    facts = answer("run", *step, "--plan", str(plan_file), cwd=tmp_path, code=3)
    assert facts["error"] == "PlanMismatchError"


def test_check_pins_a_plan_and_compares(tmp_path: Path) -> None:
    pins = ("--stages", "2", "--microbatches", "2", "--schedule", "1f1b", "--strategy", "data=2,tensor=2")
    facts = answer("check", *STEP, *pins, "--steps", "2", cwd=tmp_path)
    assert facts["loss_rel_diff"] <= 1e-5
    assert facts["grad_rel_diff"] <= 1e-4
    assert facts["state_abs_diff"] < 1e-2
    assert len(facts["per_step"]) == 2
    plan = facts["plan"]
    assert (plan["num_stages"], plan["num_microbatches"], plan["schedule"]) == (2, 2, "one_f_one_b")
    strategies = [(layer["strategy"]["data"], layer["strategy"]["tensor"]) for layer in plan["layers"]]
    assert (2, 2) in strategies


LOOP = """
import jax, jax.numpy as jnp, numpy as np

def build():
    params = {"w": np.full((4, 8, 8), 0.1, np.float32), "out": np.ones((8, 2), np.float32)}
    def train_step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["w"])
            return jnp.mean((x @ params["out"]) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value
    return params, train_step, {"x": np.ones((8, 8), np.float32)}
"""


def test_a_loop_is_unfolded_where_asked(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    step = ("--step", "loop.py:build", "--devices", "2")
    folded, unfolded = (answer("trace", *step, *more, cwd=tmp_path) for more in ((), ("--unfold-scans",)))
    assert "--unfold-scans" in " ".join(folded["notes"])
    assert len(unfolded["layers"]) == len(folded["layers"]) + 3
    facts = answer("check", *step, "--unfold-scans", "--source", "described", "--stages", "2", cwd=tmp_path)
    assert facts["plan"]["num_stages"] == 2
    assert facts["loss_rel_diff"] <= 1e-5


@pytest.mark.parametrize(
    ("pins", "field"),
    [
        (("--stages", "3"), "num_stages"),
        (("--microbatches", "3"), "num_microbatches"),
    ],
)
def test_a_pinned_plan_that_cannot_be_made_leaves_with_3_and_its_reason(
    pins: tuple[str, ...], field: str, tmp_path: Path
) -> None:
    facts = answer("check", *STEP, *pins, cwd=tmp_path, code=3)
    assert field in facts["fields"]
    assert facts["status"] == "infeasible"


def test_too_little_memory_leaves_with_3_and_says_how_much_would_do(tmp_path: Path) -> None:
    facts = answer("plan", *STEP, "--source", "described", "--memory-limit", "20KiB", cwd=tmp_path, code=3)
    assert facts["error"] == "InfeasibleError"
    assert facts["fields"]["needed_bytes"] > 20 * 1024


def test_plan_for_devices_that_are_not_here(tmp_path: Path) -> None:
    step = ("--step", "uniap_jax.demo_gpt:build_tiny")
    facts = answer("plan", *step, "--topology", "v5e:2x4", cwd=tmp_path)
    assert facts["device_kind"] == "TPU v5 lite"
    assert facts["prediction"]["source"] == "described"
    assert sum(len(s) for s in facts["stage_devices"]) == 8
    measured = answer("plan", *step, "--topology", "v5e:2x4", "--source", "measured", cwd=tmp_path, code=2)
    assert measured["error"] == "UsageError"


def test_plan_verify_compares_memory_with_the_compiled_programs(tmp_path: Path) -> None:
    pins = ("--stages", "2", "--microbatches", "2", "--source", "described")
    facts = answer("plan", *STEP, *pins, "--verify", cwd=tmp_path)["verify"]
    names = {p["name"] for p in facts["programs"]}
    assert {"stage_0_forward", "stage_0_backward", "stage_1_forward_backward"} <= names
    assert [s["stage"] for s in facts["stages"]] == [0, 1]
    for stage in facts["stages"]:
        compiled = stage["compiled_bytes"]
        assert stage["rel_error"] == pytest.approx(abs(stage["predicted_bytes"] - compiled) / compiled)
        assert compiled > max(p["temp_bytes"] for p in facts["programs"] if f"stage_{stage['stage']}_" in p["name"])
    assert facts["memory_rel_error"] == max(s["rel_error"] for s in facts["stages"])


def test_profile_measures_and_saves(tmp_path: Path) -> None:
    step = ("--step", "uniap_jax.demo_gpt:build_tiny", "--devices", "2")
    facts = answer("profile", *step, "--budget", "25", "--cache-dir", "cache", "--out", "profile.json", cwd=tmp_path)
    assert facts["source"] == "measured"
    assert facts["num_devices"] == 2
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["format"] == "uniap-profile"
    assert {k: facts[k] for k in saved} == saved


def test_solve_reads_tables(tmp_path: Path) -> None:
    tables = {
        "layers": 2,
        "stages": 2,
        "micro_batches": 2,
        "strategies": 1,
        "time": [[[3.0], [3.0]], [[4.0], [4.0]]],
        "iteration_time": [[0.5], [0.25]],
        "memory": np.ones((2, 2, 1)).tolist(),
        "capacity": [1.0, 1.0],
        "allowed": [[True], [True]],
        "edges": [[0, 1]],
        "reshard": [[[0.0]]],
        "cross_stage": [[[1.0]]],
        "relay": [[1.0]],
    }
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    facts = answer("solve", "tables.json", cwd=tmp_path)
    assert facts["step_time_ms"] == pytest.approx(3 + 4 + 1 + 4 + 0.5)
    tables["capacity"] = [1.0, 0.5]
    (tmp_path / "full.json").write_text(json.dumps(tables))
    assert answer("solve", "full.json", cwd=tmp_path, code=3)["status"] == "infeasible"
    assert answer("solve", "tables.json", "--engine", "magic", cwd=tmp_path, code=2)["error"] == "UsageError"
    assert answer("solve", "nowhere.json", cwd=tmp_path, code=2)["fields"]["path"] == "nowhere.json"


def test_doctor_tells_devices_versions_and_that_the_solver_works(tmp_path: Path) -> None:
    facts = answer("doctor", "--devices", "4", cwd=tmp_path)
    assert len(facts["devices"]) == 4
    assert facts["devices"][0]["platform"] == "cpu"
    assert facts["packages"]["jax"]
    assert facts["solver"]["status"] == "optimal"
    assert facts["threads"]["pool"] >= 32
    assert facts["links"]["levels"][-1]["devices"] == 4
    assert facts["problems"] == []
    one = answer("doctor", "--devices", "1", cwd=tmp_path)
    assert any("--devices 8" in problem for problem in one["problems"])
