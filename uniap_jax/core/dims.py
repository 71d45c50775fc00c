"""Which dimensions of a layer's parameters tensor parallelism shards: derived from its jaxpr, no names, no marks.

A class of dimensions that is born inside a layer and summed over inside it (heads, MLP width, vocabulary, experts)
can be cut over devices: activations arrive and leave whole, and the sum is the one all-reduce of Megatron-LM
(Shoeybi et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from uniap_jax.core.dim_classes import CROSSES, MINOR, PIECES, SUMMED_BETWEEN, DimClass, View
from uniap_jax.core.dim_walk import Walked, walk
from uniap_jax.core.graph import Layer
from uniap_jax.core.padding import Pad, padded_layer
from uniap_jax.core.padding_rules import NotPaddedError

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
        params: for each of `layer.params` the dimension sharded over the tensor axes where it is computed with, or
            None.
        reason: "" where the degree is legal for this layer, else why not, with the sizes that would work.
        views: parameter dimensions that join several sharded pieces; such a parameter is cut piece by piece where it
            is used.
        chosen: the classes that are sharded, of the layer with `pads`.
        notes: what stands in the way of others, one sentence each with its source line.
        pads: parameter dimensions that do not divide and are made longer inside the layer.
        stored: for each of `layer.params` the dimension along which the tensor axes split it between steps, or None.
            It is another than in `params` for a parameter with pads or views, whose shards would not be equal or not
            those that are computed with.
    """

    params: tuple[int | None, ...]
    reason: str = ""
    views: tuple[View, ...] = field(default=())
    chosen: tuple[DimClass, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    pads: tuple[Pad, ...] = field(default=())
    stored: tuple[int | None, ...] = field(default=())

    @property
    def moved(self) -> frozenset[int]:
        """Parameters whose parts the devices exchange before they are used."""
        return frozenset([p.param for p in self.pads] + [v.param for v in self.views])


def tensor_split(layer: Layer, degree: int, *, apart: frozenset[int] = frozenset()) -> TensorSplit:
    """Chooses the classes of a layer that are sharded `degree` ways; degree 1 shards nothing and is always legal.

    Args:
        layer: to split.
        degree: ways.
        apart: classes that other ways split.
    """
    if degree == 1:
        return TensorSplit(params=(None,) * len(layer.params), stored=(None,) * len(layer.params))
    return _split(_Key(layer), degree, apart)


@lru_cache(maxsize=2048)
def _split(key: _Key, degree: int, apart: frozenset[int]) -> TensorSplit:
    """The choice for a layer, with dimensions made longer where that makes them divide."""
    layer, plain = key.layer, _chosen(key.layer, degree, apart)
    best, refused = plain, list[str]()
    for c in () if apart else _uneven(layer, degree):
        padded = -(-c.size // degree) * degree
        pads = tuple(Pad(param=p, dim=d, size=c.size, padded=padded) for p, d in c.params)
        try:
            longer = _chosen(longer_layer(layer, (*best.pads, *pads)), degree, apart)
        except NotPaddedError as error:
            refused.append(f"a dimension of size {c.size} is not filled up to {padded}: {error}")
            continue
        if all(longer.params[p.param] == p.dim for p in pads):
            best = replace(longer, pads=(*best.pads, *pads))
    filled = dict.fromkeys((p.size, p.padded) for p in best.pads)
    notes = [f"a dimension of size {n} is filled up to {m} where it is computed with" for n, m in filled]
    reason = "; ".join([best.reason, *refused]) if best.reason else ""
    return replace(best, reason=reason, notes=(*notes, *best.notes, *refused), stored=_stored(layer, best, degree))


def _uneven(layer: Layer, degree: int) -> list[DimClass]:
    """Classes that could be sharded if they were longer, the heaviest first."""
    open_ = _worthwhile(_open_classes(layer_classes(layer).classes, layer))
    found = [c for c in open_ if c.size % degree and c.size > degree and c.even and not c.views]
    return sorted(found, key=lambda c: (-c.flops, c.index))


def _stored(layer: Layer, split: TensorSplit, degree: int) -> tuple[int | None, ...]:
    """Where the tensor axes split parameters between steps: where they are computed so, else along what divides."""
    stored = list(split.params)
    moved = [(p.param, p.dim) for p in split.pads] + [(v.param, v.dim) for v in split.views]
    for param, dim in moved:
        shape = layer.jaxpr.in_avals[param].shape
        fits = [d for d, n in enumerate(shape) if d != dim and n % degree == 0 and layer.may(param, d, "tensor")]
        stored[param] = max(fits, key=lambda d: shape[d], default=None)
    return tuple(stored)


def _chosen(layer: Layer, degree: int, apart: frozenset[int]) -> TensorSplit:
    """The choice among dimensions as they are."""
    walked = layer_classes(layer)
    open_ = [c for c in _open_classes(walked.classes, layer) if c.index not in apart]
    fitting = _worthwhile([c for c in open_ if c.size % degree == 0])
    chosen = heaviest(fitting, layer)
    notes = (*walked.notes, *_notes(walked.classes, open_, chosen, degree))
    kept = [c for c in _free_classes(walked.classes) if not _may(c, layer)]
    notes += tuple(f"a dimension of size {c.size} stays whole: logical_axis_rules keep it from tensor" for c in kept)
    params: list[int | None] = [None] * len(layer.params)
    for c in chosen:
        for p, d in c.params:
            params[p] = d
    views = tuple(v for c in chosen for v in c.views)
    reason = "" if chosen else _reason(walked.classes, open_, degree)
    if reason and kept and not open_:
        reason = f"logical_axis_rules keep its dimensions of size {', '.join(str(c.size) for c in kept)} from tensor"
    return TensorSplit(params=tuple(params), reason=reason, views=views, chosen=chosen, notes=notes)


def longer_layer(layer: Layer, pads: tuple[Pad, ...]) -> Layer:
    """A layer with dimensions made longer, to look at; equal layers share one, so its literals may be another's.

    Raises:
        NotPaddedError: an equation has no rule for it.
    """
    return _longer(_Key(layer), pads) if pads else layer


@lru_cache(maxsize=512)
def _longer(key: _Key, pads: tuple[Pad, ...]) -> Layer:
    return padded_layer(key.layer, pads)


def layer_classes(layer: Layer) -> Walked:
    """Dimension classes of a layer; equal layers are walked once."""
    return _walked(_Key(layer))


class _Key:
    """A layer as a key: equal where signature, shapes and length are, so that equal layers are walked once."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        avals = tuple((tuple(a.shape), str(a.dtype)) for a in (*layer.jaxpr.in_avals, *layer.jaxpr.out_avals))
        self._key = (
            layer.signature,
            layer.allowed,
            len(layer.params),
            len(layer.operands),
            len(layer.jaxpr.eqns),
            avals,
        )

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
    found = [c for c in _free_classes(classes) if _may(c, layer)]
    tables = [c for c in found if c.lookup]
    largest = max(tables, key=lambda c: _elements(c, sizes), default=None)
    return [c for c in found if not c.lookup or (c is largest and _elements(c, sizes) >= _SMALLEST_TABLE * sum(sizes))]


def _free_classes(classes: tuple[DimClass, ...]) -> list[DimClass]:
    return [c for c in classes if (c.params or c.views) and c.contracted and not c.blocks]


def _may(c: DimClass, layer: Layer) -> bool:
    """Whether the user lets tensor ways split all of a class."""
    return all(layer.may(p, d, "tensor") for p, d in [*c.params, *((v.param, v.dim) for v in c.views)])


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
