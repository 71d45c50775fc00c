"""`uniap-jax demo`: plans a small GPT, trains it under the plan, checks it against one device, and times it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax import api
from uniap_jax.core.cluster import Cluster, local_cluster
from uniap_jax.core.errors import UniapError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_seconds
from uniap_jax.core.profile import Key, Profile
from uniap_jax.core.serialize import load, plan_to_json, save
from uniap_jax.cost_model import TableModel, estimate
from uniap_jax.demo_gpt import FULL, Size, create_state, make_batch, train_step
from uniap_jax.planning import informed
from uniap_jax.profiler.cache import default_dir

PROFILE_BUDGET_S = 75.0
SEARCH_LIMIT_S = 30.0
TIMED_STEPS = 7
LOSS_TOLERANCE = 1e-4
"""Largest relative difference of the losses over all training steps; Adam amplifies rounding from step to step."""

Step = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


def run_demo(
    *,
    size: Size = FULL,
    steps: int,
    source: str = "measured",
    tell: Callable[[str], None],
    show_plan: Callable[[Plan], None],
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Runs the demo on all devices jax has.

    Args:
        size: of the model.
        steps: training steps.
        source: "measured" puts a clock to the layers, "described" goes by rates.
        tell: receives a line for people.
        show_plan: receives the plan.
        progress: of profiling.

    Returns:
        Losses, largest relative difference, step times and the plan, as plain data; `ok` is whether the losses agree.
    """
    started = time.perf_counter()
    devices = jax.devices()
    state = create_state(size=size)
    batches = [make_batch(seed, size=size) for seed in range(steps)]
    count = sum(x.size for x in jax.tree.leaves(state.params))
    tell(
        f"a GPT with {count / 1e6:.1f} million parameters, batch {size.batch} × {size.sequence}, {len(devices)} devices"
    )

    plan, planned = _make_plan(state, batches[0], devices, source, tell, progress)
    show_plan(plan)
    tell(f"profiled and planned in {format_seconds(time.perf_counter() - started)}")

    losses, seconds = _train(planned, planned.place(_copy(state), batches[0]), batches, tell)
    reference, _ = _train(jax.jit(train_step), _copy(state), batches, None)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    tell(f"one device, same start: losses differ by at most {difference:.1e} (relative) over {steps} steps")

    times = time_against_data_parallel(planned, state, batches[0], devices=devices)
    _tell_times(plan, times, tell)
    total = time.perf_counter() - started
    tell(f"the demo took {format_seconds(total)}")
    return {
        "ok": difference <= LOSS_TOLERANCE,
        "losses": losses,
        "reference_losses": reference,
        "loss_rel_diff": difference,
        "seconds": seconds,
        **times,
        "predicted_step_time_s": plan.prediction.step_time_s,
        "demo_seconds": total,
        "plan": plan_to_json(plan),
    }


def _copy(state: Any) -> Any:
    """The state in buffers of its own: steps consume (donate) what they are given."""
    return jax.tree.map(jnp.copy, state)


def _make_plan(
    state: Any,
    batch: Any,
    devices: Sequence[jax.Device],
    source: str,
    tell: Callable[[str], None],
    progress: Callable[[int, int, str], None] | None,
) -> tuple[Plan, Any]:
    graph = api.trace(train_step, state, batch)
    cluster = local_cluster(devices)
    known = _known_profile(graph, cluster, tell) if source == "measured" else None

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        found = known or api.profile(graph, cluster, source=source, budget_s=seconds, only=only, progress=progress)
        if source == "measured":
            save(found, _profile_path(graph, cluster))
        return estimate(graph, cluster, found)

    _, (plan,) = informed(price, lambda costs: [api.solve(costs, time_limit_s=SEARCH_LIMIT_S)], PROFILE_BUDGET_S)
    return plan, api.compile_plan(graph, plan, cluster)


def _profile_path(graph: LayerGraph, cluster: Cluster) -> Path:
    name = f"demo-{graph.fingerprint[:16]}-{cluster.num_devices}x{cluster.platform}-jax{jax.__version__}.json"
    return default_dir().parent / name


def _known_profile(graph: LayerGraph, cluster: Cluster, tell: Callable[[str], None]) -> Profile | None:
    """What an earlier demo measured here; None where there is nothing, or nothing that can be read."""
    path = _profile_path(graph, cluster)
    if not path.is_file():
        return None
    try:
        found = load(path)
    except UniapError as error:
        tell(f"the profile of an earlier demo cannot be used: {error}")
        return None
    if not isinstance(found, Profile):
        return None
    tell(f"times come from an earlier demo; delete {path} to measure again")
    return found


def _train(
    step: Step, state: Any, batches: Sequence[Any], tell: Callable[[str], None] | None
) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    losses, seconds = [], []
    for number, batch in enumerate(batches):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
        if tell and (number % 5 == 4 or number == 0):
            tell(f"step {number + 1:3d}  loss {losses[-1]:.4f}  {format_seconds(seconds[-1])}")
    return losses, seconds


def data_parallel(devices: Sequence[jax.Device]) -> tuple[Step, NamedSharding, NamedSharding]:
    """Plain data parallelism by hand: the jitted step, the state's sharding, the batch's."""
    mesh = Mesh(np.asarray(devices, dtype=object), ("data",))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(train_step, donate_argnums=0, out_shardings=everywhere), everywhere, split


def time_against_data_parallel(
    planned: Any, state: Any, batch: Any, *, devices: Sequence[jax.Device], rounds: int = TIMED_STEPS
) -> dict[str, Any]:
    """Seconds per step of the plan and of plain data parallelism, taken in turns so that a busy machine hits both.

    Returns:
        Medians and all times; the first round, which compiles, is not among them.
    """
    step, everywhere, split = data_parallel(devices)
    states = {"plan": planned.place(_copy(state), batch), "data": jax.device_put(_copy(state), everywhere)}
    runs: dict[str, tuple[Step, Any]] = {"plan": (planned, batch), "data": (step, jax.device_put(batch, split))}
    times: dict[str, list[float]] = {"plan": [], "data": []}
    for _ in range(rounds + 1):
        for name, (run, piece) in runs.items():
            start = time.perf_counter()
            states[name], metrics = run(states[name], piece)
            jax.block_until_ready((states[name], metrics))
            times[name].append(time.perf_counter() - start)
    return {
        "step_time_s": statistics.median(times["plan"][1:]),
        "data_parallel_step_time_s": statistics.median(times["data"][1:]),
        "timed_steps": {name: t[1:] for name, t in times.items()},
    }


def _tell_times(plan: Plan, times: dict[str, Any], tell: Callable[[str], None]) -> None:
    planned, plain = times["step_time_s"], times["data_parallel_step_time_s"]
    tell(
        f"median step: plan {format_seconds(planned)} (predicted {format_seconds(plan.prediction.step_time_s)}), "
        f"plain data parallelism {format_seconds(plain)}: {plain / planned:.2f} ×"
    )
    if jax.default_backend() == "cpu":
        tell(
            "virtual CPU devices share this host's cores: these times show that the plan runs, not how fast it would be"
        )
