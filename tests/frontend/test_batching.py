"""How values follow the batch: what may be split into micro-batches, and that splitting changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import uniap_jax as uniap
from uniap_jax.check import TOLERANCE, WHOLE_BATCH, tolerance_of
from uniap_jax.core.errors import OptionError, TraceError
from uniap_jax.core.reference import reference_gradients
from uniap_jax.frontend import trace

W = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
BATCH = {"x": jnp.linspace(0.0, 1.0, 32).reshape(8, 4), "label": jnp.arange(8) % 3, "mask": jnp.arange(8) % 2 * 1.0}


def traced(loss, has_aux=False):
    def step(w, b):
        out, grad = jax.value_and_grad(lambda p: loss(p, b), has_aux=has_aux)(w)
        return w - grad, out

    return trace(step, W, BATCH)


def logits(w, b):
    return b["x"] @ w


def cross_entropy(w, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, b), b["label"])


SPLITTABLE = {
    "mean": (lambda w, b: cross_entropy(w, b).mean(), "mean"),
    "sum": (lambda w, b: cross_entropy(w, b).sum(), "sum"),
    "sum over count": (lambda w, b: cross_entropy(w, b).sum() / b["x"].shape[0], "mean"),
    "rows over count": (lambda w, b: (cross_entropy(w, b) / b["x"].shape[0]).sum(), "mean"),
    "regularised": (lambda w, b: cross_entropy(w, b).mean() + 0.1 * (w**2).sum(), "mean"),
    "scaled": (lambda w, b: 1024.0 * -cross_entropy(w, b).mean(), "mean"),
    "one hot": (lambda w, b: -(jax.nn.one_hot(b["label"], 3) * jax.nn.log_softmax(logits(w, b))).mean(), "mean"),
    "masked sum": (lambda w, b: (cross_entropy(w, b) * b["mask"]).sum(), "sum"),
    "indexed": (lambda w, b: jax.nn.log_softmax(logits(w, b))[jnp.arange(b["x"].shape[0]), b["label"]].mean(), "mean"),
    "not a number": (
        lambda w, b: jnp.nan_to_num(jnp.where(b["mask"][:, None] > 0, logits(w, b), jnp.nan)).mean(),
        "mean",
    ),
    "two means": (lambda w, b: cross_entropy(w, b).mean() + (logits(w, b) ** 2).mean(), "mean"),
    "merged dims": (lambda w, b: (logits(w, b).reshape(-1) ** 2).mean(), "mean"),
    "scan over features": (
        lambda w, b: jax.lax.scan(lambda c, row: (c + jnp.outer(b["x"].sum(1), row**2), None), 0.0 * logits(w, b), w)[
            0
        ].mean(),
        "mean",
    ),
    "as long as the batch": (  # features, after the first product, as many as examples
        lambda w, b: ((((b["x"] @ jnp.tile(w, 3)[:, :8]).T * 2.0).T @ jnp.ones((8, 8))) ** 2).mean(),
        "mean",
    ),
    "over time": (
        lambda w, b: jax.lax.scan(
            lambda c, x: (jnp.tanh(c + x), c), 0.0 * logits(w, b), jnp.stack([logits(w, b)] * 8, 1).swapaxes(0, 1)
        )[1].mean(),
        "mean",
    ),
    "dot with itself": (lambda w, b: jnp.vdot(logits(w, b), logits(w, b)), "sum"),
    "mean over a mask": (lambda w, b: (cross_entropy(w, b) * b["mask"]).sum() / b["mask"].sum(), "sum"),
    "mean over a mask, or a one": (
        lambda w, b: jnp.sum(cross_entropy(w, b) * b["mask"]) / jnp.maximum(b["mask"].sum(), 1),
        "sum",
    ),
    "mean where": (lambda w, b: jnp.mean(cross_entropy(w, b), where=b["mask"] > 0), "sum"),
    "average": (lambda w, b: jnp.average(cross_entropy(w, b), weights=b["mask"]), "sum"),
    "ratio of means": (lambda w, b: (cross_entropy(w, b) * b["mask"]).mean() / b["mask"].mean(), "mean"),
    "weights of mean one": (lambda w, b: (cross_entropy(w, b) * b["mask"] / b["mask"].mean()).mean(), "mean"),
    "mean over a mask, or nothing": (
        lambda w, b: jnp.where(b["mask"].sum() > 0, (cross_entropy(w, b) * b["mask"]).sum() / b["mask"].sum(), 0.0),
        "sum",
    ),
    "mean over a mask, regularised": (
        lambda w, b: (
            (cross_entropy(w, b) * b["mask"]).sum() / b["mask"].sum()
            - 0.1 * (w**2).sum()
            + 0.3 * (logits(w, b) ** 2).mean()
        ),
        "sum",
    ),
    "sum, regularised": (lambda w, b: 0.1 * (w**2).sum() - cross_entropy(w, b).sum(), "sum"),
    "standardised inputs": (
        lambda w, b: (((b["x"] - b["x"].mean(0)) / b["x"].std(0)) @ w - b["x"].max()).mean(),
        "mean",
    ),
    "times one over the count": (lambda w, b: cross_entropy(w, b).sum() * (1.0 / b["x"].shape[0]), "sum"),
    "over a root": (
        lambda w, b: (cross_entropy(w, b) * b["x"].shape[0] ** -0.5).mean() + (w**2).sum() / b["x"].shape[0],
        "mean",
    ),
    "weights of classes": (
        lambda w, b: (cross_entropy(w, b) / jnp.bincount(b["label"], length=3)[b["label"]]).sum(),
        "sum",
    ),
}

MIXING = {
    "ratio of sums": (
        lambda w, b: (cross_entropy(w, b) * logits(w, b).max(1)).sum() / logits(w, b).max(1).sum(),
        "ratio",
    ),
    "checkpointed ratio": (
        jax.checkpoint(lambda w, b: (cross_entropy(w, b) * b["mask"]).sum() / b["mask"].sum()),
        "ratio",
    ),
    "contrastive": (lambda w, b: jax.nn.logsumexp(logits(w, b) @ logits(w, b).T, axis=1).mean(), "every example"),
    "normalised": (lambda w, b: ((logits(w, b) - logits(w, b).mean(0)) ** 2).mean(), "whole batch"),
    "cumulative": (lambda w, b: jnp.cumsum(logits(w, b), axis=0).mean(), "along the batch"),
    "maximum": (lambda w, b: logits(w, b).max(), "along the batch"),
    "squared mean": (lambda w, b: cross_entropy(w, b).mean() ** 2, "not linear"),
    "neighbours": (lambda w, b: (logits(w, b)[1:] - logits(w, b)[:-1]).sum(), "along the batch"),
    "standard deviation": (lambda w, b: logits(w, b).std(), ""),
    "sorted": (lambda w, b: (jnp.sort(logits(w, b), axis=0) * jnp.arange(b["x"].shape[0])[:, None]).sum(), ""),
    "reversed": (lambda w, b: (logits(w, b) * logits(w, b)[::-1]).sum(), "along the batch"),
    "balance": (lambda w, b: (jax.nn.softmax(logits(w, b)).mean(0) * (logits(w, b) > 0).mean(0)).sum(), ""),
    "scan over examples": (
        lambda w, b: jax.lax.scan(lambda c, x: (jnp.tanh(c + x @ w), None), w[0], b["x"])[0].sum(),
        "",
    ),
}


@pytest.mark.parametrize("name", SPLITTABLE)
def test_losses_that_may_be_split(name):
    loss, kind = SPLITTABLE[name]
    graph = traced(loss)
    assert graph.split_reason == ""
    assert graph.reductions == (kind,)
    pieces = []
    for i in range(4):
        piece = jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH)
        ours = reference_gradients(graph.microbatch(4), index=i, whole=jax.tree.leaves(BATCH))
        pieces.append(ours(W, *jax.tree.leaves(piece)))
    together = [sum(parts) / (4 if kind == "mean" else 1) for parts in zip(*((v, *g) for v, g in pieces), strict=True)]
    whole, grad = jax.value_and_grad(loss)(W, BATCH)
    np.testing.assert_allclose(together[0], whole, rtol=1e-5)
    np.testing.assert_allclose(together[1], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MIXING)
def test_losses_that_must_not_be_split(name):
    loss, why = MIXING[name]
    graph = traced(loss)
    assert graph.split_reason
    assert why in graph.split_reason
    assert graph.split_cause == "statistic"
    assert "test_batching.py:" in graph.split_reason, "bodies of jnp functions too, which come from a cache"
    with pytest.raises(TraceError) as caught:
        graph.microbatch(2)
    assert caught.value.num_microbatches == 2


def test_auxiliary_outputs():
    def loss(w, b):
        rows = cross_entropy(w, b)
        correct = (logits(w, b).argmax(-1) == b["label"]).sum()
        return rows.mean(), {"rows": rows, "correct": correct, "size": (w**2).sum()}

    graph = traced(loss, has_aux=True)
    kinds = {
        graph.values[r].shape: k for r, k in zip(graph.results, graph.reductions, strict=True) if graph.values[r].shape
    }
    assert kinds == {(8,): "concat"}
    assert sorted(graph.reductions) == ["concat", "mean", "same", "sum"]


def test_batch_must_divide():
    with pytest.raises(TraceError) as caught:
        traced(SPLITTABLE["mean"][0]).microbatch(3)
    assert (caught.value.batch_size, caught.value.num_microbatches) == (8, 3)


def _fixed(w, b):
    return (jnp.ones((8, 3)) * logits(w, b)).mean()


def _asserted(w, b):
    assert b["x"].shape == (8, 4), "a batch of eight"
    return logits(w, b).mean()


def _another(w, b):
    out = logits(w, b)
    return (jnp.tanh(out) if b["x"].shape[0] == 8 else out).mean()


def _unknown(w, b):
    one = logits(w, b)
    return jnp.linalg.cholesky(one[:, :, None] * one[:, None, :] + 9.0 * jnp.eye(one.shape[1])).mean()


@pytest.mark.parametrize(
    ("loss", "cause", "why"),
    [
        (_fixed, "shapes", "does not trace at another batch size"),
        (_asserted, "shapes", "a batch of eight"),
        (_another, "shapes", "something else at another batch size"),
        (_unknown, "unknown", "`cholesky` at "),
    ],
)
def test_a_batch_that_cannot_be_followed_is_not_one_whose_examples_meet(loss, cause, why):
    graph = traced(loss)
    assert graph.split_cause == cause
    assert why in graph.split_reason
    assert tolerance_of(graph) == TOLERANCE
    assert tolerance_of(traced(MIXING["normalised"][0])) == WHOLE_BATCH


def noise(key, x):
    return x + jax.random.normal(key, x.shape)


def own_keys(w, b, key):
    return jax.vmap(noise)(jax.random.split(key, b["x"].shape[0]), logits(w, b))


KEYED = {
    "typed keys": lambda w, b: own_keys(w, b, jax.random.key(1)),
    "raw keys": lambda w, b: own_keys(w, b, jax.random.PRNGKey(1)),
    "checkpoint": lambda w, b: jax.checkpoint(own_keys)(w, b, jax.random.key(1)),
    "loop": lambda w, b: jax.lax.scan(
        lambda c, k: (noise(k, own_keys(w, b, k)) + c, None), 0.0 * logits(w, b), jax.random.split(jax.random.key(1), 3)
    )[0],
}


@pytest.mark.parametrize("name", KEYED)
def test_a_key_for_each_example_does_not_change_with_micro_batches(name):
    def loss(w, b):
        return (KEYED[name](w, b) ** 2).mean()

    graph = traced(loss)
    assert graph.split_reason == ""
    micro = graph.microbatch(4)
    pieces = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH) for i in range(4)]
    losses = [reference_gradients(micro, index=i)(W, *jax.tree.leaves(piece))[0] for i, piece in enumerate(pieces)]
    np.testing.assert_allclose(np.mean(losses), loss(W, BATCH), rtol=1e-5)


def numbers(b):
    return jnp.arange(b["x"].shape[0])


NUMBERED = {
    "weight": lambda w, b: (logits(w, b) * numbers(b)[:, None]).mean(),
    "first half": lambda w, b: jnp.where((numbers(b) < 4)[:, None], logits(w, b), 0.0).mean(),
    "every other": lambda w, b: jnp.where((numbers(b) % 2 == 0)[:, None], logits(w, b), 0.0).mean(),
    "table": lambda w, b: (logits(w, b) * jnp.linspace(0.0, 1.0, 64)[numbers(b)][:, None]).mean(),
    "column": lambda w, b: jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i))(
        jnp.tile(logits(w, b), 3), numbers(b)
    ).mean(),
    "index too": lambda w, b: (jax.nn.log_softmax(logits(w, b))[numbers(b), b["label"]] * numbers(b)).mean(),
    "key": lambda w, b: jax.vmap(noise)(
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), numbers(b)), logits(w, b)
    ).mean(),
    "flattened": lambda w, b: (logits(w, b).reshape(-1) * jnp.arange(logits(w, b).size)).mean(),
}

WHOLE = {
    "ranks": lambda w, b: (logits(w, b)[:, 0] * jnp.argsort(b["label"])).mean(),
    "running sum": lambda w, b: (logits(w, b) * jnp.cumsum(b["x"], 0)[:, :3]).mean(),
    "neighbours' inputs": lambda w, b: (jnp.roll(b["x"], 1, 0) @ w * logits(w, b)).mean(),
    "gamma": lambda w, b: (logits(w, b) * jax.random.gamma(jax.random.key(0), 1.0, (len(b["x"]), 1))).mean(),
    "noise of a mean": lambda w, b: (
        (logits(w, b) - (n := jax.random.normal(jax.random.key(3), (len(b["x"]), 3)))) * (n - n.mean())
    ).mean(),
}


@pytest.mark.parametrize("name", [*NUMBERED, *WHOLE])
def test_lists_over_the_batch_are_made_of_all_of_it(name):
    loss = {**NUMBERED, **WHOLE}[name]
    graph = traced(loss)
    assert graph.split_reason == ""
    np.testing.assert_allclose(_in_pieces(graph), loss(W, BATCH), rtol=1e-5)


def _in_pieces(graph):
    """The mean of a loss over four micro-batches."""
    pieces = [jax.tree.leaves(jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH)) for i in range(4)]
    micro, whole = graph.microbatch(4), jax.tree.leaves(BATCH)
    return np.mean([reference_gradients(micro, index=i, whole=whole)(W, *p)[0] for i, p in enumerate(pieces)])


OUT_OF_PLACE = {
    "next example": (lambda w, b: (logits(w, b) * logits(w, b)[numbers(b) + 1]).mean(), "across the batch"),
    "number in a loop": (
        lambda w, b: jax.lax.scan(
            lambda c, row: (c + logits(w, b) * row[0] * numbers(b)[:, None], None), 0.0 * logits(w, b), w
        )[0].mean(),
        "the place of an example",
    ),
    "pairs of labels": (
        lambda w, b: (logits(w, b) @ logits(w, b).T * (b["label"][:, None] == b["label"])).mean(),
        "meet",
    ),
    "checkpointed gamma": (
        jax.checkpoint(lambda w, b: (logits(w, b) * jax.random.gamma(jax.random.key(0), 1.0, (len(b["x"]), 1))).mean()),
        "drawn for all examples",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_lists_over_the_batch_that_are_not_cut(name):
    loss, why = OUT_OF_PLACE[name]
    assert why in traced(loss).split_reason


@pytest.mark.parametrize("typed", [False, True])
def test_noise_that_is_drawn_outside_of_the_loss_is_cut(typed):
    def step(w, b):
        noise = jax.random.normal(jax.random.key(3), (b["x"].shape[0], 3))
        keys = (jax.random.key if typed else jax.random.PRNGKey)(4)
        keys = jax.random.split(keys, b["x"].shape[0])

        def loss(p):
            own = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
            return ((logits(p, b) + w.sum() * noise - own) ** 2).mean()

        out, grad = jax.value_and_grad(loss)(w)
        return w - grad, out

    graph = trace(step, W, BATCH)
    assert graph.split_reason == ""
    np.testing.assert_allclose(_in_pieces(graph), step(W, BATCH)[1], rtol=1e-5)


class Block(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dropout(0.5, deterministic=False)(jnp.tanh(nn.Dense(self.width)(x))), None


def _looped(block):
    return nn.scan(
        block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3, in_axes=nn.broadcast
    )(4)


BLOCKS = {
    "plain": lambda: Block(),
    "checkpoint": lambda: nn.remat(Block)(),
    "loop": lambda: _looped(Block),
    "loop of checkpoints": lambda: _looped(nn.remat(Block, prevent_cse=False)),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_dropout_does_not_change_with_micro_batches(block):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x, _ = BLOCKS[block]()(x, None)
            return nn.Dense(3)(x)

    net, key = Net(), jax.random.key(7)
    variables = net.init({"params": key, "dropout": key}, BATCH["x"])

    def loss(v, b):
        out = net.apply(v, b["x"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(out, b["label"]).mean()

    def step(v, b):
        value, grads = jax.value_and_grad(loss)(v, b)
        return jax.tree.map(lambda a, g: a - g, v, grads), value

    graph = trace(step, variables, BATCH)
    assert graph.split_reason == ""
    whole, grads = jax.value_and_grad(loss)(variables, BATCH)
    micro = graph.microbatch(4)
    losses, pieces = [], []
    for i in range(4):
        piece = jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH)
        value, grad = reference_gradients(micro, index=i)(*jax.tree.leaves(variables), *jax.tree.leaves(piece))
        losses.append(value)
        pieces.append(grad)
    np.testing.assert_allclose(np.mean(losses), whole, rtol=1e-6)
    for got, expected in zip(map(sum, zip(*pieces, strict=True)), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got / 4, expected, rtol=1e-5, atol=1e-7)


def test_single_examples_that_run_other_operations_are_refused():
    def loss(w, b):
        examples = b["x"].shape[0]
        token = jnp.broadcast_to(w[:1], (examples, 3))  # nothing to broadcast to one example
        return ((logits(w, b) + token) ** 2).mean()

    graph = traced(loss)
    assert graph.split_reason == ""
    assert graph.microbatch(4).num_microbatches == 4
    with pytest.raises(TraceError, match="fewer micro-batches") as error:
        graph.microbatch(8)
    assert error.value.examples == 1
    costs = uniap.estimate(graph)
    assert {c.num_microbatches for c in costs.candidates() if costs.refusal(c)} == {8}
    assert any("one example" in note for note in costs.notes)
    with pytest.raises(OptionError, match="8 micro-batches are not possible"):
        uniap.solve(costs, num_microbatches=8)
    assert uniap.solve(costs).num_microbatches <= 4
