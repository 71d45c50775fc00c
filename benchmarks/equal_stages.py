"""One program for equal stages against a pipeline by hand, compile time against depth, two processes against one.

    python -m benchmarks.equal_stages

The pipeline by hand is what `shard_map` tutorials show: stacked weights split over an axis `stage`, a scan over the
ticks of GPipe with `ppermute`, `jax.value_and_grad` through it; embedding and head on all devices. Both train the same
model from the same start on the same eight virtual CPU devices, take turns in one run, and must agree in their losses.
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


def by_hand(layers: int) -> tuple[Callable[..., Any], Any, Any]:
    """A GPipe under `shard_map`: the compiled step, its state, its batch."""
    mesh = Mesh(np.array(jax.devices()).reshape(STAGES, DATA), ("stage", "data"))
    ticks, rows = PIECES + STAGES - 1, ROWS // PIECES

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def stage(own: Any, pieces: jax.Array) -> jax.Array:
        number = lax.axis_index("stage")

        def tick(held: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            fed = lax.dynamic_index_in_dim(pieces, jnp.minimum(t, PIECES - 1), 0, keepdims=False)
            x = jnp.where(number == 0, fed, held)
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, own)
            return lax.ppermute(x, "stage", [(s, s + 1) for s in range(STAGES - 1)]), x

        _, outs = lax.scan(tick, jnp.zeros((rows, WIDTH)), jnp.arange(ticks))
        return outs[STAGES - 1 :][None]

    run = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(PartitionSpec("stage"), PartitionSpec()),
        out_specs=PartitionSpec("stage"),
        axis_names={"stage"},
        check_vma=False,
    )

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            x = (batch["x"] @ params["in"]).reshape(PIECES, rows, WIDTH)
            x = lax.with_sharding_constraint(x, on(None, "data"))
            x = run(params["layers"], x)[-1].reshape(ROWS, WIDTH)
            x = lax.with_sharding_constraint(x, on(("stage", "data")))
            return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    params = make_params(layers, stacked=True)
    homes = {"in": on(), "layers": {"up": on("stage"), "down": on("stage")}, "out": on()}
    state = jax.device_put(params, homes)
    batch = jax.device_put(make_batch(), on(("stage", "data")))
    return jax.jit(step, out_shardings=(homes, on()), donate_argnums=0), state, batch


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


def timed(step: Any, state: Any, batch: Any) -> tuple[float, Any, float]:
    """Seconds of one step, the state after it, its loss."""
    started = time.perf_counter()
    state, loss = step(state, batch)
    value = float(loss)
    jax.block_until_ready(state)
    return time.perf_counter() - started, state, value


def against_hand(layers: int, steps: int) -> dict[str, Any]:
    """Medians of steps taken in turn."""
    runs = {"by hand": by_hand(layers), "GPipe": planned(layers), "1F1B": planned(layers, "one_f_one_b")}
    states, seconds = {n: r[1] for n, r in runs.items()}, {n: [] for n in runs}
    losses: dict[str, list[float]] = {n: [] for n in runs}
    for number in range(steps + 2):
        for name, (step, _, batch) in runs.items():
            took, states[name], loss = timed(step, states[name], batch)
            losses[name].append(loss)
            if number >= 2:
                seconds[name].append(took)
    for name in runs:
        np.testing.assert_allclose(losses[name], losses["by hand"], rtol=1e-4)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    return {**medians, "ratio": medians["GPipe"] / medians["by hand"]}


def compile_seconds(layers: int, *, stacked: bool) -> float:
    """CPU seconds from a traced graph to the executable, XLA's cheapest passes."""
    params, batch = make_params(layers, stacked=stacked), make_batch()
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
        took, state, _ = timed(step, state, batch)
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
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
