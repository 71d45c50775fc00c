"""How fast shared cores are at a moment: a program of fixed work, timed between measurements.

A CPU is shared with other processes, and a virtual one with other guests of its host: the same layer has been seen to
take half as long again for some seconds, while products of small matrices took as long as ever, for what had become
slow was the memory that all guests share. So the fixed work is like that of layers, products and passes over arrays
that do not lie in a core's own cache. What is measured at another pace than the machine's own is measured again; where
that does not help, it is told at the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.profiler.timing import time_in_a_row

ROWS, WIDTH, ROUNDS = 256, 256, 2
LOOKS = 3
"""Rows of runs of which the median says the pace of a moment."""
STEADY = 0.12
"""How far from the machine's own pace the pace may be for a measurement to count as it is."""
TRIES, WAIT_S = 4, 1.0
"""Of one measurement, and between them: slow moments have been seen to last from one to ten seconds."""
PATIENCE = 0.5
"""Seconds of waiting and measuring again for each second of measuring: a machine may stay slow."""

T = TypeVar("T")


def fixed_work(devices: Sequence[Any]) -> Callable[[], Any]:
    """A program of fixed work for each device, and one sum over all: hands a run of it over."""
    mesh = Mesh(np.asarray(devices, dtype=object), ("x",))
    x = np.full((ROWS * len(devices), WIDTH), 0.01, np.float32)
    w = np.full((WIDTH, WIDTH), 0.01, np.float32)
    shardings = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

    def work(x: Any, w: Any) -> Any:
        for _ in range(ROUNDS):
            y = jnp.tanh(x @ w)
            x = y + jax.nn.softmax(y, axis=-1)
        return x.sum(axis=0)

    with jax.set_mesh(mesh):
        run: Any = jax.jit(work, in_shardings=shardings, out_shardings=shardings[1]).lower(x, w).compile()
    arguments = jax.device_put((x, w), shardings)
    jax.block_until_ready(run(*arguments))
    return lambda: run(*arguments)


class Pace:
    """The pace of all devices at once, and measurements at a steady one.

    Args:
        devices: to run on.
        own_s: what the fixed work takes at the machine's own pace; 0 where that is yet to be found out.
    """

    def __init__(self, devices: Sequence[Any], own_s: float = 0.0) -> None:
        self._start, self._own_s, self._patience_s = fixed_work(devices), own_s, 2 * WAIT_S

    def __call__(self, looks: int = LOOKS) -> float:
        """Seconds of the fixed work now."""
        return time_in_a_row(self._start, jax.block_until_ready, min_rows=looks, max_rows=looks).median_s

    def steadily(self, measure: Callable[[], T]) -> tuple[T, float]:
        """What is measured at the machine's own pace, and 1; or nearest to it, and the pace over the machine's own.

        Waits and measures again while the pace is another, as long as patience reaches.
        """
        tries: list[tuple[float, T, float]] = []
        while True:
            started, before = time.monotonic(), self() / self._own_s
            found = measure()
            after, taken = self() / self._own_s, time.monotonic() - started
            tries.append((max(abs(before - 1.0), abs(after - 1.0)), found, (before + after) / 2))
            self._patience_s += PATIENCE * taken if len(tries) == 1 else -taken
            if tries[-1][0] <= STEADY or len(tries) >= TRIES or self._patience_s < WAIT_S + taken:
                break
            time.sleep(WAIT_S)
            self._patience_s -= WAIT_S
        off, found, ratio = min(tries, key=lambda t: t[0])
        return found, 1.0 if off <= STEADY else ratio
