"""Bounds that know stages are whole intervals, and the guide they give to the exact search.

For stage i and layers [a, b), at memory prices m >= 0, a shortest path over strategies bounds from below

    s_iab <= p + d_i g        t_iab <= p        (each with m (memory - capacity) added, the best price of several)

so that min over cuts of sum s + sum o + (c - 1) max t bounds the step time. Unlike the Lagrangian bound over all layers
at once it sees that 98 layers on 8 stages put 13 on one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import BoolArray, FloatArray
from uniap_jax.planner.chain import Chain, IntArray
from uniap_jax.planner.multipliers import Multipliers

CHUNK = 4_000_000
"""Numbers per temporary array."""

MANY = 2_000_000
"""Places of a candidate (layers × stages × strategies) beyond which fewer prices are tried."""

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


def _paths(groups: _Groups, node: FloatArray, kinds: IntArray, width: int) -> FloatArray:
    """[stages, layers, widths] least sum of node and resharding costs over the strategies of every interval.

    Intervals with the same kinds of layers are computed once.

    Args:
        groups: of the chain.
        node: [stages, layers, strategies].
        kinds: [layers] of the chain.
        width: most layers of an interval.
    """
    num_stages, num_layers, num_strategies = node.shape
    least = np.full((num_stages, num_layers, width), np.inf)
    some = max(1, CHUNK // (num_layers * num_strategies * groups.members.shape[1] + 1))
    for i in range(0, num_stages, some):
        part = slice(i, i + some)
        _, first, same = np.unique(kinds, return_index=True, return_inverse=True)
        cost = node[part][:, first]
        least[part, :, 0] = cost.min(axis=2)[:, same]
        for d in range(1, width):
            # cost[i, n] belongs to an interval of d layers; one more layer makes it end at its start + d
            key = same[: num_layers - d] * (len(kinds) + 1) + kinds[d:]
            shorter = same
            _, first, same = np.unique(key, return_index=True, return_inverse=True)
            cost = groups.moved(cost[:, shorter[first]], first + d - 1) + node[part][:, first + d]
            least[part, : num_layers - d, d] = cost.min(axis=2)[:, same]
    return least


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """Resharding between layers with strategies gathered into classes of equal rows.

    Attributes:
        members: [layers - 1, classes, strategies] zero where the strategy is of the class, infinite elsewhere.
        rows: [layers - 1, classes, strategies] cost from a class to the next layer's strategies.
    """

    members: FloatArray
    rows: FloatArray

    @staticmethod
    def of(chain: Chain) -> _Groups:
        num_layers, _, k = chain.shape
        classes = [np.unique(chain.out_class[u]) for u in range(num_layers - 1)]
        most = max((len(c) for c in classes), default=1)
        members = np.full((max(num_layers - 1, 0), most, k), np.inf)
        rows = np.full((max(num_layers - 1, 0), most, k), np.inf)
        for u, found in enumerate(classes):
            members[u, : len(found)] = np.where(chain.out_class[u][None, :] == found[:, None], 0.0, np.inf)
            rows[u, : len(found)] = chain.reshard[u][found]
        return _Groups(members=members, rows=rows)

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


def _shares(chain: Chain, prices: Multipliers) -> tuple[float, ...]:
    """Memory prices to try; fewer where every one of them takes long."""
    if not prices.memory.any():
        return (0.0,)
    return PRICES if chain.time.size <= MANY else PRICES[:2]


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
    groups = _Groups.of(chain)
    node = np.ascontiguousarray(chain.time.transpose(1, 0, 2))
    memory = np.ascontiguousarray(chain.memory.transpose(1, 0, 2))
    once = np.ascontiguousarray(chain.iteration.transpose(1, 0, 2)) * prices.iteration[:, None, None]
    total = time = np.full((num_stages, num_layers, width), -np.inf)
    for share in _shares(chain, prices):
        price = (prices.memory * share)[:, None, None]
        spent = price * chain.capacity[:, None, None]
        paths = _paths(groups, node + price * memory, chain.kinds, width) - spent
        time = np.maximum(time, paths)
        if chain.has_iteration:
            total = np.maximum(total, _paths(groups, node + price * memory + once, chain.kinds, width) - spent)
    overfull = _overfull(chain, width)
    time = np.where(overfull, np.inf, time)
    total = np.where(overfull, np.inf, total)
    link = np.zeros(num_layers + 1)
    if num_layers > 1:
        link[1:-1] = chain.cross.min(axis=(1, 2))
    if num_stages == 1:
        link[:] = 0.0
    return Intervals(total=total if chain.has_iteration else time, time=time, link=link, count=chain.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Test:
    """A bound that labels must pass: ahead + p + d_i g + m_i (memory - capacity_i) + after <= limit.

    Attributes:
        ahead: [stages, layers] by stage and first layer.
        after: [layers, stages, strategies] by last layer so far.
        iteration: [stages] d.
        memory: [stages] m, seconds per byte.
        spent: [stages] m · capacity.
        limit: seconds.
    """

    ahead: FloatArray
    after: FloatArray
    iteration: FloatArray
    memory: FloatArray
    spent: FloatArray
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guide:
    """What a plan at or below `upper` can still look like.

    Attributes:
        allowed: [stages, layers, widths] intervals.
        slowest: no stage and no link takes longer, seconds.
        tests: for labels; the first also ranks them.
        live: [layers, stages, strategies] places.
    """

    allowed: BoolArray
    slowest: float
    tests: tuple[Test, ...]
    live: BoolArray


def guide(chain: Chain, intervals: Intervals, prices: Multipliers, *, upper: float) -> Guide | None:
    """Prunes intervals, places and partial stages by what they can lead to; None where nothing is left."""
    slowest = intervals.bottleneck()
    weight = chain.num_microbatches - 1
    reach, rest = intervals.ahead(np.inf), intervals.behind(np.inf)
    if not np.isfinite(reach[-1, -1]):
        return None
    _, num_layers, width = intervals.total.shape
    limit = (upper - reach[-1, -1]) / weight if weight else np.inf
    limit = limit * (1 + 1e-9) if limit > 0 else limit
    ends = np.minimum(np.arange(num_layers)[:, None] + np.arange(width)[None, :] + 1, num_layers)
    after = (rest[1:] + intervals.link)[:, ends]
    least = reach[:-1, :-1, None] + intervals.total + after
    peak = np.maximum(intervals.time, slowest)
    room = upper * (1 + 1e-12) - weight * np.where(np.isfinite(peak), peak, 0.0)
    allowed = (least <= room) & (intervals.time <= limit) & np.isfinite(least)
    if not allowed.any(axis=(1, 2)).all():
        return None
    tests, live = _tests(chain, intervals, prices, allowed, reach, rest, upper=upper, slowest=slowest, limit=limit)
    return Guide(allowed=allowed, slowest=limit, tests=tests, live=live)


def _tests(
    chain: Chain,
    intervals: Intervals,
    prices: Multipliers,
    allowed: BoolArray,
    reach: FloatArray,
    rest: FloatArray,
    *,
    upper: float,
    slowest: float,
    limit: float,
) -> tuple[tuple[Test, ...], BoolArray]:
    num_stages, num_layers, width = allowed.shape
    groups = _Groups.of(chain)
    ends = np.zeros((num_stages, num_layers + 1), dtype=np.bool_)
    for d in range(width):
        ends[:, d + 1 :] |= allowed[:, : num_layers - d, d]
    inside = _covered(allowed)
    close = np.where(ends, rest[1:] + intervals.link, np.inf)
    total = upper * (1 + 1e-12) - (chain.num_microbatches - 1) * slowest
    starts = np.where(allowed.any(axis=2), reach[:-1, :-1], np.inf)
    found = []
    for share in _shares(chain, prices):
        price = prices.memory * share
        sums = _to_the_end(chain, groups, price, prices.iteration, close, inside)
        found.append(
            Test(
                ahead=starts,
                after=sums,
                iteration=prices.iteration,
                memory=price,
                spent=price * chain.capacity,
                limit=total,
            )
        )
        if np.isfinite(limit):
            nothing = np.zeros_like(prices.iteration)
            times = _to_the_end(chain, groups, price, nothing, np.where(ends, 0.0, np.inf), inside)
            found.append(
                Test(
                    ahead=np.zeros_like(starts),
                    after=times,
                    iteration=nothing,
                    memory=price,
                    spent=price * chain.capacity,
                    limit=limit,
                )
            )
    live = np.isfinite(found[0].after) & np.isfinite(chain.time)
    return tuple(found), live


def _covered(allowed: BoolArray) -> BoolArray:
    """[layers, stages] whether some allowed interval of the stage holds the layer."""
    num_stages, num_layers, width = allowed.shape
    steps = np.zeros((num_layers + 1, num_stages), dtype=np.int64)
    for d in range(width):
        steps[: num_layers - d] += allowed[:, : num_layers - d, d].T
        steps[d + 1 :] -= allowed[:, : num_layers - d, d].T
    covered: BoolArray = np.cumsum(steps, axis=0)[:-1] > 0
    return covered


def _to_the_end(
    chain: Chain, groups: _Groups, price: FloatArray, iteration: FloatArray, close: FloatArray, inside: BoolArray
) -> FloatArray:
    """[layers, stages, strategies] least of time + d g + m memory from a place to an end of its stage, plus `close`."""
    num_layers = chain.shape[0]
    after = np.empty(chain.shape)
    node = chain.time + price[None, :, None] * chain.memory
    if chain.has_iteration and iteration.any():
        node = node + iteration[None, :, None] * chain.iteration
    for u in range(num_layers - 1, -1, -1):
        after[u] = close[:, u + 1][:, None]
        if u + 1 < num_layers:
            further = node[u + 1] + after[u + 1]
            by_class = (further[:, None, :] + groups.rows[u][None]).min(axis=2)
            stay = (by_class[:, :, None] + groups.members[u][None]).min(axis=1)
            np.minimum(after[u], stay, out=after[u])
        after[u][~inside[u]] = np.inf
    return after
