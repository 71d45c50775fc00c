"""Trains the GPT of `gpt.py` by several processes; rank 0 plans for all of them.

    python examples/multi_process.py --spawn 2                     # two processes on this host, to see it work
    python examples/multi_process.py --rank 0 --size 2 --host 10.0.0.1 --port 4320   # on every host, with its rank

Every process runs the same script; rank 0 plans, and plan and program are compared before any step. The coordinator of
`jax.distributed` listens at --port of rank 0, the line that carries the plan and watches the steps at the next port.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import jax
import numpy as np
from gpt import DEFAULT_TEXT, batches, create_state, train_step

import uniap_jax as uniap
from uniap_jax.runtime.processes import connect, global_batch, local_rows


def spawn(size: int, steps: int) -> int:
    """Runs all ranks on this host, four CPU devices in all; returns the first bad exit code."""
    with socket.socket() as taken, socket.socket() as next_taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        next_taken.bind(("127.0.0.1", port + 1))
    flags = f"--xla_force_host_platform_device_count={max(4 // size, 1)} --xla_backend_optimization_level=0"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": os.environ.get("NPROC", "64")}
    arguments = ["--size", str(size), "--host", "127.0.0.1", "--port", str(port), "--steps", str(steps)]
    command = [sys.executable, __file__, *arguments]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(size)]
    return next((code for code in [r.wait() for r in ranks] if code), 0)


def run(rank: int, size: int, host: str, port: int, steps: int) -> None:
    """One rank: join the others, and train on this process's rows."""
    jax.distributed.initialize(f"{host}:{port}", size, rank)
    data = batches(DEFAULT_TEXT)
    batch = next(data)
    with connect(f"{host}:{port + 1}") as group:
        step = uniap.parallelize(train_step, source="described", processes=group)
        state = step.init(lambda: create_state(2, 64, 4), batch=batch)  # every device makes its own share
        form, layouts = jax.tree.structure(batch), step.batch_shardings
        mine = [local_rows(v, s) for v, s in zip(step.graph.step.batch, layouts, strict=True)]
        for number in range(steps):
            local = [leaf[rows] for leaf, rows in zip(jax.tree.leaves(batch), mine, strict=True)]
            rows = global_batch(local, step.graph.step.batch, layouts)
            state, metrics = step(state, jax.tree.unflatten(form, rows))
            if rank == 0:
                print(f"step {number + 1:3d}  loss {float(np.asarray(metrics['loss'])):.4f}", flush=True)
            batch = next(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawn", type=int, help="run this many processes on this host")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1", help="of rank 0")
    parser.add_argument("--port", type=int, default=4320, help="of rank 0; the one after it is used too")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.spawn:
        sys.exit(spawn(options.spawn, options.steps))
    run(options.rank, options.size, options.host, options.port, options.steps)


if __name__ == "__main__":
    main()
