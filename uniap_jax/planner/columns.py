"""Stage columns: every way to run layers [a, b) on one stage that could still be part of a better plan.

Label setting. A label is a partial stage: where it starts, how it is entered, the last strategy, and three sums (time,
once-per-step time, memory). Labels are extended layer by layer on all stages at once and dropped when they do not fit,
when the Lagrangian potentials prove that no plan through them beats `upper`, or when another label with the same start,
entry and exit is no worse in all three sums. Nothing else is dropped, so the columns hold an optimal plan if any plan
is below `upper`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import FloatArray
from uniap_jax.planner.bounds import Potentials
from uniap_jax.planner.chain import Chain

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
        lower: least step time of a plan that uses it.
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
    lower: FloatArray
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
    """Labels of one layer; `origin` numbers (stage, first layer, entry class)."""

    stage: IntArray
    origin: IntArray
    strategy: IntArray
    parent: IntArray
    time: FloatArray
    iteration: FloatArray
    memory: FloatArray
    lower: FloatArray

    def __len__(self) -> int:
        return len(self.stage)

    def take(self, index: NDArray[np.generic]) -> _Labels:
        return _Labels(
            self.stage[index],
            self.origin[index],
            self.strategy[index],
            self.parent[index],
            self.time[index],
            self.iteration[index],
            self.memory[index],
            self.lower[index],
        )


def _joined(a: _Labels, b: _Labels) -> _Labels:
    names = ("stage", "origin", "strategy", "parent", "time", "iteration", "memory", "lower")
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
    order = np.lexsort((labels.lower, group))
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
    potential: Potentials
    others: tuple[Potentials, ...]
    upper: float
    slowest: float
    alive: NDArray[np.bool_]

    def begin(self, u: int) -> _Labels:
        """Labels of stages that start at layer u."""
        stage, strategy = np.nonzero(self.alive[u] & np.isfinite(self.potential.start[u]))
        entry = self.chain.in_class[u, strategy]
        num_layers, _, num_strategies = self.chain.shape
        ahead = self.potential.start[u, stage, strategy]
        return self._finish(
            u,
            _Labels(
                stage=stage,
                origin=(stage * num_layers + u) * num_strategies + entry,
                strategy=strategy,
                parent=np.full(len(stage), -1),
                time=self.chain.time[u, stage, strategy],
                iteration=self.chain.iteration[u, stage, strategy],
                memory=self.chain.memory[u, stage, strategy],
                lower=ahead + self.potential.node[u, stage, strategy],
            ),
        )

    def extend(self, u: int, labels: _Labels) -> _Labels:
        """Every label of layer u - 1 with every live strategy of layer u on the same stage."""
        stages, strategies = np.nonzero(self.alive[u])
        first = np.searchsorted(stages, labels.stage, side="left")
        count = np.searchsorted(stages, labels.stage, side="right") - first
        parent = np.repeat(np.arange(len(labels)), count)
        offset = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
        strategy = strategies[np.repeat(first, count) + offset]
        stage, before = labels.stage[parent], labels.strategy[parent]
        reshard = self.chain.reshard[u - 1, before, strategy]
        price = 1 + self.potential.multipliers.time[stage]
        lower = labels.lower[parent] + price * reshard + self.potential.node[u, stage, strategy]
        # most extensions die here, so the other sums are formed for the rest only
        keep = np.flatnonzero(lower + self.potential.after[u, stage, strategy] <= self.upper + self.potential.constant)
        parent, strategy, stage, reshard = parent[keep], strategy[keep], stage[keep], reshard[keep]
        return self._finish(
            u,
            _Labels(
                stage=stage,
                origin=labels.origin[parent],
                strategy=strategy,
                parent=parent,
                time=labels.time[parent] + reshard + self.chain.time[u, stage, strategy],
                iteration=labels.iteration[parent] + self.chain.iteration[u, stage, strategy],
                memory=labels.memory[parent] + self.chain.memory[u, stage, strategy],
                lower=lower[keep],
            ),
        )

    def _finish(self, u: int, labels: _Labels) -> _Labels:
        """Drops what does not fit or cannot lead below `upper`; `lower` stays the distance so far."""
        least = labels.lower + self.potential.after[u, labels.stage, labels.strategy] - self.potential.constant
        keep = (
            (least <= self.upper)
            & np.isfinite(least)
            & (labels.memory <= self.chain.capacity[labels.stage])
            & (labels.time <= self.slowest)
        )
        for other in self.others:
            keep &= self._least(other, u, labels) <= self.upper
        return labels.take(np.flatnonzero(keep))

    def _least(self, potential: Potentials, u: int, labels: _Labels) -> FloatArray:
        """Bound of every label under other prices: those with memory to spare are judged best by a low price."""
        num_layers, _, num_strategies = self.chain.shape
        prices, entry = potential.multipliers, labels.origin % num_strategies
        first = labels.origin // num_strategies % num_layers
        least: FloatArray = (
            potential.start[first, labels.stage, entry]
            + (1 + prices.time[labels.stage]) * labels.time
            + prices.memory[labels.stage] * labels.memory
            + potential.after[u, labels.stage, labels.strategy]
            - potential.constant
        )
        if self.chain.has_iteration:
            least += prices.iteration[labels.stage] * labels.iteration
        return least

    def thin(self, u: int, labels: _Labels) -> _Labels:
        """The non-dominated labels of each start, entry and exit."""
        num_strategies = self.chain.shape[2]
        group = labels.origin * num_strategies + self.chain.out_class[u, labels.strategy]
        return labels.take(_front(group, labels, three=self.chain.has_iteration))


def grow_columns(
    chain: Chain,
    potential: Potentials,
    *,
    upper: float,
    others: tuple[Potentials, ...] = (),
    expired: Callable[[], bool] = lambda: False,
    max_labels: int = MAX_LABELS,
) -> Columns:
    """All columns that a plan below `upper` may use.

    Args:
        chain: candidate.
        potential: Lagrangian distances of the same candidate.
        others: distances under other prices; a label must pass all of them.
        upper: seconds; plans at or above it are of no interest.
        expired: asked after every layer; True stops the growth and the result says that it is incomplete.
        max_labels: of one layer; beyond it the ones with the least bound are kept.
    """
    growth = _Growth(
        chain=chain,
        potential=potential,
        others=others,
        upper=upper,
        slowest=upper / chain.num_microbatches if chain.num_microbatches > 1 else np.inf,
        alive=np.logical_and.reduce([p.through <= upper for p in (potential, *others)]),
    )
    parents, choices, done, complete = [], [], [], True
    labels: _Labels | None = None
    for u in range(chain.shape[0]):
        fresh = growth.begin(u)
        labels = fresh if labels is None else _joined(growth.extend(u, labels), fresh)
        labels = growth.thin(u, labels)
        if len(labels) > max_labels:
            least = labels.lower + potential.after[u, labels.stage, labels.strategy]
            labels, complete = labels.take(np.sort(np.argpartition(least, max_labels)[:max_labels])), False
        parents.append(labels.parent)
        choices.append(labels.strategy)
        done.append(_ended(chain, potential, u, labels, upper))
        if expired():
            complete = False
            break
    stage, first, last, entry, leave, time, iteration, lower, label = (np.concatenate(x) for x in zip(*done, strict=True))
    return Columns(
        stage=stage,
        first=first,
        last=last,
        entry=entry,
        leave=leave,
        time=time,
        iteration=iteration,
        lower=lower,
        label=label,
        parents=tuple(parents),
        choices=tuple(choices),
        complete=complete,
    )


def _ended(chain: Chain, potential: Potentials, u: int, labels: _Labels, upper: float) -> tuple[NDArray[np.generic], ...]:
    """Labels of layer u whose stage may end there, as fields of `Columns`."""
    num_layers, _, num_strategies = chain.shape
    lower = labels.lower + potential.exit[u, labels.stage, labels.strategy] - potential.constant
    index = np.flatnonzero((lower <= upper) & np.isfinite(lower))
    part = labels.take(index)
    start = part.origin // num_strategies
    return (
        part.stage,
        start % num_layers,
        np.full(len(index), u),
        part.origin % num_strategies,
        chain.out_class[u, part.strategy],
        part.time,
        part.iteration,
        lower[index],
        index,
    )
