"""Works through entries, most valuable first, until the budget is spent."""

from __future__ import annotations

import time
from collections import deque
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
SHARES = (0.25, 1.0)
"""Of what is left of the time, what one entry may take: first while others are left to do, then at all."""


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
        """Seconds that finding out would take, right up to a factor that is the same for all entries."""
        ...


def run_entries(
    ranked: Sequence[E], prober: Probing[E, T], *, deadline_s: float, progress: Progress | None, workers: int = 1
) -> dict[Any, T]:
    """What is found about entries in order until the deadline; what the cache knows costs nothing and always counts.

    Args:
        ranked: most valuable first.
        prober: measures one entry.
        deadline_s: of `time.monotonic`; an entry that would likely end after it is not begun, and one that would take
            much of what is left waits until the others are done.
        progress: called with what is done, how much there is, and what comes next.
        workers: entries under way at once; more than one only where nothing is timed.
    """
    found: dict[Any, T] = {}
    for entry in ranked:
        known = prober.known(entry)
        if known is not None:
            found[entry.key] = known
    todo = [e for e in ranked if e.key not in found]
    ended = deque[tuple[float, float]](maxlen=RECENT)
    waiting = set[Future[tuple[E, T | None, float]]]()

    def probe(entry: E) -> tuple[E, T | None, float]:
        start = time.monotonic()
        return entry, prober.measure(entry), time.monotonic() - start

    def collect(room: int) -> None:
        nonlocal waiting
        while len(waiting) > room:
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for entry, cost, seconds in (future.result() for future in ready):
                ended.append((seconds, prober.expected_s(entry)))
                if cost is not None:
                    found[entry.key] = cost

    def likely_s(entry: E) -> float:
        truth = sum(t for t, _ in ended) / sum(e for _, e in ended) if ended else 1.0
        return truth * prober.expected_s(entry)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        for share in SHARES:
            put_off: list[E] = []
            for i, entry in enumerate(todo):
                collect(workers - 1)
                left = deadline_s - time.monotonic()
                if left <= 0:
                    break
                if likely_s(entry) > share * left:
                    put_off.append(entry)
                    continue
                if progress is not None:
                    name = prober.describer.graph.layers[entry.layer].name
                    told = f"{name}, {entry.strategy}, {entry.num_stages} stages"
                    progress(len(found), len(found) + len(todo) - i + len(put_off), told)
                waiting.add(pool.submit(probe, entry))
            collect(0)
            todo = put_off
    # in order: what is not known is scaled from the nearest that is, and of two as near from the first
    return {e.key: found[e.key] for e in ranked if e.key in found}
