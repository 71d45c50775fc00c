"""Splits that reach across the edges of a layer: the sequence of its activations, and experts stacked in its weights.

Tensor parallelism leaves activations whole between layers. Sequence parallelism (Korthikanti et al., *Reducing
Activation Recomputation in Large Transformer Models*, 2022) splits them there along positions. Expert parallelism
(Lepikhin et al., *GShard*, 2020) splits the batch everywhere but inside the experts, which are split instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from uniap_jax.core.dim_classes import CROSSES, SUMMED_BETWEEN, TWICE, DimClass, Dims
from uniap_jax.core.dims import TensorSplit, heaviest, layer_classes
from uniap_jax.core.graph import Layer

_HARMLESS = (CROSSES, SUMMED_BETWEEN, TWICE)
"""Blocks of a tensor class that do not keep positions from being split: attention may gather them."""
_LEAST_RANK = 3
"""Of an activation with positions: examples, positions, features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """Which dimension of each value at a layer's edge is its sequence.

    Attributes:
        reads: for each of `layer.reads` the dimension, or None.
        writes: for each of `layer.writes`.
        reason: "" where it can be split, else why not.
    """

    reads: tuple[int | None, ...]
    writes: tuple[int | None, ...]
    reason: str = ""


def sequence_split(
    layer: Layer,
    degree: int,
    *,
    reads: Sequence[int | None],
    writes: Sequence[int | None],
    tensor: TensorSplit | None = None,
) -> SequenceSplit:
    """Finds the sequence of each value that crosses a layer's edge and whether it can be split `degree` ways.

    The sequence of a value is its first dimension, other than the batch, that no weight sums over.

    Args:
        layer: whose edges are looked at.
        degree: ways.
        reads: batch dimension of each of `layer.reads`.
        writes: batch dimension of each of `layer.writes`.
        tensor: what the same ways split inside the layer; None where the ways have devices of their own, and
            attention gathers keys and values.
    """
    walked = layer_classes(layer)
    ins = walked.ins[len(layer.params) + len(layer.operands) :]
    edges = [*zip(ins, reads, strict=True), *zip(walked.outs, writes, strict=True)]
    batch = {dims[b] for dims, b in edges if b is not None and b < len(dims)}
    taken = {c.index for c in tensor.chosen} if tensor is not None else set()
    found = [_first(dims, b, walked.classes, batch | taken) for dims, b in edges]
    named = {dims[d] for (dims, _), d in zip(edges, found, strict=True) if d is not None}
    reason = _reason([c for c in walked.classes if c.index in named], walked.values, taken, degree, tensor is None)
    if reason:
        return SequenceSplit(reads=(None,) * len(ins), writes=(None,) * len(walked.outs), reason=reason)
    return SequenceSplit(reads=tuple(found[: len(ins)]), writes=tuple(found[len(ins) :]))


def _first(dims: Dims, batch_dim: int | None, classes: Sequence[DimClass], known: set[int | None]) -> int | None:
    """The first dimension of an activation that may be its positions."""
    if batch_dim is None or len(dims) < _LEAST_RANK:
        return None
    fit = (d for d, i in enumerate(dims) if i is not None and i not in known and not classes[i].weighted)
    first = next(fit, None)
    return first if first is not None and dims.count(dims[first]) == 1 else None


def _reason(named: Sequence[DimClass], values: Sequence[Dims], taken: set[int], degree: int, gathers: bool) -> str:
    """Why the sequence cannot be split, and what would work."""
    if not named:
        return "no activation at its edge has a sequence (a dimension besides batch and features)"
    for c in named:
        stopped = [b for b in c.blocks if b.reason not in _HARMLESS]
        if stopped:
            return f"its sequence of {c.size} positions stays whole: {stopped[0]}"
        if c.size % degree:
            works = ", ".join(str(d) for d in range(2, c.size + 1) if c.size % d == 0)
            return f"its sequence of {c.size} positions does not divide by {degree}; {works} ways would"
    indices = {c.index for c in named}
    for dims in values:
        if not gathers and sum(i in indices for i in dims) > 1 and not taken & set(dims):
            return "positions meet positions (as in attention) where the tensor ways split nothing; use context instead"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSplit:
    """Which dimension of each of a layer's parameters are its experts.

    Attributes:
        params: for each of `layer.params` the dimension, or None.
        classes: of these dimensions.
        reason: "" where they can be split, else why not, with the sizes that would work.
    """

    params: tuple[int | None, ...]
    classes: frozenset[int] = frozenset()
    reason: str = ""


def expert_split(layer: Layer, degree: int) -> ExpertSplit:
    """Finds the experts of a layer, weights stacked along a batch dimension of their products, and splits them."""
    params: list[int | None] = [None] * len(layer.params)
    if degree == 1:
        return ExpertSplit(params=tuple(params))
    ranks = [len(a.shape) for a in layer.jaxpr.in_avals[: len(layer.params)]]
    stacked = [
        c
        for c in layer_classes(layer).classes
        if c.stacked and c.params and all(layer.may(p, d, "expert") for p, d in c.params if d < ranks[p] - 1)
    ]
    chosen = heaviest([c for c in stacked if c.size % degree == 0], layer)
    for c in chosen:
        for p, d in c.params:
            params[p] = d if d < ranks[p] - 1 else None  # a router ends in its experts, it is not one of them
    reason = ""
    if not stacked:
        reason = f"it has no experts stacked in one weight{_written_out(layer)}"
    elif not chosen:
        sizes = sorted({c.size for c in stacked})
        works = sorted({d for n in sizes for d in range(2, n + 1) if n % d == 0})
        told = f"{', '.join(map(str, sizes))} experts do not divide by {degree}"
        reason = f"its {told}; expert={', '.join(map(str, works))} would work"
    return ExpertSplit(params=tuple(params), classes=frozenset(c.index for c in chosen), reason=reason)


def _written_out(layer: Layer) -> str:
    """What to do where weights come in several pairs of equal shapes, as a Python loop over experts makes them."""
    shapes = Counter(tuple(a.shape) for a in layer.jaxpr.in_avals[: len(layer.params)] if len(a.shape) == 2)
    pairs = [(n, s) for s, n in shapes.items() if n > 1 and s[0] != s[1] and shapes[s[::-1]] in range(n, 9 * n, n)]
    if not pairs:
        return "; tensor splits the width of each expert instead"
    count, shape = min(pairs)
    return (
        f", but {count} of shape {shape} and {shapes[shape[::-1]]} of {shape[::-1]}: if these are experts in a loop, "
        f"stack each kind in one array of shape ({count}, ...), as nn.vmap and nnx.vmap do, or split the width of "
        "each by tensor ways"
    )
