"""What this process can plan for and run on: versions, devices, threads, solver, extras, caches, and what is amiss."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from uniap_jax.core.cluster import host_memory_bytes, local_cluster
from uniap_jax.core.errors import ProfileError, UniapError
from uniap_jax.core.machine import usable_cores
from uniap_jax.planner import solve_file
from uniap_jax.profiler.cache import default_dir

PACKAGES = ("uniap-jax", "jax", "jaxlib", "numpy", "scipy", "mip", "flax", "optax", "chex", "rich", "msgspec")
EXTRAS = {"tpu": "libtpu", "cuda": "jax-cuda13-plugin", "docs": "sphinx", "test": "pytest", "report": "tensorboardX"}
FEWEST_THREADS_PER_DEVICE = 8
SOLVER_LIMIT_S = 20.0
SMALL_PROBLEM: dict[str, Any] = {
    "layers": 2,
    "stages": 2,
    "micro_batches": 1,
    "strategies": 1,
    "time": [[[1.0], [1.0]], [[1.0], [1.0]]],
    "iteration_time": [[0.0], [0.0]],
    "memory": [[[1.0], [1.0]], [[1.0], [1.0]]],
    "capacity": [1.0, 1.0],
    "allowed": [[True], [True]],
    "edges": [[0, 1]],
    "reshard": [[[0.0]]],
    "cross_stage": [[[0.0]]],
    "relay": [[0.0]],
}
"""Two layers, two stages, one way to do it, in the form that `solve_file` reads."""


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
    cores = usable_cores()
    asked = os.environ.get("NPROC", "")
    return {"cores": cores, "pool": int(asked) if asked.isdigit() else cores, "NPROC": asked or None}


def try_solver() -> dict[str, Any]:
    """Solves a problem of two layers and two stages, so that a solver that cannot start is seen here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.json"
        path.write_text(json.dumps(SMALL_PROBLEM))
        try:
            found = solve_file(path, time_limit_s=SOLVER_LIMIT_S)
        except UniapError as error:
            return {"status": "broken", "message": str(error)}
    return {"status": found["status"], "seconds": found["seconds"]}


def folder_bytes(folder: Path) -> int:
    """Bytes of the files under a folder; 0 where there is none."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def describe_links() -> dict[str, Any]:
    """The network as described (not measured), nearest level first; or why these devices have no description."""
    try:
        cluster = local_cluster()
    except ProfileError as error:
        return {"levels": [], "message": str(error)}
    return {
        "levels": [
            {
                "name": link.name,
                "devices": link.size,
                "gigabytes_per_second": link.bandwidth_bytes_per_s / 1e9,
                "latency_s": link.latency_s,
            }
            for link in cluster.links
        ],
        "source": cluster.source,
    }


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
    if "message" in facts["links"]:
        found.append(facts["links"]["message"])
    if facts["solver"]["status"] != "optimal":
        told = facts["solver"].get("message", facts["solver"]["status"])
        found.append(f"The solver did not solve a problem of two layers: {told} Reinstall it with pip install mip.")
    return tuple(found)


def examine(*, cache_dir: Path | None = None) -> dict[str, Any]:
    """Everything `uniap-jax doctor` shows, as plain data.

    Args:
        cache_dir: folder of cached profiles; the user's where None.
    """
    cache_dir = cache_dir or default_dir()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed(name) for name in PACKAGES},
        "extras": {extra: installed(package) for extra, package in EXTRAS.items()},
        "devices": [describe_device(d) for d in jax.devices()],
        "process": {"index": jax.process_index(), "count": jax.process_count(), "local": len(jax.local_devices())},
        "links": describe_links(),
        "threads": cpu_threads(),
        "host_memory_bytes": host_memory_bytes(),
        "solver": try_solver(),
        "cache": {"path": str(cache_dir), "bytes": folder_bytes(cache_dir)},
    }
    return {**facts, "problems": list(find_problems(facts)), "ok": True}
