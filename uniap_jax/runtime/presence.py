"""Which devices are this process's, and arrays on devices of which none is.

Every process of a job runs the same loop over all stages. Where it has no device of a stage, it leaves the stage's work
to those that have one: what is computed there is None here, and what the user holds of it is an array without shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from uniap_jax.core.errors import ExecutionError


def is_here(devices: Iterable[Any]) -> bool:
    """Whether this process runs programs on some of these devices.

    A lone process says so of all devices: what are not its own are described, and programs for them are compiled here.
    """
    return jax.process_count() == 1 or any(d.process_index == jax.process_index() for d in devices)


def owners(devices: Iterable[Any]) -> frozenset[int]:
    """Processes that run programs on these devices; a lone process runs them all."""
    return frozenset({0} if jax.process_count() == 1 else (d.process_index for d in devices))


def is_elsewhere(array: Any) -> bool:
    """Whether some of an array's devices are another process's."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def absent(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array on devices of other processes: it has a shape, a layout and no shards."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def shards_of(array: Any) -> dict[Any, Any]:
    """What each device of this process holds of an array."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def assembled(shape: Sequence[int], dtype: Any, sharding: NamedSharding, shards: dict[Any, Any]) -> jax.Array:
    """An array of shards that are on their devices already; nothing is copied."""
    devices = sharding.mesh.devices.flat
    mine = [shards[d] for d in devices if d in shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, mine, dtype=dtype)


def laid(array: Any, sharding: NamedSharding) -> Any:
    """An array that this process has whole, in a layout; None where it has none of the devices.

    `jax.device_put` would have all processes compare what they have first, those too that have none of the devices.
    """
    if not is_here(sharding.device_set):
        return None
    if jax.process_count() == 1 or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def relaid(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array in another layout of its devices; all processes that have some of them call this together.

    `jax.device_put` does it for numbers; keys over several processes it refuses.
    """
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or jax.process_count() == 1:
        moved: jax.Array = jax.device_put(array, sharding)
        return moved
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    data = jax.device_put(jax.random.key_data(array), sharding)
    keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return keys


def on_devices(array: jax.Array, mesh: Mesh, what: str) -> jax.Array:
    """An array of several processes on the devices of a mesh, where it is there already; nothing is copied.

    Args:
        array: on exactly these devices, or a copy each on these and others.
        mesh: of which some devices are this process's.
        what: it is, for the message.

    Raises:
        ExecutionError: it is not there.
    """
    if array.sharding.device_set == set(mesh.devices.flat):
        return array
    shards = shards_of(array)
    if not array.is_fully_replicated or not all(d in shards for d in mesh.local_devices):
        raise ExecutionError(
            f"{what} lies on devices of {len(owners(array.sharding.device_set))} processes as {array.sharding}, and is "
            "not where the stage that reads it wants it; pass the numpy array, which every process has whole, or an "
            "array made with the step's own layouts (batch_shardings, abstract_state)",
            what=what,
        )
    return assembled(array.shape, array.dtype, NamedSharding(mesh, PartitionSpec()), shards)
