"""Clusters: the devices at hand, or described ones. Imports no JAX until asked for the devices at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster, Link, Route, parse_limit, usable_cores
from uniap_jax.core.topology import describe_devices, load_cluster, shipped_names

__all__ = ["Cluster", "Link", "Route", "load_cluster", "local_cluster", "parse_limit", "shipped_names"]

_CPU_FLOPS_PER_CORE = 5e10
"""float32 operations per second of one core: 16 to 32 per cycle at about 2.5 GHz; a measurement replaces it."""
_CPU_BANDWIDTH_PER_CORE = 8e9


def local_cluster(devices: Sequence[Any] | None = None, *, memory_limit: str | int = "90%") -> Cluster:
    """The devices JAX has here, rates from the shipped descriptions where the kind is known.

    Virtual CPU devices share the host: its memory and cores are divided among all of this process's CPU devices.

    Args:
        devices: `jax.Device`s to use, in the order stages will take them; all of `jax.devices()` where None.
        memory_limit: how much of each device a plan may use.

    Raises:
        ProfileError: no device, devices of more than one kind, or an accelerator that no description fits.
    """
    import jax

    found = list(jax.devices() if devices is None else devices)
    kinds = sorted({d.device_kind for d in found})
    if len(kinds) != 1:
        raise ProfileError(
            f"{len(found)} devices of {len(kinds)} kinds ({', '.join(kinds)}); a plan needs devices of one kind",
            field="devices",
        )
    if found[0].platform == "cpu":
        return _local_cpu(found, len(jax.devices("cpu")), memory_limit)
    return describe_devices(found, memory_limit=memory_limit)


def _local_cpu(devices: list[Any], host_devices: int, memory_limit: str | int) -> Cluster:
    cores, total = usable_cores(), host_memory_bytes()
    share = cores / host_devices
    bandwidth = _CPU_BANDWIDTH_PER_CORE * share
    return Cluster(
        name=f"local-cpu:{len(devices)}",
        num_devices=len(devices),
        kind=devices[0].device_kind,
        platform="cpu",
        memory_bytes=total // host_devices,
        memory_limit=memory_limit,
        peak_flops=(("float32", _CPU_FLOPS_PER_CORE * share),),
        memory_bandwidth_bytes_per_s=bandwidth,
        links=(
            Link(
                name="host memory",
                size=max(len(devices), 1),
                bandwidth_bytes_per_s=bandwidth / 2,
                uplink_bytes_per_s=bandwidth / 2,
                latency_s=2e-5,
            ),
        ),
        link_efficiency=1.0,
        memory_efficiency=1.0,
        op_overhead_s=5e-6 * max(1.0, 1 / share),
        dispatch_s=2e-4 * max(1.0, len(devices) / 8),
        num_hosts=len({d.process_index for d in devices}),
        devices_per_host_cores=max(1, round(host_devices / cores)),
        source=f"this host: {cores} cores, {total} bytes, shared by {host_devices} CPU devices; rates assumed",
    )


def host_memory_bytes() -> int:
    """Memory of this host, or of the container it is confined to.

    Raises:
        ProfileError: the operating system does not tell.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        raise ProfileError(
            "the size of this host's memory cannot be read; describe the machine in a file and use load_cluster",
            field="memory_bytes",
        ) from None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
