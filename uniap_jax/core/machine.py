"""The machine a plan is made for, as data: devices, memory, rates and links. Imports no JAX."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field

from uniap_jax.core.errors import ProfileError

PLATFORMS = ("cpu", "gpu", "tpu")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of the network, inside groups of neighbouring devices.

    Attributes:
        name: for people, for example "nvlink".
        size: devices in one group of this level; groups are aligned runs of device indices.
        bandwidth_bytes_per_s: what one device can send, while it receives as much.
        uplink_bytes_per_s: what one group of the level below can send to its peers, shared by all that cross.
        latency_s: of one hop.
        line_bytes_per_s: of an axis of a torus: what a device can send inside a part of the axis, which closes to no
            ring; None where the level is no axis.
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float
    line_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ProfileError(f"link {self.name}: size {self.size} is not a positive count", field="size")
        for name in ("bandwidth_bytes_per_s", "uplink_bytes_per_s", "latency_s"):
            check_number(f"link {self.name}: {name}", getattr(self, name), positive=name != "latency_s")
        if self.line_bytes_per_s is not None:
            check_number(f"link {self.name}: line_bytes_per_s", self.line_bytes_per_s, positive=True)


def check_number(name: str, value: float, *, positive: bool = False) -> None:
    """Refuses NaN, infinite and negative numbers (and zero where it must be positive).

    Raises:
        ProfileError: names the number and its value.
    """
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        wanted = "a positive finite number" if positive else "a finite number that is not negative"
        raise ProfileError(f"{name} is {value!r}; it must be {wanted}", field=name, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a group of devices sees of the network when all such groups work at once.

    Attributes:
        latency_s: of one hop over the slowest level.
        bandwidth_bytes_per_s: of each device in a ring.
        level: name of the slowest level.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind, numbered so that near ones have near numbers.

    Attributes:
        name: for people, for example "a100-80g:2x8".
        num_devices: all of them.
        kind: as `jax.Device.device_kind` says it.
        platform: "cpu", "gpu" or "tpu".
        memory_bytes: of one device.
        memory_limit: how much of it a plan may use: a share ("90%"), a size ("12GiB") or bytes.
        peak_flops: (dtype name, floating-point operations per second of one device) for matrix products at JAX's
            default precision.
        memory_bandwidth_bytes_per_s: of one device.
        links: levels of the network, nearest first; the last one holds every device.
        matmul_efficiency: share of the peak that large matrix products reach.
        memory_efficiency: share of the memory bandwidth that fused element-wise code reaches.
        link_efficiency: share of a link's bandwidth that collectives reach.
        overlap_slowdown: of kernels and collectives that run together, 1 where neither minds the other, 2 where they
            take turns.
        op_overhead_s: of one operation, whatever its size.
        dispatch_s: host time to start one program on a stage.
        num_hosts: hosts the devices are spread over; on several, each runs a process of its own.
        devices_per_host_cores: virtual CPU devices that take turns on the same cores; 1 where each has its own.
        source: where the numbers come from, with date.
        notes: one sentence each.
    """

    name: str
    num_devices: int
    kind: str
    platform: str
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth_bytes_per_s: float
    links: tuple[Link, ...]
    memory_limit: str | int = "90%"
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    overlap_slowdown: float = 2.0
    op_overhead_s: float = 3e-6
    dispatch_s: float = 1e-4
    num_hosts: int = 1
    devices_per_host_cores: int = 1
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ProfileError(f"a cluster of {self.num_devices} devices; it needs at least 1", field="num_devices")
        if self.platform not in PLATFORMS:
            raise ProfileError(
                f"platform {self.platform!r} is unknown; use one of {', '.join(PLATFORMS)}", field="platform"
            )
        check_number("memory_bytes", self.memory_bytes, positive=True)
        check_number("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, positive=True)
        if not self.peak_flops:
            raise ProfileError("peak_flops is empty; give at least float32", field="peak_flops")
        for dtype, rate in self.peak_flops:
            check_number(f"peak_flops of {dtype}", rate, positive=True)
        for name in ("matmul_efficiency", "memory_efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ProfileError(f"{name}={getattr(self, name)!r} is not a share in (0, 1]", field=name)
        if not 1 <= self.overlap_slowdown <= 2:
            raise ProfileError(
                f"overlap_slowdown={self.overlap_slowdown!r} is not between 1 (free) and 2 (taking turns)",
                field="overlap_slowdown",
            )
        if self.num_devices > 1 and (not self.links or self.links[-1].size < self.num_devices):
            last = self.links[-1].size if self.links else 0
            raise ProfileError(
                f"links of {self.name} reach {last} devices of {self.num_devices}; the last level must hold all",
                field="links",
            )
        parse_limit(self.memory_limit, self.memory_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device that a plan may use."""
        return parse_limit(self.memory_limit, self.memory_bytes)

    @property
    def streamed_bytes_per_s(self) -> float:
        """Rate at which fused element-wise code goes over memory."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate of matrix products of a dtype; that of float32 where it is not listed."""
        rates = dict(self.peak_flops)
        return rates.get(dtype) or rates.get("float32") or min(rates.values())

    def route(self, size: int, stride: int = 1) -> Route:
        """The network as seen by groups of `size` devices, `stride` apart, all groups at once.

        A ring gets the bandwidth of the slowest level it crosses; rings that leave one group of the level below share
        its uplink. On a torus every axis that the group spans works at once, each on its share of the bytes, at the
        rate of the slowest of them (rings along several axes, Jouppi et al., 2023).
        """
        if any(link.line_bytes_per_s is not None for link in self.links):
            return self._torus_route(size, stride)
        extent, below = size * stride, 1
        latency, bandwidth, name = 0.0, math.inf, "none"
        for link in self.links:
            rings = min(stride, below) if below > 1 else 1
            rate = min(link.bandwidth_bytes_per_s, link.uplink_bytes_per_s / rings)
            if rate < bandwidth:
                bandwidth, name = rate, link.name
            latency = max(latency, link.latency_s)
            if link.size >= extent:
                break
            below = link.size
        return Route(latency_s=latency, bandwidth_bytes_per_s=bandwidth * self.link_efficiency, level=name)

    def _torus_route(self, size: int, stride: int) -> Route:
        rates, latency, names, below = [], 0.0, list[str](), 1
        chip, inside = 1, math.inf  # devices of one chip, and what joins them
        for link in self.links:
            first, last = max(stride, below), min(size * stride, link.size)
            if first < last:
                names.append(link.name)
                latency = max(latency, link.latency_s)
                if link.line_bytes_per_s is None:
                    inside = link.bandwidth_bytes_per_s
                else:
                    whole = first == below and last == link.size
                    rate = link.bandwidth_bytes_per_s if whole else link.line_bytes_per_s
                    sharing = (first // below) * min(stride, chip)  # groups that use the same links
                    rates.append(rate / sharing)
            chip = link.size if link.line_bytes_per_s is None else chip
            below = link.size
        bandwidth = min(inside, len(rates) * min(rates)) if rates else inside
        return Route(
            latency_s=latency, bandwidth_bytes_per_s=bandwidth * self.link_efficiency, level=", ".join(names) or "none"
        )

    def boundary(self, num_stages: int) -> Route:
        """The network between neighbouring stages, at the slowest of the boundaries, all devices sending at once."""
        per_stage = self.num_devices // max(1, num_stages)
        slowest = None
        for stage in range(num_stages - 1):
            first, second = stage * per_stage, (stage + 1) * per_stage
            route = self._pair(first, second, per_stage)
            if slowest is None or route.bandwidth_bytes_per_s < slowest.bandwidth_bytes_per_s:
                slowest = route
        return slowest or Route(latency_s=0.0, bandwidth_bytes_per_s=math.inf, level="none")

    def _pair(self, first: int, second: int, per_stage: int) -> Route:
        below = 1
        for link in self.links:
            if first // link.size == second // link.size:
                crossing = min(per_stage, below)
                rate = min(link.bandwidth_bytes_per_s, link.uplink_bytes_per_s / crossing)
                if link.line_bytes_per_s is not None:  # a shift along the axis: each link carries all it passes over
                    rate = link.line_bytes_per_s / max(1, per_stage // below)
                return Route(
                    latency_s=link.latency_s, bandwidth_bytes_per_s=rate * self.link_efficiency, level=link.name
                )
            below = link.size
        raise ProfileError(f"no link of {self.name} joins devices {first} and {second}", field="links")


def parse_limit(limit: str | int, memory_bytes: int) -> int:
    """Bytes that a limit allows: "90%" of the memory, "12GiB", "512 MB" or bytes.

    Raises:
        ProfileError: not a limit, not positive, or more than the device has.
    """
    share, size = None, None
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%|[kKmMgGtT]?[iI]?[bB]?)\s*", limit)
        number, unit = (match[1], match[2].upper()) if match else ("", "?")
        try:
            share = float(number) / 100 if unit == "%" else None
            size = None if unit == "%" else int(float(number) * _UNITS[unit])
        except (ValueError, KeyError):
            raise ProfileError(
                f"memory limit {limit!r} is not a share of the memory, a size or bytes; for example 90%, 12GiB or 8e9",
                field="memory_limit",
                value=limit,
            ) from None
    else:
        size = int(limit)
    allowed = int(memory_bytes * share) if share is not None else size or 0
    if not 0 < allowed <= memory_bytes:
        raise ProfileError(
            f"memory limit {limit!r} is {allowed} bytes; it must be positive and within the device's {memory_bytes}",
            field="memory_limit",
            value=limit,
            memory_bytes=memory_bytes,
        )
    return allowed


def usable_cores() -> int:
    """Cores this process may run on."""
    if "sched_getaffinity" in dir(os):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
