"""What `run` sees of a plan while it trains, to be put beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from uniap_jax.core.errors import ExecutionError
from uniap_jax.core.observed import Observed
from uniap_jax.core.plan import Plan
from uniap_jax.runtime import ParallelStep
from uniap_jax.runtime.monitor import Monitor
from uniap_jax.runtime.stage_memory import stage_peaks
from uniap_jax.runtime.stopwatch import Reading


def follow(step: ParallelStep) -> Monitor | None:
    """Follows every step's passes; None where a plan has no passes to follow: one stage, or one program for all."""
    if step.plan.num_stages == 1:
        return None
    try:
        return Monitor(step, every=1, window=1, threshold=float("inf"))
    except ExecutionError:
        return None


def live_bytes(devices: Sequence[jax.Device]) -> float | None:
    """Most bytes in use on any of these devices so far; None where the platform does not tell."""
    stats = [d.memory_stats() or {} for d in devices]
    known = [float(s["peak_bytes_in_use"]) for s in stats if "peak_bytes_in_use" in s]
    return max(known, default=None)


def observe(step: ParallelStep, seconds: Sequence[float], monitor: Monitor | None) -> Observed:
    """Memory as compiled and as used, step times, and the passes of the last step.

    Args:
        step: that has run.
        seconds: of every step; the first, which compiles, is left out where there are more.
        monitor: from `follow`.
    """
    readings: tuple[Reading, ...] = ()
    if monitor is not None:
        monitor.wait()
        readings = monitor.readings
    return Observed(
        compiled_bytes=tuple(map(float, stage_peaks(step))),
        live_bytes=stage_live_bytes(step.plan, jax.devices()),
        step_times_s=tuple(seconds[1:] or seconds),
        events=readings[-1].events if readings else (),
    )


def stage_live_bytes(plan: Plan, devices: Sequence[jax.Device]) -> tuple[float, ...]:
    """Per stage, most bytes in use on a device of it; () where the platform does not tell."""
    found = [live_bytes([devices[d] for d in stage]) for stage in plan.stage_devices]
    return tuple(b for b in found if b is not None) if None not in found else ()
