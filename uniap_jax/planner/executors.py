"""Both ways to run several stages, priced: a program for each stage, or one program for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uniap_jax.core.costs import Candidate, CostModel
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import InfeasibleError, NoPlanInTimeError, OptionError, StrategyError, UniapError
from uniap_jax.core.plan import EXECUTORS, Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.plan_text import format_bytes, format_seconds
from uniap_jax.core.strategy import Strategy, parse_strategy
from uniap_jax.planner.answer import gap_of
from uniap_jax.planner.candidates import Auto, filled, nearest
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.equal_stages import EqualResult, search_equal
from uniap_jax.planner.search import PROOF_GAP, TIE
from uniap_jax.planner.solve import solve as solve_stages

ENGINE = "equal_stages"
SEARCHING = ("interval", "hybrid", "miqp")
"""Engines beside which one program is considered too; the others are asked for by name, for what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the user fixed."""

    num_stages: int | Auto
    num_microbatches: int | Auto
    schedule: str
    strategy: Strategy | None


def solve(
    costs: CostModel,
    *,
    executor: str = "auto",
    time_limit_s: float = 60.0,
    num_stages: int | Auto = "auto",
    num_microbatches: int | Auto = "auto",
    schedule: str = "auto",
    strategy: Strategy | str | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan under a cost model, with its proof.

    Args:
        costs: tables of every candidate.
        executor: "stages", a program for each stage; "program", one program for the whole step: a single stage, or
            equal stages; "auto" prices both and takes the faster.
        time_limit_s: wall time of the search; the best plan so far is returned with its gap.
        num_stages: fixes P.
        num_microbatches: fixes c.
        schedule: fixes the schedule; "auto" is 1F1B with a program for each stage, the better one with one for all.
        strategy: fixes the strategy of every layer that may take it, as text too ("data=2,tensor=2"); elsewhere the
            nearest legal one.
        **options: `engine`, `solver`, `pin`, `top_k`, `baselines`, `why` and `progress` of `planner.solve.solve`.

    Raises:
        OptionError: a fixed value that no candidate has, or an unknown engine or executor; names what exists.
        StrategyError: a strategy that cannot be read, or one program is asked for and the model has no equal stages;
            says what comes nearest.
        InfeasibleError: no plan exists, proved.
        NoPlanInTimeError: the time passed before any plan was found.
    """
    if executor not in ("auto", *EXECUTORS):
        raise OptionError(
            f"executor={executor!r} is unknown; use 'auto', {', '.join(map(repr, EXECUTORS))}",
            executor=executor,
            possible=("auto", *EXECUTORS),
        )
    clock = Clock(limit_s=time_limit_s)
    strategy = None if strategy is None else parse_strategy(strategy)
    wanted = _Wanted(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, strategy=strategy)
    fixed = {"num_microbatches": num_microbatches, "schedule": schedule, "strategy": strategy, **options}
    beside = options.get("engine", "interval") in SEARCHING and not options.get("pin")
    if executor == "stages" or (executor == "auto" and not beside):
        return solve_stages(costs, time_limit_s=time_limit_s, num_stages=num_stages, **fixed)
    if executor == "program" and options.get("pin"):
        raise OptionError(
            "pin= places layers one by one, which one program for all stages cannot do; use strategy=, or "
            "executor='stages'",
            executor=executor,
        )
    alone = executor == "program" and num_stages not in (1, "auto")
    # equal stages first: their tables are few, and a stage search may take all the time that is left
    equal, reason = _equal(costs, wanted, clock=clock if alone else Clock(limit_s=time_limit_s / 2), must=alone)
    stages: Plan | UniapError | None = None
    if not alone:
        only = 1 if executor == "program" else num_stages
        stages = _attempt(costs, time_limit_s=clock.left(), num_stages=only, **fixed)
        known = num_stages == "auto" or any(c.num_stages == num_stages for c in costs.candidates())
        if isinstance(stages, OptionError) and equal is None and not known and _counts(costs, wanted):
            raise _refusal(costs, wanted) from stages  # one program may have that many stages
    return _better(costs, stages, equal, reason, clock)


def _attempt(costs: CostModel, **options: Any) -> Plan | UniapError:
    try:
        return solve_stages(costs, **options)
    except (InfeasibleError, NoPlanInTimeError, OptionError) as error:
        return error


def _equal(costs: CostModel, wanted: _Wanted, *, clock: Clock, must: bool) -> tuple[EqualResult | None, str]:
    """The best plan of equal stages, or why there is none.

    Raises:
        StrategyError: one is asked for, and no number of stages has equal ones.
    """
    possible = _candidates(costs, wanted)
    if not possible:
        reason = _refusal(costs, wanted)
        if must:
            raise reason
        return None, str(reason)
    if wanted.strategy is not None:
        costs = costs.with_strategy(wanted.strategy)

    def tables_of(candidate: Candidate) -> EqualTables:
        tables = costs.equal_tables(candidate)
        if wanted.strategy is None:
            return tables
        return _pinned(tables, filled(wanted.strategy, costs.num_devices // candidate.num_stages))

    return search_equal(tables_of, possible, clock=clock, refusal=costs.refusal), ""


def _candidates(costs: CostModel, wanted: _Wanted) -> list[Candidate]:
    """Those that match; both schedules where none is fixed, for with one program GPipe has fewer ticks than 1F1B."""

    def matches(candidate: Candidate) -> bool:
        return all(
            value in ("auto", getattr(candidate, name))
            for name, value in (
                ("num_stages", wanted.num_stages),
                ("num_microbatches", wanted.num_microbatches),
                ("schedule", wanted.schedule),
            )
        )

    return [c for c in costs.equal_candidates() if matches(c)]


def _counts(costs: CostModel, wanted: _Wanted) -> list[int]:
    """Numbers of micro-batches that equal stages may have."""
    return sorted({c.num_microbatches for c in costs.equal_candidates() if wanted.num_stages in ("auto", c.num_stages)})


def _refusal(costs: CostModel, wanted: _Wanted) -> UniapError:
    """Why no candidate of equal stages matches."""
    n = costs.num_devices
    degrees = [p for p in range(2, n + 1) if n % p == 0 and wanted.num_stages in ("auto", p)]
    if not degrees:
        return OptionError(
            f"num_stages={wanted.num_stages!r} is no number of equal stages of {n} devices; use one of "
            f"{', '.join(str(p) for p in range(2, n + 1) if n % p == 0) or 'none: there is one device'}",
            num_stages=wanted.num_stages,
        )
    try:
        costs.equal_tables(Candidate(num_stages=degrees[0], num_microbatches=1))
    except StrategyError as error:
        return error
    why = costs.split_reason or f"micro-batches divide the batch of {costs.batch_size}"
    have = ", ".join(map(str, _counts(costs, wanted)))
    return OptionError(
        f"no candidate of equal stages has num_microbatches={wanted.num_microbatches!r} and "
        f"schedule={wanted.schedule!r}: {why}; use one of {have or 'none'} micro-batches",
        num_microbatches=wanted.num_microbatches,
        schedule=wanted.schedule,
    )


def _pinned(tables: EqualTables, strategy: Strategy) -> EqualTables:
    allowed = np.zeros_like(tables.allowed)
    for row in range(tables.num_rows):
        k = nearest(tables, row, strategy)
        if k is not None:
            allowed[row, k] = True
    return replace(tables, allowed=allowed)


def _better(
    costs: CostModel, stages: Plan | UniapError | None, equal: EqualResult | None, reason: str, clock: Clock
) -> Plan:
    """The faster of two plans, with what is known of the other."""
    planned = stages if isinstance(stages, Plan) else None
    value = math.inf if planned is None else planned.prediction.step_time_s
    if equal is not None and equal.value < value * (1 - TIE):
        return _equal_plan(costs, equal, planned, clock)
    if planned is not None:
        one = "one program for equal stages"
        if equal is None:
            note = f"{one} was not considered: {reason}"
        elif math.isfinite(equal.value):
            note = f"{one} would take {format_seconds(equal.value)}"
        else:
            note = f"{one} does not fit, or was not found in time ({equal.candidates} candidates)"
        return _with_other_bound(planned, math.inf if equal is None else equal.bound_s, note)
    if isinstance(stages, UniapError):
        raise stages
    assert equal is not None
    if clock.expired():
        raise NoPlanInTimeError(
            f"no plan of equal stages found in {clock.spent():.2f} s; one may exist. Raise the time limit.",
            seconds=clock.spent(),
            engine=ENGINE,
            limit_s=clock.limit_s,
        )
    raise InfeasibleError(
        f"no plan of equal stages fits ({costs.num_devices} devices, global batch {costs.batch_size}, "
        f"{equal.candidates} candidates): the leanest needs {format_bytes(equal.least_bytes)} per device. Give each "
        "device as much, use more devices, lower the batch size, or use executor='auto'",
        needed_bytes=equal.least_bytes,
        num_devices=costs.num_devices,
        batch_size=costs.batch_size,
    )


def _with_other_bound(plan: Plan, bound_s: float, note: str) -> Plan:
    proof = plan.certificate
    value = plan.prediction.step_time_s
    gap, bound = gap_of(value, min(proof.bound_s, bound_s))
    notes = (*proof.notes, note)
    if gap <= proof.gap:
        return replace(plan, certificate=replace(proof, notes=notes))
    return replace(plan, certificate=replace(proof, status="feasible", bound_s=bound, gap=gap, notes=notes))


def _equal_plan(costs: CostModel, found: EqualResult, stages: Plan | None, clock: Clock) -> Plan:
    tables, price = found.tables, found.price
    assert tables is not None
    assert price is not None
    candidate, value = tables.candidate, price.step_time_s
    other = stages.certificate if stages is not None else Certificate(status="pinned", bound_s=math.inf)
    gap, bound = gap_of(value, min(found.bound_s, other.bound_s))
    notes = [*costs.notes, _why(tables, found, stages)]
    against: tuple[tuple[str, float | None], ...] = ()
    if stages is not None:
        name = "one_stage" if stages.num_stages == 1 else "a_program_for_each_stage"
        against = ((name, stages.prediction.step_time_s),)
    return Plan(
        num_stages=candidate.num_stages,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule,
        batch_size=costs.batch_size,
        stage_devices=costs.stage_devices(candidate.num_stages),
        layers=tuple(
            LayerPlan(name=name, stage=stage, strategy=tables.strategies[found.choice[row]])
            for name, stage, row in zip(costs.layer_names, tables.stage, tables.rows, strict=True)
        ),
        prediction=Prediction(
            step_time_s=value,
            stage_time_s=price.stage_time_s,
            link_time_s=price.link_time_s,
            iteration_time_s=price.iteration_time_s,
            peak_bytes=price.stage_memory_bytes,
            capacity_bytes=(tables.capacity_bytes,) * candidate.num_stages,
            source=costs.source,
        ),
        certificate=Certificate(
            status="optimal" if gap <= PROOF_GAP else "feasible",
            bound_s=bound,
            gap=gap,
            engine=ENGINE if stages is None else f"{other.engine}, {ENGINE}",
            seconds=clock.spent(),
            candidates=found.candidates + other.candidates,
            baselines=(*other.baselines, *against),
            notes=tuple(notes),
            searched=other.searched,
        ),
        executor="program",
        graph_fingerprint=costs.graph_fingerprint,
        device_kind=costs.device_kind,
    )


def _why(tables: EqualTables, found: EqualResult, stages: Plan | None) -> str:
    run = [i for i, row in enumerate(tables.rows) if tables.run <= row < tables.run + tables.slots]
    what = f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"the loop in layer {run[0]}"
    shares = f"one program runs all stages: {what} in equal shares, every other layer on all devices"
    if stages is None:
        return shares
    way = "one stage" if stages.num_stages == 1 else "a program for each stage"
    return f"{shares}; {way} would take {format_seconds(stages.prediction.step_time_s)}"
