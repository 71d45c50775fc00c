"""Speed and quality of the planner on Llama-like chains, one run, one table.

    python -m benchmarks.planner              whole searches, then engines on single candidates
    python -m benchmarks.planner --only search|engines|graphs
    python -m benchmarks.planner --limit 60   seconds for each call

CPU seconds include building the tables and the solver's child process. Costs are analytic (see `chains.py`): what is
measured here is the search, not any device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from benchmarks.chains import LlamaChain, t5, u_net
from benchmarks.markdown import cpu_seconds, head, made_on, peak_mib, row, say
from uniap_jax.core.costs import Candidate
from uniap_jax.core.errors import NoPlanInTimeError
from uniap_jax.planner import solve, solve_tables

T = TypeVar("T")
LLAMA = LlamaChain(num_blocks=32, num_devices=8, batch_size=64, memory_gib=24.0)
ENGINES = ("interval", "miqp", "literal", "layerwise_dp", "inter_then_intra", "mcmc")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """A call's answer and its CPU seconds."""
    before = cpu_seconds()
    answer = call()
    return answer, cpu_seconds() - before


def searches(limit: float) -> None:
    """Whole searches over all candidates."""
    head("layers", "devices", "batch", "blocks", "candidates", "P, c", "step, s", "status", "gap", "CPU s", "peak MiB")
    sizes = [
        ("equal", LLAMA),
        ("equal", replace(LLAMA, num_blocks=96, num_devices=64, batch_size=256)),
        ("equal", replace(LLAMA, num_blocks=96, num_devices=512, batch_size=1024)),
        ("equal", replace(LLAMA, num_blocks=998, num_devices=4096, batch_size=4096, memory_gib=40.0)),
        ("3 % noise", replace(LLAMA, noise=0.03)),
        ("3 % noise", replace(LLAMA, num_blocks=96, num_devices=64, batch_size=256, noise=0.03)),
    ]
    for blocks, costs in sizes:
        try:
            plan, cpu = timed(lambda costs=costs: solve(costs, baselines=False, time_limit_s=limit))
        except NoPlanInTimeError:
            row(
                costs.num_layers, costs.num_devices, costs.batch_size, blocks, "", "", "", "no plan in time", "", "", ""
            )
            continue
        proof = plan.certificate
        where = f"{plan.num_stages}, {plan.num_microbatches}"
        row(
            costs.num_layers, costs.num_devices, costs.batch_size, blocks, proof.candidates, where,
            f"{plan.prediction.step_time_s:.4f}", proof.status, f"{proof.gap:.1e}", f"{cpu:.2f}", peak_mib(),
        )  # fmt: skip


def engines(limit: float) -> None:
    """Every engine on single candidates, the same limit for all."""
    head("layers", "P", "c", "K", "engine", "step, s", "status", "gap", "CPU s")
    settings = [(12, 2, 8, 8), (32, 2, 16, 16), (32, 4, 16, 8), (48, 4, 32, 8)]
    for blocks, stages, count, k in settings:
        costs = replace(LLAMA, num_blocks=blocks, max_strategies=k, memory_gib=14.0 + blocks / 2)
        tables = costs.tables(Candidate(num_stages=stages, num_microbatches=count, schedule="one_f_one_b"))
        for engine in ENGINES:
            result, cpu = timed(lambda t=tables, e=engine: solve_tables(t, engine=e, time_limit_s=limit))
            found = "" if result.evaluation is None else f"{result.evaluation.step_time_s:.4f}"
            gap = "" if result.evaluation is None else f"{result.gap:.1e}"
            row(blocks + 2, stages, count, k, engine, found, result.status, gap, f"{cpu:.2f}")


def graphs(limit: float) -> None:
    """Edges that skip layers."""
    head("graph", "layers", "P, c", "step, s", "status", "gap", "CPU s")
    for name, skips in (("T5-like", t5(32)), ("U-Net-like", u_net(32))):
        costs = replace(LLAMA, skips=skips, max_strategies=8, memory_gib=28.0, node_size=2, slow=4e9)
        plan, cpu = timed(lambda costs=costs: solve(costs, baselines=False, time_limit_s=limit))
        proof = plan.certificate
        where = f"{plan.num_stages}, {plan.num_microbatches}"
        row(name, 34, where, f"{plan.prediction.step_time_s:.4f}", proof.status, f"{proof.gap:.1e}", f"{cpu:.2f}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("search", "engines", "graphs"))
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    say(made_on())
    parts = {"search": searches, "engines": engines, "graphs": graphs}
    for name, part in parts.items():
        if options.only in (None, name):
            part(options.limit)


if __name__ == "__main__":
    main()
