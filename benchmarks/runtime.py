"""The runtime against what it promises, on the demo's GPT and 8 virtual CPU devices: one command, Markdown tables.

    python -m benchmarks.runtime                    every table
    python -m benchmarks.runtime --only single      one stage against the same shardings written by hand
    python -m benchmarks.runtime --only programs    the same, by what the compiler made of both
    python -m benchmarks.runtime --only pipeline    CPU time of pipelines, and what the host pays to drive them
    python -m benchmarks.runtime --only memory      peaks: planned, compiled, live
    python -m benchmarks.runtime --rounds 9         steps of each contender

Contenders of a table take turns, step by step, so that whatever else the machine does hits all of them; the numbers
are medians, ratios are medians of the ratios of one round.
"""

from __future__ import annotations

import argparse
import collections
import gc
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import uniap_jax as uniap
from benchmarks.markdown import head, made_on, row, say
from uniap_jax import demo_gpt
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.stage_memory import program_bytes, stage_peaks
from uniap_jax.runtime.verify import count_collectives

MICROBATCHES = 8
PROFILE_BUDGET_S = 90.0


@dataclass(kw_only=True, eq=False)
class Contender:
    """A step with its state, and what its turns took.

    Attributes:
        name: for the table.
        step: called with state and batch.
        state: of the next turn.
        batch: of every turn.
        wall_s: per turn, until the state is there.
        cpu_s: per turn, of the whole process.
        host_s: per turn, CPU time of the thread that calls.
        compilations: while it was timed.
    """

    name: str
    step: Callable[..., Any]
    state: Any
    batch: Any
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    compilations: int = 0

    def turn(self, compiled: Sequence[str]) -> None:
        """One step."""
        seen = len(compiled)
        wall, cpu, host = time.perf_counter(), time.process_time(), time.thread_time()
        self.state, metrics = self.step(self.state, self.batch)
        self.host_s.append(time.thread_time() - host)
        jax.block_until_ready((self.state, metrics))
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        self.compilations += len(compiled) - seen


def in_turns(contenders: Sequence[Contender], rounds: int) -> None:
    """Two rounds that compile and warm up, then the timed ones."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    for contender in contenders:
        for _ in range(2):
            contender.turn(())
        for times in (contender.wall_s, contender.cpu_s, contender.host_s):
            times.clear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    for _ in range(rounds):
        for contender in contenders:
            contender.turn(compiled)
    jax.monitoring.unregister_event_duration_listener(listen)


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median over the rounds of first / second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def spread_evenly(graph: LayerGraph, strategy: Strategy, *, stages: int, microbatches: int) -> Plan:
    """A plan by hand: the same number of layers on every stage."""
    count, size = len(graph.layers), strategy.num_devices
    layers = tuple(
        LayerPlan(name=layer.name, stage=i * stages // count, strategy=strategy) for i, layer in enumerate(graph.layers)
    )
    return Plan(
        num_stages=stages,
        num_microbatches=microbatches,
        schedule="one_f_one_b",
        batch_size=graph.batch_size,
        stage_devices=tuple(tuple(range(s * size, (s + 1) * size)) for s in range(stages)),
        layers=layers,
        prediction=Prediction(step_time_s=0.0),
        certificate=Certificate(status="pinned"),
        graph_fingerprint=graph.fingerprint,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Demo:
    """The demo's step, captured, with a state and a batch on the host."""

    graph: LayerGraph
    train_step: Callable[..., Any]
    state: Any
    batch: Any


def demo() -> Demo:
    """One state for all contenders: an optimizer built anew is another one."""
    state, train_step, batch = demo_gpt.build()
    return Demo(graph=uniap.trace(train_step, state, batch), train_step=train_step, state=state, batch=batch)


def planned(model: Demo, plan: Plan, name: str) -> Contender:
    """A plan in the ring."""
    step = uniap.compile_plan(model.graph, plan)
    return Contender(name=name, step=step, state=step.place(model.state, model.batch), batch=model.batch)


def by_hand(model: Demo, plan: Plan) -> Contender:
    """The user's own step in one jit with the plan's shardings for state and batch."""
    step = uniap.compile_plan(model.graph, plan)
    state = step.place(model.state, model.batch)
    homes = jax.tree.map(lambda x: x.sharding, state)
    rows = jax.tree.unflatten(jax.tree.structure(model.batch), step.batch_shardings)
    jitted = jax.jit(model.train_step, in_shardings=(homes, rows), out_shardings=(homes, None), donate_argnums=0)
    return Contender(name="by hand", step=jitted, state=state, batch=jax.device_put(model.batch, rows))


def single(rounds: int) -> None:
    """One stage against one jit."""
    model = demo()
    say("\n## One stage: one jit with the same shardings")
    head("strategy", "plan, ms", "by hand, ms", "ratio", "compilations after the first step")
    for strategy in ("data=8", "fsdp=8", "data=2,tensor=4"):
        plan = spread_evenly(model.graph, parse_strategy(strategy), stages=1, microbatches=1)
        ours, theirs = planned(model, plan, strategy), by_hand(model, plan)
        in_turns((ours, theirs), rounds)
        times = (f"{1e3 * statistics.median(c.wall_s):.0f}" for c in (ours, theirs))
        row(strategy, *times, f"{ratio(ours.wall_s, theirs.wall_s):.3f}", ours.compilations)


def opcodes(text: str) -> collections.Counter[str]:
    """Instructions of an optimised program by what they do, those inside of fusions too."""
    return collections.Counter(re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = .*?[\]})] ([a-z][\w-]*)\(", text, re.MULTILINE))


def programs(rounds: int) -> None:
    """One stage against one jit, without a clock: what the compiler made of both."""
    del rounds
    model = demo()
    say("\n## One stage: the compiler's program against that of one jit with the same shardings")
    head(
        "strategy",
        "",
        "instructions",
        "dots",
        "fusions",
        "collectives",
        "GFLOP",
        "GB read and written",
        "temporaries, MiB",
    )
    for strategy in ("data=8", "fsdp=8", "data=2,tensor=4"):
        plan = spread_evenly(model.graph, parse_strategy(strategy), stages=1, microbatches=1)
        ours, theirs = planned(model, plan, strategy), by_hand(model, plan)
        pair = (
            ("plan", ours.step.programs[0].compiled),
            ("by hand", theirs.step.lower(theirs.state, theirs.batch).compile()),
        )
        for name, compiled in pair:
            text, cost = compiled.as_text(), compiled.cost_analysis()
            counts, sent = opcodes(text), count_collectives(text)
            row(
                strategy, name, sum(counts.values()), counts["dot"] + counts["custom-call"], counts["fusion"],
                ", ".join(f"{n} {kind}" for kind, n in sorted(sent.items())), f"{cost['flops'] / 1e9:.3f}",
                f"{cost['bytes accessed'] / 1e9:.3f}", f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:.1f}",
            )  # fmt: skip


def pipeline(rounds: int) -> None:
    """Pipelines against one device that does the same micro-batches."""
    model = demo()
    one = planned(model, spread_evenly(model.graph, Strategy(), stages=1, microbatches=MICROBATCHES), "one device")
    contenders = [one]
    for stages, strategy in ((2, "data=1"), (4, "data=1"), (2, "data=2"), (4, "data=2"), (4, "data=1,keep=inputs")):
        plan = spread_evenly(model.graph, parse_strategy(strategy), stages=stages, microbatches=MICROBATCHES)
        contenders.append(planned(model, plan, f"{stages} stages of {strategy}"))
    in_turns(contenders, rounds)
    say(f"\n## Pipelines, {MICROBATCHES} micro-batches")
    head(
        "plan", "CPU, ms", "CPU / one device", "wall, ms", "host per task, µs", "least", "compilations later"
    )  # fmt: skip
    for c in contenders:
        stages = c.step.plan.num_stages
        tasks = 2 * MICROBATCHES * stages if stages > 1 else 1
        host = [
            f"{1e6 * found / tasks:.0f}" if stages > 1 else "" for found in (statistics.median(c.host_s), min(c.host_s))
        ]
        row(
            c.name, f"{1e3 * statistics.median(c.cpu_s):.0f}", f"{ratio(c.cpu_s, one.cpu_s):.2f}",
            f"{1e3 * statistics.median(c.wall_s):.0f}", *host, c.compilations,
        )  # fmt: skip


def live_bytes(device: jax.Device) -> int:
    """Bytes of all arrays on a device; their shards are not looked at, for that would make arrays of its own."""
    here = [a for a in jax.live_arrays() if device in a.sharding.device_set]
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in here)


def live_peaks(step: Any, state: Any, batch: Any) -> tuple[int, ...]:
    """Per stage, the most bytes of arrays on its first device as tasks are issued, with the program's temporaries."""
    run, devices = step.executor, [jax.devices()[stage[0]] for stage in step.plan.stage_devices]
    assert isinstance(run, Pipeline)
    peaks = [0] * len(devices)

    def watch(stage: int, task: Any, kept: int) -> None:
        built = run.built.stages[stage]
        program = built.forward if task.kind == "forward" else built.backward or built.forward
        peaks[stage] = max(peaks[stage], live_bytes(devices[stage]) + program_bytes(program)["temp_bytes"])

    run.watch = watch
    jax.block_until_ready(step(state, batch))
    run.watch = None
    return tuple(peaks)


def memory(rounds: int) -> None:
    """Peak memory of a device: as planned from a measured profile, as compiled, as live in a step."""
    del rounds
    state, train_step, batch = demo_gpt.build()
    shapes = jax.eval_shape(lambda x: x, state)
    graph = uniap.trace(train_step, shapes, batch)
    del state
    say("\n## Peak memory of a device, MiB")
    head("plan", "stage", "planned", "compiled", "planned / compiled", "live", "live / planned")
    for stages in (2, 4):
        devices = jax.devices()[:stages]
        cluster = uniap.local_cluster(devices)
        found = uniap.profile(
            graph, cluster, devices=devices, num_stages=stages, num_microbatches=MICROBATCHES, budget_s=PROFILE_BUDGET_S
        )
        prices = uniap.estimate(graph, cluster, found)
        plan = uniap.solve(
            prices, num_stages=stages, num_microbatches=MICROBATCHES, schedule="one_f_one_b", baselines=False
        )
        step = uniap.compile_plan(graph, plan)
        compiled = stage_peaks(step)
        gc.collect()
        live = live_peaks(step, step.init(lambda: demo_gpt.create_state(size=demo_gpt.FULL)), batch)
        for s, (want, have, seen) in enumerate(zip(plan.prediction.peak_bytes, compiled, live, strict=True)):
            row(
                f"{stages} stages", s, f"{want / 2**20:.1f}", f"{have / 2**20:.1f}", f"{want / have:.3f}",
                f"{seen / 2**20:.1f}", f"{seen / want:.3f}",
            )  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"single": single, "programs": programs, "pipeline": pipeline, "memory": memory}
    parser.add_argument("--only", choices=tuple(parts))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    say(made_on(("jax", "jaxlib", "flax")))
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.rounds)
    say(f"\nLoad {os.getloadavg()[0]:.1f} at the end.")


if __name__ == "__main__":
    main()
