"""Works through entries, most valuable first, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from uniap_jax.core.described import Describer
from uniap_jax.core.strategy import Strategy

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

Progress = Callable[[int, int, str], None]
SHARES = (0.25, 1.0)
"""Of what is left of the time, what one entry may take: while others are left to do that take less, then at all."""


class Item(Protocol):
    """Something about a layer that is to be found out."""

    @property
    def key(self) -> Any:
        """What it is found by."""
        ...

    @property
    def layer(self) -> int:
        """Index in the graph."""
        ...

    @property
    def strategy(self) -> Strategy:
        """On a stage's sub-mesh."""
        ...

    @property
    def num_stages(self) -> int:
        """P."""
        ...


E = TypeVar("E", bound=Item)
E_contra = TypeVar("E_contra", bound=Item, contravariant=True)


class Probing(Protocol[E_contra, T_co]):
    """What finds something out about an entry."""

    @property
    def describer(self) -> Describer:
        """Of the graph."""
        ...

    def known(self, entry: E_contra) -> T_co | None:
        """What the cache has."""
        ...

    def measure(self, entry: E_contra) -> T_co | None:
        """Found out now; None where it cannot be."""
        ...

    def expected_s(self, entry: E_contra) -> float:
        """Seconds that finding out would likely take, by all that was found out before."""
        ...


def run_entries(
    ranked: Sequence[E],
    prober: Probing[E, T],
    *,
    deadline_s: float,
    progress: Progress | None,
    workers: int = 1,
    only: Container[Any] | None = None,
) -> dict[Any, T]:
    """What is found about entries in order until the deadline; what the cache knows costs nothing and always counts.

    Args:
        ranked: most valuable first.
        prober: measures one entry.
        deadline_s: of `time.monotonic`; an entry that would likely end after it is not begun, and one that would take
            much of what is left waits until the others are done.
        progress: called with what is done, how much there is, and what comes next.
        workers: entries under way at once; more than one only where nothing is timed.
        only: keys of entries that may be measured; all where None.
    """
    found: dict[Any, T] = {}
    for entry in ranked:
        known = prober.known(entry)
        if known is not None:
            found[entry.key] = known
    todo = [e for e in ranked if e.key not in found and (only is None or e.key in only)]
    waiting = set[Future[tuple[E, T | None]]]()

    def collect(room: int) -> None:
        nonlocal waiting
        while len(waiting) > room:
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            found.update({entry.key: cost for entry, cost in (f.result() for f in ready) if cost is not None})

    def first_within(seconds: float) -> E | None:
        return next((e for e in todo if prober.expected_s(e) <= seconds), None)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        while todo:
            collect(workers - 1)
            left = deadline_s - time.monotonic()
            if left <= 0:
                break
            ready = (first_within(share * left) for share in SHARES)
            next_one = next((e for e in ready if e is not None), None)
            if next_one is None:
                break
            todo.remove(next_one)
            if progress is not None:
                name = prober.describer.graph.layers[next_one.layer].name
                total = len(found) + len(waiting) + len(todo) + 1
                progress(len(found), total, f"{name}, {next_one.strategy}, {next_one.num_stages} stages")
            waiting.add(pool.submit(lambda e: (e, prober.measure(e)), next_one))
        collect(0)
    # in order: what is not known is scaled from the nearest that is, and of two as near from the first
    return {e.key: found[e.key] for e in ranked if e.key in found}
