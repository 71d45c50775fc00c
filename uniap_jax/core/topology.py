"""Described machines: the files in `profiles/` and names such as `a100-80g:2x8` or `v5p:8x8x8`. Imports no JAX."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster, Link

MAX_FILE_BYTES = 1 << 20
CHIPS_PER_HOST = 4
"""Of a TPU slice over several hosts."""


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    uplink_bytes_per_s: float | None = None
    size: int | None = None
    one_card: bool = False


class _Source(msgspec.Struct, forbid_unknown_fields=True):
    what: str
    title: str
    url: str
    date: str


class _Torus(msgspec.Struct, forbid_unknown_fields=True):
    """Links of a torus: one axis, one direction; axes whose size is a multiple of `wrap_multiple` close to a ring.

    `chip_devices` devices share a chip and its links; inside it they exchange `chip_bytes_per_s`.
    """

    axes: int
    link_bytes_per_s: float
    wrap_multiple: int
    latency_s: float
    chip_devices: int = 1
    chip_bytes_per_s: float = 0.0


class _Device(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file of `profiles/`."""

    schema: str
    version: int
    name: str
    kind: str
    platform: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    sources: list[_Source]
    aliases: list[str] = []
    levels: list[_Level] = []
    torus: _Torus | None = None
    node_devices: int = 8
    default: str = ""
    shared_host: bool = False
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    overlap_slowdown: float = 2.0
    op_overhead_s: float = 3e-6
    dispatch_s: float = 1e-4
    notes: list[str] = []
    judgement: str = ""


def shipped_names() -> tuple[str, ...]:
    """Names of the machines that ship with the package."""
    files = resources.files("uniap_jax").joinpath("profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load_cluster(name: str | Path, *, memory_limit: str | int = "90%") -> Cluster:
    """A described cluster.

    Args:
        name: a shipped machine with its shape, nodes × devices per node for GPUs ("a100-80g:2x8", "h100:8") or the
            torus for TPUs ("v5e:4x4"), or the path of a file in the same format, with the same ":shape" after it.
        memory_limit: how much of each device a plan may use.

    Raises:
        ProfileError: an unknown name or shape, or a file whose first wrong field is named.
    """
    text = str(name)
    stem, _, shape = text.rpartition(":") if _has_shape(text) else (text, "", "")
    device = _read(stem)
    sizes = _parse_shape(shape or device.default, device, text)
    return _torus_cluster(device, sizes, memory_limit) if device.torus else _node_cluster(device, sizes, memory_limit)


def _has_shape(text: str) -> bool:
    tail = text.rpartition(":")[2]
    return ":" in text and bool(tail) and set(tail) <= set("0123456789x")


def _read(stem: str) -> _Device:
    names = shipped_names()
    if stem in names:
        data = resources.files("uniap_jax").joinpath("profiles").joinpath(f"{stem}.json").read_bytes()
    elif Path(stem).is_file():
        if Path(stem).stat().st_size > MAX_FILE_BYTES:
            raise ProfileError(f"{stem} is larger than {MAX_FILE_BYTES} bytes; it is no machine description", path=stem)
        data = Path(stem).read_bytes()
    else:
        raise ProfileError(
            f"no machine is called {stem!r} and no such file exists; known are {', '.join(names)}, "
            "for example a100-80g:2x8 or v5e:4x4",
            name=stem,
            known=names,
        )
    try:
        device = msgspec.json.decode(data, type=_Device)
    except msgspec.MsgspecError as error:  # its message names the first wrong field
        raise ProfileError(f"{stem}: {error}", path=stem) from error
    if (device.schema, device.version) != ("uniap-cluster", 1):
        raise ProfileError(
            f"{stem}: schema {device.schema!r} version {device.version}; this version reads uniap-cluster 1",
            field="schema",
        )
    return device


def _parse_shape(shape: str, device: _Device, text: str) -> tuple[int, ...]:
    sizes = tuple(int(s) for s in shape.split("x") if s) if shape else (1,)
    wanted = device.torus.axes if device.torus else 2
    example = "x".join(["4"] * wanted) if device.torus else f"2x{device.node_devices}"
    if not sizes or min(sizes) < 1 or len(sizes) > wanted:
        raise ProfileError(
            f"{text}: shape {shape!r} is not up to {wanted} positive sizes; for example {device.name}:{example}",
            field="shape",
        )
    if device.torus is None and sizes[-1] > device.node_devices:
        raise ProfileError(
            f"{text}: {sizes[-1]} devices per node, but a node of {device.name} has {device.node_devices}; "
            f"write nodes × devices, for example {device.name}:{math.ceil(math.prod(sizes) / device.node_devices)}"
            f"x{device.node_devices}",
            field="shape",
        )
    return sizes


def _node_cluster(device: _Device, sizes: tuple[int, ...], memory_limit: str | int) -> Cluster:
    nodes, per_node = sizes if len(sizes) == 2 else (1, sizes[0])
    total = nodes * per_node
    share = 1 / per_node if device.shared_host else 1.0
    links = []
    for level in device.levels:
        size = min(level.size or total, total) if level is not device.levels[-1] else total
        if level.size and level.size >= device.node_devices:
            size = min(per_node, level.size)
        uplink = level.uplink_bytes_per_s or level.bandwidth_bytes_per_s
        if level is device.levels[-1] and len(device.levels) > 1 and not level.one_card:
            uplink *= per_node / device.node_devices  # one network card per device, as these nodes are built
        links.append(
            Link(
                name=level.name,
                size=size,
                bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * share,
                uplink_bytes_per_s=uplink * share,
                latency_s=level.latency_s,
            )
        )
        if size >= total:
            break
    return _cluster(device, total, tuple(links), "x".join(map(str, sizes)), share, memory_limit, hosts=nodes)


def _torus_cluster(device: _Device, sizes: tuple[int, ...], memory_limit: str | int) -> Cluster:
    torus = device.torus
    assert torus is not None
    total, extent = math.prod(sizes) * torus.chip_devices, torus.chip_devices
    links = [
        Link(
            name="chip",
            size=extent,
            bandwidth_bytes_per_s=torus.chip_bytes_per_s,
            uplink_bytes_per_s=torus.chip_bytes_per_s,
            latency_s=torus.latency_s,
        )
        for _ in range(torus.chip_devices > 1)
    ]
    for size in reversed(sizes):  # the last axis varies fastest, so it holds neighbours
        extent *= size
        if size == 1:
            continue
        ways = 2 if size % torus.wrap_multiple == 0 else 1  # a ring sends both ways, a line turns back
        rate = torus.link_bytes_per_s * ways
        links.append(
            Link(
                name=f"torus axis of {size}",
                size=extent,
                bandwidth_bytes_per_s=rate,
                uplink_bytes_per_s=rate * (extent // size),
                latency_s=torus.latency_s,
                line_bytes_per_s=torus.link_bytes_per_s,
            )
        )
    if not links:
        links = [Link(name="none", size=1, bandwidth_bytes_per_s=1e9, uplink_bytes_per_s=1e9, latency_s=0.0)]
    return _cluster(
        device, total, tuple(links), "x".join(map(str, sizes)), 1.0, memory_limit, hosts=_hosts(device, total)
    )


def _hosts(device: _Device, total: int) -> int:
    """Hosts of a slice of TPUs: one where it is small enough, else one for every four chips."""
    chips = device.torus.chip_devices if device.torus else 1
    return 1 if total <= device.node_devices else max(1, total // (CHIPS_PER_HOST * chips))


def _cluster(
    device: _Device,
    total: int,
    links: tuple[Link, ...],
    shape: str,
    share: float,
    memory_limit: str | int,
    *,
    hosts: int,
) -> Cluster:
    source = "; ".join(f"{s.what}: {s.title} ({s.date})" for s in device.sources)
    return Cluster(
        name=f"{device.name}:{shape}",
        num_devices=total,
        kind=device.kind,
        platform=device.platform,
        memory_bytes=int(device.memory_bytes * share),
        memory_limit=memory_limit,
        peak_flops=tuple((d, r * share) for d, r in device.peak_flops.items()),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * share,
        links=links,
        matmul_efficiency=device.matmul_efficiency,
        memory_efficiency=device.memory_efficiency,
        link_efficiency=device.link_efficiency,
        overlap_slowdown=device.overlap_slowdown,
        op_overhead_s=device.op_overhead_s,
        dispatch_s=device.dispatch_s,
        num_hosts=hosts,
        devices_per_host_cores=round(1 / share) if device.shared_host else 1,
        source=source,
        notes=tuple(device.notes) + ((device.judgement,) if device.judgement else ()),
    )


def describe_devices(devices: list[Any], *, memory_limit: str | int) -> Cluster:
    """Accelerators at hand, described by the shipped file whose kind they are.

    Devices of one process (host) count as a node. The memory is what the device itself reports where it does.

    Raises:
        ProfileError: no shipped description has this kind.
    """
    kind = devices[0].device_kind
    for name in shipped_names():
        device = _read(name)
        if kind.lower() in (k.lower() for k in (device.kind, *device.aliases)):
            break
    else:
        raise ProfileError(
            f"no shipped description fits devices of kind {kind!r}; write one as the files in uniap_jax/profiles "
            f"({', '.join(shipped_names())}) and pass cluster=load_cluster(path)",
            kind=kind,
        )
    hosts = len({d.process_index for d in devices})
    shape = (len(devices) // device.torus.chip_devices,) if device.torus else (hosts, max(1, len(devices) // hosts))
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        device.memory_bytes = int(stats["bytes_limit"])
    make = _torus_cluster if device.torus else _node_cluster
    return replace(make(device, shape, memory_limit), num_hosts=hosts)
