"""Examples and the demo run at a tiny size, and compute what one device computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from uniap_jax.core.plan import Plan
from uniap_jax.demo import run_demo
from uniap_jax.demo_gpt import TINY, build_tiny, make_batch, make_text


def test_gpt_example_trains_and_prints_its_plan(root: Path, tmp_path: Path) -> None:
    argv = ["--layers", "2", "--width", "32", "--steps", "3", "--described"]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "gpt.py"), *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ") and "loss" in line
    ]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "8 devices" in done.stdout
    assert "status: optimal" in done.stdout


def test_demo_trains_under_the_plan_as_on_one_device() -> None:
    lines: list[str] = []
    plans: list[Plan] = []
    facts = run_demo(size=TINY, steps=5, source="described", tell=lines.append, show_plan=plans.append)
    assert facts["ok"]
    assert facts["loss_rel_diff"] <= 1e-4
    assert len(facts["losses"]) == 5
    assert facts["losses"][-1] < facts["losses"][0]
    assert len(facts["timed_steps"]["plan"]) == len(facts["timed_steps"]["data"]) == 7
    assert len(plans) == 1
    assert plans[0].num_devices == 8
    assert any(line.startswith("step   5  loss") for line in lines)
    json.dumps(facts)


def test_demo_text_is_the_same_for_the_same_seed_and_never_wrong() -> None:
    import numpy as np

    text = make_text(np.random.default_rng(3), 400)
    assert text == make_text(np.random.default_rng(3), 400)
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    sentences = [s.split() for s in text.split(". ")[:-1]]
    assert len(sentences) > 5
    for a, plus, b, is_, total in sentences:
        assert (plus, is_) == ("plus", "is")
        assert words.index(a) + words.index(b) == words.index(total)


def test_demo_targets_are_the_next_tokens() -> None:
    batch = make_batch(0, size=TINY)
    assert batch["tokens"].shape == (TINY.batch, TINY.sequence)
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert batch["tokens"].max() < 128


def test_build_returns_state_step_and_batch() -> None:
    state, train_step, batch = build_tiny()
    assert callable(train_step)
    assert state.params["block_1"]["up"]["kernel"].shape == (TINY.width, 4 * TINY.width)
    assert set(batch) == {"tokens", "targets"}
