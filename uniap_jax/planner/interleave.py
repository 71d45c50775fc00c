"""Interleaved stages: every set of devices holds several pieces of the model, which makes the bubble shorter.

The search does not look at such plans. One is made by hand from a plan that it found: the layers keep their
strategies, and the model is cut anew into more and smaller stages, which take turns on the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import MEMORY_TOLERANCE, Assignment, Candidate, CostModel, CostTables, evaluate
from uniap_jax.core.errors import InfeasibleError, PlanMismatchError
from uniap_jax.core.plan import INTERLEAVED, Certificate, Plan, Prediction
from uniap_jax.core.schedule import Schedule, interleaved, one_f_one_b
from uniap_jax.core.timeline import BACKWARD_SHARE

FloatArray = NDArray[np.float64]


def interleave(plan: Plan, costs: CostModel, *, num_chunks: int = 2) -> Plan:
    """A plan of P stages as one of `num_chunks` × P stages on the same P sets of devices (Narayanan et al., 2021).

    Its step time is that of the schedule run with the stages' times; the cut into stages makes the slowest of them as
    fast as it can be. More micro-batches are in flight than under 1F1B, which the memory counts.

    Args:
        plan: with a program per stage, two stages or more, its sets of devices of one size.
        costs: that it was made from.
        num_chunks: stages per set of devices.

    Raises:
        PlanMismatchError: the plan cannot be interleaved so: too few stages or layers, sets of different sizes,
            micro-batches that do not come in groups of P, or costs of something else.
        InfeasibleError: a device's memory does not hold it.

    Example:
        >>> woven = interleave(plan, costs, num_chunks=2)  # doctest: +SKIP
        >>> step = uniap.compile_plan(graph, woven)  # doctest: +SKIP
    """
    _check(plan, costs, num_chunks)
    places, count = plan.num_stages, num_chunks * plan.num_stages
    tables = costs.tables(Candidate(num_stages=places, num_microbatches=plan.num_microbatches, schedule="one_f_one_b"))
    position = {s: k for k, s in enumerate(tables.strategies)}
    unknown = sorted({str(layer.strategy) for layer in plan.layers} - {str(s) for s in position})
    if unknown:
        raise PlanMismatchError(
            f"the costs have no price for {', '.join(unknown)}, strategies of the plan; pin them when estimating",
            strategies=tuple(unknown),
        )
    strategy = tuple(position[layer.strategy] for layer in plan.layers)
    rows = np.arange(tables.num_layers)
    stage = cut_evenly(tables.time_s.mean(axis=1)[rows, list(strategy)], count)
    schedule = interleaved(places, plan.num_microbatches, num_chunks)
    price = evaluate(_in_turn(tables, count), Assignment(stage=stage, strategy=strategy))
    peaks = _peaks(costs, tables, stage, strategy, schedule)
    _check_memory(peaks, tables.capacity_bytes)
    once = np.asarray(price.iteration_time_s).reshape(num_chunks, places).sum(axis=0)
    ahead, back = ([t * share for t in price.stage_time_s] for share in (1 - BACKWARD_SHARE, BACKWARD_SHARE))
    span = schedule.makespan(ahead, back, [t / 2 for t in price.link_time_s])
    return replace(
        plan,
        num_stages=count,
        schedule=INTERLEAVED,
        stage_devices=plan.stage_devices * num_chunks,
        layers=tuple(replace(layer, stage=s) for layer, s in zip(plan.layers, stage, strict=True)),
        prediction=Prediction(
            step_time_s=float(span + once.max()),
            stage_time_s=price.stage_time_s,
            link_time_s=price.link_time_s,
            iteration_time_s=price.iteration_time_s,
            peak_bytes=tuple(peaks.tolist()) * num_chunks,
            capacity_bytes=tuple(tables.capacity_bytes.tolist()) * num_chunks,
            source=costs.source,
        ),
        certificate=Certificate(
            status="pinned",
            notes=(
                f"interleaved by hand, {num_chunks} stages per set of devices: the search does not look at such plans",
            ),
        ),
    )


def cut_evenly(seconds: Sequence[float] | FloatArray, count: int) -> tuple[int, ...]:
    """A stage for every layer: runs of layers, none empty, the slowest as fast as possible.

    Args:
        seconds: [layers].
        count: stages; at most one per layer.
    """
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
    layers = len(ends) - 1
    best, choice = ends.copy(), np.zeros((count, layers + 1), dtype=np.int64)
    best[0] = np.inf
    for k in range(1, count):
        cost = np.full(layers + 1, np.inf)
        for i in range(k + 1, layers + 1):
            options = np.maximum(best[:i], ends[i] - ends[:i])
            choice[k, i] = int(options.argmin())
            cost[i] = options[choice[k, i]]
        best = cost
    stage, end = np.zeros(layers, dtype=np.int64), layers
    for k in reversed(range(count)):
        start = int(choice[k, end])
        stage[start:end] = k
        end = start
    return tuple(stage.tolist())


def _in_turn(tables: CostTables, count: int) -> CostTables:
    """The tables of stages that take turns on the places of these."""
    turn = np.arange(count) % tables.candidate.num_stages
    return replace(
        tables,
        candidate=replace(tables.candidate, num_stages=count),
        time_s=tables.time_s[:, turn],
        iteration_time_s=tables.iteration_time_s[:, turn],
        memory_bytes=tables.memory_bytes[:, turn],
        capacity_bytes=tables.capacity_bytes[turn],
    )


def _peaks(
    costs: CostModel, tables: CostTables, stage: tuple[int, ...], strategy: tuple[int, ...], schedule: Schedule
) -> FloatArray:
    """[places] bytes of a device. What one micro-batch holds is what GPipe holds more than 1F1B, per micro-batch."""
    candidate, places = tables.candidate, tables.candidate.num_stages
    rows, chosen, place = np.arange(len(stage)), list(strategy), np.asarray(stage) % places
    everything = costs.tables(replace(candidate, schedule="gpipe")).memory_bytes - tables.memory_bytes
    each = everything[rows, places - 1, chosen] / (candidate.num_microbatches - 1)
    flying = np.asarray(one_f_one_b(places, candidate.num_microbatches).in_flight)
    steady = tables.memory_bytes[rows, place, chosen] - each * flying[place]
    per_stage = np.bincount(stage, weights=each, minlength=schedule.num_stages)
    return np.array([steady[place == p].sum() + schedule.held(p, per_stage.tolist()) for p in range(places)])


def _check(plan: Plan, costs: CostModel, num_chunks: int) -> None:
    places = plan.num_stages
    faults = {
        "it has one stage, two are the least": places < 2,
        f"it runs as {plan.executor!r} under {plan.schedule!r}": plan.executor != "stages"
        or plan.schedule == INTERLEAVED,
        f"its stages have {[len(d) for d in plan.stage_devices]} devices, which are to be equal": len(
            {len(d) for d in plan.stage_devices}
        )
        > 1,
        f"{plan.num_microbatches} micro-batches are not in groups of {places}": plan.num_microbatches % places != 0,
        f"{num_chunks} stages per set of devices, two are the least": num_chunks < 2,
        f"{len(plan.layers)} layers are too few for {num_chunks * places} stages": len(plan.layers)
        < num_chunks * places,
        "the costs are those of another model or cluster": plan.graph_fingerprint != costs.graph_fingerprint
        or plan.stage_devices != costs.stage_devices(places),
    }
    found = [text for text, wrong in faults.items() if wrong]
    if found:
        raise PlanMismatchError(
            f"the plan cannot be interleaved: {'; '.join(found)}. Take a plan of several equal stages whose number "
            "divides the micro-batches, and num_chunks so that every stage gets a layer",
            num_stages=places,
            num_chunks=num_chunks,
            num_microbatches=plan.num_microbatches,
        )


def _check_memory(peaks: FloatArray, capacity: FloatArray) -> None:
    place = int((peaks / capacity).argmax())
    if peaks[place] > capacity[place] * (1 + MEMORY_TOLERANCE):
        raise InfeasibleError(
            f"interleaved, devices of set {place} need {peaks[place] / 2**30:.2f} GiB of "
            f"{capacity[place] / 2**30:.2f} GiB: more micro-batches are in flight than under 1F1B. Keep the plan as it "
            "is, use fewer chunks, or more micro-batches",
            needed_bytes=float(peaks[place]),
            limit_bytes=float(capacity[place]),
            place=place,
        )
