"""Costs of layers from the real compiler of accelerators that are not here: memory as it says, time as a judgement.

Time of a program: its kernels take what the compiler's own cycle estimates say, or what its bytes take in main memory
where that is longer; without estimates each kernel is a roofline. Collectives are added at alpha + beta × bytes; those
that run beside kernels are hidden by them as far as they reach. No clock has confirmed any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster
from uniap_jax.core.profile import LayerCost, Links, overlapped
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.hlo import Program, read_program
from uniap_jax.profiler.order import Entry
from uniap_jax.profiler.probe import Prober
from uniap_jax.profiler.programs import Direction

CLOCK_SIZE = 4096
"""Rows and columns of the matrix product whose time is known, to learn how long the compiler's cycle is."""
DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time of one program.

    Attributes:
        kernels_s: computing and main memory.
        collectives_s: what collectives add to it.
    """

    kernels_s: float
    collectives_s: float


def program_seconds(program: Program, cluster: Cluster, links: Links, cycle_s: float) -> Seconds:
    """Predicted time of one run.

    Args:
        program: read from the optimised HLO.
        cluster: rates.
        links: times of collectives.
        cycle_s: seconds of one of the compiler's cycles; 0 where it estimates none.
    """
    bandwidth = cluster.streamed_bytes_per_s
    cycles = program.total("cycles")
    if cycles > 0 and cycle_s > 0:
        kernels = max(cycles * cycle_s, program.total("nbytes") / bandwidth)
    else:
        kernels = 0.0
        for k in program.kernels:
            rate = cluster.flops_per_s(DTYPES.get(k.dtype, "float32")) * cluster.matmul_efficiency
            kernels += k.times * (max(k.flops / rate, k.nbytes / bandwidth) + cluster.op_overhead_s)
    times = [(c.hidden, c.times * links.time_s(c.kind, c.nbytes, c.size, c.stride)) for c in program.collectives]
    beside, alone = sum(t for h, t in times if h), sum(t for h, t in times if not h)
    added = overlapped(kernels, beside, cluster.overlap_slowdown) - kernels
    return Seconds(kernels_s=kernels, collectives_s=alone + added)


def compiler_facts(cluster: Cluster, devices: Sequence[Any]) -> dict[str, Any]:
    """What a compiled program depends on besides the layer."""
    return {
        "compiled_for": devices[0].device_kind,
        "described": repr(replace(cluster, memory_limit="90%", source="", notes=())),
        "num_devices": len(devices),
        "compiler": str(devices[0].client.platform_version),
        "jax": jax.__version__,
    }


def measure_cycle(cluster: Cluster, devices: Sequence[Any], cache: Cache) -> float:
    """Seconds of one cycle of the compiler's estimates, from a matrix product that runs at the peak rate; 0 if none."""
    facts = {"what": "cycle", "size": CLOCK_SIZE, **compiler_facts(cluster, devices)}
    known = cache.get(facts)
    if known is None:
        mesh = Mesh([devices[0]], ("x0",))
        shape = jax.ShapeDtypeStruct(
            (CLOCK_SIZE, CLOCK_SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
        )
        with jax.set_mesh(mesh):
            compiled: Any = jax.jit(jnp.matmul).lower(shape, shape).compile()
        known = {"cycles": read_program(compiled.as_text()).total("cycles")}
        cache.put(facts, known)
    seconds = 2.0 * CLOCK_SIZE**3 / cluster.flops_per_s("bfloat16")
    return seconds / float(known["cycles"]) if known["cycles"] else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Compiler(Prober):
    """Finds costs of entries by compiling them.

    Attributes:
        devices: of one stage, in the cluster's order, by their number.
        cycle_s: seconds of one of the compiler's cycles.
    """

    verb = "compiled"
    what = "compiled layer"
    devices: Mapping[int, Sequence[Any]]
    cycle_s: float

    def stage(self, size: int) -> Sequence[Any]:
        """A topology of its own."""
        if size not in self.devices:
            name = self.describer.cluster.name
            raise ProfileError(f"{size} devices of {name} are no box to compile for", field="devices", value=size)
        return self.devices[size]

    def surroundings(self, size: int) -> dict[str, Any]:
        """The compiler and what it compiles for."""
        return compiler_facts(self.describer.cluster, self.stage(size))

    def times(self, programs: Sequence[Direction]) -> dict[str, Any]:
        """Read off the optimised HLO."""
        read = [read_program(p.compiled.as_text()) for p in programs]
        times = [program_seconds(r, self.describer.cluster, self.describer.links, self.cycle_s) for r in read]
        return {"kernels": [t.kernels_s for t in times], "collectives": [t.collectives_s for t in times]}

    def cost(self, entry: Entry, numbers: dict[str, Any], told: LayerCost) -> LayerCost:
        """As compiled."""
        fused = entry.num_stages == 1
        kernels, collectives = numbers["kernels"], numbers["collectives"]
        sync = min(told.sync_s, collectives[-1])  # gradients meet at the end of the backward
        total = sum(kernels) + sum(collectives) - sync
        share = told.forward_s / told.time_s if told.time_s > 0 else 1 / 3
        forward = total * share if fused else kernels[0] + collectives[0]
        return LayerCost(
            forward_s=forward,
            backward_s=total - forward,
            sync_s=sync,
            kept_bytes=told.kept_bytes,
            transient_bytes=told.transient_bytes,
            origin="compiled",
        )
