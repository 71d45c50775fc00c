"""Jobs of several processes on this host: they train as one device does, or end with a reason."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import uniform_support as support
from uniap_jax.frontend import trace

WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 240
"""Of a whole job; a loaded machine is slow, and a slow run looks like a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(scenario: str, size: int, *, devices: int = 4, timeout_s: float = 120.0, line: str = "") -> list[Ended]:
    """Runs a job; what is still there at the limit is killed outright, for it may ignore anything softer."""
    coordinator, line = f"127.0.0.1:{free_port()}", line or f"127.0.0.1:{free_port()}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices // size}")
    env = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join((str(WORKER.parent.parent), os.environ["PYTHONPATH"])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(rank), str(size), coordinator, line, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    end = time.monotonic() + LIMIT_S
    ended = []
    try:
        for process in reversed(ranks):  # rank 0 ends after it is spoken to: JAX aborts ranks that outlive it
            out, err = process.communicate(timeout=max(end - time.monotonic(), 1.0))
            ended.insert(0, Ended(code=process.returncode, out=out, err=err))
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return ended


def losses_of_one_device(steps: int, *, masked: bool = False) -> list[float]:
    state, step, batch = support.residual(aux=False, masked=masked)
    graph = trace(step, state, batch)
    run, (leaves, rows) = jax.jit(graph.step.flat), graph.step.flatten(state, batch)
    losses = []
    for _ in range(steps):
        outputs = run(*leaves, *rows)
        places = graph.step.output_leaf
        leaves, loss = [outputs[places.index(i)] for i in range(len(leaves))], outputs[places.index(None)]
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        ("one_stage", 2),
        ("alone", 2),
        ("auto", 2),
        ("equal_stages", 2),
        ("equal_stages", 4),
        ("unequal_stages", 2),
        ("spanning_stages", 2),
        ("masked_spanning_stages", 2),
        ("planned_stages", 2),
        ("checkpoint_program", 2),
        ("checkpoint_stages", 2),
    ],
)
def test_process_training_equals_one_device(scenario: str, size: int, tmp_path: Path) -> None:
    ended = launch(scenario, size, line=str(tmp_path) if "checkpoint" in scenario else "")
    assert [e.code for e in ended] == [0] * size, ended[0].err + ended[-1].err
    found = [json.loads(e.out.splitlines()[-1]) for e in ended]  # above it, what gloo has to say
    assert [f["devices"] for f in found] == [4] * size
    expected = losses_of_one_device(20, masked=scenario.startswith("masked"))
    for f in found:
        np.testing.assert_allclose(f["losses"], expected, rtol=support.LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["one_stage", "equal_stages", "unequal_stages", "spanning_stages"])
def test_process_training_does_not_hang_in_twenty_runs(scenario: str) -> None:
    expected = losses_of_one_device(20)
    for _ in range(20):
        ended = launch(scenario, 2)
        assert [e.code for e in ended] == [0, 0], ended[0].err + ended[-1].err
        for e in ended:
            losses = json.loads(e.out.splitlines()[-1])["losses"]
            np.testing.assert_allclose(losses, expected, rtol=support.LOSS_TOLERANCE)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("die", "rank 1 ended in step 2: its process is gone"),
        ("raise", "rank 1 failed in step 2: ValueError: no more data"),
        ("unequal_die", "rank 1 ended in step 2: its process is gone"),
        ("spanning_starve", "rank 1 stopped in step 2: rank 0 has waited in step 3 for 10 s"),
        ("starve", "rank 1 stopped in step 2: rank 0 has waited in step 3 for 10 s"),
    ],
)
def test_process_that_falls_out_ends_the_job(scenario: str, message: str) -> None:
    began = time.monotonic()
    ended = launch(scenario, 2, timeout_s=10.0 if "starve" in scenario else 60.0)
    assert time.monotonic() - began < LIMIT_S
    assert all(e.code != 0 for e in ended)
    assert message in ended[0].err


def test_process_with_another_model_is_refused_before_compiling() -> None:
    ended = launch("differ", 2)
    assert all(e.code != 0 for e in ended)
    for e in ended:
        assert "PlanMismatchError" in e.err
        assert "rank 1 has" in e.err
