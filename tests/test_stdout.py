"""Standard output belongs to the result: whatever a step file or a C library prints goes to stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOISY_STEP = """
import ctypes, os, subprocess, sys
print("python print while importing")
os.write(1, b"descriptor 1 while importing\\n")
from uniap_jax.demo_gpt import build_tiny

def build():
    print("python print in build")
    ctypes.CDLL(None).puts(b"C library in build")
    subprocess.run(["echo", "child process in build"], check=True)
    state, train_step, batch = build_tiny()
    def noisy(state, batch):
        print("python print while tracing")
        return train_step(state, batch)
    return state, noisy, batch
"""
NOISE = (
    "python print while importing",
    "descriptor 1 while importing",
    "python print in build",
    "C library in build",
    "child process in build",
    "python print while tracing",
)


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "uniap_jax", *argv], cwd=cwd, capture_output=True, text=True, check=False, timeout=280
    )


def test_json_is_all_of_stdout_though_the_step_prints(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY_STEP)
    done = run("trace", "--step", "noisy.py:build", "--devices", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert facts["batch_size"] == 8
    for noise in NOISE:
        assert noise in done.stderr


def test_the_table_is_all_of_stdout_too(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY_STEP)
    done = run("trace", "--step", "noisy.py:build", "--devices", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout
    for noise in NOISE:
        assert noise not in done.stdout
        assert noise in done.stderr


def test_an_error_is_one_object_and_a_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("print('noise')\n")
    done = run("trace", "--step", "empty.py:build", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["fields"]["name"] == "build"
    assert "UsageError: empty.py has no function 'build'" in done.stderr
    assert "Traceback" not in done.stderr
