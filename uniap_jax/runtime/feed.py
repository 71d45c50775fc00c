"""What stages read from outside, ready on their devices: parameters, state operands, micro-batches, their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from uniap_jax.core.jax_compat import Literal
from uniap_jax.core.jaxprs import variables
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.programs import Program, as_function, build, shape_of
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

    def fetch(self, state: Sequence[Any], leaf: int, stage: int) -> Any:
        """The leaf on a stage's devices."""
        home = self._layout.leaves[leaf].stage
        if home == stage:
            return state[leaf]
        if home is None:
            return view(state[leaf], self._layout.on(stage))
        self.shape(leaf, stage)
        return self._moves[leaf, stage](state[leaf])


class Begin:
    """Parameters and state operands of one stage, computed from the state once per step.

    Args:
        layout: graph under its plan.
        spec: of the stage.
        leaves: how to read the state.
    """

    def __init__(self, layout: Layout, spec: StageSpec, leaves: Leaves) -> None:
        flow, graph, stage = layout.before, layout.graph, spec.stage
        self._leaves, self._stage = leaves, stage
        self._atoms: list[Any] = [flow.outvars[p] for p in spec.params if layout.params[p].stage == stage]
        self.params = tuple(p for p in spec.params if layout.params[p].stage == stage)
        self.operands = tuple(o for o in spec.operands if graph.operands[o].kind == "state")
        self._atoms += [flow.outvars[len(graph.params) + graph.operands[o].leaf] for o in self.operands]
        self._direct = {a: flow.sources[a][1] for a in variables(self._atoms) if a in flow.sources}
        self._is_made = [isinstance(a, Literal) or a not in flow.sources for a in self._atoms]
        shardings = [layout.on(stage, layout.params[p].stored) for p in self.params]
        shardings += [operand_sharding(layout, stage, o) for o in self.operands]
        self.shardings = [
            s if made else leaves.shape(self._direct[a], stage).sharding
            for a, s, made in zip(self._atoms, shardings, self._is_made, strict=True)
        ]
        self._inputs: list[int] = []
        self._program: Program | None = None
        if any(self._is_made):
            jaxpr, inputs = flow.cone(a for a, made in zip(self._atoms, self._is_made, strict=True) if made)
            self._inputs = [flow.sources[v][1] for v in inputs if v in flow.sources]
            run = as_function(jaxpr, inputs, flow.consts)
            self._program = build(
                f"stage_{stage}_before",
                lambda args: run(*args),
                [[leaves.shape(i, stage) for i in self._inputs]],
                mesh=layout.meshes[stage],
                outputs=[s for s, made in zip(shardings, self._is_made, strict=True) if made],
            )

    @property
    def programs(self) -> tuple[Program, ...]:
        """None or one."""
        return () if self._program is None else (self._program,)

    def __call__(self, state: Sequence[Any]) -> list[Any]:
        """Arrays for `params` at home here, then for `operands`."""
        made: Any = iter(())
        if self._program is not None:
            made = iter(self._program([self._leaves.fetch(state, i, self._stage) for i in self._inputs]))
        return [
            next(made) if is_made else self._leaves.fetch(state, self._direct[a], self._stage)
            for a, is_made in zip(self._atoms, self._is_made, strict=True)
        ]


class Feeder:
    """Rows of each micro-batch on the devices that read them.

    Args:
        layout: graph under its plan.
        specs: of all stages.
    """

    def __init__(self, layout: Layout, specs: Sequence[StageSpec]) -> None:
        graph, c = layout.graph, layout.plan.num_microbatches
        self._count = c
        self._leaves = [
            [graph.operands[o].leaf for o in spec.operands if graph.operands[o].kind == "batch"] for spec in specs
        ]
        self._targets = [
            operand_sharding(layout, s.stage, o) for s in specs for o in s.operands if graph.operands[o].kind == "batch"
        ]
        self._index = [
            [jax.device_put(np.int32(i), layout.on(s.stage)) for i in range(c)]
            if any(graph.operands[o].kind == "index" for o in s.operands)
            else []
            for s in specs
        ]
        self._order = [[graph.operands[o].kind for o in s.operands] for s in specs]

    def split(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Every leaf as its micro-batches: views of numpy arrays, slices where the array lies."""
        if self._count == 1:
            return [[leaf] for leaf in batch]
        return [_pieces(leaf, self._count) for leaf in batch]

    def place(self, pieces: Sequence[Sequence[Any]], microbatch: int) -> list[list[Any]]:
        """Per stage its rows of one micro-batch, in one call."""
        rows = [pieces[leaf][microbatch] for leaves in self._leaves for leaf in leaves]
        placed = iter(jax.device_put(rows, self._targets) if rows else [])
        return [[next(placed) for _ in leaves] for leaves in self._leaves]

    def operands(self, rows: Sequence[Any], stage: int, microbatch: int, state: Sequence[Any]) -> list[Any]:
        """Operands of a stage for one micro-batch, in the stage's order.

        Args:
            rows: of the batch, from `place`.
            stage: which.
            microbatch: its number.
            state: those that `Begin` made.
        """
        placed, made = iter(rows), iter(state)
        return [
            next(made) if kind == "state" else next(placed) if kind == "batch" else self._index[stage][microbatch]
            for kind in self._order[stage]
        ]


def _pieces(leaf: Any, count: int) -> list[Any]:
    rows = leaf.shape[0] // count
    if isinstance(leaf, jax.Array):
        return list(_split(leaf, count))
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]


def _split_rows(leaf: jax.Array, count: int) -> list[jax.Array]:
    rows = leaf.shape[0] // count
    return [leaf[i * rows : (i + 1) * rows] for i in range(count)]


_split = jax.jit(_split_rows, static_argnums=1)


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
