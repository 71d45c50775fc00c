"""A solver that is killed, hangs, lies or is missing never changes the plan."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from uniap_jax.planner import mip_model, solve_file
from uniap_jax.planner.mip_model import MipModel, solve_mip

DATA = Path(__file__).resolve().parent.parent / "data" / "planning"
CHAIN, SKIPS = DATA / "chain14_p2.json", DATA / "small_5.json"
TRUTH = {CHAIN: 2195.134382, SKIPS: 422.0}

READ = "import json, sys; spec = json.load(sys.stdin); n = len(spec['cost']); "
FAULTS = {
    "killed": f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})",
    "nonsense": "print('Cbc0010I After 0 nodes')",
    "short": READ + "print(json.dumps({'status': 'optimal', 'values': [1.0], 'objective': 1.0, 'bound': 1.0}))",
    "zeros": READ + "print(json.dumps({'status': 'optimal', 'values': [0.0] * n, 'objective': 0.0, 'bound': 0.0}))",
    "ones": READ + "print(json.dumps({'status': 'optimal', 'values': [1.0] * n, 'objective': 1.0, 'bound': 1.0}))",
    "infeasible": READ + "print(json.dumps({'status': 'infeasible', 'values': None, 'bound': None}))",
    "no module": READ + "print(json.dumps({'status': 'failed', 'reason': 'ModuleNotFoundError: mip', 'values': None}))",
}


true_child = mip_model.child_command


def inject(monkeypatch, code: str, *, only: str = "") -> None:
    """Replaces the solvers' children by code; `only` one solver's."""
    real = mip_model.child_command
    wrong = [sys.executable, "-c", code]
    monkeypatch.setattr(mip_model, "child_command", lambda solver: wrong if only in ("", solver) else real(solver))


# all ones is the right answer where the master has one column per stage
@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "ones"])
def test_chain_survives(monkeypatch, fault):
    inject(monkeypatch, FAULTS[fault])
    answer = solve_file(CHAIN)
    assert answer["status"] == "optimal"
    assert answer["step_time_ms"] == pytest.approx(TRUTH[CHAIN], rel=1e-6)
    assert answer["engine"] == "interval"
    assert any("path search" in note for note in answer["notes"])


@pytest.mark.parametrize("fault", FAULTS)
def test_graph_with_skips_keeps_a_plan_and_claims_no_proof(monkeypatch, fault):
    inject(monkeypatch, FAULTS[fault])
    answer = solve_file(SKIPS)
    assert answer["status"] == "feasible"
    assert answer["step_time_ms"] >= TRUTH[SKIPS] * (1 - 1e-9)
    assert answer["gap"] > 0
    assert any("CBC" in note for note in answer["notes"])


@pytest.mark.parametrize(("fault", "solver"), [("killed", "cbc"), ("infeasible", "cbc"), ("zeros", "highs")])
def test_the_other_solver_steps_in(monkeypatch, fault, solver):
    inject(monkeypatch, FAULTS[fault], only=solver)
    answer = solve_file(SKIPS, solver=solver)
    assert answer["status"] == "optimal"
    assert answer["step_time_ms"] == pytest.approx(TRUTH[SKIPS], rel=1e-6)
    assert any("asked instead" in note for note in answer["notes"])


def lying(solver: str, change: str) -> str:
    """A child that asks the true solver and changes its answer."""
    *real, _ = true_child(solver)  # whose parent is the liar
    return (
        "import json, os, subprocess, sys; spec = json.load(sys.stdin); "
        f"ask = lambda s: json.loads(subprocess.run([*{real!r}, str(os.getpid())], "
        f"input=json.dumps(s).encode(), stdout=-1).stdout); {change}; print(json.dumps(answer))"
    )


SECOND_BEST = (
    "best = ask(spec)['values']; one = [j for j, w in enumerate(spec['whole']) if w and best[j] > 0.5]; "
    "spec['rows'].append([one, [1.0] * len(one), '<', len(one) - 1.0]); answer = ask(spec)"
)
"""A true solution, truly priced, with a matching bound: but not the best one."""


@pytest.mark.parametrize(("engine", "solver"), [("miqp", "cbc"), ("literal", "highs")])
def test_a_wrong_optimum_is_found_out(monkeypatch, engine, solver):
    inject(monkeypatch, lying(solver, SECOND_BEST), only=solver)
    answer = solve_file(SKIPS, engine=engine, solver=solver)
    assert answer["step_time_ms"] == pytest.approx(TRUTH[SKIPS], rel=1e-6)
    assert any("found a better plan" in note for note in answer["notes"])


def test_hang_is_killed(monkeypatch):
    began = time.monotonic()
    inject(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(mip_model, "GRACE_S", 0.5)
    model = MipModel()
    model.add(cost=1.0)
    answer = solve_mip(model, time_limit_s=0.5)
    assert answer.status == "failed"
    assert "killed" in answer.reason
    assert time.monotonic() - began < 20


def test_solver_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(mip_model, "child_command", lambda solver: ["/nonexistent/python"])
    answer = solve_file(CHAIN)
    assert answer["step_time_ms"] == pytest.approx(TRUTH[CHAIN], rel=1e-6)
    assert any("did not start" in note for note in answer["notes"])


def test_missing_mip(monkeypatch, tmp_path):
    (tmp_path / "mip.py").write_text("raise ModuleNotFoundError(\"No module named 'mip'\")\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    answer = solve_file(CHAIN)
    assert answer["step_time_ms"] == pytest.approx(TRUTH[CHAIN], rel=1e-6)
    assert any("No module named 'mip'" in note for note in answer["notes"])


def test_gurobi_without_licence_is_not_asked(monkeypatch, tmp_path):
    (tmp_path / "gurobipy.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert solve_file(CHAIN)["engine"] == "interval+cbc"


def test_a_true_plan_with_a_false_price_is_not_believed(monkeypatch):
    """The solver's own child, but every bound it reports is ten times too high."""
    *real, _ = true_child("cbc")
    code = (
        "import json, os, subprocess, sys; "
        f"out = subprocess.run([*{real!r}, str(os.getpid())], input=sys.stdin.buffer.read(), stdout=-1).stdout; "
        "answer = json.loads(out); answer['bound'] = 10 * (answer['bound'] or 1.0); print(json.dumps(answer))"
    )
    inject(monkeypatch, code)
    answer = solve_file(SKIPS)
    assert answer["step_time_ms"] == pytest.approx(TRUTH[SKIPS], rel=1e-6)
    assert answer["status"] == "feasible"
    assert any("not used" in note for note in answer["notes"])


def test_nothing_on_stdout(capfd):
    solve_file(CHAIN)
    solve_file(SKIPS, engine="miqp")
    assert capfd.readouterr() == ("", "")


def child_with(solve: str) -> str:
    """A child of ours, of the process whose number it is given, whose solver is one line of code."""
    return (
        "import os, sys, time, types; from uniap_jax.planner import child; "
        f"child._solver = lambda name: types.SimpleNamespace(solve=lambda spec: {solve}); "
        "child.main('cbc', int(sys.argv[1]))"
    )


def test_what_a_solver_prints_is_no_part_of_its_answer():
    noisy = child_with("[os.write(1, b'Cbc0010I'), os.write(2, b'Presolve')]")
    done = subprocess.run([sys.executable, "-c", noisy, str(os.getpid())], input=b"{}", capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"[8, 8]", b"")


def test_the_solver_ends_with_the_process_that_asked():
    ask = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {child_with('time.sleep(600)')!r}, str(os.getpid())], "
        "stdin=subprocess.PIPE, start_new_session=True); "
        "child.stdin.write(b'{}'); child.stdin.close(); print(child.pid, flush=True); child.wait()"
    )
    asking = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE)
    child = int(asking.stdout.readline())
    asking.kill()
    asking.wait()
    asking.stdout.close()
    deadline = time.monotonic() + 20
    try:
        while Path(f"/proc/{child}").exists() and "(zombie)" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < deadline, "the solver goes on without anyone to answer"
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
