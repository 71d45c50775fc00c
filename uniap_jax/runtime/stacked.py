"""A pipeline of stages whose state the user has in stacked leaves: taken apart before the step, put together after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from uniap_jax.core.graph import LayerGraph
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.pipeline import Pipeline
from uniap_jax.runtime.presence import shards_of
from uniap_jax.runtime.programs import Program, build, known_mesh
from uniap_jax.runtime.shelves import Shelf, assembled, unstacked


class StackedPipeline(Pipeline):
    """A pipeline whose state the user has in stacked leaves.

    Args:
        graph: with the user's leaves.
        layout: of the graph by rows.
        shelves: from `shelves`.
        donated: of the user's leaves, those whose buffers are given up.
    """

    def __init__(self, graph: LayerGraph, layout: Layout, shelves: Sequence[Shelf], donated: Sequence[int]) -> None:
        rows, self._shelves, self._given = graph.step.by_rows, tuple(shelves), frozenset(donated)
        assert rows is not None
        self._groups, self._replaces = rows.outputs, graph.step.output_leaf
        replaced = {leaf for leaf in layout.graph.step.output_leaf if leaf is not None}
        # rows are this class's own arrays: the update takes their buffers whoever keeps the leaf
        own = {i for k, s in enumerate(shelves) for i in s.rows if s.is_stacked or k in self._given}
        super().__init__(layout, sorted(replaced & own))
        self._programs: dict[tuple[Any, ...], tuple[Program, Program]] = {}

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program, compiled at the first use."""
        for shelf in self._shelves:
            for number in range(len(shelf.stages) if shelf.is_stacked else 0):
                self._both(shelf, number)
        return (*super().programs, *(p for pair in self._programs.values() for p in pair))

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed state leaves and any batch leaves."""
        rows: list[Any] = []
        for k, (shelf, leaf) in enumerate(zip(self._shelves, state, strict=True)):
            rows += self._apart(shelf, leaf) if shelf.is_stacked else [leaf]
            if shelf.is_stacked and k in self._given:
                leaf.delete()  # its programs are queued and hold what they read
        outputs = super().__call__(rows, batch)
        del rows
        return [self._together(group, leaf, outputs) for group, leaf in zip(self._groups, self._replaces, strict=True)]

    def _apart(self, shelf: Shelf, leaf: Any) -> list[Any]:
        shards, rows = shards_of(leaf), list[Any]()
        for number, part in enumerate(shelf.part):
            mine = [shards[d] for d in known_mesh(part).devices.flat]
            shape = (shelf.each, *shelf.value.shape[1:])
            rows += self._both(shelf, number)[0](jax.make_array_from_single_device_arrays(shape, part, mine))
        return rows

    def _together(self, group: tuple[int, ...], leaf: int | None, outputs: list[Any]) -> Any:
        if len(group) == 1 or leaf is None:
            return outputs[group[0]]
        shelf, shards = self._shelves[leaf], {}
        for number in range(len(shelf.stages)):
            first, last = shelf.bounds(number)
            shards.update(shards_of(self._both(shelf, number)[1]([outputs[i] for i in group[first:last]])))
        for i in group:
            outputs[i] = None  # memory of one leaf is all that is held twice
        return assembled(shelf, shards)

    def _both(self, shelf: Shelf, number: int) -> tuple[Program, Program]:
        """The programs that take one stage's part of a leaf apart and put it together."""
        part, count = shelf.part[number], shelf.each
        shape = (count, *shelf.value.shape[1:])
        key = (part, shape, shelf.value.dtype)
        if key not in self._programs:
            mesh, row = known_mesh(part), NamedSharding(part.mesh, PartitionSpec(*part.spec[1:]))
            whole = jax.ShapeDtypeStruct(shape, shelf.value.dtype, sharding=part)
            rows = [jax.ShapeDtypeStruct(shape[1:], shelf.value.dtype, sharding=row)] * count
            name = f"stage_{shelf.stages[number]}"
            self._programs[key] = (
                build(f"{name}_apart", lambda leaf: unstacked(leaf, count), [whole], mesh=mesh, outputs=[row] * count),
                build(f"{name}_together", jnp.stack, [rows], mesh=mesh, outputs=part),
            )
        return self._programs[key]
