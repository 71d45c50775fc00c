"""The command line before anything runs: options, environment, the step's name."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from uniap_jax.cli.environment import set_environment
from uniap_jax.cli.options import parse
from uniap_jax.cli.output import EXIT_CODES, Output, UsageError, failure, plain
from uniap_jax.cli.steps import load_build
from uniap_jax.core import errors

STEP = ["--step", "m:build"]


def test_check_reads_a_pinned_plan() -> None:
    argv = ["check", *STEP, "--devices", "8", "--stages", "2", "--microbatches", "4", "--schedule", "1f1b"]
    options = parse([*argv, "--strategy", "data=2,tensor=2"])
    assert (options.devices, options.stages, options.microbatches) == (8, 2, 4)
    assert (options.schedule, options.strategy, options.steps) == ("one_f_one_b", "data=2,tensor=2", 3)


def test_what_is_not_pinned_is_auto() -> None:
    options = parse(["plan", *STEP])
    assert (options.stages, options.microbatches, options.schedule, options.strategy) == ("auto", "auto", "auto", None)


def test_pins_of_layers_are_patterns_with_a_decision() -> None:
    options = parse(
        ["plan", *STEP, "--pin", "block_*=tensor=2", "--pin", "embed=0", "--top-k", "3", "--solver", "highs"]
    )
    assert options.pin == [("block_*", "tensor=2"), ("embed", "0")]
    assert (options.top_k, options.solver) == (3, "highs")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["plan"], "--step"),
        (["plan", *STEP, "--pin", "block"], "'block' is no pin"),
        (["check", *STEP, "--plan", "p.json", "--pin", "a=0"], "give one"),
        (["plan", *STEP, "--devices", "0"], "'0' is not a positive whole number"),
        (["plan", *STEP, "--stages", "two"], "'two' is not a positive whole number"),
        (["plan", *STEP, "--budget", "-1"], "'-1' is not a positive number of seconds"),
        (["plan", *STEP, "--time-limit", "nan"], "'nan' is not a positive number of seconds"),
        (["check", *STEP, "--schedule", "zb"], "'zb' is no schedule; use gpipe or 1f1b"),
        (["check", *STEP, "--strategy", "rows=2"], "unknown strategy 'rows'"),
        (["check", *STEP, "--plan", "p.json", "--strategy", "data=2"], "give one"),
        (["check", *STEP, "--plan", "p.json", "--stages", "2"], "give one"),
        (["fly"], "fly"),
        ([], "name a verb"),
    ],
)
def test_wrong_use_leaves_with_2_and_says_what(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(argv)
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.out == ""


def test_help_is_quick_and_on_stdout() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "uniap_jax", "--help"], capture_output=True, text=True, timeout=60)
        times.append(time.perf_counter() - start)
    assert done.returncode == 0
    for verb in ("doctor", "trace", "profile", "plan", "explain", "check", "solve", "run", "demo"):
        assert verb in done.stdout
    assert min(times) <= 0.5


def test_only_the_demo_asks_for_virtual_devices_by_itself() -> None:
    assert parse(["demo"]).devices == 8
    assert parse(["doctor"]).devices is None
    for verb in ("trace", "profile", "plan", "check", "run"):
        assert parse([verb, *STEP]).devices is None


def fresh_environment(devices: int | None, *, absent: bool = False, **environ: str) -> dict[str, str]:
    """What `--devices` leaves in the environment of a process that has not imported jax."""
    code = (
        "import json, sys\nfrom uniap_jax.cli.environment import set_environment\n"
        f"environ = {environ!r}\nset_environment({devices}, absent={absent}, environ=environ)\n"
        "assert 'jax' not in sys.modules\nprint(json.dumps(environ))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, str] = json.loads(out.stdout)
    return found


def test_devices_keep_other_flags_and_get_threads_enough() -> None:
    flag = "--xla_force_host_platform_device_count"
    assert fresh_environment(8, XLA_FLAGS=f"--a=1 {flag}=2 --b=2") == {
        "XLA_FLAGS": f"--a=1 --b=2 {flag}=8",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "64",
    }
    assert fresh_environment(16)["NPROC"] == "128"
    assert fresh_environment(8, NPROC="200")["NPROC"] == "200"
    assert fresh_environment(None, A="b") == {"A": "b"}


def test_planning_for_devices_that_are_not_here_starts_no_accelerator() -> None:
    assert fresh_environment(None, absent=True) == {"JAX_PLATFORMS": "cpu"}
    assert fresh_environment(None, absent=True, JAX_PLATFORMS="cuda,cpu") == {"JAX_PLATFORMS": "cuda,cpu"}


def test_devices_after_jax_has_started_are_an_error() -> None:
    import jax

    assert len(jax.devices()) == 8
    set_environment(8, environ={})
    with pytest.raises(UsageError) as caught:
        set_environment(9, environ={})
    assert (caught.value.devices, caught.value.started) == (9, 8)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / f"step_{abs(hash(text))}.py"
    path.write_text(text)
    return str(path)


def test_a_step_file_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_step.py").write_text("answer = 42\n")
    spec = write(tmp_path, "from neighbour_of_step import answer\ndef build():\n    return answer, print, None\n")
    assert load_build(f"{spec}:build")() == (42, print, None)


@pytest.mark.parametrize(
    ("text", "spec", "fields"),
    [
        ("def make(): pass\ndef _hidden(): pass\n", "{}:build", {"name": "build", "functions": ["make"]}),
        ("build = 3\n", "{}:build", {"name": "build", "functions": []}),
        ("", "{}", {}),
        ("", "{}:", {}),
        ("", "nowhere.py:build", {"path": "nowhere.py"}),
        ("", "no_such_module_here.part:build", {"name": "no_such_module_here.part"}),
    ],
)
def test_a_step_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, spec: str, fields: dict[str, object]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UsageError) as caught:
        load_build(spec.format(write(tmp_path, text)))
    for name, value in fields.items():
        assert caught.value.fields[name] == value
    assert "(state, train_step, batch)" in str(caught.value)


def test_a_module_that_fails_to_import_something_shows_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        load_build(write(tmp_path, "import no_such_module_here\n") + ":build")


@pytest.mark.parametrize(("returned", "told"), [("1, 2", "2 values"), ("[]", "list"), ("1, 2, 3", "int")])
def test_build_must_return_three_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str, told: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    build = load_build(write(tmp_path, f"def build():\n    return {returned}\n") + ":build")
    with pytest.raises(UsageError, match=told):
        build()


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.InfeasibleError("m", needed_bytes=3), 3, "infeasible"),
        (errors.StrategyError("m"), 3, "infeasible"),
        (errors.OptionError("m", num_stages=3, possible=(1, 2)), 3, "infeasible"),
        (errors.PlanMismatchError("m"), 3, "plan_mismatch"),
        (errors.NoPlanInTimeError("m"), 4, "no_plan_in_time"),
        (errors.TraceError("m"), 2, "not_traced"),
        (errors.ProfileError("m"), 2, "not_profiled"),
        (errors.SolverError("m"), 1, "broken"),
        (UsageError("m"), 2, "usage"),
    ],
)
def test_errors_become_exit_codes_and_one_object(
    error: errors.UniapError, code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    assert failure(error, Output(stream=stream, as_json=True)) == code
    found = json.loads(stream.getvalue())
    assert (found["ok"], found["status"], found["error"]) == (False, status, type(error).__name__)
    assert found["fields"] == plain(error.fields)
    assert capsys.readouterr().err == f"{type(error).__name__}: m\n"


def test_every_family_has_an_exit_code() -> None:
    families = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.UniapError)}
    assert families <= {kind for kind, _, _ in EXIT_CODES} | {errors.SolverError, errors.ExecutionError}


def test_plain_values_are_strict_json() -> None:
    value = {1: (1.5, float("nan"), float("inf")), "p": Path("a"), "o": {3}}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"1": [1.5, None, None], "p": "a", "o": [3]}
