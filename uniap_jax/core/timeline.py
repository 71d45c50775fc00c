"""The step in time, as predicted: the plan's schedule run with the plan's times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uniap_jax.core.schedule import Event, Schedule, make_schedule

if TYPE_CHECKING:  # a plan draws itself with this module
    from uniap_jax.core.plan import Plan

BACKWARD_SHARE = 2 / 3
"""A plan keeps forward and backward of a stage as one time; the backward is taken as twice the forward, which is what
two matrix products for every one of the forward make it (UniAP's cost model says the same)."""


def schedule_of(plan: Plan) -> Schedule:
    """The order of a plan's work.

    Raises:
        ValueError: the plan has no such order, see `make_schedule`.
    """
    chunks = plan.num_stages // len(plan.device_sets)
    return make_schedule(plan.schedule, plan.num_stages, plan.num_microbatches, chunks)


def predicted_events(plan: Plan) -> tuple[Event, ...]:
    """Every forward and backward pass with its start and end; empty where the plan has no predicted times."""
    times = plan.prediction.stage_time_s
    if len(times) != plan.num_stages:
        return ()
    # A link's time is of both ways, there and back, for one micro-batch.
    links = [t / 2 for t in plan.prediction.link_time_s] or [0.0] * (plan.num_stages - 1)
    return schedule_of(plan).simulate(
        [t * (1 - BACKWARD_SHARE) for t in times], [t * BACKWARD_SHARE for t in times], links
    )


def bubble_share(events: tuple[Event, ...], *, num_places: int) -> float:
    """Share of the devices' time, from the first forward to the last backward, in which they wait.

    Args:
        events: of a step.
        num_places: sets of devices, `len(plan.device_sets)`.
    """
    if not events:
        return 0.0
    span = max(e.end_s for e in events)
    busy = sum(e.end_s - e.start_s for e in events)
    return 1 - busy / (span * num_places) if span > 0 else 0.0
