"""Every assignment of a small candidate, priced in bulk: the oracle of the other engines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Assignment, CostTables, FloatArray
from uniap_jax.core.errors import OptionError
from uniap_jax.planner.chain import IntArray

MAX_GRID = 3_000_000
"""Most strategy combinations; larger candidates are refused."""


def stagings(tables: CostTables) -> Iterator[tuple[int, ...]]:
    """Every way to put layers on stages: no stage empty, no edge backwards."""
    num_layers, num_stages, _ = tables.time_s.shape
    writers: list[list[int]] = [[] for _ in range(num_layers)]
    for u, v in tables.edges:
        writers[v].append(u)

    def place(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        u = len(chosen)
        if u == num_layers:
            if len(set(chosen)) == num_stages:
                yield chosen
            return
        for i in range(max((chosen[w] for w in writers[u]), default=0), num_stages):
            yield from place((*chosen, i))

    return place(())


def _grid(tables: CostTables) -> IntArray:
    legal = [np.flatnonzero(row) for row in tables.allowed]
    size = int(np.prod([len(x) for x in legal], dtype=np.float64))
    if size > MAX_GRID:
        raise OptionError(
            f"brute force over {tables.num_layers} layers would look at {size} strategy combinations per staging, "
            f"the limit is {MAX_GRID}; use the engine 'interval', which proves the same optimum",
            combinations=size,
            limit=MAX_GRID,
        )
    if size == 0:
        return np.zeros((0, tables.num_layers), dtype=np.int64)
    return np.array(list(itertools.product(*legal)), dtype=np.int64)


def _prices(tables: CostTables, stage: tuple[int, ...], grid: IntArray) -> FloatArray:
    """Step time of every strategy combination under one staging; infinite where memory overflows."""
    num_stages, count = tables.candidate.num_stages, tables.candidate.num_microbatches
    time, iteration, memory = (np.zeros((num_stages, len(grid))) for _ in range(3))
    link = np.zeros((max(num_stages - 1, 1), len(grid)))
    for u, i in enumerate(stage):
        time[i] += tables.time_s[u, i, grid[:, u]]
        iteration[i] += tables.iteration_time_s[u, i, grid[:, u]]
        memory[i] += tables.memory_bytes[u, i, grid[:, u]]
    crossings: dict[tuple[int, int], FloatArray] = {}
    for e, (u, v) in enumerate(tables.edges):
        i, j = stage[u], stage[v]
        if i == j:
            time[i] += tables.reshard_s[e, grid[:, u], grid[:, v]]
        tensor = e if tables.edge_tensor is None else tables.edge_tensor[e]
        for b in range(i, j):
            price = tables.cross_stage_s[e, grid[:, u], grid[:, v]] if b == j - 1 else tables.relay_s[e, grid[:, u]]
            crossings[tensor, b] = np.maximum(crossings.get((tensor, b), 0.0), price)
    for (_, b), price in crossings.items():
        link[b] += price
    slowest = np.maximum(time.max(axis=0), link.max(axis=0))
    total: FloatArray = time.sum(axis=0) + link.sum(axis=0) + (count - 1) * slowest + iteration.max(axis=0)
    full = (memory > tables.capacity_bytes[:, None] * (1 + MEMORY_TOLERANCE)).any(axis=0)
    return np.where(full, np.inf, total)


def brute_force(tables: CostTables) -> Assignment | None:
    """The optimum by looking at everything, or None where nothing fits.

    Raises:
        OptionError: more than MAX_GRID strategy combinations.
    """
    grid, best, found = _grid(tables), np.inf, None
    if not len(grid):
        return None
    for stage in stagings(tables):
        prices = _prices(tables, stage, grid)
        k = int(prices.argmin())
        if prices[k] < best:
            best, found = float(prices[k]), Assignment(stage=stage, strategy=tuple(grid[k].tolist()))
    return found
