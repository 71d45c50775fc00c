"""Timing of compiled programs: warm-up, median, spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one program.

    Attributes:
        median_s: of the timed runs.
        spread: half the range between the quartiles over the median.
        runs: how many were timed.
    """

    median_s: float
    spread: float
    runs: int


def time_program(run: Callable[[], Any], *, min_runs: int = 3, max_runs: int = 15, target_s: float = 0.25) -> Timing:
    """Runs once to warm up, then until `target_s` is spent, at least `min_runs` and at most `max_runs` times.

    Args:
        run: runs the program and waits for its results.
        min_runs: however long they take.
        max_runs: however short they are.
        target_s: seconds to spend.
    """
    run()
    seconds: list[float] = []
    while len(seconds) < min_runs or (len(seconds) < max_runs and sum(seconds) < target_s):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return summarize(seconds)


def summarize(seconds: list[float]) -> Timing:
    """Median and spread of timed runs."""
    median = statistics.median(seconds)
    if len(seconds) < 3:
        return Timing(median_s=median, spread=0.0, runs=len(seconds))
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(median_s=median, spread=(high - low) / 2 / median if median else 0.0, runs=len(seconds))
