"""Stage columns: every way to run layers [a, b) on one stage that could still be part of a better plan.

Label setting. A label is a partial stage: the layers it holds, how it is entered, the last strategy, and three sums
(time, once-per-step time, memory). All labels grow by one layer at a time, on all stages at once. Starts from which the
layers look the same share their labels, so equal blocks cost once. Labels are dropped when they do not fit, when the
guide's tests prove that no plan through them beats its limit, or when another label of the same layers, entry and exit
is no worse in all three sums. Nothing else is dropped, so the columns hold an optimal plan if any is below the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import BoolArray, FloatArray
from uniap_jax.planner.chain import Chain, IntArray
from uniap_jax.planner.guide import Guide, Test

LOOK_BACK = 48
"""Labels of the same group that each label is compared with when there are three sums."""

MAX_LABELS = 60_000
"""Labels of one length beyond which the worst are dropped and the answer no longer proves anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns as parallel arrays, one entry each.

    Attributes:
        stage: it belongs to.
        first: layer a where it starts.
        last: layer b - 1 where it ends.
        entry: class of the first layer's strategy, as seen from the previous stage.
        leave: class of the last layer's strategy, as seen from the next stage.
        time: seconds per micro-batch.
        iteration: seconds per step.
        label: position among the labels of its length, for `strategies`.
        parents: per length, for every label the label that it extends by a layer, or -1.
        choices: per length, for every label its last strategy.
        complete: False where labels had to be dropped for lack of room or time.
    """

    stage: IntArray
    first: IntArray
    last: IntArray
    entry: IntArray
    leave: IntArray
    time: FloatArray
    iteration: FloatArray
    label: IntArray
    parents: tuple[IntArray, ...]
    choices: tuple[IntArray, ...]
    complete: bool

    def strategies(self, column: int) -> list[int]:
        """Strategies of the layers of a column, first to last."""
        found, label = [], int(self.label[column])
        for d in range(int(self.last[column] - self.first[column]), -1, -1):
            found.append(int(self.choices[d][label]))
            label = int(self.parents[d][label])
        return found[::-1]


@dataclass(slots=True, eq=False)
class _Labels:
    """Labels of one length; `node` says which layers, `least` is the bound that ranks them."""

    stage: IntArray
    node: IntArray
    entry: IntArray
    strategy: IntArray
    parent: IntArray
    time: FloatArray
    iteration: FloatArray
    memory: FloatArray
    least: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if len(self.least) != len(self.stage):
            self.least = np.zeros(len(self.stage))

    def __len__(self) -> int:
        return len(self.stage)

    def take(self, index: NDArray[np.generic]) -> _Labels:
        return _Labels(
            stage=self.stage[index],
            node=self.node[index],
            entry=self.entry[index],
            strategy=self.strategy[index],
            parent=self.parent[index],
            time=self.time[index],
            iteration=self.iteration[index],
            memory=self.memory[index],
            least=self.least[index],
        )


def _steps(values: FloatArray) -> FloatArray:
    """Sums in whole steps of 1e-12 of the largest: the same terms added in another order are the same sum."""
    top = float(np.abs(values).max(initial=0.0))
    steps: FloatArray = np.rint(values / (top * 1e-12)) if top > 0 else np.zeros_like(values)
    return steps


def front_of_two(group: IntArray, time: FloatArray, memory: FloatArray) -> IntArray:
    """Positions of the entries of each group that no other one of the group beats in both sums."""
    time, memory = _steps(time), _steps(memory)
    order = np.lexsort((memory, time, group))
    rank = np.empty(len(order), dtype=np.int64)
    rank[np.argsort(memory[order], kind="stable")] = np.arange(len(order))
    number = np.cumsum(np.concatenate([[False], np.diff(group[order]) != 0]))
    # later groups get smaller values, so that the running minimum starts afresh with every group
    value = rank - number * len(order)
    keep = np.ones(len(order), dtype=np.bool_)
    keep[1:] = value[1:] < np.minimum.accumulate(value)[:-1]
    return order[keep]


def _front_of_three(group: IntArray, labels: _Labels) -> IntArray:
    """Positions left after comparing each label with the most promising ones of its group before it.

    A dominating label has a bound no higher, so it stands earlier in the order by bound. Looking back a limited
    number of places leaves some dominated labels in; that costs time, never exactness.
    """
    sums = [_steps(x) for x in (labels.time, labels.iteration, labels.memory)]
    order = np.lexsort((sums[2], sums[1], sums[0], group))
    columns = [x[order] for x in (group, *sums)]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = np.logical_or.reduce([x[1:] != x[:-1] for x in columns])
    order = order[new]
    order = order[np.lexsort((labels.least[order], group[order]))]
    columns = [x[order] for x in (group, *sums)]
    shift = 1
    while shift < min(len(order), LOOK_BACK):
        same = columns[0][shift:] == columns[0][:-shift]
        worse = np.logical_and.reduce([same, *(x[shift:] >= x[:-shift] for x in columns[1:])])
        if worse.any():
            keep = np.concatenate([np.ones(shift, dtype=np.bool_), ~worse])
            order, columns = order[keep], [x[keep] for x in columns]
        shift += 1
    return order


def _front(group: IntArray, labels: _Labels, *, three: bool) -> IntArray:
    if len(labels) < 2:
        return np.arange(len(labels))
    return _front_of_three(group, labels) if three else front_of_two(group, labels.time, labels.memory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Level:
    """Intervals of one length, gathered into nodes of equal content.

    Attributes:
        length: layers less one.
        node: [starts] of the interval that begins at each layer.
        order: starts sorted by node.
        bounds: [nodes] where each node begins in `order`.
        layer: [nodes] last layer of one of its intervals.
        parent: [nodes] node of the interval one layer shorter.
        useful: [nodes, stages] whether some interval of it, or a longer one, is allowed.
        live: [nodes, stages, strategies] places of the last layer.
        rest: per test, [nodes, stages, strategies] least of ahead + after over the node's intervals.
    """

    length: int
    node: IntArray
    order: IntArray
    bounds: IntArray
    layer: IntArray
    parent: IntArray
    useful: BoolArray
    live: BoolArray
    rest: tuple[FloatArray, ...]


def _level(chain: Chain, guide: Guide, possible: BoolArray, length: int, shorter: IntArray | None) -> _Level:
    kind = chain.kinds[length:]
    key = kind if shorter is None else shorter[: len(kind)] * (int(chain.kinds.max()) + 1) + kind
    _, first, node = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(node, kind="stable")
    bounds = np.searchsorted(node[order], np.arange(len(first)))
    open_starts = possible[:, : len(kind), length].T
    useful = np.logical_or.reduceat(open_starts[order], bounds, axis=0)
    rest = tuple(_rest(test, open_starts, order, bounds, length) for test in guide.tests)
    layer = first + length
    live = np.isfinite(rest[0]) & np.isfinite(chain.time[layer])
    parent = np.full(len(first), -1) if shorter is None else shorter[first]
    return _Level(
        length=length,
        node=node,
        order=order,
        bounds=bounds,
        layer=layer,
        parent=parent,
        useful=useful,
        live=live,
        rest=rest,
    )


def _rest(test: Test, open_starts: BoolArray, order: IntArray, bounds: IntArray, length: int) -> FloatArray:
    """Least of ahead + after over the intervals of every node that may still be used."""
    starts = len(open_starts)
    ahead = np.where(open_starts, test.ahead[:, :starts].T, np.inf)
    both = ahead[:, :, None] + test.after[length : length + starts]
    least: FloatArray = np.minimum.reduceat(both[order], bounds, axis=0)
    return least


@dataclass(slots=True, eq=False)
class _Growth:
    """The label setting of one candidate."""

    chain: Chain
    guide: Guide

    def begin(self, level: _Level) -> _Labels:
        """Labels of one layer."""
        node, stage, strategy = np.nonzero(level.live & level.useful[:, :, None])
        layer = level.layer[node]
        labels = _Labels(
            stage=stage,
            node=node,
            entry=self.chain.in_class[layer, strategy],
            strategy=strategy,
            parent=np.full(len(stage), -1),
            time=self.chain.time[layer, stage, strategy],
            iteration=self.chain.iteration[layer, stage, strategy],
            memory=self.chain.memory[layer, stage, strategy],
        )
        return self._passed(level, labels)

    def extend(self, level: _Level, labels: _Labels) -> _Labels:
        """Every label with every live strategy of every layer that can follow."""
        order = np.argsort(level.parent, kind="stable")
        parent, child = _pairs(labels.node, level.parent[order])
        child = order[child]
        keep = np.flatnonzero(level.useful[child, labels.stage[parent]])
        parent, child = parent[keep], child[keep]
        num_stages = level.useful.shape[1]
        nodes, stages, strategies = np.nonzero(level.live)
        row, place = _pairs(child * num_stages + labels.stage[parent], nodes * num_stages + stages)
        parent, child, strategy = parent[row], child[row], strategies[place]
        stage, layer = labels.stage[parent], level.layer[child]
        reshard = self.chain.reshard[layer - 1, labels.strategy[parent], strategy]
        time = labels.time[parent] + reshard + self.chain.time[layer, stage, strategy]
        memory = labels.memory[parent] + self.chain.memory[layer, stage, strategy]
        # most extensions die here, so the other sums are formed for the rest only
        keep = np.flatnonzero((time <= self.guide.slowest) & (memory <= self.chain.capacity[stage]))
        parent, child, strategy, stage, layer = (x[keep] for x in (parent, child, strategy, stage, layer))
        extended = _Labels(
            stage=stage,
            node=child,
            entry=labels.entry[parent],
            strategy=strategy,
            parent=parent,
            time=time[keep],
            iteration=labels.iteration[parent] + self.chain.iteration[layer, stage, strategy],
            memory=memory[keep],
        )
        return self._passed(level, extended)

    def _passed(self, level: _Level, labels: _Labels) -> _Labels:
        """The labels that fit and pass every test."""
        fits = (labels.memory <= self.chain.capacity[labels.stage]) & (labels.time <= self.guide.slowest)
        labels = labels.take(np.flatnonzero(fits))
        for number, (test, rest) in enumerate(zip(self.guide.tests, level.rest, strict=True)):
            least = rest[labels.node, labels.stage, labels.strategy] - test.spent[labels.stage]
            least += labels.time + test.memory[labels.stage] * labels.memory
            if self.chain.has_iteration and test.iteration.any():
                least += test.iteration[labels.stage] * labels.iteration
            if number == 0:
                labels.least = least
            keep = least <= test.limit
            if not keep.all():
                labels = labels.take(np.flatnonzero(keep))
        return labels

    def thin(self, level: _Level, labels: _Labels) -> _Labels:
        """The non-dominated labels of each node, entry and exit."""
        num_strategies = self.chain.shape[2]
        leave = self.chain.out_class[level.layer[labels.node], labels.strategy]
        group = (
            (labels.stage * len(level.layer) + labels.node) * num_strategies + labels.entry
        ) * num_strategies + leave
        return labels.take(_front(group, labels, three=self.chain.has_iteration))

    def ended(self, levels: list[_Level], grown: list[_Labels]) -> tuple[NDArray[np.generic], ...]:
        """Labels whose stage may end at their length, once for every place of their node, as fields of `Columns`."""
        offset = np.cumsum([0, *(len(x.layer) for x in levels[:-1])])
        layer = np.concatenate([x.layer for x in levels])
        places = np.concatenate([x.node[x.order] + o for x, o in zip(levels, offset, strict=True)])
        starts = np.concatenate([x.order for x in levels])
        node = np.concatenate([x.node + o for x, o in zip(grown, offset, strict=True)])
        length = np.repeat([x.length for x in levels], [len(x) for x in grown])
        label = np.concatenate([np.arange(len(x)) for x in grown])
        stage, entry, strategy, time, iteration = (
            np.concatenate([getattr(x, name) for x in grown])
            for name in ("stage", "entry", "strategy", "time", "iteration")
        )
        _, num_stages, num_strategies = self.chain.shape
        leave = self.chain.out_class[layer[node], strategy]
        group = ((node * num_stages + stage) * num_strategies + entry) * num_strategies + leave
        # memory has done its work: between the same ends only the fast ones matter
        best = np.sort(front_of_two(group, time, iteration))
        row, place = _pairs(node[best], places)
        index, first = best[row], starts[place]
        keep = np.flatnonzero(self.guide.allowed[stage[index], first, length[index]])
        index, first = index[keep], first[keep]
        return (
            stage[index],
            first,
            first + length[index],
            entry[index],
            leave[index],
            time[index],
            iteration[index],
            label[index],
        )


def _pairs(keys: IntArray, sorted_keys: IntArray) -> tuple[IntArray, IntArray]:
    """All (i, j) with keys[i] == sorted_keys[j]."""
    begin = np.searchsorted(sorted_keys, keys, side="left")
    count = np.searchsorted(sorted_keys, keys, side="right") - begin
    row = np.repeat(np.arange(len(keys)), count)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, np.repeat(begin, count) + offset


def grow_columns(
    chain: Chain,
    guide: Guide,
    *,
    expired: Callable[[], bool] = lambda: False,
    max_labels: int = MAX_LABELS,
    give_up: bool = False,
) -> Columns:
    """All columns that a plan below the guide's limit may use.

    Args:
        chain: candidate.
        guide: intervals, places and tests.
        expired: asked after every length; True stops the growth and the result says that it is incomplete.
        max_labels: of one length; beyond it the ones with the least bound are kept.
        give_up: stop there instead; what was found so far comes back, incomplete.
    """
    growth = _Growth(chain=chain, guide=guide)
    possible = np.logical_or.accumulate(guide.allowed[:, :, ::-1], axis=2)[:, :, ::-1]
    parents, choices, done, complete = [], [], [], True
    levels: list[_Level] = []
    grown: list[_Labels] = []
    labels: _Labels | None = None
    shorter: IntArray | None = None
    for length in range(guide.allowed.shape[2]):
        level = _level(chain, guide, possible, length, shorter)
        labels = growth.begin(level) if labels is None else growth.extend(level, labels)
        labels = growth.thin(level, labels)
        if len(labels) > max_labels:
            labels, complete = labels.take(np.sort(np.argpartition(labels.least, max_labels)[:max_labels])), False
        parents.append(labels.parent)
        choices.append(labels.strategy)
        levels.append(level)
        grown.append(labels)
        shorter = level.node
        late = expired()
        if late:
            complete = False
        # many short lengths at once cost what one does; more labels than this are not worth keeping until the end
        if sum(map(len, grown)) > MAX_LABELS:
            done.append(growth.ended(levels, grown))
            levels, grown = [], []
        if late or not len(labels) or (give_up and not complete):
            break
    if levels:
        done.append(growth.ended(levels, grown))
    stage, first, last, entry, leave, time, iteration, label = (np.concatenate(x) for x in zip(*done, strict=True))
    return Columns(
        stage=stage,
        first=first,
        last=last,
        entry=entry,
        leave=leave,
        time=time,
        iteration=iteration,
        label=label,
        parents=tuple(parents),
        choices=tuple(choices),
        complete=complete,
    )
