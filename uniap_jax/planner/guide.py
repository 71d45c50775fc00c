"""What interval bounds leave to the exact search: intervals, places and tests for partial stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import BoolArray, FloatArray
from uniap_jax.planner.chain import Chain
from uniap_jax.planner.intervals import Groups, Intervals, shares
from uniap_jax.planner.multipliers import Multipliers


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
    groups = Groups.of(chain)
    ends = np.zeros((num_stages, num_layers + 1), dtype=np.bool_)
    for d in range(width):
        ends[:, d + 1 :] |= allowed[:, : num_layers - d, d]
    inside = _covered(allowed)
    close = np.where(ends, rest[1:] + intervals.link, np.inf)
    total = upper * (1 + 1e-12) - (chain.num_microbatches - 1) * slowest
    starts = np.where(allowed.any(axis=2), reach[:-1, :-1], np.inf)
    found = []
    for share in shares(chain, prices):
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
    chain: Chain, groups: Groups, price: FloatArray, iteration: FloatArray, close: FloatArray, inside: BoolArray
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
