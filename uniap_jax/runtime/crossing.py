"""Takes arrays between stages on devices of several processes: one small program that all of them run.

`jax.device_put` does not go from one process's devices to another's on every backend. A collective permute does, on the
mesh of all devices concerned. Those processes have to run such programs in the same order, which they do: every one
follows the same order of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.runtime.presence import assembled, is_here, owners, shards_of
from uniap_jax.runtime.programs import Program, build, is_key, known_mesh

AXIS = "all"
CROSSING = "crossing_"
"""How the programs' names begin."""

Cell = tuple[tuple[int, int], ...]
"""Part of an array: start and stop in each dimension."""
Pair = tuple[int, int]
"""Positions of a sender and a receiver."""


def cells_of(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Cell]:
    """The part of an array that each device holds."""
    places = sharding.devices_indices_map(shape)
    return {d: tuple(s.indices(n)[:2] for s, n in zip(p or (), shape, strict=True)) for d, p in places.items()}


def rounds_of(held: dict[Any, Cell], wanted: dict[Any, Cell], devices: Sequence[Any]) -> list[list[Pair]]:
    """Who sends to whom, so that nobody sends or receives twice in a round; who holds what it wants receives nothing.

    Args:
        held: the part of each device that has one.
        wanted: the part of each device that wants one.
        devices: in the order of their positions.
    """
    position = {d: i for i, d in enumerate(devices)}
    rounds: list[list[Pair]] = []
    for cell in dict.fromkeys(wanted.values()):
        senders = [d for d, c in held.items() if c == cell]
        receivers = [d for d, c in wanted.items() if c == cell and held.get(d) != cell]
        assert senders, f"nobody holds {cell}"
        for i, receiver in enumerate(receivers):
            number, sender = divmod(i, len(senders))
            rounds += [[] for _ in range(number + 1 - len(rounds))]
            rounds[number].append((position[senders[sender]], position[receiver]))
    return rounds


class Crossing:
    """An array's way between layouts on devices of several processes; shard for shard the same on both sides.

    Args:
        name: for people and traces.
        shape: of the array, with its layout at the source.
        target: layout where it is wanted.
        pool: compiles in the background.
    """

    def __init__(
        self, name: str, shape: jax.ShapeDtypeStruct, target: NamedSharding, pool: Executor | None = None
    ) -> None:
        source = shape.sharding
        assert isinstance(source, NamedSharding)
        self._shape, self._dtype, self._target = shape.shape, shape.dtype, target
        self._sources, self._targets = (list(known_mesh(s).devices.flat) for s in (source, target))
        devices = list(dict.fromkeys([*self._sources, *self._targets]))
        mesh = Mesh(np.asarray(devices, dtype=object), (AXIS,))
        self._sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        key = jax.eval_shape(jax.random.key_data, shape) if is_key(shape.dtype) else None
        self._whole = source.shard_shape(shape.shape)
        self._cell = (*(self._whole or (1,)), *(key.shape[len(shape.shape) :] if key is not None else ()))
        self._cell_dtype = key.dtype if key is not None else shape.dtype
        self._impl = _key_impl(shape) if key is not None else None
        rounds = rounds_of(cells_of(source, shape.shape), cells_of(target, shape.shape), devices)
        self._blanks: dict[Any, Any] = {}
        self._mine = list(mesh.local_devices)
        self._stacked = (len(devices) * self._cell[0], *self._cell[1:])
        self.program = build(
            CROSSING + name,
            lambda arrays: [_across(mesh, rounds, arrays[0])],
            [[jax.ShapeDtypeStruct(self._stacked, self._cell_dtype, sharding=self._sharding)]],
            mesh=mesh,
            outputs=[self._sharding],
            pool=pool,
        )

    def __call__(self, array: Any) -> Any:
        """The array where it is wanted; None where this process has none of those devices.

        Args:
            array: at the source, or None where this process has none of its devices.
        """
        if not self._mine:
            return None
        held = shards_of(array) if array is not None else {}
        cells = {d: self._sent(held[d]) if d in self._sources else self._blank(d) for d in self._mine}
        (made,) = self.program([assembled(self._stacked, self._cell_dtype, self._sharding, cells)])
        arrived = shards_of(made)
        shards = {d: self._received(arrived[d]) for d in self._targets if d in arrived}
        return assembled(self._shape, self._dtype, self._target, shards) if shards else None

    def _sent(self, shard: Any) -> Any:
        data = shard if self._impl is None else jax.random.key_data(shard)
        return data if data.shape == self._cell else jnp.reshape(data, self._cell)

    def _received(self, cell: Any) -> Any:
        key = self._cell[len(self._whole or (1,)) :]
        data = cell if cell.shape == (*self._whole, *key) else jnp.reshape(cell, (*self._whole, *key))
        return data if self._impl is None else jax.random.wrap_key_data(data, impl=self._impl)

    def _blank(self, device: Any) -> Any:
        """What a device that only receives puts in."""
        if device not in self._blanks:
            self._blanks[device] = jnp.zeros(self._cell, self._cell_dtype, device=device)
        return self._blanks[device]


def _key_impl(keys: jax.ShapeDtypeStruct) -> Any:
    """What `jax.random.wrap_key_data` wants to be told."""
    found: list[Any] = []

    def ask(keys: Any) -> Any:
        found.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(ask, keys)
    return found[0]


def _across(mesh: Mesh, rounds: Sequence[Sequence[Pair]], stacked: Any) -> Any:
    """[devices * n, ...] with the receivers' parts replaced by those of their senders."""

    def local(cell: Any) -> Any:
        kept = cell
        for pairs in rounds:
            receives = np.zeros(mesh.size, bool)
            receives[[receiver for _, receiver in pairs]] = True
            arrived = lax.ppermute(cell, AXIS, pairs)
            kept = jnp.where(jnp.asarray(receives)[lax.axis_index(AXIS)], arrived, kept)
        return kept

    spec = PartitionSpec(AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(stacked)


def destination(sharding: NamedSharding) -> Any:
    """What `jax.device_put` is told for a layout: a lone device by its name, which takes it half the time."""
    mesh = known_mesh(sharding)
    return mesh.devices.flat[0] if mesh.size == 1 else sharding


Way = Any
"""A `Crossing`; what `jax.device_put` is told; None where both ends are other processes'."""


def way_to(name: str, shape: jax.ShapeDtypeStruct, target: NamedSharding, pool: Executor | None = None) -> Way:
    """How an array gets from one layout to another that is shard for shard the same.

    Args:
        name: for people and traces.
        shape: of the array, with its layout at the source.
        target: layout where it is wanted.
        pool: compiles in the background.
    """
    source = shape.sharding
    assert isinstance(source, NamedSharding)
    alone = len(owners(source.device_set | target.device_set)) == 1
    if alone or source.device_set == target.device_set:
        return destination(target) if is_here(target.device_set) else None
    return Crossing(name, shape, target, pool)


def carried(arrays: Sequence[Any], ways: Sequence[Way]) -> list[Any]:
    """Arrays at the ends of their ways; those that stay in this process go in one call, which costs the host least."""
    if len(arrays) == 1 and ways[0] is not None and not isinstance(ways[0], Crossing):
        return [jax.device_put(arrays[0], ways[0])]
    near = [i for i, way in enumerate(ways) if way is not None and not isinstance(way, Crossing)]
    sent = iter(jax.device_put([arrays[i] for i in near], [ways[i] for i in near]) if near else [])
    found: list[Any] = [None] * len(arrays)
    for i in near:
        found[i] = next(sent)
    for i, way in enumerate(ways):
        if isinstance(way, Crossing):
            found[i] = way(arrays[i])
    return found


def programs_of(ways: Sequence[Way]) -> list[Program]:
    """The programs that ways need."""
    return [way.program for way in ways if isinstance(way, Crossing)]
