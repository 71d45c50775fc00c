"""What stages read from outside, ready on their devices: parameters, state operands, micro-batches, their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from uniap_jax.core.jax_compat import Literal
from uniap_jax.core.jaxprs import variables
from uniap_jax.runtime.crossing import destination
from uniap_jax.runtime.homes import REPLICATED, Layout
from uniap_jax.runtime.presence import is_elsewhere, is_here, laid, on_devices, shards_of
from uniap_jax.runtime.programs import Program, as_function, build, known_mesh, shape_of
from uniap_jax.runtime.stage_programs import operand_sharding
from uniap_jax.runtime.stages import StageSpec
from uniap_jax.runtime.transfer import Move, view


class Leaves:
    """State leaves as any stage can read them: its own, its copy of what all hold, or sent by the stage that has it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._moves: dict[tuple[int, int], Move] = {}

    def shape(self, leaf: int, stage: int) -> jax.ShapeDtypeStruct:
        """The leaf as it arrives on a stage."""
        layout, home = self._layout, self._layout.leaves[leaf]
        value = layout.graph.step.state[leaf]
        if home.stage is None or home.stage == stage:
            return shape_of(value, layout.on(stage, home.spec))
        if (leaf, stage) not in self._moves:
            here = shape_of(value, layout.on(home.stage, home.spec))
            self._moves[leaf, stage] = Move(f"leaf_{leaf}_to_{stage}", here, layout.on(stage, home.spec))
        return shape_of(value, self._moves[leaf, stage].arrives)

    @property
    def moves(self) -> tuple[Move, ...]:
        """Of leaves that live on one stage and are read on another."""
        return tuple(self._moves.values())

    def of(self, state: Sequence[Any]) -> Held:
        """The leaves of one step."""
        return Held(self._layout, self._moves, state)


class Held:
    """State leaves of one step on the stages that read them; from `Leaves.of`, after all of them had their shape."""

    __slots__ = ("_layout", "_moves", "_shards", "_state", "_views")

    def __init__(self, layout: Layout, moves: Mapping[tuple[int, int], Move], state: Sequence[Any]) -> None:
        self._layout, self._moves, self._state = layout, moves, state
        self._shards: dict[int, dict[Any, Any]] = {}
        self._views: dict[tuple[int, int], Any] = {}

    def fetch(self, leaf: int, stage: int) -> Any:
        """The leaf on a stage's devices."""
        home = self._layout.leaves[leaf].stage
        if home == stage:
            return self._state[leaf]
        if home is not None:
            return self._moves[leaf, stage](self._state[leaf])
        if (leaf, stage) not in self._views:
            if leaf not in self._shards:
                self._shards[leaf] = shards_of(self._state[leaf])
            self._views[leaf, stage] = view(self._shards[leaf], self._layout.on(stage))
        return self._views[leaf, stage]


BEFORE = "_before"
"""How the names of programs end that make what a stage reads once per step."""


def whole_rows(layout: Layout, leaf: int, stage: int) -> NamedSharding:
    """Layout of a leaf of the whole batch on a stage: its rows over all devices where that divides."""
    mesh = layout.meshes[stage]
    divides = layout.graph.step.batch[leaf].shape[0] % mesh.size == 0
    return layout.on(stage, PartitionSpec(mesh.axis_names) if divides else REPLICATED)


def whole_leaf(layout: Layout, leaf: int, array: Any, target: NamedSharding) -> Any:
    """A leaf of the whole batch on a stage's devices, as far as they are this process's."""
    if is_elsewhere(array) and is_here(target.device_set):
        here = on_devices(array, known_mesh(target), f"batch leaf {layout.graph.step.batch[leaf].name}")
        return jax.device_put(here, target)
    return laid(array, target)


class Begin:
    """Parameters and state operands of one stage, computed from the state and the whole batch once per step.

    Args:
        layout: graph under its plan.
        spec: of the stage.
        leaves: how to read the state.
    """

    def __init__(self, layout: Layout, spec: StageSpec, leaves: Leaves) -> None:
        flow, graph, stage = layout.before, layout.graph, spec.stage
        self._layout, self._stage = layout, stage
        self._atoms: list[Any] = [flow.outvars[p] for p in spec.params if layout.params[p].stage == stage]
        self.params = tuple(p for p in spec.params if layout.params[p].stage == stage)
        self.operands = tuple(o for o in spec.operands if graph.operands[o].kind == "state")
        self._atoms += [flow.outvars[len(graph.params) + graph.operands[o].leaf] for o in self.operands]
        self._direct = {a: flow.sources[a][1] for a in variables(self._atoms) if a in flow.sources}
        shardings = [layout.on(stage, layout.params[p].stored) for p in self.params]
        shardings += [operand_sharding(layout, stage, o) for o in self.operands]
        # the stage takes a parameter as it is stored, an operand as its layers have it: not every leaf is stored so
        self._is_made = [
            isinstance(a, Literal)
            or a not in flow.sources
            or (i >= len(self.params) and not _lies(leaves.shape(self._direct[a], stage), s))
            for i, (a, s) in enumerate(zip(self._atoms, shardings, strict=True))
        ]
        self.shardings = [
            s if made else leaves.shape(self._direct[a], stage).sharding
            for a, s, made in zip(self._atoms, shardings, self._is_made, strict=True)
        ]
        self._inputs: list[tuple[str, int]] = []
        self._program: Program | None = None
        if any(self._is_made):
            jaxpr, inputs = flow.cone(a for a, made in zip(self._atoms, self._is_made, strict=True) if made)
            self._inputs = [flow.sources[v] for v in inputs if v in flow.sources]
            run = as_function(jaxpr, inputs, flow.consts)
            self._program = build(
                f"stage_{stage}{BEFORE}",
                lambda args: run(*args),
                [[leaves.shape(i, stage) if kind == "state" else self._rows(i) for kind, i in self._inputs]],
                mesh=layout.meshes[stage],
                outputs=[s for s, made in zip(shardings, self._is_made, strict=True) if made],
            )

    @property
    def programs(self) -> tuple[Program, ...]:
        """None or one."""
        return () if self._program is None else (self._program,)

    def __call__(self, state: Held, batch: Sequence[Any]) -> list[Any]:
        """Arrays for `params` at home here, then for `operands`."""
        made: Any = iter(())
        if self._program is not None:
            made = iter(self._program([self._fetch(kind, i, state, batch) for kind, i in self._inputs]))
        return [
            next(made) if is_made else state.fetch(self._direct[a], self._stage)
            for a, is_made in zip(self._atoms, self._is_made, strict=True)
        ]

    def _fetch(self, kind: str, i: int, state: Held, batch: Sequence[Any]) -> Any:
        if kind == "state":
            return state.fetch(i, self._stage)
        return whole_leaf(self._layout, i, batch[i], whole_rows(self._layout, i, self._stage))

    def _rows(self, leaf: int) -> jax.ShapeDtypeStruct:
        return shape_of(self._layout.graph.step.batch[leaf], whole_rows(self._layout, leaf, self._stage))


def _lies(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> bool:
    """Whether a leaf comes in a layout."""
    found = leaf.sharding
    assert found is not None
    return bool(found.is_equivalent_to(sharding, len(leaf.shape)))


class Feeder:
    """Rows of each micro-batch on the devices that read them.

    What a stage reads of the batch goes there once per step, all stages' in one call, each leaf as
    [micro-batches, rows, ...]; one program per stage takes the micro-batches apart there. `rows` has per stage the
    shapes of one micro-batch's rows; those of all are there for the whole step.

    Args:
        layout: graph under its plan.
        specs: of all stages.
        pool: compiles in the background.
    """

    def __init__(self, layout: Layout, specs: Sequence[StageSpec], pool: Executor | None = None) -> None:
        graph, c = layout.graph, layout.plan.num_microbatches
        kinds = [[graph.operands[o].kind for o in s.operands] for s in specs]
        read = [[o for o in s.operands if graph.operands[o].kind == "batch"] for s in specs]
        layouts = [[operand_sharding(layout, s.stage, o) for o in os] for s, os in zip(specs, read, strict=True)]
        self._count = c
        self.rows = [
            [shape_of(graph.operands[o], s) for o, s in zip(operands, found, strict=True)]
            for operands, found in zip(read, layouts, strict=True)
        ]
        self._leaves = [[graph.operands[o].leaf for o in operands] for operands in read]
        whole = [[_stacked_layout(s) for s in found] for found in layouts] if c > 1 else layouts
        self._targets = [s for found in whole for s in found]
        self._destinations = [destination(s) for s in self._targets]
        self._names = [v.name for v in graph.step.batch]
        self._cut = [
            build(
                f"stage_{spec.stage}_rows",
                lambda leaves: [[leaf[m] for leaf in leaves] for m in range(c)],
                [
                    [
                        jax.ShapeDtypeStruct((c, *graph.operands[o].shape), graph.operands[o].dtype, sharding=s)
                        for o, s in zip(operands, stacked, strict=True)
                    ]
                ],
                mesh=layout.meshes[spec.stage],
                outputs=[found] * c,
                pool=pool,
            )
            if operands and c > 1
            else None
            for spec, operands, found, stacked in zip(specs, read, layouts, whole, strict=True)
        ]
        self.positions = tuple(tuple(i for i, k in enumerate(found) if k == "batch") for found in kinds)
        self.state_positions = tuple(tuple(i for i, k in enumerate(found) if k == "state") for found in kinds)
        self.number_positions = tuple(tuple(i for i, k in enumerate(found) if k == "index") for found in kinds)
        self._places = [
            layout.on(s.stage) if own else None for s, own in zip(specs, self.number_positions, strict=True)
        ]

    @cached_property
    def numbers(self) -> list[list[Any]]:
        """Of the micro-batches, on the devices of each stage that reads them: there once the step runs, not before."""
        return [[laid(np.int32(m), p) for m in range(self._count)] if p is not None else [] for p in self._places]

    @property
    def programs(self) -> tuple[Program, ...]:
        """At most one per stage."""
        return tuple(p for p in self._cut if p is not None)

    def __call__(self, batch: Sequence[Any]) -> list[list[list[Any]]]:
        """Per stage and micro-batch the rows it reads, in the order of `positions`."""
        if not self._targets:
            return [[[] for _ in range(self._count)] for _ in self._leaves]
        wanted = [i for leaves in self._leaves for i in leaves]
        if jax.process_count() == 1:
            ready = {i: _stacked(batch[i], self._count) for i in sorted(set(wanted))}
            placed = iter(jax.device_put([ready[i] for i in wanted], self._destinations))
        else:
            placed = iter([self._placed(i, batch[i], s) for i, s in zip(wanted, self._targets, strict=True)])
        rows = []
        for leaves, cut in zip(self._leaves, self._cut, strict=True):
            whole = [next(placed) for _ in leaves]
            rows.append(cut(whole) if cut is not None else [list(whole) for _ in range(self._count)])
        return rows

    def _placed(self, number: int, leaf: Any, target: NamedSharding) -> Any:
        """A leaf on a stage's devices, as far as they are this process's."""
        if not is_here(target.device_set):
            return None
        if not is_elsewhere(leaf):
            return laid(_stacked(leaf, self._count), target)
        here = on_devices(leaf, known_mesh(target), f"batch leaf {self._names[number]}")
        return jax.device_put(_stacked(here, self._count), target)


def _stacked_layout(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _stacked(leaf: Any, count: int) -> Any:
    """[B, ...] to [count, B / count, ...]: a view of a numpy array; the leaf itself where it is not cut."""
    if count == 1:
        return leaf
    shape = (count, leaf.shape[0] // count, *leaf.shape[1:])
    return _reshape(leaf, shape) if isinstance(leaf, jax.Array) else np.reshape(leaf, shape)


_reshape = jax.jit(lambda leaf, shape: leaf.reshape(shape), static_argnums=1)


class Shared:
    """Parameters that several stages read: sent from home once per step, gradients sent back.

    Args:
        layout: graph under its plan.
        home: layout in which each parameter lies at home.
        specs: of all stages.
    """

    def __init__(self, layout: Layout, home: dict[int, NamedSharding], specs: Sequence[StageSpec]) -> None:
        self.there: dict[tuple[int, int], Move] = {}
        for spec in specs:
            for p in spec.params:
                if layout.params[p].stage != spec.stage:
                    local = _stored(layout, spec, p)
                    self.there[p, spec.stage] = Move(
                        f"parameter_{p}_to_stage_{spec.stage}", shape_of(layout.graph.params[p], home[p]), local
                    )


def _stored(layout: Layout, spec: StageSpec, param: int) -> NamedSharding:
    """Layout of a parameter between steps as the first layer of a stage would have it."""
    for i in spec.layers:
        layer = layout.graph.layers[i]
        if param in layer.params:
            return layout.on(spec.stage, layout.layers[i].stored[layer.params.index(param)])
    raise AssertionError(f"stage {spec.stage} does not read parameter {param}")
