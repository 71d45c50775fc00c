"""Collectives and transfers timed on the devices and fitted to alpha + beta × bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.profile import LinkFit
from uniap_jax.core.sharding import axis_sizes
from uniap_jax.profiler.pace import fixed_work
from uniap_jax.profiler.timing import summarize, time_in_a_row, time_program

SMALL_BYTES, LARGE_BYTES = 1 << 14, 1 << 22
OVERLAP_PRODUCTS, OVERLAP_ROUNDS, OVERLAP_LEAST = 4, 9, 0.2
CONTENTION_ROUNDS = 7


def groups(num_devices: int) -> Iterator[tuple[int, int]]:
    """(size, stride) of every group that strategies with one or two kinds of split use, largest first."""
    sizes = [p for _, p in axis_sizes(num_devices)]
    seen = set()
    for start in range(len(sizes)):
        for stop in range(len(sizes), start, -1):
            group = (int(np.prod(sizes[start:stop])), int(np.prod(sizes[stop:])))
            if group not in seen:
                seen.add(group)
                yield group


def measure_collective(kind: str, size: int, stride: int, devices: Sequence[Any]) -> LinkFit:
    """Times one collective at two sizes; all groups of the machine work at once."""
    outer = len(devices) // (size * stride)
    mesh = Mesh(np.asarray(devices, dtype=object).reshape(outer, size, stride), ("outer", "group", "inner"))
    points = []
    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        length = max(size, nbytes // 4 // size * size)
        run = _collective(kind, length, mesh)
        points.append((4.0 * length, time_program(run, target_s=0.1, max_runs=10).median_s))
    return fit_line(kind, size, stride, points)


def _collective(kind: str, length: int, mesh: Mesh) -> Callable[[], Any]:
    """A program that does one collective on `length` float32 per device, and little else."""
    whole, part = PartitionSpec(), PartitionSpec("group")
    bodies: dict[str, tuple[Callable[[Any], Any], PartitionSpec, PartitionSpec]] = {
        "all_reduce": (lambda x: lax.psum(x, "group"), whole, whole),
        "all_gather": (lambda x: lax.all_gather(x, "group", tiled=True), part, whole),
        "reduce_scatter": (lambda x: lax.psum_scatter(x, "group", tiled=True), whole, part),
    }
    body, into, out = bodies[kind]
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)
        array = jax.device_put(np.ones((length,), np.float32), NamedSharding(mesh, into))
        compiled = jax.jit(mapped).lower(array).compile()
    return lambda: jax.block_until_ready(compiled(array))


def measure_transfer(num_stages: int, devices: Sequence[Any]) -> LinkFit:
    """Times moving an array from one stage's devices to the next, all stages sending at once."""
    size = len(devices) // num_stages
    meshes = [Mesh(np.asarray(devices[i * size : (i + 1) * size], dtype=object), ("x",)) for i in range(num_stages)]
    points = []
    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        host = np.ones((size, nbytes // 4), np.float32)
        where = [NamedSharding(m, PartitionSpec("x")) for m in meshes]
        held = [jax.device_put(host, w) for w in where]

        def move(held: list[Any] = held, where: list[Any] = where) -> Any:
            return jax.block_until_ready([jax.device_put(a, w) for a, w in zip(held, where[1:], strict=False)])

        points.append((float(nbytes), time_program(move, target_s=0.05, max_runs=10).median_s / max(1, num_stages - 1)))
    return fit_line("transfer", size, 1, points)


def measure_overlap(devices: Sequence[Any]) -> float:
    """How much matrix products and an all_reduce that need nothing of each other slow each other down.

    Each is timed alone and both in one program, where the compiler and the devices may run them together:
    1 + (both - longer) / shorter, between 1 (the shorter one is hidden) and 2 (one after the other). The three programs
    run in turn, so that what else the machine does falls on all of them. Where the shorter one is too short to be seen
    in the sum, taking turns is assumed.
    """
    mesh = Mesh(np.asarray(devices, dtype=object), ("group",))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.device_put(np.full((256, 256), 0.01, np.float32), whole)
    moved = jax.device_put(np.ones((LARGE_BYTES // 4,), np.float32), whole)

    def products(a: Any) -> Any:
        for _ in range(OVERLAP_PRODUCTS):
            a = jnp.tanh(a @ a)
        return a

    def meet(y: Any) -> Any:
        return lax.psum(y, "group")

    bodies: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = (
        (products, (x,)),
        (meet, (moved,)),
        (lambda a, y: (products(a), meet(y)), (x, moved)),
    )
    programs = []
    for body, arguments in bodies:
        with jax.set_mesh(mesh):
            mapped = jax.shard_map(
                body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
            )
            programs.append((jax.jit(mapped).lower(*arguments).compile(), arguments))
        jax.block_until_ready(programs[-1][0](*arguments))
    seconds: list[list[float]] = [[], [], []]
    for _ in range(OVERLAP_ROUNDS):
        for taken, (run, arguments) in zip(seconds, programs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            taken.append(time.perf_counter() - start)
    return overlap_slowdown(*(summarize(taken).median_s for taken in seconds))


def overlap_slowdown(kernels_s: float, collective_s: float, both_s: float) -> float:
    """The slowdown that three times say; 2 where the shorter one is too short to be seen beside the longer."""
    longer, shorter = max(kernels_s, collective_s), min(kernels_s, collective_s)
    if shorter < OVERLAP_LEAST * longer:
        return 2.0
    return min(2.0, max(1.0, 1.0 + (both_s - longer) / shorter))


def fit_line(kind: str, size: int, stride: int, points: Sequence[tuple[float, float]]) -> LinkFit:
    """Least squares of seconds over bytes, relative to the seconds; neither part negative.

    Args:
        kind: of collective.
        size: of the group.
        stride: within the group.
        points: (bytes of one device's full array, seconds).
    """
    from scipy.optimize import nnls

    nbytes, seconds = (np.array(x, dtype=np.float64) for x in zip(*points, strict=True))
    design = np.stack([np.ones_like(nbytes), nbytes], axis=1) / seconds[:, None]
    scale = design.max(axis=0)
    (alpha, beta), _ = nnls(design / scale, np.ones_like(seconds))
    alpha, beta = alpha / scale[0], beta / scale[1]
    error = float(np.mean(np.abs(alpha + beta * nbytes - seconds) / seconds))
    return LinkFit(kind=kind, size=size, stride=stride, alpha_s=float(alpha), beta_s_per_byte=float(beta), error=error)


def measure_update_rate(devices: Sequence[Any]) -> float:
    """Bytes per second and device of an Adam-like update, all devices busy."""
    mesh = Mesh(np.asarray(devices, dtype=object), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    length = LARGE_BYTES // 4

    def update(param: Any, grad: Any, first: Any, second: Any) -> Any:
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad * grad
        return param - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second

    arrays = [jax.device_put(np.full((len(devices), length), 0.1, np.float32), sharding) for _ in range(4)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(update, donate_argnums=(0, 2, 3)).lower(*arrays).compile()
    param, grad, first, second = arrays
    param, first, second = jax.block_until_ready(compiled(param, grad, first, second))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        param, first, second = jax.block_until_ready(compiled(param, grad, first, second))
        seconds.append(time.perf_counter() - start)
    return 7.0 * 4 * length / summarize(seconds).median_s


def measure_dispatch(devices: Sequence[Any], num_stages: int) -> float:
    """Host seconds to start and finish a program that does nothing on one stage's devices."""
    mesh = Mesh(np.asarray(devices[: len(devices) // num_stages], dtype=object), ("x",))
    array = jax.device_put(np.ones((mesh.size, 8), np.float32), NamedSharding(mesh, PartitionSpec("x")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: x + 1).lower(array).compile()
    return time_program(lambda: jax.block_until_ready(compiled(array)), target_s=0.05, max_runs=30).median_s


def measure_contention(num_stages: int, devices: Sequence[Any]) -> float:
    """How much slower a stage runs when all are busy than alone; at least 1.

    Both are timed in turn, so that what else the machine does falls on both.
    """
    size = len(devices) // num_stages
    stages = [fixed_work(devices[i * size : (i + 1) * size]) for i in range(num_stages)]

    def timed(start: Callable[[], Any]) -> float:
        return time_in_a_row(start, jax.block_until_ready, min_rows=1, max_rows=1).median_s

    ratios = []
    for _ in range(CONTENTION_ROUNDS):
        alone = timed(stages[0])
        ratios.append(timed(lambda: [start() for start in stages]) / alone)
    return max(1.0, min(statistics.median(ratios), float(num_stages)))
