"""Where the loss is cut into layers: narrow places, equal neighbours, balanced work. Names play no part.

A place between two equations is narrow when few values that depend on the parameters are alive there. Values that
depend on the batch alone (masks, positions, random keys) are rebuilt by each layer that reads them and do not count;
neither do scalars (auxiliary losses carried along) nor results on their way out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uniap_jax.core.jax_compat import Var
from uniap_jax.core.jaxprs import eqn_flops, eqn_text, variables
from uniap_jax.frontend.labels import module_path
from uniap_jax.frontend.split import LossTape

HEAVY = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "custom_vjp_call", "ragged_dot"})
MIN_SHARE = 0.01  # of the work: a smaller layer joins a neighbour
MAX_REGION = 0.30  # of the work: a larger region is cut again at wider places
MAX_WIDTH = 12
PIECE = 1 / 16  # of the work: what unequal layers are gathered up to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The equations that must run in order, and what they weigh.

    Attributes:
        order: indices into `LossTape.eqns` of equations that depend on parameters (or are too heavy to repeat).
        width: for each place before `order[i]`, how many large values are alive.
        crossing_bytes: their bytes.
        weight: share of the work of each equation of `order`: the larger of its FLOPs and of the parameter bytes it
            is first to read, each as a share of the whole.
        text: structure of each equation, equal for equal layers.
        path: module path of each equation.
    """

    order: tuple[int, ...]
    width: np.ndarray
    crossing_bytes: np.ndarray
    weight: np.ndarray
    text: tuple[str, ...]
    path: tuple[tuple[str, ...], ...]


def dependent(loss: LossTape) -> set[Var]:
    """Variables that depend on parameters, or that a heavy operation made."""
    found = set(loss.params)
    for eqn in loss.eqns:
        if eqn.primitive.name in HEAVY or any(v in found for v in variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _bytes(var: Var) -> int:
    return int(np.prod(var.aval.shape, dtype=np.int64)) * int(getattr(var.aval.dtype, "itemsize", 4))


def weigh(loss: LossTape) -> Work:
    """Measures every equation and every place of a loss."""
    live = dependent(loss)
    order = [i for i, e in enumerate(loss.eqns) if any(v in live for v in e.outvars)]
    params = set(loss.params)
    born: dict[Var, int] = {}
    last: dict[Var, int] = {}
    flops, param_bytes, seen = np.zeros(len(order)), np.zeros(len(order)), set[Var]()
    for place, i in enumerate(order):
        eqn = loss.eqns[i]
        flops[place] = eqn_flops(eqn)
        for v in variables(eqn.invars):
            if v in params and v not in seen:
                seen.add(v)
                param_bytes[place] += _bytes(v)
            elif v in live and v not in params:
                last[v] = place
        born.update((v, place) for v in eqn.outvars)
    width, crossing = np.zeros(len(order) + 1, np.int64), np.zeros(len(order) + 1, np.int64)
    for v, end in last.items():
        if v in born and _bytes(v) > 64:
            width[born[v] + 1 : end + 1] += 1
            crossing[born[v] + 1 : end + 1] += _bytes(v)
    weight = np.maximum(flops / max(flops.sum(), 1.0), param_bytes / max(param_bytes.sum(), 1.0))
    eqns = [loss.eqns[i] for i in order]
    return Work(
        order=tuple(order),
        width=width,
        crossing_bytes=crossing,
        weight=weight,
        text=tuple(eqn_text(e) for e in eqns),
        path=tuple(module_path(e) for e in eqns),
    )


def cut_points(work: Work, marks: Sequence[int] = ()) -> tuple[int, ...]:
    """Places in `work.order` where a new layer starts (0 left out), in order.

    Args:
        work: the measured loss.
        marks: places the user chose; when there are any, nothing else is cut.
    """
    n = len(work.order)
    if marks:
        return tuple(sorted({m for m in marks if 0 < m < n}))
    atoms = [0, *_refine(work, 0, n, 1), n]
    pieces = _equal_runs(work, atoms, 0, len(atoms) - 1)
    return tuple(b for b in _join_small(work, [*pieces, n]) if 0 < b < n)


def _refine(work: Work, low: int, high: int, width: int) -> list[int]:
    """Narrow places inside [low, high); regions that stay too heavy are cut at wider places."""
    share = work.weight[low:high].sum() / work.weight.sum()
    if width > MAX_WIDTH or share <= (0.0 if width == 1 else MAX_REGION):
        return []
    places = [p for p in range(low + 1, high) if work.width[p] <= width]
    edges, found = [low, *places, high], list(places)
    for a, b in zip(edges, edges[1:], strict=False):
        if b - a > 1:
            found += _refine(work, a, b, width + 1)
    return sorted(found)


def _equal_runs(work: Work, atoms: Sequence[int], first: int, last: int) -> list[int]:
    """Starts of layers over atoms [first, last): repeats of a run are one layer each, the rest is gathered."""
    if first >= last:
        return []
    run = _best_run(work, atoms, first, last)
    if run is None:
        return _gather(work, atoms, first, last)
    start, period, count = run
    inside = [atoms[start + i * period] for i in range(count)]
    end = start + period * count
    return [*_equal_runs(work, atoms, first, start), *inside, *_equal_runs(work, atoms, end, last)]


def _best_run(work: Work, atoms: Sequence[int], first: int, last: int) -> tuple[int, int, int] | None:
    """The heaviest run of equal neighbours: (first atom, atoms in one, how many); of equals the shortest period."""
    ids, weight = _atom_ids(work, atoms), np.add.reduceat(work.weight, atoms[:-1])
    best: tuple[float, int, int, int] | None = None
    for period in range(1, (last - first) // 2 + 1):
        equal = ids[first : last - period] == ids[first + period : last]
        for start, length in _stretches(equal):
            count = length // period + 1
            if count < 2:
                continue
            spare = length - (count - 1) * period
            start = first + start + _rotation(work, atoms, first + start, spare, period)
            share = float(weight[start : start + period * count].sum())
            if share > 0.05 * work.weight.sum() and (best is None or share > best[0] * 1.02):
                best = (share, start, period, count)
    return None if best is None else best[1:]


def _atom_ids(work: Work, atoms: Sequence[int]) -> np.ndarray:
    """A number for each atom, equal for atoms of equal structure."""
    known: dict[str, int] = {}
    digests = [
        hashlib.sha256("\n".join(work.text[a:b]).encode()).hexdigest() for a, b in zip(atoms, atoms[1:], strict=False)
    ]
    return np.asarray([known.setdefault(d, len(known)) for d in digests])


def _stretches(equal: np.ndarray) -> list[tuple[int, int]]:
    """Start and length of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _rotation(work: Work, atoms: Sequence[int], start: int, spare: int, period: int) -> int:
    """How far to turn a run so that it starts at the narrowest place, where a module starts if names tell."""

    def cost(shift: int) -> tuple[Any, ...]:
        place = atoms[start + shift]
        before = work.path[place - 1] if place else ()
        shared = len([0 for a, b in zip(before, work.path[place], strict=False) if a == b])
        return (int(work.width[place]), shared, int(work.crossing_bytes[place]), shift)

    return min(range(min(spare, period - 1) + 1), key=cost)


def _gather(work: Work, atoms: Sequence[int], first: int, last: int) -> list[int]:
    """Gathers unequal atoms into pieces of about PIECE of the work, each starting at its narrowest place."""
    total, starts, held = work.weight.sum(), [atoms[first]], 0.0
    for i in range(first, last):
        share = work.weight[atoms[i] : atoms[i + 1]].sum() / total
        wide = work.width[atoms[i]] > work.width[[atoms[j] for j in range(first, last)]].min() + 1
        if i > first and not wide and held >= MIN_SHARE and held + share > PIECE:
            starts.append(atoms[i])
            held = 0.0
        held += share
    return starts


def _join_small(work: Work, bounds: list[int]) -> list[int]:
    """Joins layers below MIN_SHARE of the work to the neighbour with the wider border between them."""
    bounds = sorted({0, *bounds})
    total = work.weight.sum()
    while len(bounds) > 2:
        shares = [work.weight[a:b].sum() / total for a, b in zip(bounds, bounds[1:], strict=False)]
        small = int(np.argmin(shares))
        if shares[small] >= MIN_SHARE * min(1.0, 16 / len(shares)):
            break
        left, right = bounds[small], bounds[small + 1]
        inner = [b for b in (left, right) if 0 < b < bounds[-1]]
        bounds.remove(max(inner, key=lambda b: (work.width[b], work.crossing_bytes[b], -b)))
    return bounds
