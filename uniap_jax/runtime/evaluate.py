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
                f"an array of shape {leaf.shape} lives on one stage, in a job of {jax.process_count()} processes; "
                "step.jit spreads stages over all devices inside one process only. Plan with executor='program' or "
                "num_stages=1 to evaluate between steps, or restore a checkpoint in a job of its own",
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
