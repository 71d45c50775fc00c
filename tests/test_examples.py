"""Examples and the demo run at a tiny size, and compute what one device computes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import uniap_jax as uniap
from uniap_jax.core.plan import Plan
from uniap_jax.demo import run_demo
from uniap_jax.demo_gpt import TINY, build_tiny, make_batch, make_text

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

LM = {"width": 32, "heads": 2, "vocabulary": 64, "size": 8}
TINY_SIZES: dict[str, dict[str, Any]] = {
    "equinox_mlp": {"depth": 2, "width": 32, "size": 16},
    "gpt_nnx": {**LM, "depth": 2, "sequence": 8},
    "haiku_lm": {**LM, "depth": 1, "sequence": 8},
    "moe": {"depth": 1, "width": 32, "experts": 4, "vocabulary": 64, "sequence": 8, "size": 8},
    "plain_jax": {"depth": 2, "width": 32, "size": 16},
    "resnet": {"depths": (1, 1), "filters": 8, "pixels": 8, "classes": 4, "size": 8},
    "scan_remat": {**LM, "depth": 2, "sequence": 8},
    "t5": {**LM, "depth": 1, "length": 8},
    "vit": {"depth": 1, "width": 32, "heads": 2, "patch": 4, "pixels": 8, "classes": 4, "size": 8},
}
PINS: dict[str, dict[str, Any]] = {
    "equinox_mlp": {"num_stages": 2, "strategy": "data=2"},
    "gpt_nnx": {"num_stages": 1, "strategy": "data=2,tensor=2"},
    "haiku_lm": {"num_stages": 1, "strategy": "fsdp=4"},
    "moe": {"num_stages": 1, "strategy": "data=2,tensor=2"},
    "plain_jax": {"num_stages": 1, "num_microbatches": 2},
    "resnet": {"num_stages": 1, "strategy": "data=4"},
    "scan_remat": {"num_stages": 1, "strategy": "fsdp=2,tensor=2"},
    "t5": {"num_stages": 1, "strategy": "data=4"},
    "vit": {"num_stages": 2, "num_microbatches": 1, "strategy": "data=2"},
}
"""What the plan of a test is to be like, so that every kind occurs and the search is short."""

NEEDS = {"equinox_mlp": "equinox", "haiku_lm": "haiku", "t5": "transformers"}


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_every_example_is_run_by_a_test_and_is_short() -> None:
    shown = {"gpt", "multi_process", "nnx_mlp", "plan_tpu_pod", "restore"}
    assert {p.stem for p in EXAMPLES.glob("*.py")} <= shown | set(TINY_SIZES)
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text().count("\n") < 125, path.name


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("name", TINY_SIZES)
def test_example_trains_as_on_one_device(name: str, load_example: Callable[[str], Any]) -> None:
    pytest.importorskip(NEEDS.get(name, "jax"))
    sizes = TINY_SIZES[name]
    example = load_example(name)
    state, train_step, batch = example.build(**sizes)
    alone = reference_losses(example.build(**sizes), steps=2)
    step = uniap.parallelize(train_step, source="described", devices=jax.devices()[:4], **PINS[name])
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert losses[1] < losses[0]
    assert step.plan.num_devices == 4


def reference_losses(built: tuple[Any, Any, Any], *, steps: int) -> list[float]:
    """Losses of the user's own step under `jax.jit` (nnx's, where the state holds modules)."""
    from flax import nnx

    state, train_step, batch = built
    compiled = nnx.jit(train_step) if isinstance(state, tuple) else jax.jit(train_step)
    losses = []
    for _ in range(steps):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.filterwarnings("ignore")  # the checkpoint library's own
def test_restore_example_goes_on_under_the_other_plan(
    tmp_path: Path, load_example: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    sizes = (1, 16, 2)
    losses = load_example("restore").main(str(tmp_path), steps=1, sizes=sizes)
    gpt = load_example("gpt")
    state, data, alone = gpt.create_state(*sizes), gpt.batches(gpt.DEFAULT_TEXT), []
    compiled = jax.jit(gpt.train_step)
    for _ in range(2):
        state, metrics = compiled(state, next(data))
        alone.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    shown = capsys.readouterr().out
    assert "2 stages" in shown
    assert "4 devices" in shown


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
