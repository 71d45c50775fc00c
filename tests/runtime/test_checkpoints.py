"""A state saved under one plan is read under another, on fewer devices, or without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from runtime_support import decoder_state, decoder_step, make_plan, run_steps, token_batch, worst
from uniap_jax import frontend, runtime

TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))

PLANS: list[dict[str, Any]] = [
    {"stages": 2, "strategies": "fsdp=2", "microbatches": 2},
    {"strategies": "fsdp=4,zero=1"},
    {"strategies": "data=2"},
]


def arrays(state: Any) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the checkpoint library's own
def test_three_plans_continue_as_one_run(tmp_path: Path) -> None:
    batch, start = token_batch(), decoder_state(TX)
    graph = frontend.trace(decoder_step, start, batch)
    expected_state, expected = run_steps(jax.jit(lambda *a: decoder_step(*a)), start, batch, 6)
    losses: list[float] = []
    saved: Path | None = None
    with ocp.StandardCheckpointer() as checkpointer:
        for number, plan in enumerate(PLANS):
            step = runtime.compile(graph, make_plan(graph, **plan))
            if saved is None:
                state = step.place(start, batch)
            else:
                state = start.replace(**checkpointer.restore(saved, arrays(step.abstract_state())))
                for leaf, want in zip(jax.tree.leaves(state), step.in_shardings, strict=True):
                    assert leaf.sharding.is_equivalent_to(want, leaf.ndim)
            state, metrics = run_steps(step, state, batch, 2)
            losses += [float(m["loss"]) for m in metrics]
            saved = tmp_path / f"after_{number}"
            checkpointer.save(saved, arrays(state))
            checkpointer.wait_until_finished()
        whole = checkpointer.restore(saved, jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays(expected_state)))
    np.testing.assert_allclose(losses, [float(m["loss"]) for m in expected], rtol=1e-5)
    assert worst(whole, arrays(expected_state)) < 3e-4
