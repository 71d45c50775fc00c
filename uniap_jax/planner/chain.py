"""A candidate as a chain: the arrays that the interval engine works on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import MEMORY_TOLERANCE, BoolArray, CostTables, FloatArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """Layers 0 → 1 → 2 ... of one candidate, with impossible entries at infinity.

    With one stage the step time is c·p + g, one sum: `time` then holds c·A + G, `iteration` is zero and
    `num_microbatches` is 1.

    Attributes:
        time: [layers, stages, strategies] seconds; infinite where the strategy is illegal or alone over capacity.
        iteration: [layers, stages, strategies] seconds per step.
        memory: [layers, stages, strategies] bytes.
        capacity: [stages] bytes, with the referee's slack.
        reshard: [layers - 1, strategies, strategies] seconds inside a stage.
        cross: [layers - 1, strategies, strategies] seconds between neighbouring stages.
        num_microbatches: c.
    """

    time: FloatArray
    iteration: FloatArray
    memory: FloatArray
    capacity: FloatArray
    reshard: FloatArray
    cross: FloatArray
    num_microbatches: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, stages, strategies."""
        num_layers, num_stages, num_strategies = self.time.shape
        return num_layers, num_stages, num_strategies

    @cached_property
    def has_iteration(self) -> bool:
        """Whether once-per-step costs exist at all; without them labels have one criterion less."""
        return bool(self.iteration.any())

    @cached_property
    def kinds(self) -> IntArray:
        """[layers] equal for layers with equal costs on all stages and equal edges on both sides."""
        known: dict[tuple[bytes, ...], int] = {}
        edges = [_edge_key(self.reshard[u], self.cross[u]) for u in range(self.shape[0] - 1)]
        rows = zip(self.time, self.iteration, self.memory, [b"", *edges], [*edges, b""], strict=True)
        keys = [(t.tobytes(), g.tobytes(), m.tobytes(), before, after) for t, g, m, before, after in rows]
        return np.array([known.setdefault(key, len(known)) for key in keys])

    @cached_property
    def out_class(self) -> IntArray:
        """[layers, strategies] strategies with equal costs towards the next layer share the smallest index."""
        return _classes([self.reshard, self.cross], axis=1, num_layers=self.shape[0], offset=0)

    @cached_property
    def in_class(self) -> IntArray:
        """[layers, strategies] strategies with equal costs from the previous stage share the smallest index."""
        return _classes([self.cross], axis=2, num_layers=self.shape[0], offset=1)


def _edge_key(reshard: FloatArray, cross: FloatArray) -> bytes:
    return reshard.tobytes() + cross.tobytes()


def _classes(matrices: list[FloatArray], *, axis: int, num_layers: int, offset: int) -> IntArray:
    num_strategies = matrices[0].shape[1]
    classes = np.zeros((num_layers, num_strategies), dtype=np.int64)
    known: dict[bytes, IntArray] = {}
    for edge in range(num_layers - 1):
        parts = [m[edge] if axis == 1 else m[edge].T for m in matrices]
        rows = np.ascontiguousarray(np.concatenate(parts, axis=1))
        key = rows.tobytes()
        if key not in known:
            first: dict[bytes, int] = {}
            known[key] = np.array([first.setdefault(row.tobytes(), k) for k, row in enumerate(rows)])
        classes[edge + offset] = known[key]
    return classes


def consecutive_edges(tables: CostTables) -> tuple[FloatArray, FloatArray]:
    """Costs of the edges u → u + 1, [layers - 1, strategies, strategies] inside a stage and between stages.

    Several edges between the same two layers add up, those that carry one tensor cross a boundary once; a missing
    edge costs nothing.
    """
    num_layers, _, k = tables.time_s.shape
    if tables.is_chain and all(v == u + 1 for u, v in tables.edges) and tables.edges == tuple(sorted(tables.edges)):
        return tables.reshard_s, tables.cross_stage_s
    reshard = np.zeros((num_layers - 1, k, k))
    cross = np.zeros((num_layers - 1, k, k))
    for group in tables.tensors:
        dearest: dict[int, FloatArray] = {}
        for e in group:
            u, v = tables.edges[e]
            if v == u + 1:
                reshard[u] += tables.reshard_s[e]
                dearest[u] = np.maximum(dearest.get(u, 0.0), tables.cross_stage_s[e])
        for u, matrix in dearest.items():
            cross[u] += matrix
    return reshard, cross


def chain_of(tables: CostTables) -> Chain:
    """The chain of a candidate; edges that skip layers are left out, so its optimum bounds the true one from below."""
    capacity = tables.capacity_bytes * (1 + MEMORY_TOLERANCE)
    memory, iteration = tables.memory_bytes, tables.iteration_time_s
    legal = tables.allowed[:, None, :] & (memory <= capacity[None, :, None])
    count = tables.candidate.num_microbatches
    reshard, cross = consecutive_edges(tables)
    time = tables.time_s
    if tables.candidate.num_stages == 1:
        time, reshard, count = count * time + iteration, reshard * count, 1
        iteration = np.broadcast_to(0.0, time.shape)
    chain = Chain(
        time=np.where(legal, time, np.inf),
        iteration=iteration,
        memory=memory,
        capacity=capacity,
        reshard=reshard,
        cross=cross,
        num_microbatches=count,
    )
    _drop_dominated(chain)
    return chain


def _drop_dominated(chain: Chain) -> None:
    """Makes strategies impossible that another one with the same edges beats or equals in every cost."""
    _, first, inverse = np.unique(chain.kinds, return_index=True, return_inverse=True)
    arrival = _classes([chain.reshard, chain.cross], axis=2, num_layers=chain.shape[0], offset=1)
    earlier = np.tri(chain.shape[2], k=-1, dtype=np.bool_)
    dominated = np.zeros((len(first), chain.shape[2]), dtype=np.bool_)
    for number, u in enumerate(first.tolist()):
        out, into = chain.out_class[u], arrival[u]
        better: BoolArray = (out[:, None] == out[None, :]) & (into[:, None] == into[None, :])
        strict: BoolArray = np.zeros_like(better)
        for table in (chain.time[u], chain.iteration[u], chain.memory[u]):
            no_worse = _no_worse(table)
            better = np.logical_and(better, no_worse)
            strict = np.logical_or(strict, ~no_worse.T)
        dominated[number] = (better & (strict | earlier)).any(axis=1)
    np.putmask(chain.time, np.broadcast_to(dominated[inverse][:, None, :], chain.shape), np.inf)


def _no_worse(table: FloatArray) -> BoolArray:
    """[k, other] whether the other strategy costs no more on any stage; table is [stages, strategies]."""
    no_worse: BoolArray = np.logical_and.reduce(table[:, None, :] <= table[:, :, None], axis=0)
    return no_worse


def has_spine(tables: CostTables) -> bool:
    """Whether every layer feeds the next one, so that stages are intervals of the trace order."""
    return {(u, u + 1) for u in range(tables.num_layers - 1)} <= set(tables.edges)
