"""How right the predictions are: many plans of one step, predicted beside measured times and compiled memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from uniap_jax.api import compile_plan, solve
from uniap_jax.core.absent import absent_devices
from uniap_jax.core.cluster import Cluster
from uniap_jax.core.costs import CostModel
from uniap_jax.core.errors import InfeasibleError, NoPlanInTimeError, OptionError, StrategyError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.strategy import enumerate_strategies
from uniap_jax.cost_model import TableModel
from uniap_jax.profiler.pace import Pace
from uniap_jax.runtime import ParallelStep
from uniap_jax.runtime.trial import FAILURES, Trial
from uniap_jax.runtime.verify import verify

SEARCH_TIME_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAccuracy:
    """One plan.

    Attributes:
        what: stages, micro-batches, schedule and the commonest strategy.
        chosen: whether the search returned it.
        predicted_s: step time.
        measured_s: median of interleaved runs, at the pace of the profile; 0 where it was only compiled.
        spread: half the range between the quartiles of the runs over their median.
        predicted_bytes: peak per device, per stage.
        compiled_bytes: the same of the compiled programs.
        problem: why it did not compile or run; "" where it did.
    """

    what: str
    chosen: bool
    predicted_s: float
    measured_s: float = 0.0
    spread: float = 0.0
    predicted_bytes: tuple[float, ...] = ()
    compiled_bytes: tuple[float, ...] = ()
    problem: str = ""

    @property
    def time_error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def peak_error(self) -> float:
        """|predicted - compiled| / compiled, of the fullest stage of either: what decides whether a plan fits."""
        return abs(max(self.predicted_bytes) - max(self.compiled_bytes)) / max(self.compiled_bytes)

    @property
    def memory_error(self) -> float:
        """|predicted - compiled| / compiled, of the stage where it is largest."""
        pairs = zip(self.predicted_bytes, self.compiled_bytes, strict=True)
        return max(abs(p - c) / c for p, c in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """Predictions of many plans beside what is so.

    Attributes:
        plans: one entry each.
        source: of the predictions.
        pace: time of a program of fixed work during the runs over its time when layers were profiled. Runs at another
            pace are repeated, and measured times are divided by it, run by run; 1 where it is not known.
        notes: one sentence each.
    """

    plans: tuple[PlanAccuracy, ...]
    source: str
    pace: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def run(self) -> tuple[PlanAccuracy, ...]:
        """Plans that were timed."""
        return tuple(p for p in self.plans if p.measured_s > 0)

    def summary(self) -> dict[str, float]:
        """Mean and worst errors of memory (of all stages, and of the fullest) and time, Kendall's tau, and regret.

        As far as they are known.
        """
        found: dict[str, float] = {"plans": len(self.plans), "failed": sum(bool(p.problem) for p in self.plans)}
        compiled = [p for p in self.plans if p.compiled_bytes]
        for name, errors in (
            ("memory", [p.memory_error for p in compiled]),
            ("peak", [p.peak_error for p in compiled]),
        ):
            if errors:
                found |= {f"{name}_mean": statistics.fmean(errors), f"{name}_worst": max(errors)}
        if self.run:
            errors = [p.time_error for p in self.run]
            found |= {"pace": self.pace, "time_mean": statistics.fmean(errors), "time_worst": max(errors)}
            found["kendall_tau"] = kendall_tau([p.predicted_s for p in self.run], [p.measured_s for p in self.run])
        chosen = [p for p in self.run if p.chosen]
        if chosen:
            found["time_chosen"] = chosen[0].time_error
            found["regret"] = chosen[0].measured_s / min(p.measured_s for p in self.run)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `uniap-jax check --accuracy --json` prints it."""
        return {"source": self.source, **self.summary(), "plans": [asdict(p) for p in self.plans], "notes": self.notes}


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs that both order alike, minus the share that they order otherwise; 1 for fewer than two."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    if not pairs:
        return 1.0

    def sign(values: Sequence[float], i: int, j: int) -> int:
        return (values[i] > values[j]) - (values[i] < values[j])

    return sum(sign(first, i, j) * sign(second, i, j) for i, j in pairs) / len(pairs)


def diverse_plans(costs: CostModel, number: int) -> list[Plan]:
    """The plan the search chooses, then plans pinned to as many kinds of stages, micro-batches and strategies.

    Args:
        costs: to search with.
        number: of plans; fewer where the model has no more.

    Raises:
        InfeasibleError: nothing fits.
    """
    found = [solve(costs, time_limit_s=4 * SEARCH_TIME_S, why=False)]
    seen = {_decisions(found[0])}
    for stages, pieces, strategy in _pins(costs):
        if len(found) == number:
            break
        try:
            plan = solve(
                costs,
                num_stages=stages,
                num_microbatches=pieces,
                strategy=strategy,
                baselines=False,
                why=False,
                time_limit_s=SEARCH_TIME_S,
            )
        except (InfeasibleError, NoPlanInTimeError, OptionError, StrategyError):
            continue
        if _decisions(plan) not in seen:
            seen.add(_decisions(plan))
            found.append(plan)
    return found


def _decisions(plan: Plan) -> tuple[Any, ...]:
    return plan.num_stages, plan.num_microbatches, plan.schedule, plan.layers


def _pins(costs: CostModel) -> Iterator[tuple[int, int, Any]]:
    """(stages, micro-batches, strategy) in an order whose every start is diverse."""
    stages = sorted({c.num_stages for c in costs.candidates()})
    pieces = sorted({c.num_microbatches for c in costs.candidates()})
    by_stage = []
    for p in stages:
        plain = enumerate_strategies(costs.num_devices // p, keeps=("all", "inputs"))
        counts = [c for c in pieces if c >= p] or pieces[-1:]
        by_stage.append([(p, counts[i % min(3, len(counts))], s) for i, s in enumerate(plain)])
    for group in itertools.zip_longest(*by_stage):
        yield from (pin for pin in group if pin is not None)


def describe(plan: Plan) -> str:
    """A plan in one line."""
    names = [str(layer.strategy) for layer in plan.layers]
    common = statistics.mode(names)
    others = len(set(names)) - 1
    more = f" and {others} more" if others else ""
    schedule = f" {plan.schedule}" if plan.num_stages > 1 else ""
    return f"P={plan.num_stages} c={plan.num_microbatches}{schedule} {common}{more}"


def _compiled(step: ParallelStep, *, chosen: bool) -> PlanAccuracy:
    """Predicted and compiled peaks of a plan; nothing runs."""
    plan = step.plan
    row = PlanAccuracy(
        what=describe(plan),
        chosen=chosen,
        predicted_s=plan.prediction.step_time_s,
        predicted_bytes=plan.prediction.peak_bytes,
    )
    try:
        found = verify(step, full_copies=False).stages
    except FAILURES as error:
        return replace(row, problem=str(error).splitlines()[0])
    return replace(row, compiled_bytes=tuple(float(s.compiled_bytes) for s in found))


def accuracy(
    graph: LayerGraph,
    costs: TableModel,
    args: Sequence[Any],
    *,
    devices: Sequence[Any] | None = None,
    num_plans: int = 20,
    rounds: int = 7,
) -> AccuracyReport:
    """Runs many plans in turn and compares what they take with what was predicted.

    Every round times some steps of each plan, so that what else the machine does meanwhile falls on all of them alike.
    They follow other steps of the same plan, as in training.

    Args:
        graph: the captured step.
        costs: the predictions.
        args: arguments of the step.
        devices: of the plans; `jax.devices()` by default.
        num_plans: how many.
        rounds: how often steps of each plan are timed; 0 compiles the plans only.

    Raises:
        InfeasibleError: nothing fits.
    """
    here = list(jax.devices() if devices is None else devices)
    leaves = graph.step.flatten(*args)
    rows, trials = [], dict[int, Trial]()
    for i, plan in enumerate(diverse_plans(costs, num_plans)):
        step = compile_plan(graph, plan, devices=here)
        row = _compiled(step, chosen=i == 0)
        try:
            if rounds and not row.problem:
                trials[i] = Trial(step, *leaves)
                trials[i].once()
        except FAILURES as error:
            trials.pop(i, None)
            row = replace(row, problem=str(error).splitlines()[0])
        rows.append(row)
    seconds: dict[int, list[float]] = {i: [] for i in trials}
    pace_s = costs.profile.rates.pace_s if costs.profile else 0.0
    pace = Pace(here, pace_s) if pace_s and trials else None
    paces = []
    for _ in range(rounds):
        for i, trial in trials.items():
            taken, ratio = pace.steadily(trial.seconds) if pace else (trial.seconds(), 1.0)
            paces.append(ratio)
            seconds[i].append(taken / ratio)
    for i, each in seconds.items():
        median = statistics.median(each)
        low, _, high = statistics.quantiles(each, n=4) if len(each) > 2 else (median,) * 3
        rows[i] = replace(rows[i], measured_s=median, spread=(high - low) / 2 / median)
    return AccuracyReport(
        plans=tuple(rows), source=costs.source, pace=statistics.median(paces or [1.0]), notes=costs.notes
    )


def absent_accuracy(graph: LayerGraph, costs: CostModel, cluster: Cluster, *, num_plans: int = 20) -> AccuracyReport:
    """Compiles many plans for devices that are not here and compares their memory with what was predicted.

    Args:
        graph: the captured step.
        costs: the predictions.
        cluster: of TPUs or cards whose compiler is installed.
        num_plans: how many.

    Raises:
        InfeasibleError: nothing fits.
        ProfileError: there is no compiler for the devices.
    """
    absent_devices(cluster)  # says what is missing before anything is searched
    rows = [
        _compiled(compile_plan(graph, plan, devices=absent_devices(cluster, plan.num_parts)), chosen=i == 0)
        for i, plan in enumerate(diverse_plans(costs, num_plans))
    ]
    return AccuracyReport(plans=tuple(rows), source=costs.source, notes=costs.notes)


def report_lines(report: AccuracyReport) -> Iterator[str]:
    """The report as Markdown."""
    yield "| plan | predicted | measured | error | predicted peak | compiled peak | error |"
    yield "|---|---|---|---|---|---|---|"
    for p in report.plans:
        name = f"**{p.what}** (chosen)" if p.chosen else p.what
        timed = f"{1e3 * p.measured_s:.2f} ms | {100 * p.time_error:.0f} %" if p.measured_s else "– | –"
        told = f"{max(p.predicted_bytes) / 2**20:.1f} MiB"
        if p.compiled_bytes:
            told += f" | {max(p.compiled_bytes) / 2**20:.1f} MiB | {100 * p.memory_error:.1f} %"
        else:
            told += f" | {p.problem[:60]} | –"
        yield f"| {name} | {1e3 * p.predicted_s:.2f} ms | {timed} | {told} |"
    yield ""
    yield ", ".join(f"{name} {value:.3g}" for name, value in report.summary().items())
