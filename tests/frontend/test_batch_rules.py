"""Writes into arrays, pooling, Fourier transforms: inside an example they keep examples apart, across them not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.reference import reference_gradients
from uniap_jax.frontend import trace

W = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
BATCH = {"x": jnp.linspace(0.0, 1.0, 32).reshape(8, 4), "label": jnp.arange(8) % 3, "order": jnp.arange(8)[::-1]}

Loss = Callable[[Any, Any], Any]


def logits(w: Any, b: Any) -> Any:
    return b["x"] @ w


def ctc(w: Any, b: Any) -> Any:
    frames = jnp.stack([logits(w, b), 2.0 * logits(w, b), logits(w, b) - 1.0], 1)
    return optax.ctc_loss(frames, jnp.zeros(frames.shape[:2]), b["label"][:, None] % 2 + 1, 0.0 * b["x"][:, :1]).mean()


INSIDE: dict[str, Loss] = {
    "column": lambda w, b: (logits(w, b).at[:, 1].set(2.0) ** 2).mean(),
    "column of rows": lambda w, b: (logits(w, b).at[:, 1].add(b["x"][:, 0]) ** 2).mean(),
    "own place": lambda w, b: (logits(w, b).at[jnp.arange(b["x"].shape[0]), b["label"]].mul(3.0) ** 2).mean(),
    "each by itself": lambda w, b: (jax.vmap(lambda row, i: row.at[i].set(0.0))(logits(w, b), b["label"]) ** 2).mean(),
    "ctc": ctc,
    "pooled": lambda w, b: (
        jax.lax.reduce_window(logits(w, b), -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME") ** 2
    ).mean(),
    "transformed": lambda w, b: (jnp.abs(jnp.fft.fft(logits(w, b))) ** 2).mean(),
    "repeated": lambda w, b: (jnp.tile(logits(w, b), (1, 3)) ** 2).mean(),
}
ALONG: dict[str, Loss] = {
    "pooled": lambda w, b: (
        jax.lax.reduce_window(logits(w, b), -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME") ** 2
    ).mean(),
    "transformed": lambda w, b: (jnp.abs(jnp.fft.fft(logits(w, b), axis=0)) ** 2).mean(),
    "repeated": lambda w, b: (jnp.tile(logits(w, b), (2, 1)) ** 2).mean(),
}
ACROSS: dict[str, Loss] = {
    "other rows": lambda w, b: (logits(w, b).at[b["order"]].add(logits(w, b)) ** 2).mean(),
    "first row": lambda w, b: (logits(w, b).at[0].set(0.0) ** 2).mean(),
    "into no example": lambda w, b: (jnp.zeros(3).at[b["label"]].add(logits(w, b)[:, 0]) ** 2).mean(),
}


def traced(loss: Loss) -> LayerGraph:
    def step(w: Any, b: Any) -> Any:
        out, grad = jax.value_and_grad(loss)(w, b)
        return w - grad, out

    return trace(step, W, BATCH)


@pytest.mark.parametrize("name", INSIDE)
def test_what_stays_inside_examples_may_be_split(name: str) -> None:
    graph = traced(INSIDE[name])
    assert graph.split_reason == ""
    assert graph.reductions == ("mean",)
    pieces = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], BATCH) for i in range(2)]
    losses = [reference_gradients(graph.microbatch(2))(W, *jax.tree.leaves(piece))[0] for piece in pieces]
    np.testing.assert_allclose(np.mean(losses), INSIDE[name](W, BATCH), rtol=1e-5)


@pytest.mark.parametrize("name", ACROSS)
def test_writes_across_examples_must_not_be_split(name: str) -> None:
    graph = traced(ACROSS[name])
    assert graph.split_cause == "statistic"
    assert "examples are" in graph.split_reason


@pytest.mark.parametrize("name", ALONG)
def test_what_runs_along_the_batch_must_not_be_split(name: str) -> None:
    assert traced(ALONG[name]).split_reason
