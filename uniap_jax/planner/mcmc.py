"""FlexFlow's way: random moves from a plan that fits, worse ones accepted now and then (Jia et al., MLSys 2019)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Assignment, CostTables, FloatArray, evaluate, step_time
from uniap_jax.planner.baselines import balanced_cuts
from uniap_jax.planner.infeasible import leanest

MOVES_PER_LAYER = 150
POLISH_PER_LAYER = 30
SEED = 0


@dataclass(slots=True, eq=False)
class _State:
    """A plan with its sums, changed in place; a move touches the sums of one layer and its edges only."""

    tables: CostTables
    stage: list[int]
    strategy: list[int]
    time: FloatArray
    iteration: FloatArray
    memory: FloatArray
    link: FloatArray
    touching: list[list[int]]

    def shift(self, layer: int, sign: float) -> None:
        """Adds (1) or takes away (-1) what the layer and its edges cost."""
        i, k, t = self.stage[layer], self.strategy[layer], self.tables
        self.time[i] += sign * t.time_s[layer, i, k]
        self.iteration[i] += sign * t.iteration_time_s[layer, i, k]
        self.memory[i] += sign * t.memory_bytes[layer, i, k]
        for e in self.touching[layer]:
            u, v = t.edges[e]
            a, b = self.stage[u], self.stage[v]
            if a == b:
                self.time[a] += sign * t.reshard_s[e, self.strategy[u], self.strategy[v]]
            else:
                self.link[b - 1] += sign * t.cross_stage_s[e, self.strategy[u], self.strategy[v]]
                self.link[a : b - 1] += sign * t.relay_s[e, self.strategy[u]]

    def cost(self) -> float:
        """Step time; infinite where a stage is too full."""
        if (self.memory > self.tables.capacity_bytes * (1 + MEMORY_TOLERANCE)).any():
            return math.inf
        return step_time(self.time, self.link, self.iteration, self.tables.candidate.num_microbatches)


def _start(tables: CostTables) -> Assignment | None:
    """Memory-balanced stages with the leanest strategies."""
    least = leanest(tables)
    if not np.isfinite(least).all():
        return None
    cuts = balanced_cuts(least / tables.capacity_bytes, tables.candidate.num_stages)
    if cuts is None:
        return None
    stage = [i for i, (a, b) in enumerate(itertools.pairwise(cuts)) for _ in range(a, b)]
    lean = np.where(tables.allowed[:, None, :], tables.memory_bytes, np.inf)
    return Assignment(stage=tuple(stage), strategy=tuple(int(lean[u, i].argmin()) for u, i in enumerate(stage)))


def _state(tables: CostTables, plan: Assignment) -> _State | None:
    touching: list[list[int]] = [[] for _ in plan.stage]
    for e, (u, v) in enumerate(tables.edges):
        touching[u].append(e)
        touching[v].append(e)
    price = evaluate(tables, plan)
    if not price.feasible:
        return None
    time, iteration, memory = (
        np.array(x) for x in (price.stage_time_s, price.iteration_time_s, price.stage_memory_bytes)
    )
    links = _links_edge_by_edge(tables, plan)
    return _State(tables, list(plan.stage), list(plan.strategy), time, iteration, memory, links, touching)


def _links_edge_by_edge(tables: CostTables, plan: Assignment) -> FloatArray:
    return np.array(evaluate(replace(tables, edge_tensor=None), plan).link_time_s)


def mcmc(tables: CostTables) -> Assignment | None:
    """The best plan seen along a fixed number of random moves; the same for the same tables.

    A move gives one layer another legal strategy, or moves a cut by one layer. Links are summed edge by edge while
    moving (shared tensors are priced right by the referee only).
    """
    start = _start(tables)
    return None if start is None else _wander(tables, start, MOVES_PER_LAYER * tables.num_layers, heat=0.01)


def polish(tables: CostTables, plan: Assignment) -> Assignment:
    """A plan no worse than the given one, by moves that are taken only where they help."""
    better = _wander(tables, plan, POLISH_PER_LAYER * tables.num_layers, heat=0.0)
    if better is None or evaluate(tables, better).step_time_s > evaluate(tables, plan).step_time_s:
        return plan
    return better


def _wander(tables: CostTables, start: Assignment, moves: int, *, heat: float) -> Assignment | None:
    """The best plan seen; a move that is worse by `heat` of the best is taken with probability 1/e."""
    state = _state(tables, start)
    if state is None:
        return None
    random = np.random.default_rng(SEED)
    legal = [np.flatnonzero(row) for row in tables.allowed]
    cost = best_cost = state.cost()
    best = (tuple(state.stage), tuple(state.strategy))
    for _ in range(moves):
        move = _propose(state, random, legal)
        if move is None:
            continue
        layer, new_stage, new_strategy = move
        old = state.stage[layer], state.strategy[layer]
        saved = [x.copy() for x in (state.time, state.iteration, state.memory, state.link)]
        state.shift(layer, -1.0)
        state.stage[layer], state.strategy[layer] = new_stage, new_strategy
        state.shift(layer, 1.0)
        new = state.cost()
        if new <= cost or (heat > 0 and random.random() < math.exp(-(new - cost) / (heat * best_cost))):
            cost = new
            if cost < best_cost:
                best_cost, best = cost, (tuple(state.stage), tuple(state.strategy))
        else:
            state.stage[layer], state.strategy[layer] = old
            state.time, state.iteration, state.memory, state.link = saved
    return Assignment(stage=best[0], strategy=best[1])


def _propose(
    state: _State, random: np.random.Generator, legal: list[np.ndarray[tuple[int], np.dtype[np.intp]]]
) -> tuple[int, int, int] | None:
    """A layer with its new stage and strategy, or None where the drawn move is impossible."""
    num_layers, stage = len(state.stage), state.stage
    layer = int(random.integers(num_layers))
    if random.random() < 0.75:
        return layer, stage[layer], int(random.choice(legal[layer]))
    if (
        layer + 1 < num_layers
        and stage[layer + 1] == stage[layer] + 1
        and layer > 0
        and stage[layer - 1] == stage[layer]
    ):
        return layer, stage[layer] + 1, state.strategy[layer]
    if (
        layer > 0
        and stage[layer - 1] == stage[layer] - 1
        and layer + 1 < num_layers
        and stage[layer + 1] == stage[layer]
    ):
        return layer, stage[layer] - 1, state.strategy[layer]
    return None
