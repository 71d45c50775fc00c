"""Functions of the state outside the train step: evaluation, inference, statistics of the parameters.

One program cannot take arrays that live on different sub-meshes, and the state of a pipeline does. So its leaves are
spread over all devices of the plan first: no device ever holds a whole model, and a state that has not changed since
the last call is not spread again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.errors import ExecutionError
from uniap_jax.core.jax_compat import no_mesh
from uniap_jax.runtime.crossing import Crossing
from uniap_jax.runtime.presence import is_here, relaid


def spread(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """A layout on all devices that cuts the largest dimension which they divide; a copy each where they divide none."""
    count = mesh.size
    fitting = [d for d, n in enumerate(shape) if n % count == 0 and n > 0]
    if count == 1 or not fitting:
        return NamedSharding(mesh, PartitionSpec())
    dim = max(fitting, key=lambda d: shape[d])
    return NamedSharding(mesh, PartitionSpec(*([None] * dim), mesh.axis_names))


class OnAllDevices:
    """A jitted function whose arguments may live on the stages of a plan.

    Args:
        function: of any arguments.
        devices: of the plan, in stage order.
        options: of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], devices: Mesh, options: dict[str, Any]) -> None:
        self._jitted = jax.jit(function, **options)
        self._mesh, self._devices = devices, frozenset(devices.devices.flat)
        self._copies: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; what it returns lies where the compiler puts it."""
        args, kwargs = jax.tree.map(self._here, (args, kwargs))
        with no_mesh():
            return self._jitted(*args, **kwargs)

    def _here(self, leaf: Any) -> Any:
        """A leaf as the program can take it: one on some of the devices only is spread over all, once."""
        if not isinstance(leaf, jax.Array) or not leaf.committed or leaf.is_deleted():
            return leaf
        if leaf.sharding.device_set == self._devices:
            return leaf
        known = self._copies.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return known[1]
        if jax.process_count() > 1:
            raise ExecutionError(
                f"an array of shape {leaf.shape} is not on all {len(self._devices)} devices of this job of "
                f"{jax.process_count()} processes, which step.jit sees to inside one process only; use a plain jax.jit "
                "with step.spread(state) and batches on all devices",
                shape=leaf.shape,
            )
        moved = jax.device_put(leaf, spread(leaf.shape, self._mesh))
        number = id(leaf)
        self._copies[number] = weakref.ref(leaf, lambda _: self._copies.pop(number, None)), moved
        return moved

    @property
    def copies(self) -> int:
        """Arrays that are kept spread because the arrays they come from are still in use."""
        return len(self._copies)


class Spreader:
    """Spreads a state that lives on stages over all devices, where several processes hold the stages.

    A leaf is whole on every device for a moment, one leaf after the other, before each device keeps its share.

    Args:
        devices: of the plan, in stage order.
    """

    def __init__(self, devices: Mesh) -> None:
        self._mesh, self._devices = devices, frozenset(devices.devices.flat)
        self._ways: dict[tuple[Any, ...], Crossing] = {}

    def __call__(self, leaf: Any) -> Any:
        """A leaf on all devices; every process calls this for the same leaves in the same order."""
        if not isinstance(leaf, jax.Array) or leaf.sharding.device_set == self._devices:
            return leaf
        target, source = spread(leaf.shape, self._mesh), leaf.sharding
        if jax.process_count() == 1:
            return jax.device_put(leaf, target)
        assert isinstance(source, NamedSharding)
        whole = NamedSharding(source.mesh, PartitionSpec())
        here = relaid(leaf, whole) if is_here(source.device_set) else None
        key = (leaf.shape, leaf.dtype, source.mesh)
        if key not in self._ways:
            shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            self._ways[key] = Crossing(f"leaf_{len(self._ways)}_to_all", shape, everywhere)
        return relaid(self._ways[key](here), target)
