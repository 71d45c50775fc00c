"""Memory is decided before anything is searched, and explained.

Memory couples layers only through the stage they share, so the least memory of a candidate is a bottleneck path over
cuts with every layer at its leanest legal strategy:

    m* = min over cuts of max over stages of sum_u min_k M_uik
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from uniap_jax.core.costs import MEMORY_TOLERANCE, Candidate, CostTables, FloatArray
from uniap_jax.core.errors import InfeasibleError

GIB = 1024.0**3


def leanest(tables: CostTables) -> FloatArray:
    """[layers, stages] least bytes of a layer under its legal strategies; infinite without one."""
    least: FloatArray = np.where(tables.allowed[:, None, :], tables.memory_bytes, np.inf).min(axis=2)
    return least


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The leanest way to run one candidate.

    Attributes:
        candidate: stages and micro-batches.
        ratio: needed over capacity of the fullest stage; at most 1 where the candidate fits.
        needed_bytes: of the fullest stage, per device.
        limit_bytes: its capacity.
        stage: the fullest one.
        first: its first layer.
        last: its last layer.
    """

    candidate: Candidate
    ratio: float
    needed_bytes: float
    limit_bytes: float
    stage: int
    first: int
    last: int

    @property
    def fits(self) -> bool:
        """Whether some plan of the candidate respects memory (stages as intervals of the trace order)."""
        return self.ratio <= 1 + MEMORY_TOLERANCE


def fits(tables: CostTables) -> bool:
    """Whether some cuts fit with every layer at its leanest: `least_memory(tables).fits` in one pass over the stages.

    A stage that ends at a layer is leanest when it starts as late as it may.
    """
    least = leanest(tables)
    num_layers, num_stages = least.shape
    sums = np.concatenate([np.zeros((1, num_stages)), np.cumsum(least, axis=0)])
    place = np.arange(num_layers + 1)
    reached = place == 0
    for i in range(num_stages):
        last = np.maximum.accumulate(np.where(reached, place, -1))
        start = np.concatenate([[-1], last[:-1]])
        with np.errstate(invalid="ignore"):
            held = sums[:, i] - sums[np.maximum(start, 0), i]
        reached = (start >= 0) & (held <= tables.capacity_bytes[i] * (1 + MEMORY_TOLERANCE))
    return bool(reached[-1])


def least_memory(tables: CostTables) -> LeastMemory:
    """Bottleneck dynamic program over cuts, [layers²] per stage."""
    least = leanest(tables)
    num_layers, num_stages = least.shape
    sums = np.concatenate([np.zeros((1, num_stages)), np.cumsum(least, axis=0)])
    ahead = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_), k=1)
    best = np.full(num_layers + 1, np.inf)
    best[0], froms = 0.0, []
    for i in range(num_stages):
        with np.errstate(invalid="ignore"):
            part = (sums[None, :, i] - sums[:, None, i]) / tables.capacity_bytes[i]
        worst = np.where(ahead, np.maximum(best[:, None], np.nan_to_num(part, nan=np.inf)), np.inf)
        froms.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    return _fullest(tables, sums, froms, float(best[-1]))


def _fullest(
    tables: CostTables, sums: FloatArray, froms: list[np.ndarray[tuple[int], np.dtype[np.intp]]], ratio: float
) -> LeastMemory:
    end, stages = tables.num_layers, []
    for i in range(len(froms) - 1, -1, -1):
        begin = int(froms[i][end])
        stages.append((float(sums[end, i] - sums[begin, i]), i, begin, end - 1))
        end = begin
    needed, stage, first, last = max(stages, key=lambda s: (s[0] / tables.capacity_bytes[s[1]], -s[1]))
    return LeastMemory(
        candidate=tables.candidate,
        ratio=ratio,
        needed_bytes=needed,
        limit_bytes=float(tables.capacity_bytes[stage]),
        stage=stage,
        first=first,
        last=last,
    )


def _name(tables: CostTables, layer: int) -> str:
    return f"{layer} ({tables.layer_names[layer]})" if tables.layer_names else str(layer)


def _strategy_name(tables: CostTables, k: int) -> str:
    return str(tables.strategies[k]) if tables.strategies else f"strategy {k}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.01 * GIB else f"{num_bytes / 1024**2:.3g} MiB"


def explain(
    tables_of: Callable[[Candidate], CostTables],
    candidates: Sequence[Candidate],
    *,
    num_devices: int | None = None,
    batch_size: int | None = None,
) -> InfeasibleError:
    """Why no plan exists: a layer without a strategy, a layer too large alone, or the least memory over all candidates.

    Args:
        tables_of: builds the tables of a candidate.
        candidates: all of them were found impossible.
        num_devices: for the message.
        batch_size: for the message.
    """
    where = _where(candidates, num_devices, batch_size)
    least: LeastMemory | None = None
    blocked: InfeasibleError | None = None
    for candidate in candidates:
        tables = tables_of(candidate)
        error = _no_strategy(tables, where)
        blocked = blocked or error
        if error is None and tables.num_layers >= candidate.num_stages:
            found = least_memory(tables)
            if least is None or found.ratio < least.ratio * (1 - 1e-12):
                least = found
    if least is None:
        return blocked or _too_few_layers(tables_of(candidates[0]), candidates, where)
    return _too_small(tables_of(least.candidate), least, where)


def _where(candidates: Sequence[Candidate], num_devices: int | None, batch_size: int | None) -> str:
    parts = [f"{num_devices} devices"] if num_devices else []
    parts += [f"global batch {batch_size}"] if batch_size else []
    parts.append(f"{len(candidates)} candidate{'s' if len(candidates) != 1 else ''}")
    return ", ".join(parts)


def _no_strategy(tables: CostTables, where: str) -> InfeasibleError | None:
    layers = np.flatnonzero(~tables.allowed.any(axis=1))
    if not len(layers):
        return None
    first = int(layers[0])
    return InfeasibleError(
        f"no plan exists ({where}): layer {_name(tables, first)} has no legal strategy"
        f"{f', nor have {len(layers) - 1} others' if len(layers) > 1 else ''}; every degree that the devices allow "
        f"fails to divide one of its dimensions or the micro-batch. Use a batch size or a number of devices with a "
        f"common divisor, or fewer micro-batches than {tables.candidate.num_microbatches}.",
        layer=first,
        layers=tuple(layers.tolist()),
        num_stages=tables.candidate.num_stages,
        num_microbatches=tables.candidate.num_microbatches,
        needed_bytes=None,
        limit_bytes=float(tables.capacity_bytes.min()),
        stage=None,
        strategy=None,
    )


def _too_few_layers(tables: CostTables, candidates: Sequence[Candidate], where: str) -> InfeasibleError:
    stages = min(c.num_stages for c in candidates)
    return InfeasibleError(
        f"no plan exists ({where}): {tables.num_layers} layers cannot fill {stages} stages. "
        f"Use at most {tables.num_layers} stages.",
        layers=tuple(range(tables.num_layers)),
        layer=None,
        num_stages=stages,
        num_microbatches=candidates[0].num_microbatches,
        needed_bytes=None,
        limit_bytes=None,
        stage=None,
        strategy=None,
    )


def _too_small(tables: CostTables, least: LeastMemory, where: str) -> InfeasibleError:
    span = range(least.first, least.last + 1)
    memory = np.where(tables.allowed, tables.memory_bytes[:, least.stage], np.inf)[least.first : least.last + 1]
    layer = least.first + int(memory.min(axis=1).argmax())
    k = int(memory[layer - least.first].argmin())
    alone = float(memory[layer - least.first, k])
    candidate = least.candidate
    layers = f"layers {least.first}-{least.last}" if len(span) > 1 else f"layer {least.first}"
    largest = (
        f"layer {_name(tables, layer)} alone needs {_gib(alone)} at its leanest strategy ({_strategy_name(tables, k)})"
    )
    times = least.needed_bytes / least.limit_bytes
    return InfeasibleError(
        f"no plan fits in {_gib(least.limit_bytes)} per device ({where}). The smallest memory that fits is "
        f"{_gib(least.needed_bytes)}: {candidate.num_stages} stage{'s' if candidate.num_stages > 1 else ''}, "
        f"{candidate.num_microbatches} micro-batch{'es' if candidate.num_microbatches > 1 else ''}; "
        f"stage {least.stage} "
        f"holds {layers}, and {largest}. Give each device at least {_gib(least.needed_bytes)}, use about "
        f"{times:.3g} times as many devices, or lower the batch size.",
        needed_bytes=least.needed_bytes,
        limit_bytes=least.limit_bytes,
        num_stages=candidate.num_stages,
        num_microbatches=candidate.num_microbatches,
        stage=least.stage,
        layers=tuple(span),
        layer=layer,
        strategy=tables.strategies[k] if tables.strategies else k,
    )
