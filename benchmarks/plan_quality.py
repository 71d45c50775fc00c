"""The joint plan against every baseline over the same tables: the UniAP paper's models on seven clusters.

    python -m benchmarks.plan_quality                                  described: every cluster, every model
    python -m benchmarks.plan_quality --clusters v5e:4x4 --models BERT-Huge
    python -m benchmarks.plan_quality --source compiled                by the TPU compiler (extra tpu)
    python -m benchmarks.plan_quality --source measured                small models on the devices that are here

Models are traced from shapes. Described layers are priced from published rates and links; compiled and measured ones
from a profile within `--budget` seconds, whose missing entries are described and calibrated on the others. Every
engine chooses from the same tables. A number is a step time relative to the joint plan's, 1 being as good; "-" where
the baseline has no plan that fits. `inter` (one device per stage) and `intra` (one stage) are the paper's ablation.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import numpy as np

import uniap_jax as uniap
from benchmarks.markdown import head, made_on, row, say
from benchmarks.paper_models import MODELS, SMALL, Case
from uniap_jax.core.cluster import Cluster
from uniap_jax.core.costs import Candidate, CostModel, CostTables
from uniap_jax.core.errors import InfeasibleError, NoPlanInTimeError, OptionError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.topology import load_cluster
from uniap_jax.planner import solve, solve_tables

CLUSTERS = {
    "v100-sxm2-32g:1x8": 64,
    "titan-xp:2x4": 32,
    "a100-80g:1x8": 64,
    "h100:8x8": 512,
    "v5e:4x4": 128,
    "v5p:4x4x4": 512,
    "a100-80g:1x8 + v100-sxm2-32g:1x8": 128,
}
"""Clusters with the global batch planned for; the last one has two generations of devices."""
HERE = "devices that are here"
DEFAULTS = {
    "described": (tuple(CLUSTERS), tuple(MODELS)),
    "compiled": (("v5e:4x4", "v5p:4x4x4"), ("BERT-Huge", "Llama-7B")),
    "measured": ((HERE,), tuple(SMALL)),
}
"""Clusters and models of each source of numbers."""

BASELINES = ("data_parallel", "fsdp", "tensor", "pipeline_only", "intra_only", "inter_then_intra", "layerwise_dp")
COLUMNS = ("data", "fsdp", "tensor", "inter", "intra", "inter then intra", "layer-wise DP", "mcmc")


@dataclass(frozen=True)
class TwoGenerations:
    """Half of the devices of one kind, half of another, the first stages on the first kind.

    One stage over all devices waits for the slower kind and has the smaller memory; the link between the halves is the
    slower one of the two.

    Attributes:
        first: the model over as many devices as there are in all, all of the first kind.
        second: same, of the second kind.
    """

    first: CostModel
    second: CostModel

    @property
    def num_devices(self) -> int:
        """Of both kinds."""
        return self.first.num_devices

    @property
    def batch_size(self) -> int:
        """Global batch."""
        return self.first.batch_size

    @property
    def layer_names(self) -> tuple[str, ...]:
        """In trace order."""
        return self.first.layer_names

    @property
    def graph_fingerprint(self) -> str:
        """Of the graph."""
        return self.first.graph_fingerprint

    @property
    def device_kind(self) -> str:
        """Both kinds."""
        return f"{self.first.device_kind} and {self.second.device_kind}"

    @property
    def source(self) -> str:
        """Described."""
        return self.first.source

    @property
    def notes(self) -> tuple[str, ...]:
        """Of both."""
        return (*self.first.notes, *self.second.notes)

    @property
    def split_reason(self) -> str:
        """Why the batch must not be split."""
        return self.first.split_reason

    def candidates(self) -> tuple[Candidate, ...]:
        """Same as for one kind."""
        return self.first.candidates()

    def refusal(self, candidate: Candidate) -> str:
        """Of the first kind's, else of the second's."""
        return self.first.refusal(candidate) or self.second.refusal(candidate)

    def stage_devices(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Consecutive devices."""
        return self.first.stage_devices(num_stages)

    def with_strategy(self, strategy: Strategy) -> CostModel:
        """Both models with the strategy."""
        return TwoGenerations(self.first.with_strategy(strategy), self.second.with_strategy(strategy))

    @cached_property
    def _cache(self) -> dict[Candidate, CostTables]:
        return {}

    def tables(self, candidate: Candidate) -> CostTables:
        """Stages of the first half from the first model, the others from the second."""
        if candidate not in self._cache:
            self._cache[candidate] = self._joined(candidate)
        return self._cache[candidate]

    def _joined(self, candidate: Candidate) -> CostTables:
        one, two, stages = self.first.tables(candidate), self.second.tables(candidate), candidate.num_stages
        edges = {name: np.maximum(getattr(one, name), getattr(two, name)) for name in ("cross_stage_s", "relay_s")}
        slower = {
            name: np.maximum(getattr(one, name), getattr(two, name))
            for name in ("time_s", "iteration_time_s", "memory_bytes", "reshard_s")
        }
        if stages == 1:
            capacity = np.minimum(one.capacity_bytes, two.capacity_bytes)
            return replace(one, **slower, **edges, capacity_bytes=capacity, allowed=one.allowed & two.allowed)
        early = np.arange(stages) < stages // 2
        by_stage = {
            name: np.where(early[None, :, None], getattr(one, name), getattr(two, name))
            for name in ("time_s", "iteration_time_s", "memory_bytes")
        }
        return replace(
            one,
            **by_stage,
            **edges,
            reshard_s=slower["reshard_s"],
            capacity_bytes=np.where(early, one.capacity_bytes, two.capacity_bytes),
            allowed=one.allowed & two.allowed,
        )


def cost_model(graph: LayerGraph, cluster: str, source: str, budget_s: float) -> tuple[CostModel, str]:
    """Tables of a graph on a cluster, and where their entries come from.

    "A + B" has two kinds of devices, as many of each, and is described only.
    """
    if " + " in cluster:
        first, second = (_doubled(name) for name in cluster.split(" + "))
        return TwoGenerations(uniap.estimate(graph, first), uniap.estimate(graph, second)), "described"
    described = uniap.local_cluster() if cluster == HERE else load_cluster(cluster)
    if source == "described":
        return uniap.estimate(graph, described), source
    given = {"memory_share": 0.0} if source == "compiled" else {}  # what a compiler takes a minute for goes to times
    found = uniap.profile(graph, described, source=source, budget_s=budget_s, **given)
    origins = ", ".join(f"{count} {origin}" for origin, count in found.counts().items())
    return uniap.estimate(graph, described, found), origins


def _doubled(name: str) -> Cluster:
    stem, _, shape = name.partition(":")
    nodes, size = shape.split("x")
    return load_cluster(f"{stem}:{2 * int(nodes)}x{size}")


def mcmc(costs: CostModel, plan: Plan) -> float | None:
    """Step time of random moves on the joint plan's own stages and micro-batches."""
    candidate = Candidate(
        num_stages=plan.num_stages, num_microbatches=plan.num_microbatches, schedule=plan.schedule
    )  # fmt: skip
    price = solve_tables(costs.tables(candidate), engine="mcmc").evaluation
    return None if price is None else price.step_time_s


def baseline_alone(costs: CostModel, baseline: str, limit: float) -> float | None:
    """Step time of a baseline for which the joint search had no time left; NaN where its own time does not do."""
    try:
        plan = solve(costs, executor="stages", engine=baseline, time_limit_s=limit, why=False)
    except NoPlanInTimeError:
        return math.nan
    except (InfeasibleError, OptionError):
        return None
    return plan.prediction.step_time_s


def measure(name: str, costs: CostModel, origins: str, limit: float) -> list[float | None]:
    """One row; returns the relative step times of the baselines."""
    batch, started = costs.batch_size, time.perf_counter()
    try:
        plan = solve(costs, executor="stages", time_limit_s=limit, why=False)
    except (InfeasibleError, NoPlanInTimeError) as error:
        row(name, batch, origins, type(error).__name__, *[""] * (4 + len(COLUMNS)))
        return []
    seconds = time.perf_counter() - started
    proof, step = plan.certificate, plan.prediction.step_time_s
    found = dict(proof.baselines)
    for baseline in (b for b in BASELINES if found.get(b) is None):
        found[baseline] = baseline_alone(costs, baseline, limit)
    times = [*(found.get(b) for b in BASELINES), mcmc(costs, plan)]
    relative = [None if t is None else t / step for t in times]
    used = {str(layer.strategy) for layer in plan.layers}
    row(
        name, batch, origins, f"{step:.4g}", f"{plan.num_stages}, {plan.num_microbatches}", len(used),
        f"{proof.gap:.0e}", f"{seconds:.1f}", *map(_cell, relative),
    )  # fmt: skip
    return relative


def _cell(relative: float | None) -> str:
    return "-" if relative is None else "no time" if math.isnan(relative) else f"{relative:.3f}"


def summary(rows: Sequence[Sequence[float | None]]) -> None:
    """How much slower each baseline is over all rows, and how often it has no plan at all."""
    head("", *COLUMNS)
    columns = list(zip(*rows, strict=True))
    figures = [_figures(column) for column in columns]
    row("geometric mean", *(f"{geometric_mean(c):.3f}" if c else "-" for c in figures))
    row("worst", *(f"{max(c):.3f}" if c else "-" for c in figures))
    row("best", *(f"{min(c):.3f}" if c else "-" for c in figures))
    row("no plan that fits", *(sum(r is None for r in c) for c in columns))
    row("no time", *(sum(r is not None for r in c) - len(f) for c, f in zip(columns, figures, strict=True)))


def ablation(rows: Mapping[str, Sequence[Sequence[float | None]]]) -> None:
    """The paper's ablation: pipelines alone, splits alone and both, geometric means over the models of a cluster."""
    head("cluster", "models", "inter only", "intra only", "joint", "joint beats the better one by")
    for cluster, found in rows.items():
        pairs = [[r[COLUMNS.index(name)] for name in ("inter", "intra")] for r in found]
        better = [min(figures) for pair in pairs if (figures := _figures(pair))]
        gain = f"{geometric_mean(better) - 1:.1%}" if better else "-"
        row(cluster, len(pairs), *map(_mean_of_figures, zip(*pairs, strict=True)), "1.000", gain)


def _figures(times: Sequence[float | None]) -> list[float]:
    """Those that are neither missing nor unknown for lack of time."""
    return [t for t in times if t is not None and not math.isnan(t)]


def _mean_of_figures(times: Sequence[float | None]) -> str:
    figures = _figures(times)
    if not figures:
        return "-"
    return f"{geometric_mean(figures):.3f}" + (f" (of {len(figures)})" if len(figures) < len(times) else "")


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each cluster, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**MODELS, **SMALL}
    parser.add_argument("--source", choices=list(DEFAULTS), default="described")
    parser.add_argument("--clusters", nargs="*", metavar="NAME")
    parser.add_argument("--models", nargs="*", choices=list(known), metavar="NAME")
    parser.add_argument("--batch", type=int, help="global batch, in place of the cluster's own")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each search (default 30)")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of compiling or measuring for each row")
    options = parser.parse_args(argv)
    clusters, models = DEFAULTS[options.source]
    say(made_on(("jax", "numpy", "scipy", "mip")))
    rows: dict[str, list[list[float | None]]] = {}
    graphs: dict[tuple[str, int], LayerGraph] = {}
    for cluster in options.clusters or clusters:
        say(f"\n**{cluster}**, {options.source}")
        head("model", "batch", "entries", "joint, s", "P, c", "strategies", "gap", "wall s", *COLUMNS)
        batch = options.batch or CLUSTERS.get(cluster, 64)
        for name in options.models or models:
            if (name, batch) not in graphs:
                graphs[name, batch] = uniap.trace(*_step_first(known[name](batch)))
            costs, origins = cost_model(graphs[name, batch], cluster, options.source, options.budget)
            found = measure(name, costs, origins, options.limit)
            if found:
                rows.setdefault(cluster, []).append(found)
    if rows:
        say("\n**All of them**")
        summary([r for found in rows.values() for r in found])
        say("\n**Ablation**")
        ablation(rows)


def _step_first(case: Case) -> tuple[Any, ...]:
    state, step, batch = case
    return step, state, batch


if __name__ == "__main__":
    main()
