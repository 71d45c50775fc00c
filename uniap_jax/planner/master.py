"""The master of the interval engine: a path of columns through the stages, as a search of our own and as a MIP.

min  sum p + sum o + (c - 1) T + D,   T >= every p and o of the path,   D >= every g of the path
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from uniap_jax.core.costs import FloatArray
from uniap_jax.planner.chain import Chain, IntArray
from uniap_jax.planner.columns import Columns, front_of_two
from uniap_jax.planner.mip_model import MipModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """Columns as arcs from a start node to an exit node, links as arcs from an exit node to a start node.

    Attributes:
        columns: the arcs inside stages.
        by_stage: per stage, positions of its columns.
        start: of each column, its start node (start layer, entry class on its stage).
        leave: of each column, its exit node.
        num_starts: nodes where stages start.
        num_exits: nodes where stages end.
        links: per boundary, (exit node, start node, seconds).
        count: micro-batches.
    """

    columns: Columns
    by_stage: tuple[IntArray, ...]
    start: IntArray
    leave: IntArray
    num_starts: int
    num_exits: int
    links: tuple[tuple[IntArray, IntArray, FloatArray], ...]
    count: int


def network_of(chain: Chain, columns: Columns) -> Network:
    """Numbers the nodes and prices the links between columns that fit together."""
    num_layers, num_stages, num_strategies = chain.shape
    start_key = (columns.stage * num_layers + columns.first) * num_strategies + columns.entry
    leave_key = (columns.stage * num_layers + columns.last) * num_strategies + columns.leave
    starts, start = np.unique(start_key, return_inverse=True)
    exits, leave = np.unique(leave_key, return_inverse=True)
    links = [_links_of(chain, exits, starts, i) for i in range(num_stages - 1)]
    # memory has done its work inside the columns: between two nodes only the fast ones matter
    useful = np.sort(front_of_two(start * len(exits) + leave, columns.time, columns.iteration))
    return Network(
        columns=columns,
        by_stage=tuple(useful[columns.stage[useful] == i] for i in range(num_stages)),
        start=start,
        leave=leave,
        num_starts=len(starts),
        num_exits=len(exits),
        links=tuple(links),
        count=chain.num_microbatches,
    )


def _links_of(chain: Chain, exits: IntArray, starts: IntArray, i: int) -> tuple[IntArray, IntArray, FloatArray]:
    num_layers, _, num_strategies = chain.shape
    size = num_layers * num_strategies
    left = np.flatnonzero(exits // size == i)
    right = np.flatnonzero(starts // size == i + 1)
    end = exits[left] // num_strategies % num_layers + 1
    begin = starts[right] // num_strategies % num_layers
    first, last = np.searchsorted(begin, end, side="left"), np.searchsorted(begin, end, side="right")
    number = last - first
    a = np.repeat(np.arange(len(left)), number)
    b = np.repeat(first, number) + np.arange(len(a)) - np.repeat(np.cumsum(number) - number, number)
    cost = chain.cross[end[a] - 1, exits[left[a]] % num_strategies, starts[right[b]] % num_strategies]
    return left[a], right[b], cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One column per stage.

    Attributes:
        columns: chosen column of each stage.
        total: sum of stage and link times, seconds per micro-batch.
        slowest: the largest of them.
        iteration: the largest once-per-step time.
    """

    columns: tuple[int, ...]
    total: float
    slowest: float
    iteration: float

    def value(self, count: int) -> float:
        """Step time in seconds."""
        return self.total + (count - 1) * self.slowest + self.iteration


def shortest_path(network: Network, *, slowest: float, iteration: float) -> Path | None:
    """The path of least total among columns and links no slower than the two limits."""
    columns = network.columns
    value = np.full(network.num_starts, np.inf)
    value[network.start[network.by_stage[0]]] = 0.0
    values, reached, usable = [value], [], []
    for i, members in enumerate(network.by_stage):
        fits = (columns.time[members] <= slowest) & (columns.iteration[members] <= iteration)
        members = members[fits]
        exits = np.full(network.num_exits, np.inf)
        np.minimum.at(exits, network.leave[members], value[network.start[members]] + columns.time[members])
        usable.append(members)
        reached.append(exits)
        if i + 1 < len(network.by_stage):
            left, right, cost = network.links[i]
            value = np.full(network.num_starts, np.inf)
            np.minimum.at(value, right, np.where(cost <= slowest, exits[left] + cost, np.inf))
            values.append(value)
    if not len(usable[-1]) or not np.isfinite(reached[-1].min()):
        return None
    return _walk_back(network, values, reached, usable, slowest)


def _walk_back(
    network: Network, values: list[FloatArray], reached: list[FloatArray], usable: list[IntArray], slowest: float
) -> Path:
    columns, node, chosen, times = network.columns, int(reached[-1].argmin()), [], []
    for i in range(len(usable) - 1, -1, -1):
        members = usable[i][network.leave[usable[i]] == node]
        column = int(members[(values[i][network.start[members]] + columns.time[members]).argmin()])
        chosen.append(column)
        times.append(float(columns.time[column]))
        if i > 0:
            left, right, cost = network.links[i - 1]
            here = np.flatnonzero((right == network.start[column]) & (cost <= slowest))
            link = here[(reached[i - 1][left[here]] + cost[here]).argmin()]
            times.append(float(cost[link]))
            node = int(left[link])
    return Path(
        columns=tuple(chosen[::-1]),
        total=sum(times),
        slowest=max(times),
        iteration=float(columns.iteration[chosen].max()),
    )


def without_hopeless(network: Network, *, upper: float) -> Network:
    """The network without columns that no path at or below `upper` can use.

    A path through a column takes at least the cheapest way to its start, itself, the cheapest way on, (c - 1) times
    the larger of its own time and the bottleneck of the network, and the least D.
    """
    columns, last = network.columns, len(network.by_stage) - 1
    iteration = max(float(columns.iteration[m].min(initial=np.inf)) for m in network.by_stage)
    ahead, slowest = _sweep(network)
    behind = np.zeros(network.num_exits)
    through = np.full(len(columns.time), np.inf)
    for i in range(last, -1, -1):
        members = network.by_stage[i]
        on = columns.time[members] + behind[network.leave[members]]
        through[members] = ahead[network.start[members]] + on
        if i > 0:
            starts = np.full(network.num_starts, np.inf)
            np.minimum.at(starts, network.start[members], on)
            left, right, cost = network.links[i - 1]
            behind = np.full(network.num_exits, np.inf)
            np.minimum.at(behind, left, cost + starts[right])
    least = through + iteration
    if network.count > 1:
        least = least + (network.count - 1) * np.maximum(columns.time, slowest)
    hopeful = least <= upper * (1 + 1e-9)
    return replace(network, by_stage=tuple(m[hopeful[m]] for m in network.by_stage))


def _sweep(network: Network) -> tuple[FloatArray, float]:
    """Cheapest total to every start node, and the least slowest time of any path."""
    columns = network.columns
    total, worst = np.full(network.num_starts, np.inf), np.full(network.num_starts, np.inf)
    first = network.start[network.by_stage[0]]
    total[first] = worst[first] = 0.0
    slowest = np.inf
    for i, members in enumerate(network.by_stage):
        start, leave = network.start[members], network.leave[members]
        sums, peaks = np.full(network.num_exits, np.inf), np.full(network.num_exits, np.inf)
        np.minimum.at(sums, leave, total[start] + columns.time[members])
        np.minimum.at(peaks, leave, np.maximum(worst[start], columns.time[members]))
        if i + 1 == len(network.by_stage):
            slowest = float(peaks.min(initial=np.inf))
            break
        left, right, cost = network.links[i]
        np.minimum.at(total, right, sums[left] + cost)
        np.minimum.at(worst, right, np.maximum(peaks[left], cost))
    return total, slowest


def _best_time(network: Network, *, iteration: float, upper: float) -> Path | None:
    """The path of least total + (c - 1) · slowest with once-per-step time within a limit, if below `upper`."""
    best, limit, weight = None, np.inf, network.count - 1
    while True:
        path = shortest_path(network, slowest=limit, iteration=iteration)
        if path is None or path.total >= upper:
            return best
        cost = path.total + weight * path.slowest
        if cost < upper:
            best, upper = path, cost
        if weight == 0:
            return best
        # a tighter limit only raises the total, so a better path has (c - 1) · slowest < upper - total
        limit = min(np.nextafter(path.slowest, -np.inf), (upper - path.total) / weight)


def search_paths(
    network: Network, *, upper: float, expired: Callable[[], bool] = lambda: False
) -> tuple[Path | None, bool]:
    """The best path below `upper` by tightening both limits, and whether the search was finished.

    Exact: a path better than the best so far must have either limit strictly below the one just used, and
    tightening a limit never lowers what the other terms cost.
    """
    best, limit = None, np.inf
    smallest = max(float(network.columns.iteration[m].min(initial=np.inf)) for m in network.by_stage)
    if not np.isfinite(smallest):
        return None, True
    while True:
        path = _best_time(network, iteration=limit, upper=upper - smallest)
        if path is None:
            return best, True
        value = path.value(network.count)
        if value < upper:
            best, upper = path, value
        rest = path.total + (network.count - 1) * path.slowest
        limit = min(np.nextafter(path.iteration, -np.inf), upper - rest)
        if not np.isfinite(limit) or expired():
            return best, not np.isfinite(limit)


def master_mip(network: Network) -> tuple[MipModel, IntArray]:
    """The master as a MIP in milliseconds; variables 0, 1, ... are the columns in the order returned with it."""
    columns, model = network.columns, MipModel()
    kept = np.concatenate(network.by_stage)
    number = {int(q): model.add(cost=columns.time[q] * 1e3, whole=True) for q in kept}
    slowest = model.add(cost=float(network.count - 1), upper=np.inf)
    iteration = model.add(cost=1.0, upper=np.inf)
    links = [[model.add(cost=c * 1e3) for c in cost.tolist()] for _, _, cost in network.links]
    for members in network.by_stage:
        chosen = [number[int(q)] for q in members]
        model.add_row(chosen, [1.0] * len(chosen), "=", 1.0)
        model.add_row([*chosen, slowest], [*(columns.time[members] * 1e3), -1.0], "<", 0.0)
        if columns.iteration[members].any():
            model.add_row([*chosen, iteration], [*(columns.iteration[members] * 1e3), -1.0], "<", 0.0)
    for i, (left, right, cost) in enumerate(network.links):
        model.add_row([*links[i], slowest], [*(cost * 1e3), -1.0], "<", 0.0)
        _add_flow(model, links[i], left, number, network.by_stage[i], network.leave)
        _add_flow(model, links[i], right, number, network.by_stage[i + 1], network.start)
    return model, kept


def _add_flow(
    model: MipModel, links: list[int], node: IntArray, number: dict[int, int], members: IntArray, column_node: IntArray
) -> None:
    """At every node, as many links as columns."""
    for n in np.union1d(node, column_node[members]):
        arcs = [links[j] for j in np.flatnonzero(node == n)]
        inside = [number[int(q)] for q in members[column_node[members] == n]]
        model.add_row([*arcs, *inside], [1.0] * len(arcs) + [-1.0] * len(inside), "=", 0.0)


def path_of(network: Network, kept: IntArray, values: Sequence[float]) -> Path | None:
    """The path that the master's answer stands for, or None where it is none."""
    columns = network.columns
    chosen: list[int] = []
    links: list[float] = []
    picked = {int(q) for q, v in zip(kept, values, strict=False) if v > 0.5}
    for i, members in enumerate(network.by_stage):
        here = [q for q in members.tolist() if q in picked]
        if len(here) != 1:
            return None
        if i > 0:
            left, right, cost = network.links[i - 1]
            fitting = (left == network.leave[chosen[-1]]) & (right == network.start[here[0]])
            if not fitting.any():
                return None
            links.append(float(cost[fitting].min()))
        chosen.append(here[0])
    times = [float(t) for t in columns.time[chosen]] + links
    return Path(
        columns=tuple(chosen),
        total=sum(times),
        slowest=max(times),
        iteration=float(columns.iteration[chosen].max()),
    )
