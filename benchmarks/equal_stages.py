"""One program for equal stages against a pipeline by hand, compile time against depth, two processes against one.

    python -m benchmarks.equal_stages

GPipe by hand is what `shard_map` tutorials show: stacked weights split over an axis `stage`, a scan over ticks with
`ppermute`, `jax.value_and_grad` through it; embedding and head on all devices. 1F1B by hand has the layer's gradient
written out, and three loops: over ticks that run forward only, both ways, back only. All train the same model from the
same start on the same eight virtual CPU devices, take turns in one run, and must agree in their losses.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "jax" not in sys.modules:  # before JAX reads them
    count = os.environ.get("EQUAL_STAGES_DEVICES", "8")
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={count}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import uniap_jax as uniap
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy

ROWS, WIDTH, FEATURES = 128, 512, 64
STAGES, PIECES, DATA = 4, 8, 2
RATE = 1e-2


def make_params(layers: int, *, stacked: bool) -> dict[str, Any]:
    """Weights of the model, its layers in one stack or apart."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    own = {"up": weight(layers, WIDTH, 4 * WIDTH), "down": weight(layers, 4 * WIDTH, WIDTH) / 4}
    apart = [{name: x[i] for name, x in own.items()} for i in range(layers)]
    return {"in": weight(FEATURES, WIDTH), "layers": own if stacked else apart, "out": weight(WIDTH, FEATURES)}


def layer(x: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
    """One residual layer."""
    return x + jax.nn.gelu(x @ own["up"]) @ own["down"]


def make_batch() -> dict[str, np.ndarray]:
    """Rows and targets."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(ROWS, FEATURES)).astype(np.float32) for name in ("x", "y")}


def train_step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """The user's step: SGD on a mean of squares."""

    def loss(params: Any) -> jax.Array:
        x = batch["x"] @ params["in"]
        if isinstance(params["layers"], dict):
            x, _ = lax.scan(lambda x, own: (layer(x, own), None), x, params["layers"])
        else:
            for own in params["layers"]:
                x = layer(x, own)
        return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


UP = [(s, s + 1) for s in range(STAGES - 1)]
DOWN = [(s + 1, s) for s in range(STAGES - 1)]


def hand_mesh() -> Mesh:
    """Stages by data ways."""
    return Mesh(np.array(jax.devices()).reshape(STAGES, DATA), ("stage", "data"))


def by_hand(step: Callable[..., Any], layers: int) -> tuple[Callable[..., Any], Any, Any]:
    """The compiled step of a pipeline by hand, its state, its batch."""
    mesh = hand_mesh()

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    homes = {"in": on(), "layers": {"up": on("stage"), "down": on("stage")}, "out": on()}
    state = jax.device_put(make_params(layers, stacked=True), homes)
    batch = jax.device_put(make_batch(), on(("stage", "data")))
    return jax.jit(step, out_shardings=(homes, on()), donate_argnums=0), state, batch


def on_stages(mesh: Mesh, body: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    """`shard_map` over the stages alone."""
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, axis_names={"stage"}, check_vma=False)


def gpipe_by_hand() -> Callable[..., Any]:
    """GPipe: a scan over ticks, differentiated by JAX."""
    mesh, ticks, rows = hand_mesh(), PIECES + STAGES - 1, ROWS // PIECES

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def stage(own: Any, pieces: jax.Array) -> jax.Array:
        number = lax.axis_index("stage")

        def tick(held: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            fed = lax.dynamic_index_in_dim(pieces, jnp.minimum(t, PIECES - 1), 0, keepdims=False)
            x = jnp.where(number == 0, fed, held)
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, own)
            return lax.ppermute(x, "stage", UP), x

        _, outs = lax.scan(tick, jnp.zeros((rows, WIDTH)), jnp.arange(ticks))
        return outs[STAGES - 1 :][None]

    run = on_stages(mesh, stage, (PartitionSpec("stage"), PartitionSpec()), PartitionSpec("stage"))

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            x = (batch["x"] @ params["in"]).reshape(PIECES, rows, WIDTH)
            x = lax.with_sharding_constraint(x, on(None, "data"))
            x = run(params["layers"], x)[-1].reshape(ROWS, WIDTH)
            x = lax.with_sharding_constraint(x, on(("stage", "data")))
            return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    return step


def one_f_one_b_by_hand() -> Callable[..., Any]:
    """1F1B: what the layers' gradients read waits in a ring; loops over ticks that run forward, both ways, back."""
    mesh, rows, waits = hand_mesh(), ROWS // PIECES, 2 * STAGES - 1

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def forward(own: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def one(x: jax.Array, w: Any) -> tuple[jax.Array, Any]:
            h = x @ w["up"]
            return x + jax.nn.gelu(h) @ w["down"], (x, h)

        return lax.scan(one, x, own)

    def backward(own: Any, kept: Any, g: jax.Array) -> tuple[jax.Array, Any]:
        def one(g: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            w, (x, h) = layer
            active, pull = jax.vjp(jax.nn.gelu, h)
            (dh,) = pull(g @ w["down"].T)
            return g + dh @ w["up"].T, {"up": x.T @ dh, "down": active.T @ g}

        return lax.scan(one, g, (own, kept), reverse=True)

    def stages(own: Any, out: jax.Array, pieces: jax.Array, targets: jax.Array) -> Any:
        number = lax.axis_index("stage")
        count = own["up"].shape[0]

        def enter(carry: Any, t: jax.Array) -> Any:
            held, ring = carry
            fed = lax.dynamic_index_in_dim(pieces, jnp.minimum(t, PIECES - 1), 0, keepdims=False)
            x, kept = forward(own, jnp.where(number == 0, fed, held))
            ring = [
                lax.dynamic_update_index_in_dim(r, k, (t - number) % waits, 0) for r, k in zip(ring, kept, strict=True)
            ]
            return (lax.ppermute(x, "stage", UP), ring), x

        def leave(carry: Any, fed: jax.Array, ring: Any, t: jax.Array) -> tuple[Any, jax.Array]:
            handed, sums = carry
            i = t - 2 * (STAGES - 1) + number
            kept = [lax.dynamic_index_in_dim(r, i % waits, 0, keepdims=False) for r in ring]
            g, found = backward(own, kept, jnp.where(number == STAGES - 1, fed, handed))
            valid = (i >= 0) & (i < PIECES)
            sums = jax.tree.map(lambda a, b: a + jnp.where(valid, b, 0.0), sums, found)
            return (lax.ppermute(g, "stage", DOWN), sums), g

        def both(carry: Any, t: jax.Array) -> Any:
            there, back, dout, value = carry
            there, x = enter(there, t)
            wanted = lax.dynamic_index_in_dim(targets, t - (STAGES - 1), 0, keepdims=False)
            error = x @ out - wanted  # only the last stage's counts
            down = 2.0 / (ROWS * FEATURES) * error
            back, g = leave(back, down @ out.T, there[1], t)
            return (there, back, dout + x.T @ down, value + jnp.sum(error**2)), g

        shapes = [(waits, count, rows, WIDTH), (waits, count, rows, 4 * WIDTH)]
        nothing = jnp.zeros((rows, WIDTH))
        start = (nothing, [jnp.zeros(s) for s in shapes])
        there, _ = lax.scan(enter, start, jnp.arange(STAGES - 1))
        sums = (nothing, jax.tree.map(jnp.zeros_like, own))
        carry = (there, sums, jnp.zeros_like(out), jnp.zeros(()))
        (there, sums, dout, value), early = lax.scan(both, carry, jnp.arange(STAGES - 1, PIECES + STAGES - 1))
        late = jnp.arange(PIECES + STAGES - 1, PIECES + 2 * (STAGES - 1))
        (_, grads), g = lax.scan(lambda c, t: leave(c, nothing, there[1], t), sums, late)
        return grads, dout[None], value[None], jnp.concatenate([early, g])[STAGES - 1 :][None]

    whole, split = PartitionSpec(), PartitionSpec("stage")
    run = on_stages(mesh, stages, (split, whole, whole, whole), (split, split, split, split))

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        pieces = batch["x"].reshape(PIECES, rows, FEATURES)
        entering = lax.with_sharding_constraint(pieces @ params["in"], on(None, "data"))
        targets = lax.with_sharding_constraint(batch["y"].reshape(PIECES, rows, FEATURES), on(None, "data"))
        own, dout, value, returned = run(params["layers"], params["out"], entering, targets)
        into = jnp.einsum("crf,crw->fw", pieces, returned[0])
        grads = {"in": into, "layers": own, "out": dout[-1]}
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value[-1] / (ROWS * FEATURES)

    return step


def equal_plan(graph: uniap.LayerGraph, schedule: str = "gpipe") -> Plan:
    """The same stages, ways and micro-batches, as a plan."""
    from uniap_jax.core.equal_stages import find_run

    stages = find_run(graph, STAGES).stages(len(graph.layers), STAGES)
    chosen = Strategy(data=DATA)
    return Plan(
        num_stages=STAGES,
        num_microbatches=PIECES,
        schedule=schedule,
        batch_size=ROWS,
        stage_devices=tuple(tuple(range(s * DATA, s * DATA + DATA)) for s in range(STAGES)),
        layers=tuple(
            LayerPlan(name=x.name, stage=s, strategy=chosen) for x, s in zip(graph.layers, stages, strict=True)
        ),
        prediction=Prediction(step_time_s=0.0),
        certificate=Certificate(status="pinned"),
        executor="program",
    )


def planned(layers: int, schedule: str = "gpipe", *, stacked: bool = True) -> tuple[Any, Any, Any]:
    """Our step, its state, its batch."""
    params, batch = make_params(layers, stacked=stacked), make_batch()
    graph = uniap.trace(train_step, params, batch)
    step = uniap.compile_plan(graph, equal_plan(graph, schedule))
    state = step.init(lambda: make_params(layers, stacked=stacked))
    placed = [
        jax.make_array_from_callback(x.shape, s, lambda i, x=x: x[i])
        for x, s in zip(jax.tree.leaves(batch), step.batch_shardings, strict=True)
    ]
    return step, state, jax.tree.unflatten(jax.tree.structure(batch), placed)


def timed(step: Any, state: Any, batch: Any) -> tuple[tuple[float, float], Any, float]:
    """Wall and processor seconds of one step, the state after it, its loss."""
    wall, cpu = time.perf_counter(), time.process_time()
    state, loss = step(state, batch)
    value = float(loss)
    jax.block_until_ready(state)
    return (time.perf_counter() - wall, time.process_time() - cpu), state, value


def against_hand(layers: int, steps: int) -> dict[str, Any]:
    """Medians of steps taken in turn."""
    runs = {
        "GPipe by hand": by_hand(gpipe_by_hand(), layers),
        "GPipe": planned(layers),
        "1F1B by hand": by_hand(one_f_one_b_by_hand(), layers),
        "1F1B": planned(layers, "one_f_one_b"),
    }
    states = {n: r[1] for n, r in runs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {n: [] for n in runs}
    losses: dict[str, list[float]] = {n: [] for n in runs}
    for number in range(steps + 2):
        for name, (step, _, batch) in runs.items():
            took, states[name], loss = timed(step, states[name], batch)
            losses[name].append(loss)
            if number >= 2:
                seconds[name].append(took)
    for name in runs:
        np.testing.assert_allclose(losses[name], losses["GPipe by hand"], rtol=1e-4)
    found: dict[str, Any] = {
        name: {"wall_s": statistics.median(w for w, _ in s), "cpu_s": statistics.median(c for _, c in s)}
        for name, s in seconds.items()
    }
    for name in ("GPipe", "1F1B"):
        found[f"{name} ratio"] = {k: v / found[f"{name} by hand"][k] for k, v in found[name].items()}
    return found


def compile_seconds(layers: int, *, stacked: bool, alone: bool = False) -> float:
    """CPU seconds from a traced graph to the executable; `alone`: of the user's step on one device, by plain `jit`."""
    params, batch = make_params(layers, stacked=stacked), make_batch()
    if alone:
        step = jax.jit(train_step, donate_argnums=0)
        started = time.process_time()
        step.lower(params, batch).compile()
        return time.process_time() - started
    graph = uniap.trace(train_step, params, batch)
    step = uniap.compile_plan(graph, equal_plan(graph))
    started = time.process_time()
    assert step.programs
    return time.process_time() - started


def step_of_processes(size: int, layers: int, steps: int) -> float:
    """Median seconds of a step by `size` processes with eight devices in all."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"EQUAL_STAGES_DEVICES": str(8 // size)}
    job = ["--size", str(size), "--address", address, "--layers", str(layers), "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.equal_stages", "--rank", str(rank), *job],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).resolve().parents[1],
        )
        for rank in range(size)
    ]
    outs = [rank.communicate(timeout=500)[0] for rank in ranks]
    return float(json.loads(outs[0].splitlines()[-1])["median_s"])


def one_rank(rank: int, size: int, address: str, layers: int, steps: int) -> None:
    """A rank of `step_of_processes`."""
    if size > 1:
        jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
    step, state, batch = planned(layers)
    seconds = []
    for _ in range(steps + 2):
        (took, _), state, _ = timed(step, state, batch)
        seconds.append(took)
    sys.stdout.write(json.dumps({"median_s": statistics.median(seconds[2:])}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # JAX's farewell between processes is not what is timed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--address", default="")
    parser.add_argument("--only", choices=("hand", "compile", "processes"))
    options = parser.parse_args()
    if options.rank is not None:
        one_rank(options.rank, options.size, options.address, options.layers, options.steps)
    found: dict[str, Any] = {}
    if options.only in (None, "hand"):
        found["step"] = against_hand(options.layers, options.steps)
    if options.only in (None, "processes"):
        found["processes"] = {n: step_of_processes(n, options.layers, options.steps) for n in (1, 2)}
    if options.only in (None, "compile"):
        found["compile"] = {
            kind: {n: compile_seconds(n, stacked=kind == "loop") for n in (24, 96)} for kind in ("loop", "unrolled")
        }
        found["compile"]["unrolled, one device"] = {n: compile_seconds(n, stacked=False, alone=True) for n in (24, 96)}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
