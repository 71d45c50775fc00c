"""Stage columns: every way to run layers [a, b) on one stage that could still be part of a better plan.

Label setting. A label is a partial stage: where it starts, how it is entered, the last strategy, and three sums (time,
once-per-step time, memory). Labels are extended layer by layer on all stages at once and dropped when they do not fit,
when the guide's tests prove that no plan through them beats its limit, or when another label with the same start,
entry and exit is no worse in all three sums. Nothing else is dropped, so the columns hold an optimal plan if any plan
is below the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import FloatArray
from uniap_jax.planner.chain import Chain
from uniap_jax.planner.intervals import Guide

IntArray = NDArray[np.int64]

LOOK_BACK = 48
"""Labels of the same group that each label is compared with when there are three sums."""

MAX_LABELS = 150_000
"""Labels of one layer beyond which the worst are dropped and the answer no longer proves anything."""


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
        label: position among the labels of layer `last`, for `strategies`.
        parents: per layer, for every label the label of the previous layer it extends, or -1.
        choices: per layer, for every label its strategy.
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
        for u in range(int(self.last[column]), int(self.first[column]) - 1, -1):
            found.append(int(self.choices[u][label]))
            label = int(self.parents[u][label])
        return found[::-1]


@dataclass(slots=True, eq=False)
class _Labels:
    """Labels of one layer; `origin` numbers (stage, first layer, entry class), `least` is the bound that ranks them."""

    stage: IntArray
    origin: IntArray
    strategy: IntArray
    parent: IntArray
    time: FloatArray
    iteration: FloatArray
    memory: FloatArray
    least: FloatArray
    number: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.number) != len(self.stage):
            self.number = np.arange(len(self.stage))

    def __len__(self) -> int:
        return len(self.stage)

    def take(self, index: NDArray[np.generic]) -> _Labels:
        """A selection; `number` still says where they stood."""
        return _Labels(*(getattr(self, f.name)[index] for f in fields(self)))


def _joined(a: _Labels, b: _Labels) -> _Labels:
    names = [f.name for f in fields(_Labels) if f.name != "number"]
    return _Labels(*(np.concatenate([getattr(a, n), getattr(b, n)]) for n in names))


def front_of_two(group: IntArray, time: FloatArray, memory: FloatArray) -> IntArray:
    """Positions of the entries of each group that no other one of the group beats in both sums."""
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
    order = np.lexsort((labels.least, group))
    columns = [group[order], labels.time[order], labels.iteration[order], labels.memory[order]]
    shift = 1
    while shift < min(len(order), LOOK_BACK):
        same, *sums = (x[shift:] >= x[:-shift] for x in columns)
        worse = (columns[0][shift:] == columns[0][:-shift]) & sums[0] & sums[1] & sums[2]
        if worse.any():
            keep = np.concatenate([np.ones(shift, dtype=np.bool_), ~worse])
            order, columns = order[keep], [x[keep] for x in columns]
        shift += 1
    return order


def _front(group: IntArray, labels: _Labels, *, three: bool) -> IntArray:
    if len(labels) < 2:
        return np.arange(len(labels))
    return _front_of_three(group, labels) if three else front_of_two(group, labels.time, labels.memory)


@dataclass(slots=True, eq=False)
class _Growth:
    """The label setting of one candidate, a layer at a time."""

    chain: Chain
    guide: Guide
    furthest: IntArray

    def begin(self, u: int) -> _Labels:
        """Labels of stages that start at layer u."""
        starting = self.guide.allowed[:, u].any(axis=1)
        stage, strategy = np.nonzero(self.guide.live[u] & starting[:, None])
        entry = self.chain.in_class[u, strategy]
        num_layers, _, num_strategies = self.chain.shape
        labels = _Labels(
            stage=stage,
            origin=(stage * num_layers + u) * num_strategies + entry,
            strategy=strategy,
            parent=np.full(len(stage), -1),
            time=self.chain.time[u, stage, strategy],
            iteration=self.chain.iteration[u, stage, strategy],
            memory=self.chain.memory[u, stage, strategy],
            least=np.zeros(len(stage)),
        )
        return self._passed(u, labels)

    def extend(self, u: int, labels: _Labels) -> _Labels:
        """Every label of layer u - 1 with every live strategy of layer u on the same stage."""
        labels = labels.take(np.flatnonzero(self.furthest[labels.stage, self.first(labels)] >= u))
        stages, strategies = np.nonzero(self.guide.live[u])
        begin = np.searchsorted(stages, labels.stage, side="left")
        count = np.searchsorted(stages, labels.stage, side="right") - begin
        parent = np.repeat(np.arange(len(labels)), count)
        offset = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
        strategy = strategies[np.repeat(begin, count) + offset]
        stage, before = labels.stage[parent], labels.strategy[parent]
        time = labels.time[parent] + self.chain.reshard[u - 1, before, strategy] + self.chain.time[u, stage, strategy]
        memory = labels.memory[parent] + self.chain.memory[u, stage, strategy]
        # most extensions die here, so the other sums are formed for the rest only
        keep = np.flatnonzero((time <= self.guide.slowest) & (memory <= self.chain.capacity[stage]))
        parent, strategy, stage = parent[keep], strategy[keep], stage[keep]
        extended = _Labels(
            stage=stage,
            origin=labels.origin[parent],
            strategy=strategy,
            parent=labels.number[parent],
            time=time[keep],
            iteration=labels.iteration[parent] + self.chain.iteration[u, stage, strategy],
            memory=memory[keep],
            least=labels.least[parent],
        )
        return self._passed(u, extended)

    def first(self, labels: _Labels) -> IntArray:
        """First layer of every label's stage."""
        num_layers, _, num_strategies = self.chain.shape
        layers: IntArray = labels.origin // num_strategies % num_layers
        return layers

    def _passed(self, u: int, labels: _Labels) -> _Labels:
        """The labels that fit and pass every test."""
        fits = (labels.memory <= self.chain.capacity[labels.stage]) & (labels.time <= self.guide.slowest)
        labels = labels.take(np.flatnonzero(fits))
        for number, test in enumerate(self.guide.tests):
            least = (
                test.ahead[labels.stage, self.first(labels)]
                + labels.time
                + test.memory[labels.stage] * labels.memory
                - test.spent[labels.stage]
                + test.after[u, labels.stage, labels.strategy]
            )
            if self.chain.has_iteration and test.iteration.any():
                least = least + test.iteration[labels.stage] * labels.iteration
            if number == 0:
                labels.least = least
            keep = least <= test.limit
            if not keep.all():
                labels = labels.take(np.flatnonzero(keep))
        return labels

    def thin(self, u: int, labels: _Labels) -> _Labels:
        """The non-dominated labels of each start, entry and exit."""
        num_strategies = self.chain.shape[2]
        group = labels.origin * num_strategies + self.chain.out_class[u, labels.strategy]
        return labels.take(_front(group, labels, three=self.chain.has_iteration))


def grow_columns(
    chain: Chain,
    guide: Guide,
    *,
    expired: Callable[[], bool] = lambda: False,
    max_labels: int = MAX_LABELS,
) -> Columns:
    """All columns that a plan below the guide's limit may use.

    Args:
        chain: candidate.
        guide: intervals, places and tests.
        expired: asked after every layer; True stops the growth and the result says that it is incomplete.
        max_labels: of one layer; beyond it the ones with the least bound are kept.
    """
    num_layers, _, _ = chain.shape
    widths = guide.allowed.shape[2] - np.argmax(guide.allowed[:, :, ::-1], axis=2)
    last = np.where(guide.allowed.any(axis=2), np.arange(num_layers)[None, :] + widths - 1, -1)
    growth = _Growth(chain=chain, guide=guide, furthest=last)
    parents, choices, done, complete = [], [], [], True
    labels: _Labels | None = None
    for u in range(num_layers):
        fresh = growth.begin(u)
        labels = fresh if labels is None else _joined(growth.extend(u, labels), fresh)
        labels = growth.thin(u, labels)
        if len(labels) > max_labels:
            labels, complete = labels.take(np.sort(np.argpartition(labels.least, max_labels)[:max_labels])), False
        labels.number = np.arange(len(labels))
        parents.append(labels.parent)
        choices.append(labels.strategy)
        done.append(_ended(growth, u, labels))
        if expired():
            complete = False
            break
    stage, first, final, entry, leave, time, iteration, label = (np.concatenate(x) for x in zip(*done, strict=True))
    return Columns(
        stage=stage,
        first=first,
        last=final,
        entry=entry,
        leave=leave,
        time=time,
        iteration=iteration,
        label=label,
        parents=tuple(parents),
        choices=tuple(choices),
        complete=complete,
    )


def _ended(growth: _Growth, u: int, labels: _Labels) -> tuple[NDArray[np.generic], ...]:
    """Labels of layer u whose stage may end there, as fields of `Columns`."""
    num_strategies = growth.chain.shape[2]
    first = growth.first(labels)
    width = growth.guide.allowed.shape[2]
    offset = np.minimum(u - first, width - 1)
    index = np.flatnonzero((u - first < width) & growth.guide.allowed[labels.stage, first, offset])
    part = labels.take(index)
    return (
        part.stage,
        first[index],
        np.full(len(index), u),
        part.origin % num_strategies,
        growth.chain.out_class[u, part.strategy],
        part.time,
        part.iteration,
        index,
    )
