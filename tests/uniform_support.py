"""Models, plans and the comparison with one device for tests of the one-program executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax import lax

from uniap_jax.core.graph import LayerGraph, Value
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.frontend import trace
from uniap_jax.runtime.uniform import compile_uniform

VOCABULARY, WIDTH, HEADS, SEQUENCE = 64, 32, 2, 8
LOSS_TOLERANCE = 1e-5
GRAD_TOLERANCE = 1e-4


class State(train_state.TrainState):
    rng: jax.Array


class Block(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        heads = nn.Dense(3 * width, use_bias=False, name="qkv")(nn.LayerNorm()(x))
        query, key, value = jnp.split(heads.reshape(rows, length, HEADS, 3 * width // HEADS), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // HEADS)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(rows, length, width)
        x = x + nn.Dropout(self.dropout, deterministic=False)(nn.Dense(width, name="out")(mixed))
        hidden = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout, deterministic=False)(nn.Dense(width, name="down")(hidden))


class Turn(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Block(self.dropout)(x), None


class GPT(nn.Module):
    """Tied embeddings; blocks unrolled, or one `nn.scan`; with or without `nn.remat`."""

    layers: int
    dropout: float
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, name="embed")
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (SEQUENCE, WIDTH))
        if self.scan:
            turn = nn.remat(Turn, prevent_cse=False) if self.remat else Turn
            loop = nn.scan(
                turn, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.layers
            )
            x, _ = loop(self.dropout, name="blocks")(x, None)
        else:
            block = nn.remat(Block) if self.remat else Block
            for i in range(self.layers):
                x = block(self.dropout, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(name="norm")(x))


def gpt(
    *,
    layers: int = 4,
    dropout: float = 0.1,
    scan: bool = False,
    remat: bool = False,
    batch: int = 8,
    mask: np.ndarray | None = None,
) -> tuple[State, Callable[..., Any], dict[str, np.ndarray]]:
    """State, train step and batch; with a mask the loss is the mean over the tokens it leaves."""
    model = GPT(layers, dropout, scan, remat)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(keys, jnp.zeros((1, SEQUENCE), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = State.create(apply_fn=model.apply, params=params, tx=tx, rng=jax.random.key(2))

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        rng = jax.random.fold_in(state.rng, state.step)

        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["x"], rngs={"dropout": rng})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            if mask is None:
                return losses.mean()
            return (losses * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    masked = {} if mask is None else {"mask": mask}
    text = np.random.default_rng(0).integers(0, VOCABULARY, (batch, SEQUENCE + 1)).astype(np.int32)
    return state, step, {"x": text[:, :-1], "y": text[:, 1:], **masked}


def residual(
    *, aux: bool, dtype: Any = jnp.float32, bad: bool = False, rows: int = 8, masked: bool = False
) -> tuple[Any, Any, Any]:
    """Residual layers over a value from before them (relay), a bias they share, and a loss term of each (extra).

    Masked, the loss is the mean over those examples whose first target is positive.
    """
    rng, width = np.random.default_rng(0), 16

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype)

    own = [{"up": weight(width, 2 * width), "down": weight(2 * width, width)} for _ in range(4)]
    params: dict[str, Any] = {
        "in": weight(8, width),
        "gate": weight(8, width),
        "bias": weight(width),
        "out": weight(width, 4),
    }
    params |= {"bias": weight(width), "own": own}
    tx = optax.sgd(0.01, momentum=0.9)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            given = batch["x"].astype(dtype)
            x, gate = jnp.tanh(given @ params["in"]), jnp.tanh(given @ params["gate"])
            if bad:  # zero rows in a bubble: a gradient of infinity that must not reach the sums
                x = x + 1
            terms = []
            for layer in params["own"]:
                h = x @ layer["up"]
                terms.append(jnp.mean(h.astype(jnp.float32) ** 2))
                if bad:
                    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
                x = x + (jax.nn.relu(h) @ layer["down"]) * gate + params["bias"]
            errors = ((x @ params["out"]).astype(jnp.float32) - batch["y"]) ** 2
            error = jnp.mean(errors, where=batch["y"][:, :1] > 0) if masked else jnp.mean(errors)
            return (error + 0.01 * sum(terms), terms) if aux else (error, [])

        (value, terms), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "terms": terms}

    batch = {"x": rng.normal(size=(rows, 8)).astype(np.float32), "y": rng.normal(size=(rows, 4)).astype(np.float32)}
    return (params, tx.init(params)), step, batch


def plain_scan(*, reverse: bool = False, batched: bool = False, before: bool = True) -> tuple[Any, Any, Any]:
    """`lax.scan` over stacked weights, with a shared bias, a mask from the batch, a cast and collected statistics."""
    rng, width, layers = np.random.default_rng(0), 16, 4

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32)

    params = {"in": weight(8, width), "w": weight(layers, width, width), "bias": weight(width), "out": weight(width, 4)}
    tx = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state

        def loss(params: Any) -> Any:
            first = jnp.tanh(batch["x"] @ params["in"])
            gate = jax.nn.sigmoid(batch["x"] @ params["in"])
            numbers = jnp.arange(layers, dtype=jnp.float32)
            extra = jnp.broadcast_to(first, (layers, *first.shape)) if batched else numbers

            def turn(x: Any, own: tuple[Any, Any]) -> Any:
                w, e = own
                h = jax.nn.relu(x @ w) * batch["mask"][:, None] + params["bias"]
                return x + h * gate + 0.01 * e, jnp.mean(h**2)

            x, terms = lax.scan(turn, first, (params["w"] * 1.5, extra), reverse=reverse)
            error = jnp.mean(((x + (first if before else 0.0)) @ params["out"] - batch["y"]) ** 2)
            return error + 0.1 * terms.sum(), terms

        (value, terms), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value, "terms": terms}

    batch = {
        "x": rng.normal(size=(8, 8)).astype(np.float32),
        "y": rng.normal(size=(8, 4)).astype(np.float32),
        "mask": (rng.random(8) > 0.3).astype(np.float32),
    }
    return (params, tx.init(params)), step, batch


class StackTurn(nnx.Module):
    """A residual turn with dropout and batch normalisation, whose statistics and keys change inside the loop."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


class Stack(nnx.Module):
    """`nnx.scan` over turns."""

    def __init__(self, width: int, layers: int, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> StackTurn:
            return StackTurn(width, rngs=rngs)

        self.entry = nnx.Linear(8, width, rngs=rngs)
        self.turns = create(rngs)
        self.exit = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, turn: StackTurn) -> jax.Array:
            return turn(x)

        return self.exit(forward(self.entry(x), self.turns))


def nnx_stack() -> tuple[Any, Any, Any]:
    """State, train step and batch of a loop whose statistics change."""
    model = Stack(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = state

        def loss(model: Stack) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return state, {"loss": value}

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32), "y": rng.normal(size=(8, 4)).astype(np.float32)}
    return (model, optimizer), step, batch


def pinned(
    graph: LayerGraph,
    num_stages: int,
    num_microbatches: int,
    strategy: str,
    schedule: str,
    stages: Sequence[int] | None = None,
) -> Plan:
    """A plan that spreads the most frequent layers evenly; the others go to the first and last stage."""
    kind = max((layer.signature for layer in graph.layers), key=[x.signature for x in graph.layers].count)
    equal = [layer.index for layer in graph.layers if layer.signature == kind]
    if stages is None:
        share = max(len(equal) // num_stages, 1)
        stages = [min(max((i - equal[0]) // share, 0), num_stages - 1) for i in range(len(graph.layers))]
    chosen = parse_strategy(strategy)
    n = chosen.num_devices
    return Plan(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        batch_size=graph.batch_size,
        stage_devices=tuple(tuple(range(s * n, s * n + n)) for s in range(num_stages)),
        layers=tuple(
            LayerPlan(name=layer.name, stage=stage, strategy=chosen)
            for layer, stage in zip(graph.layers, stages, strict=True)
        ),
        prediction=Prediction(step_time_s=0.0),
        certificate=Certificate(status="pinned"),
    )


def with_gradients(graph: LayerGraph) -> LayerGraph:
    """The same step, which also returns the loss and the gradients."""
    step, count = graph.step, len(graph.params)

    def update(*args: Any) -> list[Any]:
        outputs = jax.core.eval_jaxpr(step.update.jaxpr, step.update.consts, *args)
        return [*outputs, args[len(args) - count - len(graph.results)], *args[len(args) - count :]]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in step.update.in_avals]
    loss = Value(shape=(), dtype=graph.values[graph.results[0]].dtype)
    more = replace(
        step,
        update=jax.make_jaxpr(update)(*shapes),
        outputs=(*step.outputs, loss, *graph.params),
        output_leaf=(*step.output_leaf, *([None] * (1 + count))),
    )
    return replace(graph, step=more)


def reference(graph: LayerGraph, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Loss and gradients of the whole batch on one device, layer after layer."""
    ready = jax.core.eval_jaxpr(graph.step.before.jaxpr, graph.step.before.consts, *state, *batch)
    params, operands = ready[: len(graph.params)], ready[len(graph.params) :]
    places = {"state": operands, "batch": list(batch), "index": [np.int32(0)]}

    def loss(params: Sequence[Any]) -> Any:
        values: dict[int, Any] = {}
        for layer in graph.layers:
            inputs = [params[i] for i in layer.params]
            inputs += [places[graph.operands[i].kind][graph.operands[i].leaf] for i in layer.operands]
            inputs += [values[i] for i in layer.reads]
            values.update(zip(layer.writes, jax.core.eval_jaxpr(layer.jaxpr.jaxpr, (), *inputs), strict=True))
        return values[graph.results[0]]

    return jax.jit(jax.value_and_grad(loss))(params)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A traced step, its arguments and what one device makes of them.

    Attributes:
        graph: of the whole batch.
        state: flat leaves.
        batch: flat leaves.
        loss: of the first step.
        grads: of the first step.
        outputs: of the first step.
    """

    graph: LayerGraph
    state: list[Any]
    batch: list[Any]
    loss: float
    grads: list[Any]
    outputs: list[Any]


def make_case(built: tuple[Any, Callable[..., Any], Any]) -> Case:
    """Traces a (state, step, batch) and runs it on one device."""
    state, step, batch = built
    graph = trace(step, state, batch)
    leaves, rows = graph.step.flatten(state, batch)
    loss, grads = reference(graph, leaves, rows)
    outputs = jax.jit(graph.step.flat)(*leaves, *rows)
    return Case(graph=graph, state=leaves, batch=rows, loss=float(loss), grads=list(grads), outputs=list(outputs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Difference:
    """Largest relative differences from one device: of the loss, of a gradient, of an output of the step."""

    loss: float
    grad: float
    leaf: str
    output: float
    program: Any


def largest(x: Any) -> float:
    """Maximum norm."""
    return float(np.abs(np.asarray(x, np.float64)).max(initial=0.0))


def gap(a: Any, b: Any) -> float:
    """Maximum norm of a difference."""
    return largest(np.asarray(a, np.float64) - np.asarray(b, np.float64))


def difference(case: Case, plan: Plan, devices: Sequence[Any] | None = None) -> Difference:
    """Runs a plan as one program and compares it with one device."""
    graph = case.graph
    program = compile_uniform(with_gradients(graph), plan, list(devices or jax.devices()))
    state = [jax.device_put(x, s) for x, s in zip(case.state, program.state_shardings, strict=True)]
    batch = [jax.device_put(x, s) for x, s in zip(case.batch, program.batch_shardings, strict=True)]
    outputs = program(state, batch)
    count = 1 + len(graph.params)
    outputs, (loss, *grads) = outputs[:-count], outputs[-count:]
    scale = max(map(largest, case.grads))
    found = {
        p.name: gap(a, b) / max(largest(a), 1e-3 * scale)
        for p, a, b in zip(graph.params, case.grads, grads, strict=True)
    }
    leaf = max(found, key=lambda name: found[name])
    plain = [
        gap(a, b) / max(largest(a), 1.0)
        for a, b in zip(case.outputs, outputs, strict=True)
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
    ]
    off = abs(float(loss) - case.loss) / abs(case.loss)
    return Difference(loss=off, grad=found[leaf], leaf=leaf, output=max(plain), program=program)
