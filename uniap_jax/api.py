"""What a user calls: `parallelize`, and the five verbs it walks through, each usable alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from uniap_jax import cost_model, frontend, profiler
from uniap_jax.core.cluster import Cluster, local_cluster
from uniap_jax.core.costs import CostModel
from uniap_jax.core.errors import PlanMismatchError, TraceError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Profile
from uniap_jax.core.serialize import load, save
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.frontend.axes import bound_axis
from uniap_jax.frontend.capture import value_and_grad
from uniap_jax.planner import Pinning
from uniap_jax.planning import Options, compile_plan, plan_graph, possible_executor, price_graph, solve, solve_for
from uniap_jax.runtime import ParallelStep
from uniap_jax.runtime.monitor import Monitor, replanner
from uniap_jax.runtime.processes import Group

__all__ = [
    "Parallelized",
    "compile_plan",
    "estimate",
    "load",
    "local_cluster",
    "mark_layer",
    "parallelize",
    "possible_executor",
    "profile",
    "save",
    "solve",
    "trace",
    "value_and_grad",
]

log = logging.getLogger("uniap_jax")

trace = frontend.trace
mark_layer = frontend.mark_layer


def profile(
    graph: LayerGraph,
    cluster: Cluster | None = None,
    *,
    source: str = "measured",
    devices: Sequence[Any] | None = None,
    **options: Any,
) -> Profile:
    """Times and memory of the layers under every strategy; see `uniap_jax.profiler.profile`.

    Args:
        graph: from `trace`.
        cluster: the devices; those of this process by default.
        source: "measured" on the devices, or "described" from published rates without compiling anything.
        devices: which of this process's devices to measure on; all by default.
        **options: `num_stages`, `num_microbatches`, `budget_s`, `only`, `cache_dir`, `progress` of the profiler.
    """
    return profiler.profile(graph, cluster or local_cluster(devices), source=source, devices=devices, **options)


def estimate(graph: LayerGraph, cluster: Cluster | None = None, profile: Profile | None = None) -> CostModel:
    """Cost tables of every candidate, built as they are asked for.

    Args:
        graph: from `trace`.
        cluster: the devices; those of this process by default.
        profile: from `profile`; None prices with the cluster's published rates.
    """
    return cost_model.estimate(graph, cluster or local_cluster(), profile)


class Parallelized:
    """A train step that plans itself at its first call and runs as planned from then on.

    Callable with the signature of the user's step. A call whose arguments have another structure or other shapes is
    planned again, with one log line; Python numbers do not plan again.
    """

    def __init__(self, train_step: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, train_step)
        self._step = bound_axis(train_step, options.axis_name)
        self._options = options
        self._planned: list[ParallelStep] = []
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        """One training step, planned first where the form of the call is new."""
        step = self._for(args)
        if self._options.processes is not None:
            self._options.processes.enter(self._calls)
        self._calls += 1
        return step(*args)

    def _for(self, args: tuple[Any, ...]) -> ParallelStep:
        for planned in self._planned:
            if _fits(planned, args):
                return planned
        graph = trace(
            self._step,
            *args,
            batch_argnums=self._options.batch_argnums,
            static_argnums=self._options.static_argnums,
            logical_axis_rules=self._options.logical_axis_rules,
            unfold_scans=self._options.unfold_scans,
        )
        # an optimizer built anew is another function, not another model: its update is compiled, nothing is solved
        plan = next((p.plan for p in self._planned if p.graph.fingerprint == graph.fingerprint), self._options.plan)
        if self._planned and plan is None:
            log.info("planning again for batch %s: the call differs from those planned before", graph.batch_size)
        self._planned.append(plan_graph(graph, plan, self._options, args))
        return self._planned[-1]

    @property
    def _only(self) -> ParallelStep:
        if not self._planned:
            raise TraceError(
                "the step has no plan yet: it is planned from the shapes of its first call. Call it, or "
                "step.place(state, batch); arrays and jax.ShapeDtypeStruct both do"
            )
        return self._planned[-1]

    @property
    def plan(self) -> Plan:
        """The plan in force (of the latest call form)."""
        return self._only.plan

    @property
    def graph(self) -> LayerGraph:
        """The captured layers (of the latest call form)."""
        return self._only.graph

    def place(self, *args: Any) -> Any:
        """Plans for the shapes of these arguments and returns the state (all that is not batch) sharded as planned."""
        return self._for(args).place(*args)

    def init(self, create_state: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """Creates the state sharded from the start: no device ever holds more than its shard.

        Args:
            create_state: function of `args` that returns the step's non-batch argument.
            *args: its arguments.
            batch: a batch (or shapes), needed where the step has not been planned yet.
        """
        if batch is not None:
            shape = jax.eval_shape(create_state, *args)
            return self._for((shape, batch)).init(create_state, *args)
        return self._only.init(create_state, *args)

    def monitor(self, **options: Any) -> Monitor:
        """Follows the stages of the step in force from now on; see `uniap_jax.runtime.monitor.Monitor`.

        Args:
            **options: `every`, `window`, `threshold` of the monitor.
        """
        graph, chosen = self._only.graph, self._options
        return Monitor(
            self._only,
            replan=replanner(
                lambda: price_graph(graph, chosen, chosen.budget_s), lambda model: solve_for(model, chosen)
            ),
            compile=lambda plan: plan_graph(graph, plan, chosen),
            adopt=self._adopt,
            **options,
        )

    def _adopt(self, step: ParallelStep) -> None:
        self._planned = [step if p.graph is step.graph else p for p in self._planned]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._only, name)


def _fits(planned: ParallelStep, args: tuple[Any, ...]) -> bool:
    try:
        planned.graph.step.flatten(*args)
    except PlanMismatchError:
        return False
    return True


def parallelize(
    train_step: Callable[..., Any] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    profile: Profile | None = None,
    batch_argnums: int | Sequence[int] = (1,),
    donate_argnums: int | Sequence[int] = (0,),
    verify: bool = False,
    static_argnums: int | Sequence[int] = (),
    axis_name: str | None = None,
    logical_axis_rules: frontend.AxisRules | None = None,
    unfold_scans: bool = False,
    num_stages: int | Literal["auto"] = "auto",
    num_microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    executor: str = "auto",
    strategy: Strategy | str | None = None,
    pin: Pinning | None = None,
    top_k: int = 1,
    finalists: int = 1,
    memory_limit: str | int = "90%",
    time_limit_s: float = 60.0,
    budget_s: float = 120.0,
    cache_dir: str | None = None,
    source: str = "measured",
    processes: Group | None = None,
    progress: Callable[..., None] | None = None,
) -> Any:
    """Wraps a train step so that it is planned and run on many devices; also a decorator.

    The step is an ordinary function of state and batch that takes one gradient. It is captured, cut into layers,
    profiled, planned with a proof of optimality, compiled and run; it returns what it returned before.

    Args:
        train_step: `train_step(state, batch) -> (state, metrics)` or any other signature.
        devices: devices to use; `jax.devices()` by default.
        cluster: description of the devices; measured from them by default.
        plan: a plan made before, which is checked and run instead of solving.
        profile: a profile made before.
        batch_argnums: arguments whose leaves have the global batch as leading dimension.
        donate_argnums: arguments whose buffers are given up; () keeps them.
        verify: compile at once and warn of everything in the programs that is not as planned: layouts, collectives,
            peak memory, reshardings through full copies, each with its layer and source line.
        static_argnums: arguments handed to the step as they are, hashable or not.
        axis_name: of a step written for `pmap`: bound to the whole batch.
        logical_axis_rules: what may split the dimensions that a Flax model names, for example
            (("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)); None leaves all to the search.
        unfold_scans: whether the turns of a loop over layers (`nn.scan`, `nnx.scan`, `lax.scan`) are layers with a plan
            each, of stages with a program each. They compile as long as layers that are written out; as it is, a loop
            is one layer, which compiles as fast at any depth and which one program for equal stages can share out.
        num_stages: pipeline stages, or "auto".
        num_microbatches: micro-batches per step, or "auto".
        schedule: "gpipe", "one_f_one_b" or "auto".
        executor: of several stages: "stages", a program for each; "program", one for all, whose stages hold equal
            layers; or "auto", the faster one.
        strategy: pins every layer where legal, for example "data=2,tensor=2"; the nearest legal one elsewhere.
        pin: fixes strategy or stage of layers by name, for example {"block_*": "tensor=2", "embed": 0}.
        top_k: how many plans to find; the others are `plan.certificate.alternatives`.
        finalists: how many plans are compiled, and run a few steps on copies of the state, before the fastest that fits
            is taken: the best plan and the best of other numbers of stages, if predicted within half as long again.
            1 compiles the best plan alone. `plan.certificate.notes` says how each fared.
        memory_limit: share of a device's memory ("90%") or bytes.
        time_limit_s: seconds for a search; after measuring what its plan rests on another may follow.
        budget_s: seconds for profiling.
        cache_dir: where profiles are kept; the user's cache folder by default.
        source: "measured" profiles the layers on the devices, "described" prices them from published rates.
        processes: lines between the processes of a job, from `uniap_jax.runtime.processes.connect`: every call says
            which step it is, and a rank that dies or stays behind ends the job with its number and step. Without them
            plan and program are still compared between processes, by JAX's own collectives.
        progress: called with progress of profiling and solving.

    Returns:
        A `Parallelized` step (a decorator where `train_step` is left out).

    Example:
        >>> step = parallelize(train_step)  # doctest: +SKIP
        >>> state = step.place(state, batch)  # doctest: +SKIP
        >>> state, metrics = step(state, batch)  # doctest: +SKIP
    """

    def numbers(value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) if isinstance(value, int) else tuple(value)

    options = Options(
        devices=None if devices is None else tuple(devices),
        cluster=cluster,
        plan=plan,
        profile=profile,
        batch_argnums=numbers(batch_argnums),
        donate=bool(numbers(donate_argnums)),
        verify=verify,
        static_argnums=numbers(static_argnums),
        axis_name=axis_name,
        logical_axis_rules=logical_axis_rules,
        unfold_scans=unfold_scans,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        executor=executor,
        strategy=None if strategy is None else parse_strategy(strategy),
        pin=pin,
        top_k=top_k,
        finalists=finalists,
        memory_limit=memory_limit,
        time_limit_s=time_limit_s,
        budget_s=budget_s,
        cache_dir=cache_dir,
        source=source,
        processes=processes,
        progress=progress,
    )
    if train_step is None:
        return lambda function: Parallelized(function, options)
    return Parallelized(train_step, options)
