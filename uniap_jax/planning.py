"""From a traced step and what was asked for to a step that runs, on one process or several."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import jax

from uniap_jax import cost_model, frontend, planner, profiler, runtime
from uniap_jax.core.cluster import Cluster, local_cluster
from uniap_jax.core.costs import CostModel
from uniap_jax.core.errors import InfeasibleError, NoPlanInTimeError, OptionError, PlanMismatchError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Key, Profile
from uniap_jax.core.strategy import Strategy
from uniap_jax.cost_model import TableModel
from uniap_jax.planner import Pinning
from uniap_jax.runtime import ParallelStep
from uniap_jax.runtime.processes import Everyone, Group, Speakers, agree_on_plan, agree_on_program
from uniap_jax.runtime.trial import try_out
from uniap_jax.runtime.verify import warn

log = logging.getLogger("uniap_jax")

FIRST_SHARE = 0.6
"""Of the budget, what is spent before the first search."""
ROUND_SHARE = 0.5
"""Of what is left of it, what a round may take that measures what the last plan rests on."""
ROUNDS = 5
"""Such rounds, each followed by a search."""
FAR = 1.5
"""Plans predicted so many times as long as the best are not tried out."""

Price = Callable[[Sequence[Key] | None, float], TableModel]
"""Costs, with only the given entries measured (with any where None) in so many seconds; what was measured is kept."""

TRIED_OVER_HOSTS = ("cpu",)
"""Platforms on which stages with a program each have run over several processes; elsewhere they are to be asked for."""


def compile_plan(
    graph: LayerGraph,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    devices: Sequence[Any] | None = None,
    donate: bool = True,
) -> ParallelStep:
    """Programs that run a plan.

    Args:
        graph: the graph the plan was made for.
        plan: from `solve` or `load`.
        cluster: checked against the plan where given.
        devices: devices in the plan's numbering; `jax.devices()` by default.
        donate: whether the state's buffers are given up to the step.

    Raises:
        PlanMismatchError: the plan is for another model, batch or set of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if cluster is not None and cluster.num_devices < plan.num_devices:
        raise PlanMismatchError(
            f"the plan uses {plan.num_devices} devices, the cluster has {cluster.num_devices}",
            needed=plan.num_devices,
            available=cluster.num_devices,
        )
    return runtime.compile(graph, plan, devices=devices, donate=donate)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """What `parallelize` was asked for."""

    devices: tuple[Any, ...] | None
    cluster: Cluster | None
    plan: Plan | None
    profile: Profile | None
    batch_argnums: tuple[int, ...]
    donate: bool
    verify: bool
    static_argnums: tuple[int, ...]
    axis_name: str | None
    logical_axis_rules: frontend.AxisRules | None
    unfold_scans: bool
    num_stages: int | Literal["auto"]
    num_microbatches: int | Literal["auto"]
    schedule: str
    executor: str
    strategy: Strategy | None
    pin: Pinning | None
    top_k: int
    finalists: int
    memory_limit: str | int
    time_limit_s: float
    budget_s: float
    cache_dir: str | None
    source: str
    processes: Group | None
    progress: Callable[..., None] | None


def plan_graph(graph: LayerGraph, plan: Plan | None, options: Options, args: Sequence[Any] = ()) -> ParallelStep:
    """Compiles a plan for a traced step, found first where there is none.

    Args:
        graph: the step.
        plan: what to compile; None searches.
        options: what was asked for.
        args: of the call that is planned for, arrays or shapes; finalists are run on copies of them.
    """
    for note in graph.notes:
        log.info("%s", note)
    started = time.perf_counter()
    speakers = _speakers(options)

    def compiled(plan: Plan) -> ParallelStep:
        return compile_plan(graph, plan, options.cluster, devices=options.devices, donate=options.donate)

    def found() -> Sequence[Plan]:
        return [plan] if plan is not None else find_plans(graph, options)

    if speakers is None:
        step = best_of(found(), compiled, graph.step.flatten(*args) if args else None)
    elif options.finalists > 1:
        raise OptionError(
            f"finalists={options.finalists}: plans are tried out by one process, and this job has several; leave it at "
            "1, or try plans out on one host and hand the best to every process with plan=",
            finalists=options.finalists,
        )
    else:
        step = compiled(agree_on_plan(speakers, lambda: found()[0], fingerprint=graph.fingerprint))
    log.info("planned in %.1f s", time.perf_counter() - started)
    if speakers is not None:
        agree_on_program(speakers, {p.name: p.lowered for p in step.programs})
    if options.verify:
        warn(step)
    return step


def _speakers(options: Options) -> Speakers | None:
    """The processes that must run the same plan; None where this one is alone."""
    devices = jax.devices() if options.devices is None else options.devices
    alone = len({d.process_index for d in devices}) == 1
    return options.processes or (None if alone else Everyone())


def find_plans(graph: LayerGraph, options: Options) -> Sequence[Plan]:
    """Profile, estimate and solve for a traced step: the best plan, and other finalists where they are asked for."""
    fixed = {"num_stages": options.num_stages, "num_microbatches": options.num_microbatches}

    def plans_of(model: TableModel) -> list[Plan]:
        return finalists(functools.partial(solve_for, model, options), model, options.finalists, fixed=fixed)

    return informed(lambda only, seconds: price_graph(graph, options, seconds, only), plans_of, options.budget_s)[1]


def finalists(
    solve_for: Callable[..., Plan], model: CostModel, number: int, *, fixed: Mapping[str, Any] = MappingProxyType({})
) -> list[Plan]:
    """The best plan, and the best ones of other numbers of stages, the fastest first.

    Plans whose predicted times lie within the error of a prediction are told apart by running them, and those that
    differ in this differ most. Where the stages are fixed, plans differ in their micro-batches.

    Args:
        solve_for: `solve_for(**pins)`, the search.
        model: the costs it searches with.
        number: of plans; fewer where others are predicted FAR times as long as the best.
        fixed: `num_stages` and `num_microbatches` as they are pinned, "auto" where they are not.

    Raises:
        OptionError: a number below 1.
    """
    if number < 1:
        raise OptionError(f"finalists={number!r} is not possible; ask for at least one plan", finalists=number)
    best, others = solve_for(), list[Plan]()
    free = [name for name in ("num_stages", "num_microbatches") if fixed.get(name, "auto") == "auto"]
    if number == 1 or not free:
        return [best]
    vary = free[0]
    for value in sorted({getattr(c, vary) for c in model.candidates()} - {getattr(best, vary)}):
        try:
            others.append(solve_for(**{vary: value}, baselines=False, why=False))
        except (InfeasibleError, NoPlanInTimeError, OptionError):
            continue  # nothing of that kind fits, or what else is fixed rules it out
    near = [p for p in others if p.prediction.step_time_s <= FAR * best.prediction.step_time_s]
    return [best, *sorted(near, key=lambda plan: plan.prediction.step_time_s)][:number]


def best_of(
    plans: Sequence[Plan],
    compiled: Callable[[Plan], ParallelStep],
    leaves: tuple[Sequence[Any], Sequence[Any]] | None,
) -> ParallelStep:
    """The step of the plan that runs fastest among those that fit as compiled; with one plan, nothing is tried out.

    Args:
        plans: the best as predicted first.
        compiled: the programs of a plan.
        leaves: of state and batch; None where nothing can run, and the first that fits is taken.
    """
    if len(plans) == 1:
        return compiled(plans[0])
    tried = try_out(plans, compiled, leaves)
    fit = [t for t in tried if not t.problem] or [tried[0]]
    best = min(fit, key=lambda t: t.seconds)
    step = best.step or compiled(best.plan)  # says what is wrong where not even one compiles
    each = "; ".join(f"{t} (chosen)" if t is best else str(t) for t in tried)
    note, proof = f"{len(tried)} finalists were tried out: {each}", plans[0].certificate
    if best.plan is plans[0]:
        return step.with_certificate(replace(proof, notes=(*proof.notes, note)))
    return step.with_certificate(proof.of_another(best.plan.prediction.step_time_s, note))


def informed(
    price: Price, plans_of: Callable[[TableModel], Sequence[Plan]], budget_s: float
) -> tuple[TableModel, Sequence[Plan]]:
    """Costs under which plans rest on measured numbers, as far as the budget goes, and the plans.

    A search likes best what is underestimated. So what the plans found rest on and was not measured is measured next,
    and the search run again, until nothing is left to measure or nothing more can be.

    Args:
        price: costs.
        plans_of: the plans that matter under them.
        budget_s: of all measuring together.
    """
    model = price(None, FIRST_SHARE * budget_s)
    plans, left_s, before, share = plans_of(model), (1.0 - FIRST_SHARE) * budget_s, set[Key](), ROUND_SHARE
    for _ in range(ROUNDS):
        wanted = dict.fromkeys(key for plan in plans for key in cost_model.unmeasured(model, plan))
        again = set(wanted) == before
        if not wanted or (again and share == 1.0):
            break
        share = 1.0 if again else ROUND_SHARE  # what half of the time was too short for gets all of it, once
        log.info("measuring %d numbers that the plan rests on", len(wanted))
        started, before = time.monotonic(), set(wanted)
        model = price(tuple(wanted), share * left_s)
        left_s = max(0.0, left_s - (time.monotonic() - started))
        plans = plans_of(model)
    return model, plans


def price_graph(graph: LayerGraph, options: Options, budget_s: float, only: Sequence[Key] | None = None) -> TableModel:
    """Profile and estimate for a traced step.

    Args:
        graph: the step.
        options: what was asked for.
        budget_s: for measuring.
        only: entries of the profile to measure, and no others.
    """
    cluster = cluster_of(options)
    measured = options.profile
    if measured is None and options.source == "measured" and cluster.num_hosts > 1:
        log.info("numbers are described: one process cannot measure the devices of %d hosts", cluster.num_hosts)
    elif measured is None and options.source == "measured":
        measured = profiler.profile(
            graph,
            cluster,
            devices=options.devices,
            num_stages=options.num_stages,
            num_microbatches=options.num_microbatches,
            budget_s=budget_s,
            only=only,
            cache_dir=options.cache_dir,
            progress=options.progress,
        )
    return cost_model.estimate(graph, cluster, measured)


@functools.wraps(planner.solve)
def solve(costs: CostModel, **options: Any) -> Plan:
    """`planner.solve`, with the predicted memory taken apart, and told where it is over the limit after all."""
    plan = planner.solve(costs, **options)
    return cost_model.with_memory_parts(costs, plan) if isinstance(costs, TableModel) else plan


def solve_for(model: CostModel, options: Options, **pins: Any) -> Plan:
    """The best plan under the options, some of them replaced."""
    asked = {
        "time_limit_s": options.time_limit_s,
        "num_stages": options.num_stages,
        "num_microbatches": options.num_microbatches,
        "schedule": options.schedule,
        "executor": possible_executor(options.executor, cluster_of(options)),
        "strategy": options.strategy,
        "pin": options.pin,
        "top_k": options.top_k,
        "progress": options.progress,
    }
    return solve(model, **{**asked, **pins})


def cluster_of(options: Options) -> Cluster:
    """The devices that were asked for."""
    return options.cluster or local_cluster(options.devices, memory_limit=options.memory_limit)


def possible_executor(executor: str, cluster: Cluster) -> str:
    """What "auto" means for a cluster: over several hosts a program per stage only where that has been tried."""
    unsure = executor == "auto" and cluster.num_hosts > 1 and cluster.platform not in TRIED_OVER_HOSTS
    return "program" if unsure else executor
