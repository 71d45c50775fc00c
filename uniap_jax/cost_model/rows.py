"""Costs of layers that were unfolded from loops: their parameters are rows of one array of the state.

One array has one layout. So these layers store what is theirs alike, and stages hold equally many of them, in order;
what they keep for the backward may differ. Each way to store is a candidate of its own, so that the search stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from uniap_jax.core.costs import ANY_STAGE, BoolArray, Candidate, CostTables, FloatArray, kept_on
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.sharding import layer_sharding
from uniap_jax.core.strategy import Strategy, storage
from uniap_jax.cost_model.assemble import TableModel

PASSES = 2.0
"""Times that rows are read and written beside the update: taken apart before the step, put together after it."""

Storage = tuple[PartitionSpec, PartitionSpec]


class RowLayers:
    """The layers that read rows, and what a plan must keep for the rows of an array to stay one.

    Args:
        graph: by rows.
        params: per stacked parameter the positions of its rows.
    """

    def __init__(self, graph: LayerGraph, params: Sequence[tuple[int, ...]]) -> None:
        self._graph, self._params = graph, tuple(params)
        self._readers: dict[int, tuple[Layer, int]] = {}
        for layer in reversed(graph.layers):
            self._readers.update({p: (layer, i) for i, p in enumerate(layer.params)})
        self.params = frozenset(p for group in params for p in group)
        self.layers = tuple(sorted({self._readers[p][0].index for p in self.params if p in self._readers}))
        self._stored: dict[tuple[str, Strategy], tuple[Storage, ...] | None] = {}

    def stage_of(self, num_stages: int) -> tuple[int, ...] | None:
        """Per layer the stage that it must lie on, ANY_STAGE where it may lie on any; None where it cannot be so."""
        found = [ANY_STAGE] * len(self._graph.layers)
        for group in self._params if num_stages > 1 else ():
            readers = sorted(self._readers[p][0].index for p in group if p in self._readers)
            if len(readers) < len(group) or len(group) % num_stages:
                return None
            for k, u in enumerate(readers):
                stage = k * num_stages // len(group)
                if found[u] not in (ANY_STAGE, stage):
                    return None
                found[u] = stage
        wanted = [stage for stage in found if stage != ANY_STAGE]
        return tuple(found) if wanted == sorted(wanted) else None

    def agree(self, strategy: Strategy) -> bool:
        """Whether all rows of every array would be stored alike under a strategy."""
        for group in self._params:
            stored = {self._storage(*self._readers[p], strategy) for p in group if p in self._readers}
            if len(stored - {None}) > 1:
                return False
        return True

    def _storage(self, layer: Layer, position: int, strategy: Strategy) -> Storage | None:
        key = (layer.signature, strategy)
        if key not in self._stored:
            try:
                found = layer_sharding(self._graph, layer, strategy)
                self._stored[key] = tuple(zip(found.stored, found.optimizer, strict=True))
            except StrategyError:
                self._stored[key] = None
        stored = self._stored[key]
        return None if stored is None else stored[position]


class RowModel(TableModel):
    """A cost model of a graph whose loops over layers were unfolded.

    Args:
        graph: with a step by rows.
        *machine: as of `TableModel`.
        **options: likewise.
    """

    def __init__(self, graph: LayerGraph, *machine: Any, **options: Any) -> None:
        rows = graph.step.by_rows
        assert rows is not None
        super().__init__(graph.by_rows, *machine, **options)
        self._rows = RowLayers(self.graph, rows.params)
        self._last: CostTables | None = None

    def candidates(self) -> tuple[Candidate, ...]:
        """Every P that the loops divide and every c that divides the batch, with every way to store rows."""
        ways = {
            p: dict.fromkeys(map(storage, self.strategies(p))) for p in {c.num_stages for c in super().candidates()}
        }
        return tuple(
            replace(c, storage=way)
            for c in super().candidates()
            if c.num_stages == 1 or (self.cluster.num_hosts == 1 and self._rows.stage_of(c.num_stages) is not None)
            for way in ways[c.num_stages]
        )

    def tables(self, candidate: Candidate) -> CostTables:
        """The tables of one candidate; without a way to store rows, those of all ways.

        Raises:
            ValueError: the stages divide neither devices nor loops, or the micro-batches do not divide the batch.
        """
        stage_of = self._rows.stage_of(candidate.num_stages)
        if stage_of is None:
            raise ValueError(f"{candidate.num_stages} stages do not divide the loops whose layers were unfolded")
        whole = replace(candidate, storage="")
        if self._last is None or self._last.candidate != whole:
            self._last = super().tables(whole)
        tables, ways = self._last, self.strategies(candidate.num_stages)
        legal = [candidate.storage in ("", storage(s)) and self._rows.agree(replace(s, keep="all")) for s in ways]
        allowed = tables.allowed.copy()
        allowed[list(self._rows.layers)] &= np.array(legal, dtype=np.bool_)
        changed = replace(tables, candidate=candidate, allowed=allowed)
        if candidate.num_stages > 1:
            return kept_on(changed, stage_of)
        return replace(changed, memory_bytes=changed.memory_bytes + self._copies(allowed, ways)[:, None, :])

    def _copies(self, allowed: BoolArray, strategies: Sequence[Strategy]) -> FloatArray:
        """[layers, strategies] bytes of a layer's rows beside the array that they are taken from.

        With one stage both are there at once, in one program. With several a leaf is given up before the next one is
        taken apart, and nothing else of the step is there yet.
        """
        copies = np.zeros(allowed.shape)
        for u, k in zip(*np.nonzero(allowed), strict=True):
            if u in self._rows.layers:
                layer = self.graph.layers[u]
                shares = self.shares(layer, strategies[k]).stored
                own = zip(layer.params, shares, strict=True)
                copies[u, k] = sum(self.state.param[p] * share for p, share in own if p in self._rows.params)
        return copies

    def with_strategy(self, strategy: Strategy) -> TableModel:
        """The same model, whose tables also list strategies of this one's ZeRO stage and of what it keeps."""
        wider = super().with_strategy(strategy)
        assert isinstance(wider, RowModel)
        wider._last = None
        return wider

    def equal_candidates(self) -> tuple[Candidate, ...]:
        """None: one program takes the loop as it is."""
        return ()

    def equal_tables(self, candidate: Candidate) -> EqualTables:
        """Refused.

        Raises:
            StrategyError: always; says what to do.
        """
        raise StrategyError(
            "one program for equal stages takes a loop over layers as it is, and here it was unfolded; trace with "
            "unfold_scans=False",
            num_stages=candidate.num_stages,
        )

    def update_s(self, layer: Layer, strategy: Strategy) -> float:
        """Optimizer update, with rows taken apart and put together."""
        moved, shares = 0.0, self.shares(layer, strategy)
        for i, p in enumerate(layer.params):
            if p in self._rows.params:
                moved += self.state.param[p] * shares.stored[i] + self.state.optimizer[p] * shares.optimizer[i]
        rate = self.update_bytes_per_s
        return super().update_s(layer, strategy) + 2.0 * PASSES * moved / rate
