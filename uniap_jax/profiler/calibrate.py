"""From a few measurements to all entries: described parts weighed to fit, then corrected by the nearest neighbour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Footprint, Key, LayerCost
from uniap_jax.core.weights import param_bytes
from uniap_jax.profiler.footprint import NO_RUNS, Footprints, Replica, Runs, replica_of, ticked_replica
from uniap_jax.profiler.order import Entry, described

PRIOR = 0.3
"""Weight of the described rates against one measurement: decides only where measurements cannot."""
LEAST_RECOMPUTE = 0.05
"""Share of a layer's time that recompute adds at the least."""
REACH = 2.0
"""Distance (in doublings of a degree or of the batch) at which a neighbour's correction counts for half."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Weights of the described parts.

    Attributes:
        weights: of flops, bytes, kernels, collectives inside the layer, gradient synchronisation.
        error: mean relative distance of the measured entries from the weighed parts.
    """

    weights: NDArray[np.float64]
    error: float


def described_parts(describer: Describer, entry: Entry) -> NDArray[np.float64]:
    """Seconds of flops, bytes, kernels, collectives inside the layer, gradient synchronisation."""
    layer, fused = describer.graph.layers[entry.layer], entry.num_stages == 1
    parts = describer.parts(layer, entry.strategy, samples=entry.key.samples, fused=fused)
    sync_s = describer.sync_s(entry.strategy, param_bytes(describer.graph, layer, entry.strategy))
    return np.array([parts.flops_s, parts.memory_s, parts.kernels_s, parts.reduce_s + parts.gather_s, sync_s])


def calibrate(measured: Sequence[tuple[NDArray[np.float64], float]]) -> Calibration:
    """Weights >= 0 that minimise the relative error of the measured totals, drawn to one common factor.

    Args:
        measured: (described parts, measured seconds with gradient synchronisation).
    """
    from scipy.optimize import nnls

    if not measured:
        return Calibration(weights=np.ones(5), error=0.0)
    parts = np.stack([p for p, _ in measured])
    seconds = np.array([t for _, t in measured])
    factor = float(np.median(seconds / np.maximum(parts.sum(axis=1), 1e-12)))
    scaled = parts / seconds[:, None]
    prior = math.sqrt(PRIOR) * np.eye(parts.shape[1]) * np.maximum(scaled.mean(axis=0), 1e-9)
    design = np.vstack([scaled, prior])
    target = np.concatenate([np.ones(len(seconds)), prior @ np.full(parts.shape[1], factor)])
    weights, _ = nnls(design, target)
    error = float(np.mean(np.abs(scaled @ weights - 1.0)))
    return Calibration(weights=weights, error=error)


def fill(
    entries: Sequence[Entry],
    measured: Mapping[Key, LayerCost],
    describer: Describer,
    footprints: Mapping[Replica, Footprint] | None = None,
    runs: Runs = NO_RUNS,
) -> tuple[dict[Key, LayerCost], Calibration]:
    """Every entry: times as measured, else the calibrated description times the neighbour's correction.

    Args:
        entries: to fill.
        measured: those that were.
        describer: of the graph.
        footprints: memory of those replicas whose programs were compiled; that of all entries follows from them.
        runs: those whose ticks are compiled.
    """
    parts = {e.key: described_parts(describer, e) for e in entries}
    known = [e for e in entries if e.key in measured and measured[e.key].origin in ("measured", "compiled")]
    found = calibrate([(parts[e.key], _total(measured[e.key])) for e in known])
    ratio = {e.key: _total(measured[e.key]) / max(float(parts[e.key] @ found.weights), 1e-12) for e in known}
    by_layer: dict[int, list[Entry]] = {}
    for e in known:
        by_layer.setdefault(e.layer, []).append(e)
    filled = dict(measured)
    for e in (x for x in entries if x.strategy.keep == "all"):
        if e.key not in filled:
            filled[e.key] = _scaled(e, parts[e.key], found, by_layer.get(e.layer, []), ratio, describer)
    for e in (x for x in entries if x.strategy.keep != "all"):
        if e.key not in filled:
            plain = replace(e.key, strategy=str(replace(e.strategy, keep="all")))
            if plain in filled and filled[plain].origin != "described":
                filled[e.key] = _recomputed(e, parts[plain], parts[e.key], filled[plain], describer)
            else:
                filled[e.key] = _scaled(e, parts[e.key], found, by_layer.get(e.layer, []), ratio, describer)
    memory = Footprints(describer, footprints or {})
    return {e.key: _with_memory(e, filled[e.key], memory, describer, runs) for e in entries}, found


def _with_memory(entry: Entry, cost: LayerCost, memory: Footprints, describer: Describer, runs: Runs) -> LayerCost:
    layer = describer.graph.layers[entry.layer]

    def replica(*, turned: bool) -> Replica:
        return replica_of(entry, describer.graph, describer.cluster.platform, turned=turned)

    def found(*, turned: bool) -> Footprint:
        fused = turned or entry.num_stages == 1
        told = describer.cost(layer, entry.strategy, samples=entry.key.samples, fused=fused)
        return memory.of(replica(turned=turned), told)

    # where only inputs are kept, one program for both directions holds nearly what two hold
    otherwise = entry.strategy.keep != "inputs" or memory.has(replica(turned=True))
    turned = found(turned=True) if entry.num_stages > 1 and otherwise else None
    ticking = ticked_replica(entry, describer.graph, runs)
    if ticking is not None and memory.has(ticking):
        cost = replace(cost, ticking=memory.of(ticking, cost))
    return replace(cost, **asdict(found(turned=False)), turned=turned)


def _recomputed(
    entry: Entry, plain_parts: NDArray[np.float64], parts: NDArray[np.float64], plain: LayerCost, describer: Describer
) -> LayerCost:
    """Recompute from the same entry without it: the operations it adds, in the backward."""
    base = described(entry, describer)
    work, plain_work = float(parts[0] + parts[3]), float(plain_parts[0] + plain_parts[3])
    more = max(work / plain_work - 1.0, LEAST_RECOMPUTE) if plain_work > 0 else LEAST_RECOMPUTE
    return replace(
        base,
        forward_s=plain.forward_s,
        backward_s=plain.backward_s + more * plain.time_s,
        sync_s=plain.sync_s,
        origin="scaled",
    )


def _total(cost: LayerCost) -> float:
    return cost.time_s + cost.sync_s


def _scaled(
    entry: Entry,
    parts: NDArray[np.float64],
    found: Calibration,
    known: Sequence[Entry],
    ratio: Mapping[Key, float],
    describer: Describer,
) -> LayerCost:
    base = described(entry, describer)
    if not ratio:
        return base
    correction = 1.0
    if known:
        near = min(known, key=lambda k: distance(entry, k))
        correction = ratio[near.key] ** (REACH / (REACH + distance(entry, near)))
    sync = float(parts[4] * found.weights[4] * correction)
    rest = float(parts[:4] @ found.weights[:4] * correction)
    share = base.forward_s / base.time_s if base.time_s > 0 else 1 / 3
    return replace(
        base,
        forward_s=rest * share,
        backward_s=rest * (1 - share),
        sync_s=sync,
        origin="scaled",
    )


def distance(a: Entry, b: Entry) -> float:
    """How unlike two entries of one layer are: doublings of degrees and batch, and whether they keep alike."""
    pairs = (
        (a.strategy.data, b.strategy.data),
        (a.strategy.fsdp, b.strategy.fsdp),
        (a.strategy.tensor, b.strategy.tensor),
        (a.key.samples, b.key.samples),
    )
    moved = sum(abs(math.log2(x / y)) for x, y in pairs) / 2
    return moved + 1.5 * (a.strategy.keep != b.strategy.keep) + 0.5 * (a.num_stages != b.num_stages)
