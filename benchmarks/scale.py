"""Planning time and memory against the number of devices and of layers, each search in a process of its own.

    python -m benchmarks.scale               8 to 16,384 devices, then 24 to 1,000 layers; slopes of the log-log lines
    python -m benchmarks.scale --one 98 64   one size; prints a JSON object

Llama-like chains with analytic costs (`chains.py`); every stage count that divides the devices and every number of
micro-batches that divides the batch. CPU seconds include building the tables and the solver's child process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.chains import LlamaChain
from benchmarks.markdown import cpu_seconds, head, made_on, peak_mib, row, say
from uniap_jax.core.errors import NoPlanInTimeError
from uniap_jax.planner import solve

DEVICES = (8, 64, 512, 4096, 16384)
LAYERS = (24, 98, 320, 1000)
FIXED_LAYERS, FIXED_DEVICES = 98, 512
MOST_SAMPLES = 4096


def costs_of(layers: int, devices: int) -> LlamaChain:
    """The chain of one size; 8 samples a device up to 4,096 in all, one a device beyond."""
    batch = max(min(8 * devices, MOST_SAMPLES), devices)
    return LlamaChain(num_blocks=layers - 2, num_devices=devices, batch_size=batch, memory_gib=40.0)


def measure(layers: int, devices: int, limit: float) -> dict[str, Any]:
    """One search."""
    costs, started, before = costs_of(layers, devices), time.perf_counter(), cpu_seconds()
    try:
        plan = solve(costs, executor="stages", baselines=False, why=False, time_limit_s=limit)
    except NoPlanInTimeError:
        plan = None
    found: dict[str, Any] = {
        "layers": layers,
        "devices": devices,
        "batch": costs.batch_size,
        "cpu_s": cpu_seconds() - before,
        "wall_s": time.perf_counter() - started,
        "peak_mib": peak_mib(),
    }
    if plan is not None:
        proof = plan.certificate
        found |= {"candidates": proof.candidates, "step_s": plan.prediction.step_time_s, "gap": proof.gap}
        found |= {"status": proof.status, "stages": plan.num_stages, "microbatches": plan.num_microbatches}
    return found


def in_child(layers: int, devices: int, limit: float) -> dict[str, Any]:
    """One search in a new process, whose memory is its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one", str(layers), str(devices), "--limit", str(limit)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found


def table(sizes: Iterable[tuple[int, int]], limit: float) -> list[dict[str, Any]]:
    """Prints one row a size."""
    head("layers", "devices", "batch", "candidates", "P, c", "step, s", "gap", "CPU s", "wall s", "peak MiB")
    found = []
    for layers, devices in sizes:
        m = in_child(layers, devices, limit)
        found.append(m)
        cells: tuple[object, ...] = ("", "", "no plan in time", "")
        if "status" in m:
            cells = (m["candidates"], f"{m['stages']}, {m['microbatches']}", f"{m['step_s']:.4f}", f"{m['gap']:.1e}")
        row(layers, devices, m["batch"], *cells, f"{m['cpu_s']:.2f}", f"{m['wall_s']:.1f}", m["peak_mib"])
    return found


def slope(found: Sequence[dict[str, Any]], axis: str, value: str) -> float:
    """Of the straight line through log(value) over log(axis)."""
    x, y = (np.log([float(m[name]) for m in found]) for name in (axis, value))
    return float(np.polyfit(x, y, 1)[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Prints two tables with their slopes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=2, type=int, metavar=("LAYERS", "DEVICES"))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each search (default 120)")
    options = parser.parse_args(argv)
    if options.one:
        say(json.dumps(measure(*options.one, options.limit)))
        return
    say(made_on())
    for axis, sizes in (
        ("devices", [(FIXED_LAYERS, n) for n in DEVICES]),
        ("layers", [(n, FIXED_DEVICES) for n in LAYERS]),
    ):
        found = table(sizes, options.limit)
        say(
            f"\nSlope of the log-log line over {axis}: CPU seconds {slope(found, axis, 'cpu_s'):.2f}, "
            f"memory {slope(found, axis, 'peak_mib'):.2f}."
        )


if __name__ == "__main__":
    main()
