"""The problem as UniAP writes it, products linearised by McCormick (F1): a reference, and an oracle on small cases.

P_ui and S_uk are binary; a product of n binaries becomes a variable x >= their sum - (n - 1). Costs are not negative
and everything is minimised, so the lower envelopes suffice; memory, too, only pushes from below.
"""

from __future__ import annotations

import math

import numpy as np

from uniap_jax.core.costs import Assignment, CostTables
from uniap_jax.planner.infeasible import GIB
from uniap_jax.planner.mip_model import MipModel


class LiteralModel:
    """F1 of one candidate, milliseconds and GiB."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self.model = MipModel()
        num_layers, num_stages, num_strategies = tables.time_s.shape
        self.stage = [[self.model.add(whole=True) for _ in range(num_stages)] for _ in range(num_layers)]
        self.strategy = [
            [self.model.add(whole=True, upper=float(tables.allowed[u, k])) for k in range(num_strategies)]
            for u in range(num_layers)
        ]
        self.slowest = self.model.add(cost=float(tables.candidate.num_microbatches - 1), upper=math.inf)
        self.iteration = self.model.add(cost=1.0, upper=math.inf)
        self.time: list[dict[int, float]] = [{} for _ in range(num_stages)]
        self.once: list[dict[int, float]] = [{} for _ in range(num_stages)]
        self.memory: list[dict[int, float]] = [{} for _ in range(num_stages)]
        self.link: list[dict[int, float]] = [{} for _ in range(num_stages - 1)]
        self._add_order()
        self._add_layers()
        for group in tables.tensors:
            self._add_tensor(group)
        self._add_maxima()

    def _product(self, factors: list[int], cost: float) -> int:
        """A variable at least the product of binaries."""
        x = self.model.add(cost=cost)
        self.model.add_row([x, *factors], [1.0] + [-1.0] * len(factors), ">", 1.0 - len(factors))
        return x

    def _add_order(self) -> None:
        """One stage and one strategy per layer, no empty stage, no edge backwards."""
        num_stages = self.tables.candidate.num_stages
        for row in (*self.stage, *self.strategy):
            self.model.add_row(row, [1.0] * len(row), "=", 1.0)
        for i in range(num_stages):
            self.model.add_row([row[i] for row in self.stage], [1.0] * len(self.stage), ">", 1.0)
        index = [float(i) for i in range(num_stages)]
        for u, v in self.tables.edges:
            self.model.add_row([*self.stage[v], *self.stage[u]], [*index, *(-i for i in index)], ">", 0.0)

    def _add_layers(self) -> None:
        t = self.tables
        for u, i, k in np.ndindex(*t.time_s.shape):
            if not t.allowed[u, k]:
                continue
            cost = float(t.time_s[u, i, k]) * 1e3
            x = self._product([self.stage[u][i], self.strategy[u][k]], cost)
            self.time[i][x] = cost
            self.memory[i][x] = float(t.memory_bytes[u, i, k]) / GIB
            self.once[i][x] = float(t.iteration_time_s[u, i, k]) * 1e3

    def _add_tensor(self, group: tuple[int, ...]) -> None:
        """Edges of one tensor: resharding inside stages, and its price at every boundary."""
        t, num_stages = self.tables, self.tables.candidate.num_stages
        shared = [self.model.add(cost=1.0, upper=math.inf) for _ in self.link]
        for e in group:
            u, v = t.edges[e]
            at: list[dict[int, float]] = [{} for _ in self.link]
            for i in range(num_stages):
                for j in range(i, num_stages):
                    self._add_pair(e, u, v, i, j, at)
            for b, terms in enumerate(at):
                if terms:
                    self.model.add_row([shared[b], *terms], [1.0, *(-c for c in terms.values())], ">", 0.0)
        for b, w in enumerate(shared):
            self.link[b][w] = 1.0

    def _add_pair(self, e: int, u: int, v: int, i: int, j: int, at: list[dict[int, float]]) -> None:
        t = self.tables
        for k in np.flatnonzero(t.allowed[u]).tolist():
            for m in np.flatnonzero(t.allowed[v]).tolist():
                price = float((t.reshard_s if i == j else t.cross_stage_s)[e, k, m]) * 1e3
                relay = float(t.relay_s[e, k]) * 1e3 if j > i + 1 else 0.0
                if price == 0.0 and relay == 0.0:
                    continue
                factors = [self.stage[u][i], self.stage[v][j], self.strategy[u][k], self.strategy[v][m]]
                x = self._product(factors, price if i == j else 0.0)
                if i == j:
                    self.time[i][x] = price
                for b in range(i, j):
                    at[b][x] = price if b == j - 1 else relay

    def _add_maxima(self) -> None:
        for i, room in enumerate(self.tables.capacity_bytes.tolist()):
            self.model.add_row([*self.memory[i]], [*self.memory[i].values()], "<", room / GIB)
        for terms in (*self.time, *self.link):
            self.model.add_row([self.slowest, *terms], [1.0, *(-c for c in terms.values())], ">", 0.0)
        for terms in self.once:
            self.model.add_row([self.iteration, *terms], [1.0, *(-c for c in terms.values())], ">", 0.0)

    def assignment(self, values: tuple[float, ...]) -> Assignment | None:
        """Reads the answer; None where a layer does not have exactly one stage and strategy."""
        picks = []
        for rows in (self.stage, self.strategy):
            chosen = [[n for n, x in enumerate(row) if values[x] > 0.5] for row in rows]
            if any(len(c) != 1 for c in chosen):
                return None
            picks.append(tuple(c[0] for c in chosen))
        return Assignment(stage=picks[0], strategy=picks[1])
