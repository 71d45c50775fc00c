"""How fast shared cores are at a moment: a program of fixed work, timed between measurements.

A CPU is shared with other processes, and a virtual one with other guests of its host: the same layer has been seen to
take half as long again a minute later. What is measured is therefore told at one pace, that of the machine's own
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.profiler.timing import time_in_a_row

ROWS, WIDTH, PRODUCTS = 32, 256, 8
LOOKS = 3
"""Rows of runs of which the median says the pace of a moment."""


class Pace:
    """The program of fixed work on all devices: matrix products and element-wise work on each, then one sum over all.

    Args:
        devices: to run on.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        mesh = Mesh(np.asarray(devices, dtype=object), ("x",))
        x = np.full((ROWS * len(devices), WIDTH), 0.01, np.float32)
        w = np.full((WIDTH, WIDTH), 0.01, np.float32)
        shardings = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

        def work(x: Any, w: Any) -> Any:
            for _ in range(PRODUCTS):
                x = jnp.tanh(x @ w)
            return x.sum(axis=0)

        with jax.set_mesh(mesh):
            self._run: Any = jax.jit(work, in_shardings=shardings, out_shardings=shardings[1]).lower(x, w).compile()
        self._arguments = jax.device_put((x, w), shardings)
        self()

    def __call__(self, looks: int = LOOKS) -> float:
        """Seconds of the program now."""
        return time_in_a_row(self._start, jax.block_until_ready, min_rows=looks, max_rows=looks).median_s

    def _start(self) -> Any:
        return self._run(*self._arguments)
