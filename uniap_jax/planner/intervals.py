"""Bounds that know stages are whole intervals.

For stage i and layers [a, b), at memory prices m >= 0, a shortest path over strategies bounds from below

    s_iab <= p + d_i g        t_iab <= p        (each with m (memory - capacity) added, the best price of several)

so that min over cuts of sum s + sum o + (c - 1) max t bounds the step time. Unlike the Lagrangian bound over all layers
at once it sees that 98 layers on 8 stages put 13 on one of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import BoolArray, FloatArray
from uniap_jax.planner.chain import Chain, IntArray
from uniap_jax.planner.multipliers import Multipliers

CHUNK = 4_000_000
"""Numbers per temporary array."""

MANY = 2_000_000
"""Places of a candidate (layers × stages × strategies) beyond which fewer prices are tried."""

FEW_KINDS = 8
"""Kinds of layers up to which the prices of the commonest one are worth trying."""

PRICES = (1.0, 0.0, 0.7, 1.4, 0.4, 2.2)
"""Shares of the Lagrangian memory price that are tried for every interval."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervals:
    """Bounds by stage, first layer and number of layers less one.

    Attributes:
        total: [stages, layers, widths] s, infinite where impossible.
        time: [stages, layers, widths] t.
        link: [layers + 1] least cost of a boundary before the layer; zero at both ends.
        count: micro-batches.
    """

    total: FloatArray
    time: FloatArray
    link: FloatArray
    count: int

    def ahead(self, limit: float) -> FloatArray:
        """[stages + 1, layers + 1] least sum of s and o up to a stage's start at a layer, with every t <= limit."""
        num_stages, num_layers, width = self.total.shape
        reach = np.full((num_stages + 1, num_layers + 1), np.inf)
        reach[0, 0] = 0.0
        for i in range(num_stages):
            costs = np.where(self.time[i] <= limit, self.total[i], np.inf)
            for d in range(width):
                end = reach[i + 1, d + 1 :]
                np.minimum(end, reach[i, : num_layers - d] + costs[: num_layers - d, d], out=end)
            reach[i + 1] += self.link
        return reach

    def behind(self, limit: float) -> FloatArray:
        """[stages + 1, layers + 1] least sum of s and o from a stage's start at a layer to the end."""
        num_stages, num_layers, width = self.total.shape
        rest = np.full((num_stages + 1, num_layers + 1), np.inf)
        rest[num_stages, num_layers] = 0.0
        for i in range(num_stages - 1, -1, -1):
            costs = np.where(self.time[i] <= limit, self.total[i], np.inf)
            after = rest[i + 1] + self.link
            for d in range(width):
                begin = rest[i, : num_layers - d]
                np.minimum(begin, costs[: num_layers - d, d] + after[d + 1 :], out=begin)
        return rest

    def bottleneck(self) -> float:
        """Least possible slowest stage or link."""
        num_stages, num_layers, width = self.time.shape
        reach = np.full(num_layers + 1, np.inf)
        reach[0] = 0.0
        for i in range(num_stages):
            then = np.full(num_layers + 1, np.inf)
            for d in range(width):
                end = then[d + 1 :]
                np.minimum(end, np.maximum(reach[: num_layers - d], self.time[i, : num_layers - d, d]), out=end)
            reach = np.maximum(then, self.link)
        return float(reach[-1])

    def bound(self, upper: float) -> tuple[float, float, float]:
        """Bound of the step time (at most `upper`), the least sum, and the least slowest time.

        The minimum over cuts of sum + (c - 1) max is found by tightening a limit on t: a better cut must have its max
        below (bound so far - sum under the limit) / (c - 1).
        """
        slowest = self.bottleneck()
        if not np.isfinite(slowest):
            return np.inf, np.inf, np.inf
        weight, limit = self.count - 1, np.inf
        least = float(self.ahead(np.inf)[-1, -1])
        best, total = upper, least
        while np.isfinite(total) and total + weight * slowest < best:
            actual = self._slowest_of(limit)
            best = min(best, total + weight * actual)
            if weight == 0:
                break
            limit = min(np.nextafter(actual, -np.inf), (best - total) / weight)
            total = float(self.ahead(limit)[-1, -1])
        return best, least, slowest

    def _slowest_of(self, limit: float) -> float:
        """The largest t on one path of least sum under a limit."""
        return self._trace(limit)[0]

    def cuts(self, upper: float) -> list[int]:
        """Where the stages begin and end in the bound's own best plan; empty without one."""
        best, least, slowest = self.bound(upper)
        if not np.isfinite(least):
            return []
        weight = max(self.count - 1, 1)
        limit = max((best - least) / weight, slowest) if np.isfinite(best) else slowest
        return self._trace(limit * (1 + 1e-9))[1]

    def _trace(self, limit: float) -> tuple[float, list[int]]:
        num_stages, num_layers, width = self.total.shape
        reach, b, slowest, cuts = self.ahead(limit), num_layers, 0.0, [num_layers]
        for i in range(num_stages - 1, -1, -1):
            starts = np.arange(max(0, b - width), b)
            costs = self.total[i, starts, b - 1 - starts]
            times = self.time[i, starts, b - 1 - starts]
            value = np.where(times <= limit, reach[i, starts] + costs, np.inf)
            pick = int(value.argmin())
            slowest = max(slowest, float(times[pick]), float(self.link[b]))
            b = int(starts[pick])
            cuts.append(b)
        return slowest, cuts[::-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Contents:
    """Intervals of one length gathered by what they hold: the same kinds of layers in the same order.

    Attributes:
        first: [contents] a start of each.
        same: [starts] content of the interval that begins at each layer.
        shorter: [contents] the content one layer shorter.
    """

    first: IntArray
    same: IntArray
    shorter: IntArray


def _contents(kinds: IntArray, width: int) -> list[_Contents]:
    """By length less one, up to `width`."""
    num_layers = len(kinds)
    found: list[_Contents] = []
    key, shorter = kinds, kinds
    for d in range(width):
        if d:
            shorter = found[-1].same
            key = shorter[: num_layers - d] * (num_layers + 1) + kinds[d:]
        _, first, same = np.unique(key, return_index=True, return_inverse=True)
        found.append(_Contents(first=first, same=same, shorter=shorter[first]))
    return found


def _paths(
    chain: Chain, groups: Groups, contents: list[_Contents], prices: FloatArray, iteration: FloatArray
) -> FloatArray:
    """[stages, layers, widths] least time + d g + m (memory - capacity) of every interval, the best of several prices.

    Args:
        chain: candidate.
        groups: of the chain.
        contents: of its intervals; each is computed once.
        prices: [prices, stages] m, seconds per byte.
        iteration: [stages] d.
    """
    num_layers, num_stages, num_strategies = chain.shape
    least = np.full((num_stages, num_layers, len(contents)), -np.inf)
    most = max(len(c.first) for c in contents)
    some = max(1, CHUNK // (most * num_strategies * groups.members.shape[1] * len(prices) + 1))
    for i in range(0, num_stages, some):
        part = slice(i, min(i + some, num_stages))
        price, size = prices[:, part], part.stop - i
        spent = price * chain.capacity[part]

        def node(layers: IntArray, part: slice = part, price: FloatArray = price) -> FloatArray:
            """[prices × stages, contents, strategies] cost of one layer of each."""
            time, memory = (table[layers, part].transpose(1, 0, 2) for table in (chain.time, chain.memory))
            if iteration.any():
                time = time + chain.iteration[layers, part].transpose(1, 0, 2) * iteration[part, None, None]
            cost: FloatArray = time[None] + price[:, :, None, None] * memory[None]
            return cost.reshape(-1, len(layers), num_strategies)

        cost = np.zeros(0)
        for d, content in enumerate(contents):
            before = groups.moved(cost[:, content.shorter], content.first + d - 1) if d else 0.0
            cost = before + node(content.first + d)
            value = cost.min(axis=2).reshape(len(prices), size, -1) - spent[:, :, None]
            least[part, : num_layers - d, d] = value.max(axis=0)[:, content.same]
    return least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Resharding between layers with strategies gathered into classes of equal rows.

    Attributes:
        members: [layers - 1, classes, strategies] zero where the strategy is of the class, infinite elsewhere.
        rows: [layers - 1, classes, strategies] cost from a class to the next layer's strategies.
    """

    members: FloatArray
    rows: FloatArray

    @staticmethod
    def of(chain: Chain) -> Groups:
        """The classes of a chain's strategies as seen from the next layer."""
        num_layers, _, k = chain.shape
        classes = [np.unique(chain.out_class[u]) for u in range(num_layers - 1)]
        most = max((len(c) for c in classes), default=1)
        members = np.full((max(num_layers - 1, 0), most, k), np.inf)
        rows = np.full((max(num_layers - 1, 0), most, k), np.inf)
        for u, found in enumerate(classes):
            members[u, : len(found)] = np.where(chain.out_class[u][None, :] == found[:, None], 0.0, np.inf)
            rows[u, : len(found)] = chain.reshard[u][found]
        return Groups(members=members, rows=rows)

    def moved(self, cost: FloatArray, layers: IntArray) -> FloatArray:
        """Least cost [stages, intervals, strategies] of having moved on from the last layer of every interval."""
        by_class = (cost[:, :, None, :] + self.members[None, layers]).min(axis=3)
        moved: FloatArray = (by_class[:, :, :, None] + self.rows[None, layers]).min(axis=2)
        return moved


def widest(chain: Chain, limit: float) -> int:
    """Most layers that any stage can hold in `limit` seconds, by the fastest strategies alone."""
    num_layers, num_stages, _ = chain.shape
    most = num_layers - num_stages + 1
    if not np.isfinite(limit):
        return most
    sums = np.concatenate([[0.0], np.cumsum(chain.time.min(axis=(1, 2)))])
    ends = np.searchsorted(sums, sums[:-1] + limit * (1 + 1e-9), side="right") - 1
    return int(np.clip((ends - np.arange(num_layers)).max(), 1, most))


def shares(chain: Chain, prices: Multipliers) -> tuple[float, ...]:
    """Shares of the memory price to try; fewer where every one of them takes long."""
    if not prices.memory.any():
        return (0.0,)
    return PRICES if chain.time.size <= MANY else PRICES[:2]


def _memory_prices(chain: Chain, prices: Multipliers) -> FloatArray:
    """[prices, stages] memory prices to try, seconds per byte.

    Also those at which the commonest kind of layer (the median, where kinds are many) moves from one strategy to a
    leaner one: for equal layers the best price of every interval is among them.
    """
    common = np.array(shares(chain, prices))[:, None] * prices.memory[None, :]
    kinds, first, number = np.unique(chain.kinds, return_index=True, return_counts=True)
    if len(kinds) <= FEW_KINDS:
        layer = int(first[number.argmax()])
        time, memory = chain.time[layer], chain.memory[layer]
    elif chain.time.size <= MANY:
        time, memory = np.median(chain.time, axis=0), np.median(chain.memory, axis=0)
    else:
        return common
    slopes = [_slopes(time[i], memory[i]) for i in range(chain.shape[1])]
    steps = np.zeros((max(map(len, slopes)), chain.shape[1]))
    for i, found in enumerate(slopes):
        steps[: len(found), i] = found
    return np.concatenate([common, np.zeros((1, chain.shape[1])), steps])


def _slopes(time: FloatArray, memory: FloatArray) -> list[float]:
    """Prices at which the least of time + price × memory changes hands: slopes of the lower convex hull."""
    hull: list[tuple[float, float]] = []
    for k in np.lexsort((time, memory)):
        point = (float(memory[k]), float(time[k]))
        if not np.isfinite(point[1]) or (hull and point[1] >= hull[-1][1]):
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(t - u) / (n - m) for (m, t), (n, u) in itertools.pairwise(hull) if n > m]


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _overfull(chain: Chain, width: int) -> BoolArray:
    """[stages, layers, widths] intervals too large for their stage even with every layer at its leanest."""
    num_layers, num_stages, _ = chain.shape
    lean = np.where(np.isfinite(chain.time), chain.memory, np.inf).min(axis=2)
    lean = np.minimum(lean, 4 * chain.capacity)
    sums = np.concatenate([np.zeros((1, num_stages)), np.cumsum(lean, axis=0)]).T
    overfull = np.zeros((num_stages, num_layers, width), dtype=np.bool_)
    for d in range(width):
        held = sums[:, d + 1 :] - sums[:, : num_layers - d]
        overfull[:, : num_layers - d, d] = held > chain.capacity[:, None] * (1 + 1e-9)
    return overfull


def build_intervals(chain: Chain, prices: Multipliers, *, width: int) -> Intervals:
    """Bounds of all intervals of at most `width` layers.

    Args:
        chain: candidate.
        prices: Lagrangian prices; their memory prices, times PRICES, are tried, and their iteration prices d are used.
        width: most layers of a stage.
    """
    num_layers, num_stages, _ = chain.shape
    groups, contents = Groups.of(chain), _contents(chain.kinds, width)
    memory, nothing = _memory_prices(chain, prices), np.zeros(num_stages)
    time = _paths(chain, groups, contents, memory, nothing)
    total = time
    if chain.has_iteration:
        total = _paths(chain, groups, contents, memory, prices.iteration)
    overfull = _overfull(chain, width)
    both = (time,) if total is time else (time, total)
    for bound in both:
        bound[overfull] = np.inf
        for d in range(1, width):
            bound[:, num_layers - d :, d] = np.inf
    link = np.zeros(num_layers + 1)
    if num_layers > 1:
        link[1:-1] = chain.cross.min(axis=(1, 2))
    if num_stages == 1:
        link[:] = 0.0
    return Intervals(total=total, time=time, link=link, count=chain.num_microbatches)
