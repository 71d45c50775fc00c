"""What others do, over the same tables: each baseline answers with an assignment that the referee prices.

| name | idea |
| --- | --- |
| data_parallel, fsdp, tensor | one stage, one strategy for every layer (the nearest legal one where it is not) |
| pipeline_only | one device per stage, stages chosen exactly |
| intra_only | one stage, strategies chosen exactly |
| inter_then_intra | two levels as in Alpa (Zheng et al., OSDI 2022) |
| layerwise_dp | balanced stages, then a dynamic program over layers with memory in steps, as in Galvatron (VLDB 2023) |
| mcmc | random moves, as in FlexFlow (Jia et al., MLSys 2019) |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from uniap_jax.core.costs import Assignment, CostTables, FloatArray, evaluate
from uniap_jax.core.strategy import KEEPS, Strategy
from uniap_jax.planner.candidates import SAME_FOR_ALL, nearest
from uniap_jax.planner.chain import Chain, chain_of

MEMORY_STEPS = 256
"""Buckets of a stage's memory in `layerwise_dp`."""

MEMORY_PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Prices of a whole capacity in mean stage times that `inter_then_intra` tries where stages overflow."""


def uniform(tables: CostTables, make: Callable[[int], Strategy]) -> Assignment | None:
    """One stage, one strategy; of the three ways to keep residuals the fastest that fits.

    Args:
        tables: of a candidate with one stage and named strategies.
        make: the strategy for a number of devices.
    """
    if tables.candidate.num_stages != 1 or not tables.strategies:
        return None
    wanted = make(tables.strategies[0].num_devices)
    found = []
    for keep in KEEPS:
        variant = Strategy(data=wanted.data, fsdp=wanted.fsdp, tensor=wanted.tensor, zero=wanted.zero, keep=keep)
        if variant not in tables.strategies:
            continue
        picks = [nearest(tables, u, variant) for u in range(tables.num_layers)]
        if any(k is None for k in picks):
            return None
        found.append(Assignment(stage=(0,) * tables.num_layers, strategy=tuple(k for k in picks if k is not None)))
    return _cheapest(tables, found)


def _cheapest(tables: CostTables, found: list[Assignment]) -> Assignment | None:
    priced = [(evaluate(tables, a), a) for a in found]
    fitting = [(e.step_time_s, number) for number, (e, _) in enumerate(priced) if e.feasible]
    return priced[min(fitting)[1]][1] if fitting else None


def data_parallel(tables: CostTables) -> Assignment | None:
    """Every device holds the model and a share of the batch."""
    return uniform(tables, SAME_FOR_ALL["data_parallel"])


def fsdp(tables: CostTables) -> Assignment | None:
    """State of the parameters split over all devices (ZeRO 3)."""
    return uniform(tables, SAME_FOR_ALL["fsdp"])


def tensor(tables: CostTables) -> Assignment | None:
    """Every layer split over all devices."""
    return uniform(tables, SAME_FOR_ALL["tensor"])


def _fastest_inner(chain: Chain, i: int, price: float) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
    """Per interval [a, b): time and memory of the fastest strategies of stage i, other levels unseen.

    Args:
        chain: candidate.
        i: stage.
        price: seconds per byte.

    Returns:
        time and memory [layers, layers + 1], infinite where b <= a, and per layer predecessors [starts, strategies].
    """
    num_layers, _, k = chain.shape
    priced, time, memory = (np.full((num_layers, k), np.inf) for _ in range(3))
    best_time, best_memory = (np.full((num_layers, num_layers + 1), np.inf) for _ in range(2))
    parents: list[FloatArray] = []
    last: list[FloatArray] = []
    for u in range(num_layers):
        cost = chain.time[u, i] + price * chain.memory[u, i]
        if u:
            options = priced[:u, :, None] + chain.reshard[u - 1]
            parent = options.argmin(axis=1)
            rows, columns = np.arange(u)[:, None], np.arange(k)[None, :]
            priced[:u] = options.min(axis=1) + cost
            time[:u] = time[rows, parent] + chain.reshard[u - 1][parent, columns] + chain.time[u, i]
            memory[:u] = memory[rows, parent] + chain.memory[u, i]
            parents.append(parent)
        else:
            parents.append(np.zeros((0, k), dtype=np.int64))
        priced[u], time[u], memory[u] = cost, chain.time[u, i], chain.memory[u, i]
        pick = priced[: u + 1].argmin(axis=1)
        best_time[: u + 1, u + 1] = time[np.arange(u + 1), pick]
        best_memory[: u + 1, u + 1] = memory[np.arange(u + 1), pick]
        last.append(pick)
    return best_time, best_memory, [*parents, *last]


def _inner_strategies(trace: list[FloatArray], a: int, b: int) -> list[int]:
    num_layers = len(trace) // 2
    k = int(trace[num_layers + b - 1][a])
    found = [k]
    for u in range(b - 1, a, -1):
        k = int(trace[u][a, k])
        found.append(k)
    return found[::-1]


def _cut(interval: list[FloatArray], count: int) -> list[int] | None:
    """Cuts that minimise sum p + (c - 1) max p over intervals with given times, links unseen; None where none fit."""
    num_layers = interval[0].shape[0]
    best, upper, limit = None, np.inf, np.inf
    while True:
        reach, froms = np.full(num_layers + 1, np.inf), []
        reach[0] = 0.0
        for times in interval:
            options = reach[:-1, None] + np.where(times <= limit, times, np.inf)
            froms.append(options.argmin(axis=0))
            reach = options.min(axis=0)
        total = float(reach[-1])
        if not np.isfinite(total):
            return best
        cuts = [num_layers]
        for back in reversed(froms):
            cuts.append(int(back[cuts[-1]]))
        cuts = cuts[::-1]
        slowest = max(float(t[a, b]) for t, a, b in zip(interval, cuts, cuts[1:], strict=False))
        if total + (count - 1) * slowest < upper:
            best, upper = cuts, total + (count - 1) * slowest
        if count == 1:
            return best
        limit = min(np.nextafter(slowest, -np.inf), (upper - total) / (count - 1))


def inter_then_intra(tables: CostTables) -> Assignment | None:
    """Two levels: the fastest strategies inside every interval, then the best cuts.

    The inner level sees neither what leaves the interval nor the memory of the stage; intervals that turn out not to
    fit are tried again with memory at a price, and dropped after the last price.
    """
    if tables.candidate.num_stages == 1:
        return intra_level(tables)
    chain = chain_of(tables)
    num_layers, num_stages, _ = chain.shape
    mean = float(np.where(np.isfinite(chain.time), chain.time, 0).mean()) * num_layers / num_stages
    intervals, choices = [], []
    for i in range(num_stages):
        times = np.full((num_layers, num_layers + 1), np.inf)
        chosen = np.full((num_layers, num_layers + 1), -1)
        traces = []
        for number, share in enumerate(MEMORY_PRICES):
            time, memory, trace = _fastest_inner(chain, i, float(share * mean / chain.capacity[i]))
            better = (memory <= chain.capacity[i]) & (chosen < 0)
            times[better], chosen[better] = time[better], number
            traces.append(trace)
            if not (np.isfinite(time) & (chosen < 0)).any():
                break
        intervals.append(times)
        choices.append((chosen, traces))
    cuts = _cut(intervals, chain.num_microbatches)
    if cuts is None:
        return None
    stage, strategy = [], []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        chosen, traces = choices[i]
        inner = _inner_strategies(traces[int(chosen[a, b])], a, b)
        stage += [i] * len(inner)
        strategy += inner
    return Assignment(stage=tuple(stage), strategy=tuple(strategy))


def intra_level(tables: CostTables) -> Assignment | None:
    """The inner level alone, on one stage."""
    chain = chain_of(tables)
    mean = float(np.where(np.isfinite(chain.time), chain.time, 0).mean()) * chain.shape[0]
    for share in MEMORY_PRICES:
        _, memory, trace = _fastest_inner(chain, 0, float(share * mean / chain.capacity[0]))
        if memory[0, -1] <= chain.capacity[0]:
            return Assignment(stage=(0,) * chain.shape[0], strategy=tuple(_inner_strategies(trace, 0, chain.shape[0])))
    return None


def balanced_cuts(weights: FloatArray, num_stages: int) -> list[int] | None:
    """Cuts into non-empty stages that minimise the largest sum of weights [layers, stages]."""
    num_layers = len(weights)
    if num_layers < num_stages:
        return None
    sums = np.concatenate([np.zeros((1, num_stages)), np.cumsum(weights, axis=0)])
    ahead = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_), k=1)
    best, froms = np.full(num_layers + 1, np.inf), []
    best[0] = 0.0
    for i in range(num_stages):
        part = np.where(ahead, np.maximum(best[:, None], sums[None, :, i] - sums[:, None, i]), np.inf)
        froms.append(part.argmin(axis=0))
        best = part.min(axis=0)
    cuts = [num_layers]
    for back in reversed(froms):
        cuts.append(int(back[cuts[-1]]))
    return cuts[::-1]


def layerwise_dp(tables: CostTables) -> Assignment | None:
    """Stages balanced by mean memory, then per stage a dynamic program over layers with memory in whole steps."""
    chain = chain_of(tables)
    _num_layers, num_stages, _ = chain.shape
    legal = tables.allowed[:, None, :]
    weights = (np.where(legal, tables.memory_bytes, 0.0).sum(axis=2) / legal.sum(axis=2)) / chain.capacity
    cuts = balanced_cuts(weights, num_stages)
    if cuts is None or np.isnan(weights).any():
        return None
    return fill_stages(chain, cuts)


def fill_stages(chain: Chain, cuts: list[int], *, steps: int = MEMORY_STEPS) -> Assignment | None:
    """Strategies for given stages by a dynamic program over layers; None where a stage does not fit."""
    stage: list[int] = []
    strategy: list[int] = []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        inner = _knapsack(chain, i, a, b, steps) or _leanest(chain, i, a, b)
        if inner is None:
            return None
        stage += [i] * len(inner)
        strategy += inner
    return Assignment(stage=tuple(stage), strategy=tuple(strategy))


def _leanest(chain: Chain, i: int, a: int, b: int) -> list[int] | None:
    """The strategies of least memory, where rounding to whole steps found none."""
    memory = np.where(np.isfinite(chain.time[a:b, i]), chain.memory[a:b, i], np.inf)
    return memory.argmin(axis=1).tolist() if memory.min(axis=1).sum() <= chain.capacity[i] else None


def _knapsack(chain: Chain, i: int, a: int, b: int, steps: int) -> list[int] | None:
    """Fastest strategies of layers [a, b) on stage i with memory rounded up to whole steps of the capacity."""
    k = chain.shape[2]
    step = chain.capacity[i] / steps
    need = np.ceil(chain.memory[a:b, i] / step * (1 - 1e-9)).astype(np.int64)
    room = np.arange(steps + 1)
    table = np.where(room[:, None] >= need[0], chain.time[a, i], np.inf)
    froms = []
    for u in range(a + 1, b):
        # strategies that cost the next layer the same differ in nothing but their own sums
        classes = chain.out_class[u - 1]
        order = np.argsort(classes, kind="stable")
        some, firsts = np.unique(classes[order], return_index=True)
        least = np.minimum.reduceat(table[:, order], firsts, axis=1)
        options = least[:, :, None] + chain.reshard[u - 1][some]
        entered = options.argmin(axis=1)
        value = np.take_along_axis(options, entered[:, None, :], axis=1)[:, 0]
        froms.append((table, classes, some[entered]))
        left = room[:, None] - need[u - a]
        table = np.where(left >= 0, value[np.maximum(left, 0), np.arange(k)] + chain.time[u, i], np.inf)
    last = int(table[-1].argmin())
    if not np.isfinite(table[-1, last]):
        return None
    found, left_over = [last], steps
    for u in range(b - 1, a, -1):
        left_over -= int(need[u - a, found[-1]])
        before, classes, entered = froms[u - a - 1]
        members = np.flatnonzero(classes == entered[left_over, found[-1]])
        found.append(int(members[before[left_over, members].argmin()]))
    return found[::-1]
