"""Progress for the person who waits: a bar on a terminal, nothing in a pipe; always stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]
"""Called with what is done, how much there is, and what it is about."""


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A progress callback that draws a bar while it lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[about]}", markup=False),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None, about="")

        def update(done: int, total: int, about: str) -> None:
            bar.update(task, completed=done, total=total, about=about)

        yield update
