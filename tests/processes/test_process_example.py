"""The example of several processes runs as its first line says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def test_process_example_trains(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "examples" / "multi_process.py"), "--spawn", "2", "--steps", "3"]
    job = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = job.communicate(timeout=240)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, err
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[2] < losses[0]
