"""Where the loss is cut into layers: narrow places, equal neighbours, balanced work. Names play no part.

A place between two equations is narrow when few values that depend on the parameters are alive there. Values that
depend on the batch alone (masks, positions, random keys) are rebuilt by each layer that reads them and do not count;
neither do scalars (auxiliary losses carried along) nor results on their way out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from uniap_jax.core.jax_compat import Var, shape_of
from uniap_jax.core.jaxprs import eqn_flops, eqn_text, variables
from uniap_jax.frontend.labels import module_path
from uniap_jax.frontend.split import LossTape

HEAVY = frozenset({"dot_general", "conv_general_dilated", "scan", "while", "custom_vjp_call", "ragged_dot"})
MIN_SHARE = 0.01  # of the work: a smaller layer joins a neighbour
MAX_REGION = 0.30  # of the work: a larger region is cut again at wider places
MAX_WIDTH = 12
PIECE = 1 / 8  # of the work: what unequal layers are gathered up to
MAX_SPREAD = 16  # times the bytes at the edges of a region: a place that more crosses is not cut
MIN_RUN = 0.05  # of the work: a lighter run of equal neighbours is not worth telling apart
REPEATS = 32  # of one structure of equation in a layer of a run
NOTHING = 1e-4  # of the work: joins a neighbour whatever that breaks


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
    shape = shape_of(var)
    return int(math.prod(shape.shape)) * int(getattr(shape.dtype, "itemsize", 4))


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


MARK = "uniap_layer:"


def mark_layer(x: Any, name: str) -> Any:
    """Ends a layer here; where a loss has marks it is cut at them and nowhere else. The value is unchanged.

    Args:
        x: array or pytree of arrays that the next layer reads.
        name: of the layer that ends.

    Example:
        >>> import jax.numpy as jnp
        >>> mark_layer(jnp.ones(3), "encoder").shape
        (3,)
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, MARK + name), x)


def _mark(eqn: Any) -> str | None:
    """Name of the layer that ends with this equation, or None."""
    name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
    return name.removeprefix(MARK) if name.startswith(MARK) else None


def marked_places(loss: LossTape, order: Sequence[int]) -> dict[int, str]:
    """Places that follow a mark, with the name of the layer that ends there."""
    marks = {place + 1: _mark(loss.eqns[i]) for place, i in enumerate(order)}
    return {p: m for p, m in marks.items() if m is not None and (p == len(order) or marks.get(p + 1) != m)}


def cut_points(work: Work, marks: Sequence[int] = ()) -> tuple[int, ...]:
    """Places in `work.order` where a new layer starts (0 left out), in order.

    Args:
        work: the measured loss.
        marks: places the user chose; when there are any, nothing else is cut.
    """
    n = len(work.order)
    if marks:
        return tuple(sorted({m for m in marks if 0 < m < n}))
    ids = _text_ids(work)
    pieces = _join_small(work, _pieces(work, ids, 0, n), n)
    return tuple(p.start for p in pieces if p.start)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A layer to be: where it starts, and whether it is one of a run of equal ones."""

    start: int
    equal: bool


def _text_ids(work: Work) -> np.ndarray:
    """A number for each equation, equal for equations of equal structure."""
    known: dict[str, int] = {}
    return np.asarray([known.setdefault(t, len(known)) for t in work.text])


def _pieces(work: Work, ids: np.ndarray, low: int, high: int) -> list[_Piece]:
    """Pieces of [low, high): the heaviest run of equal neighbours is one piece each, the rest is gathered."""
    if low >= high:
        return []
    level = _level(work, low, high)
    run = _best_run(work, ids, low, high, level)
    if run is None:
        return [_Piece(p, False) for p in _gather(work, low, high, level)]
    start, period, count = run
    inside = [_Piece(start + i * period, True) for i in range(count)]
    return [*_pieces(work, ids, low, start), *inside, *_pieces(work, ids, start + period * count, high)]


def _level(work: Work, low: int, high: int) -> int:
    """Smallest width whose places leave no region of [low, high) above MAX_REGION of the work."""
    total = work.weight.sum()
    for width in range(1, MAX_WIDTH):
        places = low + 1 + np.flatnonzero(work.width[low + 1 : high] <= width)
        edges = [low, *places, high]
        sums = [work.weight[a:b].sum() for a, b in pairwise(edges)]
        if max(sums) <= MAX_REGION * total:
            return width
    return MAX_WIDTH


def _best_run(work: Work, ids: np.ndarray, low: int, high: int, level: int) -> tuple[int, int, int] | None:
    """The heaviest run of equal neighbours: (start, equations in one, how many); of equals the shortest period.

    Only places no wider than `level` start a layer: three equal projections of one input are not three layers.
    """
    sums = np.concatenate([[0.0], np.cumsum(work.weight)])
    least = MIN_RUN * sums[-1]
    best: tuple[float, int, int, int] | None = None
    for period in _periods(ids[low:high]):
        equal = ids[low : high - period] == ids[low + period : high]
        if np.count_nonzero(equal) < period:
            continue
        for offset, length in _stretches(equal):
            count = length // period + 1
            if count < 2 or sums[low + offset + length + period] - sums[low + offset] <= least:
                continue
            start = low + offset + _rotation(work, low + offset, length - (count - 1) * period, period, count)
            if work.width[start + period * np.arange(1, count)].max() > level:
                continue
            share = float(sums[start + period * count] - sums[start])
            if share > least and (best is None or share > best[0] * 1.02):
                best = (share, start, period, count)
    return None if best is None else best[1:]


def _periods(ids: np.ndarray) -> list[int]:
    """Distances at which equations repeat, those of every equation with the next `REPEATS` of its structure.

    One that a layer holds no more than `REPEATS` times is found at the length of the layer.
    """
    order = np.argsort(ids, kind="stable")
    found: set[int] = set()
    for k in range(1, min(REPEATS, len(ids) - 1) + 1):
        same = ids[order[k:]] == ids[order[:-k]]
        found.update(np.unique((order[k:] - order[:-k])[same]).tolist())
    return sorted(p for p in found if p <= len(ids) // 2)


def _stretches(equal: np.ndarray) -> list[tuple[int, int]]:
    """Start and length of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _rotation(work: Work, start: int, spare: int, period: int, count: int) -> int:
    """How far to turn a run so that it starts at the narrowest places, where a module starts if names tell."""

    def cost(shift: int) -> tuple[Any, ...]:
        places = [start + shift + i * period for i in range(count)]
        first = places[1]
        shared = len([0 for a, b in zip(work.path[first - 1], work.path[first], strict=False) if a == b])
        widths = work.width[places]
        return (int(widths.max()), shared, int(work.crossing_bytes[places].max()), shift)

    return min(range(spare + 1), key=cost)


def _gather(work: Work, low: int, high: int, level: int) -> list[int]:
    """Starts of pieces of about PIECE of the work: the narrowest places first, of those the most balanced."""
    total = work.weight.sum()
    sums = np.concatenate([[0.0], np.cumsum(work.weight[low:high])]) / total
    if sums[-1] <= PIECE:
        return [low]
    places = np.arange(low + 1, high)
    before = sums[1:-1]
    fit = (work.width[places] <= level) & (before >= MIN_SHARE) & (sums[-1] - before >= MIN_SHARE)
    if edge := max(work.crossing_bytes[low], work.crossing_bytes[high]):  # logits are no edge of a layer
        fit &= work.crossing_bytes[places] <= MAX_SPREAD * edge
    if not fit.any():
        return [low]
    unbalanced = np.abs(2 * before - sums[-1])
    at = int(places[fit][np.lexsort((work.crossing_bytes[places[fit]], unbalanced[fit], work.width[places[fit]]))[0]])
    return [*_gather(work, low, at, level), *_gather(work, at, high, level)]


def _join_small(work: Work, pieces: list[_Piece], end: int) -> list[_Piece]:
    """Joins pieces below MIN_SHARE of the work to the neighbour with the wider border between them.

    One of a run of equal layers is left equal: a small layer beside it (the embedding of a very deep model) stands
    alone unless it is next to nothing.
    """
    total, pieces = work.weight.sum(), list(pieces)
    while len(pieces) > 1:
        starts = [p.start for p in pieces] + [end]
        shares = [work.weight[a:b].sum() / total for a, b in pairwise(starts)]
        for i in sorted(
            (i for i, p in enumerate(pieces) if not p.equal and shares[i] < MIN_SHARE), key=lambda i: shares[i]
        ):
            borders = [j for j in (i, i + 1) if 0 < j < len(pieces)]
            free = [j for j in borders if not pieces[j - 1 if j == i else j].equal]
            if not free and shares[i] < NOTHING:
                free = borders
            if free:
                at = max(free, key=lambda j: (work.width[starts[j]], work.crossing_bytes[starts[j]], -j))
                pieces[at - 1 : at + 1] = [_Piece(pieces[at - 1].start, False)]
                break
        else:
            break
    return pieces
