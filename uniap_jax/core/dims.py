"""Which dimensions of a layer's parameters tensor parallelism shards: derived from its jaxpr, no names, no marks.

A class of dimensions that is born inside a layer and summed over inside it (heads, MLP width, vocabulary, experts)
can be cut over devices: activations arrive and leave whole, and the sum is the one all-reduce of Megatron-LM
(Shoeybi et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

from uniap_jax.core.dim_classes import CROSSES, MINOR, PIECES, SUMMED_BETWEEN, DimClass, View
from uniap_jax.core.dim_walk import Walked, walk
from uniap_jax.core.graph import Layer

# Sharding a small looked-up table (positions, segments) costs an all-reduce of an activation and saves nothing.
_SMALLEST_TABLE = 0.05
# Sharding less work than this share of the heaviest class's costs a reduction and saves nothing.
_LIGHTEST = 0.01
# Beyond this many classes that exclude each other, the lightest are left out of the exact choice.
_EXACT = 12
# What stops every head dimension, no news to anyone.
_EXPECTED = (PIECES, MINOR, SUMMED_BETWEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """What `tensor=degree` shards in one layer.

    Attributes:
        params: for each of `layer.params` the dimension sharded over the tensor axes, or None.
        reason: "" where the degree is legal for this layer, else why not, with the sizes that would work.
        views: parameter dimensions that join several sharded pieces; such a parameter is stored whole and cut
            piece by piece where it is used.
        chosen: the classes that are sharded.
        notes: what stands in the way of others, one sentence each with its source line.
    """

    params: tuple[int | None, ...]
    reason: str = ""
    views: tuple[View, ...] = field(default=())
    chosen: tuple[DimClass, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def tensor_split(layer: Layer, degree: int, *, apart: frozenset[int] = frozenset()) -> TensorSplit:
    """Chooses the classes of a layer that are sharded `degree` ways; degree 1 shards nothing and is always legal.

    Args:
        layer: to split.
        degree: ways.
        apart: classes that other ways split.
    """
    if degree == 1:
        return TensorSplit(params=(None,) * len(layer.params))
    walked = layer_classes(layer)
    open_ = [c for c in _open_classes(walked.classes, layer) if c.index not in apart]
    fitting = _worthwhile([c for c in open_ if c.size % degree == 0])
    chosen = heaviest(fitting, layer)
    notes = (*walked.notes, *_notes(walked.classes, open_, chosen, degree))
    params: list[int | None] = [None] * len(layer.params)
    for c in chosen:
        for p, d in c.params:
            params[p] = d
    views = tuple(v for c in chosen for v in c.views)
    reason = "" if chosen else _reason(walked.classes, open_, degree)
    return TensorSplit(params=tuple(params), reason=reason, views=views, chosen=chosen, notes=notes)


def layer_classes(layer: Layer) -> Walked:
    """Dimension classes of a layer; equal layers are walked once."""
    return _walked(_Key(layer))


class _Key:
    """A layer as a key: equal where signature, shapes and length are, so that equal layers are walked once."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        avals = tuple((tuple(a.shape), str(a.dtype)) for a in (*layer.jaxpr.in_avals, *layer.jaxpr.out_avals))
        self._key = (layer.signature, len(layer.params), len(layer.operands), len(layer.jaxpr.eqns), avals)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Key) or self._key != other._key:
            return False
        return bool(self.layer.signature) or self.layer is other.layer


@lru_cache(maxsize=512)
def _walked(key: _Key) -> Walked:
    layer = key.layer
    return walk(layer.jaxpr, len(layer.params), len(layer.operands))


def _sizes(layer: Layer) -> list[int]:
    """Elements of each parameter."""
    return [int(a.size) for a in layer.jaxpr.in_avals[: len(layer.params)]]


def _elements(c: DimClass, sizes: list[int]) -> int:
    return sum(sizes[p] for p in {p for p, _ in c.params} | {v.param for v in c.views})


def _open_classes(classes: tuple[DimClass, ...], layer: Layer) -> list[DimClass]:
    """Classes that may be sharded: in a parameter, summed over, nothing in the way, a table only where it is large."""
    sizes = _sizes(layer)
    found = [c for c in classes if (c.params or c.views) and c.contracted and not c.blocks]
    tables = [c for c in found if c.lookup]
    largest = max(tables, key=lambda c: _elements(c, sizes), default=None)
    return [c for c in found if not c.lookup or (c is largest and _elements(c, sizes) >= _SMALLEST_TABLE * sum(sizes))]


def _worthwhile(classes: list[DimClass]) -> list[DimClass]:
    """Without the classes (a router, a gate) whose work is nothing beside that of the heaviest."""
    most = max((c.flops for c in classes), default=0.0)
    return [c for c in classes if c.lookup or c.flops >= _LIGHTEST * most]


def heaviest(classes: list[DimClass], layer: Layer) -> tuple[DimClass, ...]:
    """The conflict-free set of classes that shrinks the most work, parameters deciding between equals."""
    sizes = _sizes(layer)
    weight = {c.index: c.flops + _elements(c, sizes) for c in classes}
    ranked = sorted(classes, key=lambda c: (-weight[c.index], c.index))
    best: tuple[float, tuple[DimClass, ...]] = (0.0, ())
    free = [c for c in ranked if not any(o.index in c.conflicts for o in classes)]
    tight = [c for c in ranked if c not in free][:_EXACT]
    for count in range(len(tight) + 1):
        for picked in combinations(tight, count):
            total = sum(weight[c.index] for c in picked)
            if total > best[0] and not any(b.index in a.conflicts for a, b in combinations(picked, 2)):
                best = (total, picked)
    return tuple(sorted((*free, *best[1]), key=lambda c: c.index))


def _notes(
    classes: tuple[DimClass, ...], open_: list[DimClass], chosen: tuple[DimClass, ...], degree: int
) -> tuple[str, ...]:
    """Why classes that look like candidates are left whole."""
    notes = []
    for c in open_:
        if c.size % degree:
            notes.append(f"a dimension of size {c.size} stays whole: it does not divide by {degree}")
        elif c not in chosen:
            shared = any(o.index in c.conflicts for o in chosen)
            why = "it shares a value with a heavier one" if shared else "its work is too little for a reduction"
            notes.append(f"a dimension of size {c.size} stays whole: {why}")
    for c in classes:
        stopped = [b for b in c.blocks if b.source and b.reason not in _EXPECTED]
        if c.params and c.flops and stopped and len(stopped) == len(c.blocks):
            notes.append(f"a dimension of size {c.size} stays whole: {stopped[0]}")
    return tuple(notes)


def _reason(classes: tuple[DimClass, ...], open_: list[DimClass], degree: int) -> str:
    """Why no class can be sharded, and what would work."""
    if open_:
        sizes = ", ".join(str(c.size) for c in sorted(open_, key=lambda c: -c.flops))
        works = sorted({d for c in open_ for d in range(2, c.size + 1) if c.size % d == 0})
        shown = ", ".join(map(str, works[:8])) + (", ..." if len(works) > 8 else "")
        return f"its dimensions of size {sizes} do not divide by {degree}; tensor={shown} would work"
    inner = [c for c in classes if c.params and c.flops and not any(b.reason == CROSSES for b in c.blocks)]
    heaviest = max((c for c in inner if c.blocks), key=lambda c: c.flops, default=None)
    if heaviest is None:
        return "it has no dimension of its own to split (every one crosses to another layer); use data or fsdp here"
    why = f"its largest inner dimension, of size {heaviest.size}, stays whole: {heaviest.blocks[0]}"
    return f"{why}; use data or fsdp here"
