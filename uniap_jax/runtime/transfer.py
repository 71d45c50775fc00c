"""Moves arrays between the devices of two stages without a stop at the host.

`jax.device_put` copies from device to device where every shard of the target is also a shard of the source;
otherwise it gathers the array on the host and waits for it. So both sides agree on a layout they can express.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.runtime.crossing import Crossing, Way, carried, programs_of, way_to
from uniap_jax.runtime.programs import Program, build, known_mesh

Ways = tuple[int, ...]


def ways_of(mesh: Mesh, spec: PartitionSpec, ndim: int) -> Ways:
    """In how many pieces a layout cuts each dimension."""
    sizes = dict(mesh.shape)
    entries = [*spec, *([None] * (ndim - len(spec)))]
    return tuple(
        math.prod(sizes[n] for n in ((names,) if isinstance(names, str) else tuple(names or ()))) for names in entries
    )


def express(mesh: Mesh, ways: Ways) -> PartitionSpec | None:
    """A layout that cuts dimensions in these ways, axes taken in order; None where the axes do not multiply to it."""
    axes, entries = list(mesh.shape.items()), []
    for want in ways:
        taken: list[str] = []
        product = 1
        while product < want and axes:
            name, size = axes.pop(0)
            product *= size
            taken.append(name)
        if product != want:
            return None
        entries.append(tuple(taken) or None)
    return PartitionSpec(*entries)


def _coarser(mesh: Mesh, ways: Ways) -> list[Ways]:
    """These ways, then fewer of them along the first dimension that is cut, then none."""
    cut = [d for d, w in enumerate(ways) if w > 1]
    found = [ways]
    if len(cut) == 1:
        product, prefixes = 1, []
        for size in mesh.shape.values():
            product *= size
            prefixes.append(product)
        smaller = [p for p in reversed(prefixes) if p < ways[cut[0]] and ways[cut[0]] % p == 0]
        found += [tuple(p if d == cut[0] else 1 for d in range(len(ways))) for p in smaller]
    return [*found, (1,) * len(ways)]


def _pieces(ways: Ways) -> int:
    return math.prod(ways)


def wire(
    ndim: int, source: NamedSharding, targets: Sequence[NamedSharding]
) -> tuple[NamedSharding, list[NamedSharding]]:
    """The layouts in which an array leaves a sub-mesh and arrives on others: shard for shard the same.

    The finest of the layouts wanted on either side goes over the wire where all can express it: each device then
    receives least, and gathers among its neighbours what it wants more of.

    Args:
        ndim: of the array.
        source: layout its writer computes.
        targets: per reader, the layout it computes with.
    """
    if all(t.mesh.shape == source.mesh.shape for t in targets):
        finest = max((source, *targets), key=lambda s: _pieces(ways_of(known_mesh(s), s.spec, ndim)))
        return NamedSharding(source.mesh, finest.spec), [NamedSharding(t.mesh, finest.spec) for t in targets]
    ends = (source, *targets)
    wanted = sorted({ways_of(known_mesh(s), s.spec, ndim) for s in ends}, key=_pieces, reverse=True)
    for ways in (w for first in wanted for w in _coarser(known_mesh(source), first)):
        found = [(s, express(known_mesh(s), ways)) for s in ends]
        leave, *arrive = [NamedSharding(s.mesh, spec) for s, spec in found if spec is not None] or [source]
        if len(arrive) == len(targets):
            return leave, arrive
    raise AssertionError("the layout without cuts is always expressible")


class Move:
    """One array's way from a stage to another, once per step.

    Args:
        name: for people and traces.
        shape: of the array, with its sharding at the source.
        target: where it is wanted; it may arrive cut more finely, see `arrives`.
    """

    def __init__(self, name: str, shape: jax.ShapeDtypeStruct, target: NamedSharding) -> None:
        source = shape.sharding
        assert isinstance(source, NamedSharding)
        leave, (self.arrives,) = wire(len(shape.shape), source, [target])
        same = leave.is_equivalent_to(source, len(shape.shape))
        self._leave: Program | None = None
        if not same:
            self._leave = build(f"{name}_leave", lambda x: x, [shape], mesh=known_mesh(source), outputs=leave)
        self._way = way_to(name, jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leave), self.arrives)

    @property
    def programs(self) -> list[Program]:
        """Those it needs: to leave in another layout, and to reach another process."""
        return [*([self._leave] if self._leave is not None else []), *programs_of([self._way])]

    def __call__(self, array: Any) -> Any:
        """The array on the target's devices."""
        (arrived,) = carried([self._leave(array) if self._leave is not None else array], [self._way])
        return arrived


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parcel:
    """An array that waits, and the position of a list that gets it."""

    array: Any
    way: Way
    place: tuple[list[Any], int]
    due_s: float


class Outbox:
    """Arrays on their way between stages.

    Queueing a copy costs the host about as much as queueing a program, most of it per call. So what is sent waits
    here until a receiver is about to be issued, and then everything that waits leaves in one call. The devices are
    behind the host all the time: nothing moves later for it.

    What crosses to another process holds up the devices at both ends until it is through. It goes when the sender is
    done by the schedule's clock: earlier the receiver would wait instead of working, later the sender.
    """

    __slots__ = ("_crossing", "_due_s", "_receivers", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[_Parcel] = []
        self._crossing: list[_Parcel] = []
        self._receivers: set[Hashable] = set()
        self._due_s = 0.0

    def post(self, receiver: Hashable, array: Any, way: Way, place: tuple[list[Any], int]) -> None:
        """Leaves an array for a receiver, to be put at a position of a list once it is on its way.

        Args:
            receiver: whose turn sends it at the latest.
            array: that travels.
            way: from `way_to`; None where other processes send and receive it.
            place: the list and the position.
        """
        if isinstance(way, Crossing):
            self._crossing.append(_Parcel(array=array, way=way, place=place, due_s=self._due_s))
        elif way is not None:
            self._waiting.append(_Parcel(array=array, way=way, place=place, due_s=self._due_s))
            self._receivers.add(receiver)

    def turn(self, receiver: Hashable, start_s: float, end_s: float) -> None:
        """Before a task: sends what is due, and all that stays in this process where some of it is for the task.

        Args:
            receiver: the task.
            start_s: of the task by the schedule's clock.
            end_s: likewise; what is posted from now on is due then.
        """
        self._due_s = end_s
        if self._crossing:
            due = sorted((p for p in self._crossing if p.due_s <= start_s), key=lambda p: p.due_s)
            self._crossing = [p for p in self._crossing if p.due_s > start_s]
            self._send(due)
        if receiver in self._receivers:
            self._send(self._waiting)
            self._waiting, self._receivers = [], set()

    @staticmethod
    def _send(parcels: Sequence[_Parcel]) -> None:
        for p, array in zip(parcels, carried([p.array for p in parcels], [p.way for p in parcels]), strict=True):
            box, position = p.place
            box[position] = array


def view(shards: Mapping[Any, Any], sharding: NamedSharding) -> Any:
    """A stage's copy of an array that every device of the plan holds; nothing is copied.

    Args:
        shards: of the array, from `shards_of`.
        sharding: on the stage, replicated.

    Returns:
        None where this process has none of the stage's devices.
    """
    mesh = known_mesh(sharding)
    mine = [shards[d] for d in mesh.devices.flat if d in shards]
    if not mine:
        return None
    return mine[0] if mesh.size == 1 else jax.make_array_from_single_device_arrays(mine[0].shape, sharding, mine)
