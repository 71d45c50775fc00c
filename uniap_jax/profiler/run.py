"""Works through entries, most valuable first, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from uniap_jax.core.described import Describer
from uniap_jax.core.strategy import Strategy

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

Progress = Callable[[int, int, str], None]
RECENT = 5
"""How many of the latest durations say how long the next entry will take."""


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


def run_entries(
    ranked: Sequence[E], prober: Probing[E, T], *, deadline_s: float, progress: Progress | None, workers: int = 1
) -> dict[Any, T]:
    """What is found about entries in order until the deadline; what the cache knows costs nothing and always counts.

    Args:
        ranked: most valuable first.
        prober: measures one entry.
        deadline_s: of `time.monotonic`; an entry that would likely end after it is not begun.
        progress: called with what is done, how much there is, and what comes next.
        workers: entries under way at once; more than one only where nothing is timed.
    """
    found: dict[Any, T] = {}
    for entry in ranked:
        known = prober.known(entry)
        if known is not None:
            found[entry.key] = known
    todo = [e for e in ranked if e.key not in found]
    durations: list[float] = []

    def probe(entry: E) -> tuple[E, T | None, float]:
        start = time.monotonic()
        return entry, prober.measure(entry), time.monotonic() - start

    with ThreadPoolExecutor(max_workers=workers) as pool:
        waiting, begun = set[Future[tuple[E, T | None, float]]](), 0
        while True:
            recent = durations[-RECENT:]
            expected = sum(recent) / len(recent) if recent else 0.0
            while begun < len(todo) and len(waiting) < workers and time.monotonic() + expected <= deadline_s:
                entry = todo[begun]
                if progress is not None:
                    name = prober.describer.graph.layers[entry.layer].name
                    told = f"{name}, {entry.strategy}, {entry.num_stages} stages"
                    progress(len(found), len(found) + len(todo) - begun, told)
                waiting.add(pool.submit(probe, entry))
                begun += 1
            if not waiting:
                # in order: what is not known is scaled from the nearest that is, and of two as near from the first
                return {e.key: found[e.key] for e in ranked if e.key in found}
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for entry, cost, seconds in (future.result() for future in ready):
                durations.append(seconds)
                if cost is not None:
                    found[entry.key] = cost
