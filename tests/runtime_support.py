"""Small train steps, hand-written plans for them, and the comparison with one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from uniap_jax import frontend, runtime
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy, parse_strategy

BATCH, TOKENS, WIDTH, VOCABULARY = 8, 4, 16, 32

LOSS_RTOL = 1e-5
"""Losses and other metrics against one device, relative."""
GRAD_ATOL = 2e-6
"""Gradients and SGD-updated parameters, absolute, of values about 0.01 to 1."""
ADAM_ATOL = 2e-4
"""Parameters after Adam: a gradient that is zero to rounding still moves by the learning rate's size (1e-3)."""
BF16_RTOL = 2e-2
"""Anything that went through bfloat16."""


class Block(nn.Module):
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(h))
        h = nn.Dense(WIDTH, dtype=self.dtype)(h)
        return x + nn.Dropout(self.dropout, deterministic=not train)(h)


class Decoder(nn.Module):
    """A language model without attention; its head is tied to the embedding, or of its own."""

    layers: int = 3
    tied: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    vocabulary: int = VOCABULARY

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = True) -> jax.Array:
        embed = nn.Embed(self.vocabulary, WIDTH, dtype=self.dtype)
        x = embed(tokens)
        for _ in range(self.layers):
            x = Block(self.dropout, self.dtype)(x, train)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocabulary, dtype=self.dtype)(x)


DECODER = Decoder()
"""One object: a bound `apply` is equal to itself only."""


def token_batch(size: int = BATCH) -> dict[str, np.ndarray]:
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (size, TOKENS)).astype(np.int32)
    return {"x": tokens, "y": np.roll(tokens, 1, axis=1)}


@functools.lru_cache(maxsize=8)
def _params(model: nn.Module) -> Any:
    return jax.device_get(model.init(jax.random.key(0), token_batch()["x"], train=False)["params"])


def decoder_state(tx: Any, model: nn.Module | None = None, dtype: Any = None) -> TrainState:
    model = model or DECODER
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), _params(model))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def decoder_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Loss, accuracy per example and gradient norm beside the new state."""

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.key(7), state.step)
        logits = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": key}).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), losses.mean(axis=1)

    (loss, per_example), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "per_example": per_example, "grads": grads}


def split_points(graph: LayerGraph, num_stages: int) -> list[int]:
    """Layers spread evenly over the stages."""
    return [min(num_stages - 1, i * num_stages // len(graph.layers)) for i in range(len(graph.layers))]


def make_plan(
    graph: LayerGraph,
    *,
    stages: int = 1,
    microbatches: int = 1,
    schedule: str = "one_f_one_b",
    strategies: str | Sequence[str] = "data=1",
    stage_devices: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A pinned plan; strategies are taken in turn by the layers, data parallelism where one is illegal."""
    wanted = [parse_strategy(s) for s in ([strategies] if isinstance(strategies, str) else strategies)]
    micro = graph if microbatches == 1 else graph.microbatch(microbatches)
    per_stage = wanted[0].num_devices
    devices = stage_devices or [range(s * per_stage, (s + 1) * per_stage) for s in range(stages)]
    layers = []
    for i, (layer, stage) in enumerate(zip(micro.layers, split_points(graph, stages), strict=True)):
        size = len(devices[stage])
        fitting = [s for s in wanted if s.num_devices == size] or [Strategy(data=size)]
        strategy = fitting[i % len(fitting)]
        try:
            layer_sharding(micro, layer, strategy)
        except StrategyError:
            strategy = Strategy(data=size)
        layers.append(LayerPlan(name=layer.name, stage=stage, strategy=strategy))
    return Plan(
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        batch_size=graph.batch_size,
        stage_devices=tuple(tuple(d) for d in devices),
        layers=tuple(layers),
        prediction=Prediction(step_time_s=0.0),
        certificate=Certificate(status="pinned"),
        graph_fingerprint=graph.fingerprint,
    )


def run_steps(step: Callable[..., Any], state: Any, batch: Any, count: int) -> tuple[Any, list[Any]]:
    """State and metrics, on the host."""
    found = []
    for _ in range(count):
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return state, found


def worst(a: Any, b: Any) -> float:
    """Largest absolute difference of two trees of arrays."""
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return max((float(np.abs(np.float64(x) - np.float64(y)).max(initial=0.0)) for x, y in pairs), default=0.0)


def assert_as_one_device(
    train_step: Callable[..., Any],
    make_state: Callable[[], Any],
    batch: Any,
    *,
    steps: int = 2,
    atol: float = GRAD_ATOL,
    rtol: float = LOSS_RTOL,
    graph: LayerGraph | None = None,
    **plan: Any,
) -> tuple[runtime.ParallelStep, Any]:
    """Runs a step under a plan and plainly; compares every metric of every step and the final state."""
    start = make_state()
    graph = graph or frontend.trace(train_step, start, batch)
    reference_state, reference = run_steps(jax.jit(lambda *a: train_step(*a)), start, batch, steps)
    step = runtime.compile(graph, make_plan(graph, **plan))
    state, found = run_steps(step, step.place(start, batch), batch, steps)
    for got, want in zip(found, reference, strict=True):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=atol)
    assert jax.tree.structure(state) == jax.tree.structure(reference_state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(reference_state), strict=True):
        assert a.dtype == jnp.asarray(b).dtype
    assert worst(numbers(state), numbers(reference_state)) <= atol
    return step, state


def numbers(tree: Any) -> list[Any]:
    """Leaves that are numbers: keys as their data."""
    leaves = jax.tree.leaves(tree)
    return [jax.random.key_data(x) if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else x for x in leaves]
