"""Time of the step's own optimizer: everything after the gradients, on all devices, with copies and with shards.

Its time has a part that grows with the bytes a device holds and one that grows with the number of parameters; two
layouts tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.graph import LayerGraph, Value
from uniap_jax.core.jaxprs import flatten, live_eqns
from uniap_jax.core.machine import Cluster
from uniap_jax.profiler.programs import Arrays, as_function
from uniap_jax.profiler.timing import time_program

ROOM = 0.3
"""Share of a device's memory up to which state and gradients are tried as copies."""


def measure_optimizer(
    graph: LayerGraph, cluster: Cluster, devices: Sequence[Any], arrays: Arrays, bytes_per_s: float
) -> tuple[float, float]:
    """(bytes read and written per device and second, seconds of each parameter besides).

    Args:
        graph: whose update is run.
        cluster: says what fits.
        devices: all of them, in order.
        arrays: to run it on.
        bytes_per_s: of a plain Adam, where the update does not fit as copies and a layout is all there is.
    """
    count = max(len(graph.params), 1)
    state = sum(v.nbytes for v in graph.step.state)
    gradients = sum(p.nbytes for p in graph.params)
    moved = 2.0 * state + gradients
    if moved <= 0:
        return bytes_per_s, 0.0
    sharded = _time(graph, devices, arrays, sharded=True)
    ways = len(devices)
    if ways > 1 and state + gradients <= ROOM * cluster.capacity_bytes:
        copied = _time(graph, devices, arrays, sharded=False)
        more = copied - sharded
        if more > 0:
            bytes_per_s = (moved - moved / ways) / more
    return bytes_per_s, max(0.0, sharded - moved / ways / bytes_per_s) / count


def _time(graph: LayerGraph, devices: Sequence[Any], arrays: Arrays, *, sharded: bool) -> float:
    """Median seconds of the update; every array split over all devices by its longest dimension, or copied to all."""
    step, mesh = graph.step, Mesh(np.asarray(devices, dtype=object), ("x",))
    tape = flatten(step.update)
    needed = live_eqns(tape.eqns, tape.outvars)[1]
    read = [i for i, v in enumerate(tape.invars) if v in needed]
    leaves = [(i, out) for out, i in enumerate(step.output_leaf) if i in set(read) and _is_number(step.state[i])]

    def where(shape: Sequence[int]) -> NamedSharding:
        even = [d for d in range(len(shape)) if sharded and shape[d] % len(devices) == 0]
        longest = max(even, key=lambda d: shape[d], default=None)
        return NamedSharding(mesh, PartitionSpec(*("x" if d == longest else None for d in range(len(shape)))))

    avals = [step.update.in_avals[i] for i in read]
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where(a.shape)) for a in avals]
    replaced = [read.index(i) for i, _ in leaves]
    kept = [i for i in range(len(read)) if i not in set(replaced)]
    run = as_function(tape, [tape.invars[i] for i in read], tape.outvars)

    def update(state: list[Any], others: list[Any]) -> list[Any]:
        given = dict(zip([*replaced, *kept], [*state, *others], strict=True))
        return run([given[i] for i in range(len(read))])

    with jax.set_mesh(mesh):
        outputs = [where(v.shape) for v in step.outputs]
        jitted = jax.jit(update, donate_argnums=(0,), out_shardings=outputs)
        compiled: Any = jitted.lower([inputs[i] for i in replaced], [inputs[i] for i in kept]).compile()
    first, fixed = ([arrays.place(inputs[i], inputs[i].sharding) for i in group] for group in (replaced, kept))
    held = [first]

    def once() -> None:
        made = jax.block_until_ready(compiled(held[0], fixed))
        held[0] = [made[out] for _, out in leaves]

    return time_program(once).median_s


def _is_number(leaf: Value) -> bool:
    """Keys are not given up: an example of one is shared by all programs."""
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
