"""What this process can plan for and run on: versions, devices, threads, solver, extras, caches, and what is amiss."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("uniap-jax", "jax", "jaxlib", "numpy", "scipy", "mip", "flax", "optax", "chex", "rich", "msgspec")
EXTRAS = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "docs": "sphinx", "test": "pytest", "report": "tensorboardX"}
FEWEST_THREADS_PER_DEVICE = 8


def installed(package: str) -> str | None:
    """Version of a distribution, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_device(device: jax.Device) -> dict[str, Any]:
    """Platform, kind, process and memory of a device."""
    stats = device.memory_stats() or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": stats.get("bytes_limit"),
    }


def cpu_threads() -> dict[str, Any]:
    """Cores this process may use, and the size of the CPU client's thread pool."""
    cores = len(os.sched_getaffinity(0))
    asked = os.environ.get("NPROC", "")
    return {"cores": cores, "pool": int(asked) if asked.isdigit() else cores, "NPROC": asked or None}


def host_memory_bytes() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def folder_bytes(folder: Path) -> int:
    """Bytes of the files under a folder; 0 where there is none."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def find_problems(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Sentences that say what will go wrong here, and what to do."""
    devices, threads, found = facts["devices"], facts["threads"], []
    if len(devices) == 1:
        found.append(
            "There is one device, so there is nothing to split; --devices 8 gives eight virtual CPU devices, "
            "and plan --topology NAME plans for devices that are not here."
        )
    needed = FEWEST_THREADS_PER_DEVICE * len(devices)
    if devices[0]["platform"] == "cpu" and len(devices) > 1 and threads["pool"] < needed:
        found.append(
            f"The CPU client has {threads['pool']} threads for {len(devices)} devices and can wait for itself for "
            f"good; set NPROC={max(64, needed)} in the environment before Python starts."
        )
    if facts["packages"]["mip"] is None:
        found.append("python-mip is not installed, so nothing can be solved; pip install mip.")
    return tuple(found)


def examine(*, cache_dir: Path) -> dict[str, Any]:
    """Everything `uniap-jax doctor` shows, as plain data.

    Args:
        cache_dir: folder of cached profiles.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed(name) for name in PACKAGES},
        "extras": {extra: installed(package) for extra, package in EXTRAS.items()},
        "devices": [describe_device(d) for d in jax.devices()],
        "process": {"index": jax.process_index(), "count": jax.process_count(), "local": len(jax.local_devices())},
        "threads": cpu_threads(),
        "host_memory_bytes": host_memory_bytes(),
        "cache": {"path": str(cache_dir), "bytes": folder_bytes(cache_dir)},
    }
    return {**facts, "problems": list(find_problems(facts)), "ok": True}
