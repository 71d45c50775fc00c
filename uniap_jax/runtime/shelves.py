"""Stacked leaves of the state under a plan that treats their rows as leaves of their own.

The user's leaf stays one array [L, ...]. With one stage its rows are taken apart inside the program. With several, the
stages that own rows hold equally many, in order, so the leaf lies on all of them with its first dimension split over
their axis `stage`: what a stage holds of it is an array of the stage as it is, which small programs take apart before
the step and put together after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import LayerGraph, Value
from uniap_jax.runtime.homes import Layout, in_equal_parts
from uniap_jax.runtime.presence import shards_of
from uniap_jax.runtime.programs import known_mesh
from uniap_jax.runtime.state import check_created, loose


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shelf:
    """Where one leaf of the user's state lies.

    Attributes:
        value: the leaf.
        rows: positions of its rows among the leaves by rows; one where it is whole.
        sharding: of the leaf.
        stages: that hold its rows, in order; None stands for all devices.
        part: layout of one stage's share of it.
    """

    value: Value
    rows: tuple[int, ...]
    sharding: NamedSharding
    stages: tuple[int | None, ...]
    part: tuple[NamedSharding, ...]

    @property
    def is_stacked(self) -> bool:
        """Whether it is taken apart."""
        return len(self.rows) > 1

    @property
    def each(self) -> int:
        """Rows of one stage."""
        return len(self.rows) // len(self.stages)

    def bounds(self, number: int) -> tuple[int, int]:
        """First row of the `number`-th stage's share, and the one after its last."""
        return number * self.each, (number + 1) * self.each


def shelves(graph: LayerGraph, layout: Layout) -> tuple[Shelf, ...]:
    """Where the user's leaves lie under a plan.

    Args:
        graph: with the user's leaves.
        layout: of the graph by rows.

    Raises:
        StrategyError: rows of a leaf that are stored in different ways, or unequally many on the stages.
    """
    rows = graph.step.by_rows
    assert rows is not None
    return tuple(_shelf(layout, v, group) for v, group in zip(graph.step.state, rows.leaves, strict=True))


def _shelf(layout: Layout, value: Value, group: tuple[int, ...]) -> Shelf:
    homes = [layout.leaves[i] for i in group]
    stages = tuple(dict.fromkeys(h.stage for h in homes))
    if len(group) == 1:
        sharding = layout.on(homes[0].stage, homes[0].spec)
        return Shelf(value=value, rows=group, sharding=sharding, stages=stages, part=(sharding,))
    specs = list(dict.fromkeys(h.spec for h in homes))
    if len(specs) > 1:
        raise StrategyError(
            f"the rows of {value.name} would be stored in {len(specs)} ways ({', '.join(map(str, specs[:3]))}), but "
            "they are one array: give the layers of an unfolded loop strategies that split parameters alike (what they "
            "keep for the backward may differ)",
            leaf=value.name,
        )
    if not in_equal_parts([h.stage for h in homes]):
        told = ", ".join(f"{[h.stage for h in homes].count(s)} on stage {s}" for s in stages if s is not None)
        raise StrategyError(
            f"the {len(group)} rows of {value.name} lie unequally on the stages ({told}), but they are one array: give "
            "every stage as many layers of an unfolded loop, in order",
            leaf=value.name,
        )
    spec = PartitionSpec(None, *specs[0])
    part = tuple(layout.on(stage, spec) for stage in stages)
    return Shelf(value=value, rows=group, sharding=_joined(value, stages, part), stages=stages, part=part)


def _joined(value: Value, stages: Sequence[int | None], part: Sequence[NamedSharding]) -> NamedSharding:
    """The layout of a leaf whose parts lie on several stages."""
    if len(part) == 1:
        return part[0]
    meshes = [known_mesh(s) for s in part]
    devices = [m.devices for m in meshes]
    if len({m.devices.shape for m in meshes}) > 1 or len({d.id for m in devices for d in m.flat}) < sum(
        m.size for m in devices
    ):
        raise StrategyError(
            f"the rows of {value.name} lie on stages {list(stages)} of other sizes or on the same devices, but they "
            "are one array: give every stage as many devices of its own, or trace with unfold_scans=False",
            leaf=value.name,
        )
    mesh = Mesh(np.stack(devices), ("stage", *meshes[0].axis_names))
    return NamedSharding(mesh, PartitionSpec("stage", *part[0].spec[1:]))


def assembled(shelf: Shelf, shards: dict[Any, Any]) -> Any:
    """A leaf from what each device holds of it; nothing is copied."""
    mine = [shards[d] for d in known_mesh(shelf.sharding).devices.flat]
    return jax.make_array_from_single_device_arrays(shelf.value.shape, shelf.sharding, mine)


def create(
    layout: Layout, shelves: Sequence[Shelf], create_state: Callable[..., Any], args: Sequence[Any]
) -> list[Any]:
    """Leaves of a new state, each part computed only where it lives.

    Args:
        layout: of the graph by rows.
        shelves: from `shelves`.
        create_state: returns the step's non-batch argument.
        args: of `create_state`.

    Raises:
        PlanMismatchError: it returns another number of leaves, or other shapes, than the plan was made for.
    """
    check_created([s.value for s in shelves], create_state, args)
    shards: list[dict[Any, Any]] = [{} for _ in shelves]
    for stage in dict.fromkeys(stage for shelf in shelves for stage in shelf.stages):
        mine = [(k, s, s.stages.index(stage)) for k, s in enumerate(shelves) if stage in s.stages]

        def parts_here(*args: Any, mine: Sequence[tuple[int, Shelf, int]] = tuple(mine)) -> list[Any]:
            made = jax.tree.leaves(create_state(*args))
            return [made[k][slice(*s.bounds(n))] if s.is_stacked else made[k] for k, s, n in mine]

        with jax.set_mesh(layout.world if stage is None else layout.meshes[stage]):
            made = jax.jit(parts_here, out_shardings=[s.part[n] for _, s, n in mine])(*loose(args))
        for (k, _, _), part in zip(mine, made, strict=True):
            shards[k].update(shards_of(part))
    return [assembled(shelf, held) for shelf, held in zip(shelves, shards, strict=True)]


# ---- one stage: inside the program -------------------------------------------------------------------------------


def apart(shelves: Sequence[Shelf], leaves: Sequence[Any]) -> list[Any]:
    """Leaves by rows, inside a program."""
    found = [
        row
        for shelf, leaf in zip(shelves, leaves, strict=True)
        for row in (unstacked(leaf, len(shelf.rows)) if shelf.is_stacked else [leaf])
    ]
    return found


def together(groups: Sequence[tuple[int, ...]], outputs: Sequence[Any]) -> list[Any]:
    """Outputs as the user has them, inside a program."""
    return [jnp.stack([outputs[i] for i in g]) if len(g) > 1 else outputs[g[0]] for g in groups]


def unstacked(leaf: Any, count: int) -> list[Any]:
    """The rows of an array, inside a program."""
    return [jax.lax.index_in_dim(leaf, i, keepdims=False) for i in range(count)]
