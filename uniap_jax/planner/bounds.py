"""Lower bounds of one candidate: closed form, and Lagrangian with potentials that prune the exact search.

For any multipliers t, s >= 0 with sum t + sum s = c - 1, d >= 0 with sum d = 1, and m >= 0,

    sum_i (1 + t_i) p_i + sum_j (1 + s_j) o_j + sum_i d_i g_i + sum_i m_i (memory_i - capacity_i) <= step time

for every plan that fits (a maximum is at least any weighted mean). The left side is a shortest path over
(layer, stage, strategy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import MEMORY_TOLERANCE, CostTables, FloatArray, kept_on
from uniap_jax.planner.chain import Chain, has_spine
from uniap_jax.planner.multipliers import Multipliers

_Scalar = TypeVar("_Scalar", bound=np.generic)


def _narrow(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """One entry of every axis along which a broadcast view repeats itself."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def quick_bound(tables: CostTables) -> float:
    """Closed-form bound of a candidate, for any graph: balanced stages, cheapest strategies, no resharding.

    TPI >= sum_u t_u + (P - 1) o + (c - 1) max(sum_u t_u / P, max_u t_u) + sum_u g_u / P, each the least over stages
    and strategies that fit alone; the link o only where every layer feeds the next. Infinite where a layer fits nowhere
    or there are fewer layers than stages.
    """
    num_layers, num_stages, _ = tables.time_s.shape
    if num_layers < num_stages:
        return np.inf
    capacity = tables.capacity_bytes.max() * (1 + MEMORY_TOLERANCE)
    if tables.time_s.strides[1] == tables.iteration_time_s.strides[1] == 0:
        # equal on all stages, as most tables are: the leanest stage says whether a strategy fits at all
        legal = (_narrow(tables.allowed) & (_narrow(tables.memory_bytes).min(axis=1) <= capacity))[:, None, :]
    else:
        legal = _narrow(tables.allowed)[:, None, :] & (_narrow(tables.memory_bytes) <= capacity)
    time, iteration = (
        np.where(legal, _narrow(table), np.inf).min(axis=(1, 2)) for table in (tables.time_s, tables.iteration_time_s)
    )
    if len(time) == 1:
        time, iteration = np.repeat(time, num_layers), np.repeat(iteration, num_layers)
    link = 0.0
    if num_stages > 1 and has_spine(tables):
        link = float(_narrow(tables.cross_stage_s).min()) * (num_stages - 1)
    slowest = max(float(time.sum()) / num_stages, float(time.max()))
    count = tables.candidate.num_microbatches
    if not np.isfinite(time).all():
        return np.inf
    bound: float = float(time.sum()) + link + (count - 1) * slowest + float(iteration.sum()) / num_stages
    return bound


def with_unlimited_memory(tables: CostTables) -> CostTables:
    """The same tables with layers that need no memory, each where it may lie."""
    free = replace(tables, memory_bytes=np.broadcast_to(0.0, tables.memory_bytes.shape))
    return kept_on(free, tables.stage_of) if tables.stage_of else free


def first_multipliers(chain: Chain) -> Multipliers:
    """Even prices: every stage is equally likely to be the slowest, memory is free."""
    num_stages = chain.shape[1]
    return Multipliers(
        time=np.full(num_stages, (chain.num_microbatches - 1) / num_stages),
        link=np.zeros(num_stages - 1),
        iteration=np.full(num_stages, 1 / num_stages),
        memory=np.zeros(num_stages),
    )


def _node_costs(chain: Chain, prices: Multipliers) -> FloatArray:
    costs = (1 + prices.time)[None, :, None] * chain.time
    if chain.has_iteration:
        costs = costs + prices.iteration[None, :, None] * chain.iteration
    if prices.memory.any():
        costs = costs + prices.memory[None, :, None] * chain.memory
    return costs


def _forward(chain: Chain, prices: Multipliers, node: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Distances to every node (with it), and to every stage that starts at a node (without it)."""
    num_layers, num_stages, _num_strategies = chain.shape
    inside, between = (1 + prices.time)[:, None, None], (1 + prices.link)[:, None, None]
    reach, start = np.full(chain.shape, np.inf), np.full(chain.shape, np.inf)
    start[0, 0] = 0.0
    reach[0, 0] = node[0, 0]
    for u in range(1, num_layers):
        lo, hi = max(0, num_stages - (num_layers - u)), min(num_stages, u + 1)
        before = reach[u - 1]
        stay = (before[lo:hi, :, None] + inside[lo:hi] * chain.reshard[u - 1]).min(axis=1)
        first = max(lo, 1)
        if first < hi:
            moved = before[first - 1 : hi - 1, :, None] + between[first - 1 : hi - 1] * chain.cross[u - 1]
            start[u, first:hi] = moved.min(axis=1)
        reach[u, lo:hi] = np.minimum(stay, start[u, lo:hi]) + node[u, lo:hi]
    return reach, start


def _path(chain: Chain, prices: Multipliers, node: FloatArray, reach: FloatArray) -> tuple[list[int], list[int]]:
    """Stages and strategies of the shortest path, read backwards from the distances."""
    num_layers = chain.shape[0]
    i, k = chain.shape[1] - 1, int(reach[-1, -1].argmin())
    stages, strategies = [i], [k]
    for u in range(num_layers - 1, 0, -1):
        stay = reach[u - 1, i] + (1 + prices.time[i]) * chain.reshard[u - 1, :, k]
        best = int(stay.argmin())
        if i > 0:
            move = reach[u - 1, i - 1] + (1 + prices.link[i - 1]) * chain.cross[u - 1, :, k]
            if move.min() < stay[best]:
                best, i = int(move.argmin()), i - 1
        k = best
        stages.append(i)
        strategies.append(k)
    return stages[::-1], strategies[::-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    time: FloatArray
    link: FloatArray
    iteration: FloatArray
    memory: FloatArray

    def value(self, count: int) -> float:
        slowest = max(float(self.time.max()), float(self.link.max(initial=0.0)))
        return float(self.time.sum() + self.link.sum() + (count - 1) * slowest + self.iteration.max())


def _sums(chain: Chain, stages: list[int], strategies: list[int]) -> _Sums:
    num_layers, num_stages, _ = chain.shape
    i, k, u = np.array(stages), np.array(strategies), np.arange(num_layers)
    time, iteration, memory = (
        np.bincount(i, weights=table[u, i, k], minlength=num_stages).astype(np.float64)
        for table in (chain.time, chain.iteration, chain.memory)
    )
    same = i[1:] == i[:-1]
    edge = u[:-1]
    np.add.at(time, i[1:][same], chain.reshard[edge, k[:-1], k[1:]][same])
    link = np.zeros(num_stages - 1)
    np.add.at(link, i[:-1][~same], chain.cross[edge, k[:-1], k[1:]][~same])
    return _Sums(time=time, link=link, iteration=iteration, memory=memory)


def separable_bound(chain: Chain, *, upper: float) -> tuple[float, Multipliers]:
    """The Lagrangian bound without edges: one minimum per kind of layer, so any number of layers costs the same.

    Returns:
        the best bound over a geometric row of common memory prices, and the prices.
    """
    num_stages, even = chain.shape[1], first_multipliers(chain)
    _, first, number = np.unique(chain.kinds, return_index=True, return_counts=True)
    work = (1 + even.time)[None, :, None] * chain.time[first] + even.iteration[None, :, None] * chain.iteration[first]
    memory, room = chain.memory[first], float(chain.capacity.sum())
    unit = float((work.min(axis=(1, 2)) * number).sum()) / room
    best, best_price = -np.inf, 0.0
    for price in (0.0, *(unit * 2.0**e for e in np.arange(-8, 4, 0.5))):
        lower = float(((work + price * memory).min(axis=(1, 2)) * number).sum()) - price * room
        if lower > best:
            best, best_price = lower, price
        if best >= upper:
            break
    return best, replace(even, memory=np.full(num_stages, best_price))


def path_value(chain: Chain, stages: list[int], strategies: list[int]) -> float:
    """Step time of an assignment of a chain; infinite where a stage is too full."""
    sums = _sums(chain, stages, strategies)
    return sums.value(chain.num_microbatches) if (sums.memory <= chain.capacity).all() else np.inf


def _simplex(values: FloatArray, total: float) -> FloatArray:
    """Nearest point with non-negative entries that add up to `total`."""
    if total <= 0:
        return np.zeros_like(values)
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - total) / np.arange(1, len(values) + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    projected: FloatArray = np.maximum(values - shift, 0.0)
    return projected


def _moved(chain: Chain, prices: Multipliers, sums: _Sums, missing: float) -> Multipliers:
    """One Polyak step towards `missing` seconds more, each kind of price scaled to its own size."""
    num_stages, count = chain.shape[1], chain.num_microbatches
    slack = sums.memory - chain.capacity
    slack = np.where((slack < 0) & (prices.memory == 0), 0.0, slack)
    typical = max(float(sums.time.mean()), 1e-30)
    times = np.concatenate([sums.time, sums.link])
    times -= times.mean()
    spread = sums.iteration - sums.iteration.mean()
    # prices per unit of each constraint: (c - 1)/P for times, 1/P for iteration, seconds per byte for memory
    weight_time, weight_memory = max(count - 1, 1) / num_stages, count * typical / float(chain.capacity.mean())
    steps = (times * weight_time, spread / num_stages, slack * weight_memory)
    norm = sum(float((s * s).sum()) for s in steps)
    if norm <= 0:
        return prices
    length = missing / norm
    joined = np.concatenate([prices.time, prices.link]) + length * weight_time**2 * times
    joined = _simplex(joined, float(count - 1))
    return Multipliers(
        time=joined[:num_stages],
        link=joined[num_stages:],
        iteration=_simplex(prices.iteration + length * spread / num_stages**2, 1.0),
        memory=np.maximum(prices.memory + length * weight_memory**2 * slack, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """What the Lagrangian ascent found.

    Attributes:
        lower: best bound, seconds.
        prices: of the best bound.
        plan: cheapest path seen that fits, as (stages, strategies), or None.
        value: its step time; infinite without one.
    """

    lower: float
    prices: Multipliers
    plan: tuple[list[int], list[int]] | None
    value: float


@dataclass(slots=True, eq=False)
class _Ascent:
    """State of the ascent: the best bound with its prices and the cheapest plan that fits."""

    chain: Chain
    prices: Multipliers
    lower: float = -np.inf
    plan: tuple[list[int], list[int]] | None = None
    value: float = np.inf

    def visit(self, prices: Multipliers) -> tuple[float, _Sums | None]:
        """Bound and path sums at some prices; infinite and None where no path exists."""
        node = _node_costs(self.chain, prices)
        reach, _ = _forward(self.chain, prices, node)
        lower = float(reach[-1, -1].min()) - float(prices.memory @ self.chain.capacity)
        if not np.isfinite(lower):
            self.lower = np.inf
            return lower, None
        path = _path(self.chain, prices, node, reach)
        sums = _sums(self.chain, *path)
        value = sums.value(self.chain.num_microbatches)
        if (sums.memory <= self.chain.capacity).all() and value < self.value:
            self.plan, self.value = path, value
        if lower > self.lower:
            self.lower, self.prices = lower, prices
        return lower, sums

    def bound(self) -> Bound:
        return Bound(lower=self.lower, prices=self.prices, plan=self.plan, value=self.value)


def _one_memory_price(ascent: _Ascent, *, upper: float) -> None:
    """Best common memory price of all stages: the bound is concave in it, so two tangents bracket the top."""
    chain, base = ascent.chain, ascent.prices
    scale = chain.num_microbatches / float(chain.capacity.mean())

    def at(price: float) -> tuple[float, float]:
        prices = replace(base, memory=np.full(chain.shape[1], price))
        lower, sums = ascent.visit(prices)
        return lower, 0.0 if sums is None else float((sums.memory - chain.capacity).sum())

    low, (low_value, slope) = 0.0, at(0.0)
    if slope <= 0 or ascent.lower >= upper:
        return
    first = ascent.visit(base)[1]
    price = (scale * float(first.time.mean()) if first else scale) / 8
    high, high_value, fall = price, *at(price)
    while fall > 0 and ascent.lower < upper and np.isfinite(high_value) and high < price * 4**12:
        low, low_value, slope = high, high_value, fall
        high *= 4
        high_value, fall = at(high)
    for _ in range(8):
        if ascent.lower >= upper or fall >= 0 or slope <= 0:
            return
        # where the tangents at both ends meet: no price does better than their height there
        middle = (high_value - low_value + slope * low - fall * high) / (slope - fall)
        top = low_value + slope * (middle - low)
        if not low < middle < high or top <= ascent.lower * (1 + 1e-4):
            return
        value, tangent = at(middle)
        if tangent > 0:
            low, low_value, slope = middle, value, tangent
        else:
            high, high_value, fall = middle, value, tangent


def lagrangian_bound(
    chain: Chain,
    *,
    upper: float,
    iterations: int,
    expired: Callable[[], bool] = lambda: False,
    start: Multipliers | None = None,
) -> Bound:
    """Raises the bound until it passes `upper`, stops moving, or the steps are used up.

    First one memory price for all stages, then subgradient steps on all prices.

    Args:
        chain: candidate.
        upper: seconds; a bound at or above it ends the ascent.
        iterations: most subgradient steps.
        expired: asked between steps.
        start: prices that were good for much the same candidate; they replace the first part.
    """
    ascent = _Ascent(chain, start or first_multipliers(chain))
    if start is None:
        _one_memory_price(ascent, upper=upper)
    prices, scale, since = ascent.prices, 1.0, 0
    for _ in range(iterations):
        before = ascent.lower
        lower, sums = ascent.visit(prices)
        target = min(upper, ascent.value)
        if sums is None or ascent.lower >= target * (1 - 1e-9) or since >= 12 or expired():
            break
        since = 0 if lower > before * (1 + 1e-5) + 1e-15 else since + 1
        if since and since % 4 == 0:
            scale /= 2
            prices = ascent.prices
            continue
        goal = min(target, ascent.lower * 1.02)
        prices = _moved(chain, prices, sums, scale * max(goal - lower, 1e-4 * abs(ascent.lower)))
    return ascent.bound()
