"""The optimizer step split over stages gives the numbers of one device, whatever the chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from runtime_support import (
    ADAM_ATOL,
    GRAD_ATOL,
    assert_as_one_device,
    decoder_state,
    decoder_step,
    make_plan,
    token_batch,
)
from uniap_jax import frontend, runtime
from uniap_jax.core.errors import ExecutionError
from uniap_jax.runtime import update_split
from uniap_jax.runtime.homes import lay_out

TWO = {"stages": 2, "strategies": "fsdp=2,zero=1"}


def kernels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


CHAINS: dict[str, tuple[Callable[[], Any], float]] = {
    "clip_adamw": (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), ADAM_ATOL),
    "two_clips": (
        lambda: optax.chain(
            optax.clip_by_global_norm(0.1), optax.scale(3.0), optax.clip_by_global_norm(0.2), optax.sgd(0.5)
        ),
        GRAD_ATOL,
    ),
    "masked_decay": (lambda: optax.chain(optax.add_decayed_weights(0.1, mask=kernels), optax.sgd(0.1)), GRAD_ATOL),
    "multi_transform": (
        lambda: optax.multi_transform(
            {"a": optax.sgd(0.1, momentum=0.9), "b": optax.adam(1e-3)},
            lambda p: jax.tree.map(lambda m: "a" if m else "b", kernels(p)),
        ),
        ADAM_ATOL,
    ),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.3, momentum=0.9), GRAD_ATOL),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.3, momentum=0.9), 3), GRAD_ATOL),
    "ema_of_updates": (lambda: optax.chain(optax.sgd(0.3), optax.ema(0.9)), GRAD_ATOL),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16), ADAM_ATOL),
    "noise": (lambda: optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(0.1)), GRAD_ATOL),
}


SLOW = ("two_clips", "masked_decay", "inject_hyperparams", "ema_of_updates", "adafactor", "noise")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CHAINS])
def test_chains(name: str) -> None:
    make, atol = CHAINS[name]
    step, _ = assert_as_one_device(decoder_step, lambda: decoder_state(make()), token_batch(), atol=atol, **TWO)
    stages = {home.stage for home in step._run._layout.leaves}
    assert {0, 1} <= stages


@pytest.mark.parametrize("stages", [1, 2])
def test_case_11_multi_steps(stages: int) -> None:
    def make() -> Any:
        return decoder_state(optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)), 2))

    step, _ = assert_as_one_device(
        decoder_step, make, token_batch(), steps=4, atol=ADAM_ATOL, stages=stages, strategies="fsdp=2,zero=1"
    )
    values = [v.name for v in step.graph.step.state]
    kernel = values.index("[0].params['Block_0']['Dense_0']['kernel']")
    total = next(i for i, n in enumerate(values) if "acc_grads['Block_0']['Dense_0']['kernel']" in n)
    moment = next(i for i, n in enumerate(values) if ".mu['Block_0']['Dense_0']['kernel']" in n)
    assert step.in_shardings[total].device_set == step.in_shardings[kernel].device_set
    assert step.in_shardings[total] == step.in_shardings[moment]


def test_case_13_micro_batches_advance_a_schedule_once() -> None:
    schedule = optax.linear_schedule(0.5, 0.1, 4)
    for stages, microbatches in ((1, 8), (2, 8)):
        _, state = assert_as_one_device(
            decoder_step,
            lambda: decoder_state(optax.sgd(schedule)),
            token_batch(),
            steps=3,
            stages=stages,
            microbatches=microbatches,
        )
        counts = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32]
        assert [int(c) for c in counts] == [3]


class WithAverage(TrainState):
    ema: Any = None


def average_step(state: Any, batch: Any) -> Any:
    state, metrics = decoder_step(state, batch)
    ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state.ema, state.params)
    return state.replace(ema=ema), metrics


def averaged() -> Any:
    plain = decoder_state(optax.sgd(0.3))
    return WithAverage.create(apply_fn=plain.apply_fn, params=plain.params, tx=plain.tx, ema=plain.params)


def test_an_average_of_the_parameters_lives_with_them() -> None:
    step, _ = assert_as_one_device(average_step, averaged, token_batch(), **TWO)
    homes = {v.name: h.stage for v, h in zip(step.graph.step.state, step._run._layout.leaves, strict=True)}
    for name, stage in homes.items():
        if name.startswith("[0].ema"):
            assert stage == homes[name.replace(".ema", ".params")]


def test_a_loss_scale_that_joins_stages() -> None:
    tx = optax.sgd(0.3)

    def make() -> Any:
        plain = decoder_state(tx)
        return {"params": plain.params, "opt": plain.opt_state, "scale": jnp.float32(4.0)}

    apply_fn = decoder_state(tx).apply_fn

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = apply_fn({"params": params}, batch["x"])
            return state["scale"] * optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = jax.tree.map(lambda p, u: jnp.where(finite, p + u, p), state["params"], updates)
        scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
        return {"params": params, "opt": opt, "scale": scale}, {"loss": loss / state["scale"], "finite": finite}

    _, state = assert_as_one_device(train_step, make, token_batch(), steps=3, microbatches=2, **TWO)
    assert float(state["scale"]) == 32.0


@pytest.mark.parametrize("stages", [1, 2])
def test_case_52_empty_update(stages: int) -> None:
    def forgetful(state: Any, batch: Any) -> Any:
        _, metrics = decoder_step(state, batch)
        return state, metrics

    assert_as_one_device(forgetful, lambda: decoder_state(optax.sgd(0.1)), token_batch(), stages=stages)


@pytest.mark.parametrize("stages", [1, 2])
def test_case_53_loss_per_example_and_a_count(stages: int) -> None:
    tx = optax.sgd(0.3)
    apply_fn = decoder_state(tx).apply_fn

    def train_step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                apply_fn({"params": params}, batch["x"]), batch["y"]
            )
            return losses.mean(), (losses.mean(axis=1), (batch["y"] > 3).sum())

        (loss, (each, count)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, each, count)

    step, _ = assert_as_one_device(
        train_step, lambda: decoder_state(tx).params, token_batch(), stages=stages, microbatches=4, strategies="data=2"
    )
    _, (_, each, count) = step(decoder_state(tx).params, token_batch())
    assert each.shape == (8,)
    assert count.dtype == jnp.int32
    assert int(count) == int((token_batch()["y"] > 3).sum())


def test_phases_of_a_clipped_chain() -> None:
    """A sum over stages is one join, however the leaves of the stages alternate in it."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))
    graph = frontend.trace(decoder_step, decoder_state(tx), token_batch())
    layout = lay_out(graph, make_plan(graph, stages=2), jax.devices())
    pieces = update_split.split_update(layout.graph, layout.plan, layout.update, layout.params, layout.leaves)
    assert next(p.phase for p in pieces if p.place == update_split.JOIN) == 0
    assert {p.phase for p in pieces} == {0, 1}


def test_an_optimizer_that_flattens_everything_is_refused_when_large(monkeypatch: pytest.MonkeyPatch) -> None:
    state = decoder_state(optax.flatten(optax.adam(1e-3)))
    step, _ = assert_as_one_device(decoder_step, lambda: state, token_batch(), atol=ADAM_ATOL, stages=2)
    monkeypatch.setattr(update_split, "JOINED_LIMIT_BYTES", 1024)
    with pytest.raises(ExecutionError, match="num_stages=1") as caught:
        runtime.compile(step.graph, step.plan)
    assert caught.value.equation == "concatenate"
    assert caught.value.joined_bytes > 1024
    assert caught.value.source.startswith(("runtime_support.py:", "test_update_split.py:"))
