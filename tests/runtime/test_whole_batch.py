"""Values of the whole batch that no parameter enters: losses over masks, cut into micro-batches, are one device's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniform_support as uniform
from runtime_support import BATCH, TOKENS, assert_as_one_device, decoder_state, token_batch
from uniap_jax import frontend
from uniap_jax.check import check_plan
from uniap_jax.runtime.verify import verify

ROWS = 2 * BATCH


def uneven(rows: int, tokens: int) -> np.ndarray:
    """A quarter of the examples without a token, one token of the next, half of others, all of the rest."""
    mask = np.ones((rows, tokens), np.float32)
    mask[: rows // 4] = 0
    mask[rows // 4, 1:] = 0
    mask[rows // 2 : 3 * rows // 4, tokens // 2 :] = 0
    return mask


def masked_batch() -> dict[str, np.ndarray]:
    return {**token_batch(ROWS), "mask": uneven(ROWS, TOKENS)}


def masked_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """A mean over a mask with a penalty and a mean over all tokens; how many tokens count; the mean of the mask."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        logits = state.apply_fn({"params": params}, batch["x"], train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        count = batch["mask"].sum()
        spread = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        loss = (losses * batch["mask"]).sum() / jnp.maximum(count, 1) + 1e-2 * spread
        loss = loss + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        right = ((logits.argmax(-1) == batch["y"]) * batch["mask"]).sum() / count
        return loss, {"count": count, "share": batch["mask"].mean(), "right": right}

    (loss, told), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads, **told}


@pytest.mark.parametrize(
    "plan",
    [
        {"strategies": "data=4", "microbatches": 2},
        {"strategies": "data=4", "microbatches": 4},
        {"strategies": ("data=2,tensor=2", "fsdp=4"), "microbatches": 4},
        {"stages": 2, "strategies": "data=2", "microbatches": 4},
        {"stages": 2, "strategies": "fsdp=2", "microbatches": 2, "schedule": "gpipe"},
        {"stages": 2, "strategies": "tensor=2"},
        {"stages": 3, "strategies": "data=2", "microbatches": 4},
    ],
    ids=str,
)
def test_means_over_a_mask(plan: dict[str, Any]) -> None:
    step, _ = assert_as_one_device(masked_step, lambda: decoder_state(optax.sgd(0.1)), masked_batch(), **plan)
    assert verify(step).ok


def mixed_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Labels of two examples mixed, noise drawn outside of the loss, and the examples in order of their tokens."""
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), state.step), batch["mask"].shape)

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch["x"], train=False)
        order = jnp.argsort(batch["mask"].sum(1))
        own, other = (
            optax.softmax_cross_entropy_with_integer_labels(logits, y) for y in (batch["y"], batch["y"][order])
        )
        return jnp.mean(0.7 * own + 0.3 * other + noise * logits[..., 0]), order

    (loss, order), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads, "order": order}


@pytest.mark.parametrize(
    "plan",
    [
        {"strategies": "data=4", "microbatches": 4},
        {"stages": 2, "strategies": "data=2", "microbatches": 4},
        {"stages": 2, "strategies": "tensor=2", "microbatches": 2},
    ],
    ids=str,
)
def test_lists_over_the_batch(plan: dict[str, Any]) -> None:
    step, _ = assert_as_one_device(mixed_step, lambda: decoder_state(optax.sgd(0.1)), masked_batch(), **plan)
    assert not [p for p in verify(step).problems if "_before" in p], "beside the lists' way out"


@pytest.mark.parametrize(("pieces", "strategy"), [(2, "data=2"), (4, "fsdp=2"), (4, "tensor=2")])
@pytest.mark.parametrize("scan", [False, True])
def test_one_program_for_equal_stages(pieces: int, strategy: str, *, scan: bool) -> None:
    case = uniform.make_case(uniform.gpt(batch=ROWS, scan=scan, mask=uneven(ROWS, uniform.SEQUENCE)))
    plan = uniform.pinned(case.graph, 2, pieces, strategy, "one_f_one_b")
    found = uniform.difference(case, plan)
    assert found.loss <= uniform.LOSS_TOLERANCE
    assert found.grad <= uniform.GRAD_TOLERANCE, found.leaf


@pytest.mark.parametrize("stages", [1, 2])
def test_an_unfolded_loop(stages: int) -> None:
    state, step, batch = uniform.gpt(batch=ROWS, scan=True, mask=uneven(ROWS, uniform.SEQUENCE))
    graph = frontend.trace(step, state, batch, unfold_scans=True)
    plan = uniform.pinned(graph, stages, 4, "data=2", "one_f_one_b")
    report = check_plan(graph, plan, (state, batch), steps=2)
    assert report.ok, report
