"""Progress for the person who waits: a bar on a terminal, nothing in a pipe; always stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from uniap_jax.core.plan_text import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from uniap_jax.planner.search import Progress as SearchProgress


@contextmanager
def profiling_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A callback that is told what is done, how much there is, and what it is about."""
    with _bar() as bar:
        task = bar.add_task("profiling", total=None, about="")

        def update(done: int, total: int, about: str) -> None:
            bar.update(task, completed=done, total=total, about=about)

        yield update


@contextmanager
def search_bar() -> Iterator[Callable[[SearchProgress], None]]:
    """A callback that is told where the planner's search stands."""
    with _bar() as bar:
        task = bar.add_task("searching", total=None, about="")

        def update(progress: SearchProgress) -> None:
            best = "no plan yet" if math.isinf(progress.step_time_s) else f"best {format_seconds(progress.step_time_s)}"
            about = f"{best}, gap {100 * progress.gap:.1f} %, {progress.open_candidates} candidates left"
            bar.update(task, about=about)

        yield update


@contextmanager
def _bar() -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[about]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield bar
