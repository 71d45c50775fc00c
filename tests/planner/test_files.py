import json
from pathlib import Path

import pytest

from uniap_jax.core.errors import OptionError, ProfileError
from uniap_jax.planner import load_tables, solve_file

DATA = Path(__file__).resolve().parent.parent / "data" / "planning"
FILES = sorted(p.name for p in DATA.glob("*.json"))


@pytest.mark.parametrize("name", FILES)
def test_stored_optimum(name):
    truth = json.loads((DATA / name).read_text())["optimum"]
    answer = solve_file(DATA / name, time_limit_s=60.0)
    if truth is None:
        assert answer["status"] == "infeasible"
        assert answer["step_time_ms"] is None
        return
    assert answer["status"] == "optimal"
    assert answer["step_time_ms"] == pytest.approx(truth["tpi_ms"], rel=1e-6)
    assert answer["gap"] == 0.0
    assert answer["bound_ms"] == pytest.approx(truth["tpi_ms"], rel=1e-6)
    assert len(answer["stage"]) == len(answer["strategy"]) == len(truth["stage"])


@pytest.mark.parametrize("engine", ["hybrid", "miqp", "literal", "brute_force"])
@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("small")])
def test_other_exact_engines(name, engine):
    truth = json.loads((DATA / name).read_text())["optimum"]
    answer = solve_file(DATA / name, engine=engine, time_limit_s=60.0)
    assert (answer["status"], answer["engine"]) == ("optimal", engine)
    assert answer["step_time_ms"] == pytest.approx(truth["tpi_ms"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "engine"), [("small_2.json", "miqp"), ("small_5.json", "hybrid"), ("chain34_p4.json", "interval")]
)
def test_both_solvers_agree(name, engine):
    cbc, highs = (solve_file(DATA / name, engine=engine, solver=s) for s in ("cbc", "highs"))
    assert cbc["status"] == highs["status"] == "optimal"
    assert cbc["step_time_ms"] == pytest.approx(highs["step_time_ms"], rel=1e-9)
    assert (cbc["notes"], highs["notes"]) == ([], [])
    if engine == "interval":
        assert (cbc["engine"], highs["engine"]) == ("interval+cbc", "interval+highs")


@pytest.mark.parametrize("engine", ["inter_then_intra", "layerwise_dp", "mcmc"])
@pytest.mark.parametrize("name", ["chain14_p2.json", "chain34_p2.json", "chain34_p4.json", "chain34_p2_k16.json"])
def test_joint_search_beats_the_baselines(name, engine):
    truth = json.loads((DATA / name).read_text())["optimum"]["tpi_ms"]
    answer = solve_file(DATA / name, engine=engine)
    assert answer["status"] == "feasible"
    assert answer["step_time_ms"] > truth * (1 + 1e-4)
    assert 0 < answer["gap"] < 1


def test_deterministic():
    first, second = (solve_file(DATA / "chain34_p2.json") for _ in range(2))
    assert first["stage"] == second["stage"]
    assert first["strategy"] == second["strategy"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"time": None}, "time"),
        ({"capacity": [1.0]}, "capacity"),
        ({"memory": "much"}, "memory"),
        ({"layers": 0}, "layers"),
        ({"edges": [[0]]}, "edges"),
        ({"relay": -1}, "relay"),
    ],
)
def test_malformed_files_name_the_field(tmp_path, change, field):
    data = json.loads((DATA / "small_1.json").read_text())
    for key, value in change.items():
        if value is None:
            del data[key]
        elif value == -1:
            data[key][0][0] = -1.0
        else:
            data[key] = value
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        load_tables(path)
    assert caught.value.field == field


def test_not_json(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text("tables")
    with pytest.raises(ProfileError, match="JSON"):
        load_tables(path)


def test_unknown_engine_names_those_that_exist():
    with pytest.raises(OptionError, match="interval") as caught:
        solve_file(DATA / "small_1.json", engine="simplex")
    assert "miqp" in caught.value.possible


def test_unknown_solver_names_those_that_exist():
    with pytest.raises(OptionError, match="highs") as caught:
        solve_file(DATA / "small_1.json", solver="simplex")
    assert caught.value.possible == ("cbc", "highs")


def test_no_time_is_told_apart_from_infeasible():
    answer = solve_file(DATA / "chain34_p4.json", engine="literal", time_limit_s=0.01)
    assert answer["status"] == "no_plan_in_time"
