"""Times and memory of layers under strategies. One door: `profile`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from uniap_jax.core.absent import stage_devices
from uniap_jax.core.described import Describer
from uniap_jax.core.equal_stages import ticking_run
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.machine import Cluster, usable_cores
from uniap_jax.core.profile import SOURCES, Footprint, Key, LayerCost, LinkFit, Profile, Rates
from uniap_jax.profiler.cache import Cache, default_dir
from uniap_jax.profiler.calibrate import fill
from uniap_jax.profiler.compiled import Compiler, measure_cycle
from uniap_jax.profiler.footprint import Footprinter, Replica, Runs, by_variety, replicas_of
from uniap_jax.profiler.measure import Measurer, measure_machine, measured_describer
from uniap_jax.profiler.meeting import gradients_meet
from uniap_jax.profiler.order import Entry, by_value, described, entries
from uniap_jax.profiler.programs import Arrays
from uniap_jax.profiler.run import run_entries

__all__ = ["profile"]

LINKS_SHARE = 0.25
"""Of the budget, what measuring the machine may take."""
MEMORY_SHARE = 0.4
"""Of what is left of the budget, what compiling for memory may take by default."""


def profile(
    graph: LayerGraph,
    cluster: Cluster,
    *,
    source: str = "measured",
    num_stages: int | Sequence[int] | str = "auto",
    num_microbatches: int | Sequence[int] | str = "auto",
    keeps: tuple[str, ...] = ("all", "inputs"),
    budget_s: float = 120.0,
    memory_share: float = MEMORY_SHARE,
    only: Collection[Key] | None = None,
    cache_dir: str | Path | None = None,
    devices: Sequence[Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:
    """Costs of every kind of layer under every legal strategy and micro-batch.

    "measured" compiles and times what decides most first and stops when the budget is spent; the rest is described
    from the cluster's rates, calibrated on what was measured, and marked "scaled". "compiled" does the same with the
    real compiler of TPUs or cards that are not here, and no clock. "described" compiles nothing.

    Args:
        graph: from the frontend.
        cluster: the devices; for "measured" those at hand.
        source: "measured", "compiled" or "described".
        num_stages: pipeline stages to cover; "auto" for every divisor of the devices.
        num_microbatches: micro-batches to cover; "auto" for every divisor of the batch.
        keeps: what strategies may keep for the backward pass.
        budget_s: seconds to spend on compiling and timing; results in the cache cost none of it.
        memory_share: of what is left of the budget after the machine itself was measured, what compiling for memory
            may take; 1 times no layer.
        only: entries to measure, and no others; what the cache knows of the others counts.
        cache_dir: where results are kept; the user's cache folder where None.
        devices: to measure on, in the order stages take them; the first of `jax.devices()` where None.
        progress: called with what is done, how much there is, and what is being measured.

    Raises:
        ProfileError: an unknown source, a count or a share that is not possible, devices that are not the cluster's,
            or no compiler for devices that are not here.
    """
    start = time.monotonic()
    if source not in SOURCES:
        raise ProfileError(f"source {source!r} is unknown; use {', '.join(SOURCES)}", field="source")
    if not 0.0 <= memory_share <= 1.0:
        raise ProfileError(f"memory_share={memory_share}: give a share between 0 and 1", field="memory_share")
    describer = Describer(graph.by_rows, cluster)
    found = entries(describer, num_stages=num_stages, num_microbatches=num_microbatches, keeps=keeps)
    if source == "described":
        costs = {e.key: described(e, describer) for e in found}
        return _profile(describer, costs, source=source, start=start)
    cache = Cache(Path(cache_dir) if cache_dir is not None else default_dir())
    fits: tuple[LinkFit, ...] = ()
    rates: Rates | None = None
    prober: Measurer | Compiler
    if source == "measured":
        here = _devices(cluster, devices)
        stages = sorted({e.num_stages for e in found})
        fits, rates = measure_machine(here, stages, cache, start + LINKS_SHARE * budget_s)
        describer = measured_describer(describer, fits, rates)
        arrays = Arrays(cluster.memory_bytes)
        measurer = Measurer(describer=describer, devices=here, rates=rates, cache=cache, arrays=arrays)
        rates = measurer.rates = measurer.with_optimizer(start + budget_s)
        prober, workers = measurer, 1
    else:
        absent = _absent_stages(cluster, found)
        cycle_s = measure_cycle(cluster, next(iter(absent.values())), cache)
        prober, workers = Compiler(describer=describer, devices=absent, cycle_s=cycle_s, cache=cache), usable_cores()
    ranked, deadline_s = by_value(found, describer), start + budget_s
    meeting = cluster.platform == "tpu" and gradients_meet(describer.graph)  # elsewhere nothing depends on it
    runs = _ticking(describer.graph, cluster, found)
    footprinter = Footprinter(describer=describer, prober=prober, meeting=meeting, runs=runs)
    sought = by_variety(ranked, describer.graph, cluster.platform, runs)
    asked = None
    if only is not None:
        asked = {r for e in ranked if e.key in only for r in replicas_of(e, describer.graph, cluster.platform, runs)}

    def windows(share: float) -> dict[Replica, Footprint]:
        now, cores = time.monotonic(), usable_cores()
        until = now + share * (deadline_s - now)
        return run_entries(sought, footprinter, deadline_s=until, progress=progress, workers=cores, only=asked)

    windows(memory_share)
    probed = run_entries(ranked, prober, deadline_s=deadline_s, progress=progress, workers=workers, only=only)
    footprints = windows(1.0 if memory_share else 0.0)  # in what the times have left
    costs, calibration = fill(found, probed, describer, footprints, runs)
    count = sum(c.origin == source for c in probed.values())
    note = (
        f"{count} of {len(found)} entries are {source}; the others are described, calibrated on these "
        f"(mean error {calibration.error:.0%} before the correction by neighbours). Memory follows from "
        f"{len(footprinter.needs)} compiled windows."
    )
    return _profile(
        describer,
        costs,
        source=source if count else "described",
        start=start,
        links=fits,
        rates=rates,
        notes=(note, *prober.notes),
        jax_version=jax.__version__,
    )


def _ticking(graph: LayerGraph, cluster: Cluster, found: Sequence[Entry]) -> Runs:
    runs = {p: ticking_run(graph, cluster.platform, p) for p in dict.fromkeys(e.num_stages for e in found)}
    return {p: run for p, run in runs.items() if run is not None}


def _absent_stages(cluster: Cluster, found: Sequence[Entry]) -> dict[int, Sequence[Any]]:
    """Devices to compile for, by their number: of every stage, and of one replica and of two where they fill a box."""
    sizes = dict.fromkeys([e.strategy.num_devices for e in found])
    absent: dict[int, Sequence[Any]] = {size: stage_devices(cluster, cluster.num_devices // size) for size in sizes}
    alone = [e.strategy.num_devices // e.strategy.data for e in found]
    for size in dict.fromkeys([*alone, *(2 * size for size in alone if 2 * size <= cluster.num_devices)]):
        with suppress(ProfileError):
            absent.setdefault(size, stage_devices(cluster, cluster.num_devices // size))
    return absent


def _devices(cluster: Cluster, devices: Sequence[Any] | None) -> list[Any]:
    here = list(jax.devices() if devices is None else devices)
    kinds = {d.device_kind for d in here}
    if len(here) < cluster.num_devices or kinds != {cluster.kind}:
        raise ProfileError(
            f"{cluster.name} has {cluster.num_devices} devices of kind {cluster.kind!r}, but here are {len(here)} of "
            f"kind {', '.join(sorted(kinds))}: nothing can be measured; use source='described', or local_cluster()",
            field="devices",
            wanted=cluster.num_devices,
            found=len(here),
        )
    return here[: cluster.num_devices]


def _profile(
    describer: Describer,
    costs: dict[Key, LayerCost],
    *,
    source: str,
    start: float,
    links: tuple[LinkFit, ...] = (),
    rates: Rates | None = None,
    notes: tuple[str, ...] = (),
    jax_version: str = "",
) -> Profile:
    graph, cluster = describer.graph, describer.cluster
    return Profile(
        source=source,
        graph_fingerprint=graph.fingerprint,
        device_kind=cluster.kind,
        num_devices=cluster.num_devices,
        batch_size=graph.batch_size,
        entries=tuple(sorted(costs.items(), key=lambda pair: pair[0])),
        links=links,
        rates=rates or Rates(),
        jax_version=jax_version,
        seconds=time.monotonic() - start,
        notes=(*notes, *describer.notes),
    )
