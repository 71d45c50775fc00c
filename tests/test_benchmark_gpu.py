"""The GPU's benchmark, on a CPU: its numbers come from the programs it times, and without a card it says so."""

import subprocess
import sys

import jax
import pytest

import uniap_jax as uniap
from benchmarks import gpu

TINY = gpu.Sizes(layers=4, hidden=32, heads=2, sequence=16, vocabulary=64, batch=4)


@pytest.mark.parametrize("name", ["gpt block", "mlp", "attention", "conv"])
def test_layers_are_predicted_and_timed(name):
    device = jax.devices()[0]
    times = list(gpu.layer_times(name, gpu.cases(TINY)[name], uniap.local_cluster([device]), device))
    assert times
    assert all(t.name == name for t in times)
    assert all(t.predicted_s > 0 and t.measured.median_s > 0 and t.measured.runs >= 5 for t in times)


def test_twice_the_work_is_predicted_to_take_longer():
    device = jax.devices()[0]
    cluster = uniap.local_cluster([device])
    wide = gpu.Sizes(layers=4, hidden=256, heads=2, sequence=16, vocabulary=64, batch=4)
    small, large = (
        sum(t.predicted_s for t in gpu.layer_times("mlp", gpu.cases(s)["mlp"], cluster, device)) for s in (TINY, wide)
    )
    assert large > small


def test_step_of_one_stage_and_plain_jit_take_turns():
    times = gpu.step_times(gpu.gpt(TINY), jax.devices()[0], rounds=2)
    assert set(times) == {"jit", "plan"}
    assert all(t > 0 for t in times.values())


def test_the_tables_are_printed(capsys):
    gpu.compare(jax.devices()[0], TINY, rounds=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| layer")
    assert lines[-1].split(" | ")[-1] in ("yes |", "no |")


def test_without_a_card_one_line_says_what_is_missing(root):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("there is a GPU here")
    assert done.stdout.count("\n") == 1
    assert "no GPU" in done.stdout
    assert "uniap-jax[cuda]" in done.stdout
