"""Timing of compiled programs: warm-up, median, spread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ROW = 4
"""Runs that follow each other at once, where what is wanted is the time of one among others."""
ROWS = 3
"""Rows at the least."""
LONG_S = 0.3
"""Of a run that says its time after two more: neither a cold start nor the host weighs anything in it."""
RUNS_IF_LONG = 2
RECENT = 5
"""How many of the latest durations say how long the next will be."""


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


def time_in_a_row(
    start: Callable[[], Any],
    wait: Callable[[Any], Any],
    *,
    length: int = ROW,
    min_rows: int = ROWS,
    max_rows: int = 8,
    target_s: float = 0.25,
) -> Timing:
    """Seconds of a run among others, as in a step, which hands over one program after the other.

    Devices go from one run to the next without waiting for the host, and those that are done first need not wait for
    the last. Runs once to warm up, then rows of runs until `target_s` is spent; one short row where the first took
    long. Two runs are under way at a time, so that no more results than theirs are held.

    Args:
        start: hands a run over.
        wait: returns when the results it is given are ready.
        length: runs of a row.
        min_rows: however long they take.
        max_rows: however short they are.
        target_s: seconds to spend.
    """
    began = time.perf_counter()
    wait(start())
    if time.perf_counter() - began > LONG_S:
        length, min_rows = RUNS_IF_LONG, 1
    seconds: list[float] = []
    while len(seconds) < min_rows or (len(seconds) < max_rows and length * sum(seconds) < target_s):
        began = time.perf_counter()
        before = start()
        for _ in range(length - 1):
            after = start()
            wait(before)
            before = after
        wait(before)
        seconds.append((time.perf_counter() - began) / length)
    return summarize(seconds)


def in_a_row_s(run_s: float) -> float:
    """Seconds that `time_in_a_row` takes at the least for runs of `run_s`."""
    return run_s * (1 + (RUNS_IF_LONG if run_s > LONG_S else ROWS * ROW))


class Durations:
    """Of things that are much alike.

    Args:
        guess_s: of one, before any is known.
    """

    def __init__(self, guess_s: float) -> None:
        self._guess_s, self._latest = guess_s, deque[float](maxlen=RECENT)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Times one more, unless it fails."""
        started = time.monotonic()
        yield
        self._latest.append(time.monotonic() - started)

    @property
    def next_s(self) -> float:
        """Likely of the next."""
        latest = tuple(self._latest)  # threads add to it
        return statistics.median(latest) if latest else self._guess_s


def summarize(seconds: list[float]) -> Timing:
    """Median and spread of timed runs."""
    median = statistics.median(seconds)
    if len(seconds) < 3:
        return Timing(median_s=median, spread=0.0, runs=len(seconds))
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(median_s=median, spread=(high - low) / 2 / median if median else 0.0, runs=len(seconds))
