"""Moving a value between layers: other batch ways on the same devices, or the next stage's devices.

The batch lies over a prefix of the sub-mesh's axes in every layer and the sequence over a suffix, so going from w to r
ways is a local slice where r is finer and an all_gather where it is coarser; the gradient goes the other way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.costs import Candidate
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Links
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.vjp import is_float

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Values of one layer that the same later layers read.

    Attributes:
        writer: layer.
        readers: layers, in order.
        moved_bytes: that depend on the batch, with a gradient.
        still_bytes: that depend on the batch, without one (integers, masks).
        whole_bytes: that do not depend on the batch; whole on every device.
    """

    writer: int
    readers: tuple[int, ...]
    moved_bytes: float
    still_bytes: float
    whole_bytes: float


def bundles(graph: LayerGraph) -> tuple[Bundle, ...]:
    """Groups what crosses between layers by writer and readers: one tensor each, as far as cost goes."""
    producer = graph.producer
    readers: dict[int, list[int]] = {}
    for layer in graph.layers:
        for v in dict.fromkeys(layer.reads):
            readers.setdefault(v, []).append(layer.index)
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for v, users in readers.items():
        groups.setdefault((producer[v], tuple(users)), []).append(v)
    found = []
    for (writer, who), values in sorted(groups.items()):
        moved = still = whole = 0.0
        for v in values:
            value = graph.values[v]
            if value.batch_dim is None:
                whole += value.nbytes
            elif is_float(value):
                moved += value.nbytes
            else:
                still += value.nbytes
        found.append(Bundle(writer=writer, readers=who, moved_bytes=moved, still_bytes=still, whole_bytes=whole))
    return tuple(found)


Ways = tuple[int, int]
"""Ways of the batch and of the sequence at a layer's edge."""


def reshard_seconds(bundle: Bundle, ways: Sequence[Ways], num_devices: int, links: Links, share: float) -> FloatArray:
    """[writer's strategy, reader's strategy] inside a stage, forward + backward of one micro-batch.

    Priced as a gather of what either side splits further than the other, and a local slice. Where one splits the
    batch and the other the sequence the compiler may exchange parts instead, which is no slower.

    Args:
        bundle: its bytes are of the whole batch.
        ways: of each strategy.
        num_devices: of the stage.
        links: times of collectives.
        share: of the batch in one micro-batch.
    """

    def gather_s(a: Ways, b: Ways, nbytes: float) -> float:
        coarse = _common(a, b)
        size = math.prod(a) // math.prod(coarse)
        stride = num_devices // a[0] if a[0] > coarse[0] else 1
        return links.time_s("all_gather", nbytes * share / math.prod(coarse), size, stride)

    table = {}
    for w in set(ways):
        for r in set(ways):  # forward where the reader is coarser, the gradient where it is finer
            there = gather_s(w, r, bundle.moved_bytes + bundle.still_bytes)
            table[w, r] = there + gather_s(r, w, bundle.moved_bytes)
    return np.array([[table[w, r] for r in ways] for w in ways])


def _common(a: Ways, b: Ways) -> Ways:
    """The finest layout that both of two layouts refine."""
    return min(a[0], b[0]), min(a[1], b[1])


def transfer_seconds(bundle: Bundle, ways: Sequence[Ways], num_devices: int, links: Links, share: float) -> FloatArray:
    """[writer's strategy, reader's strategy] to the next stage, forward + backward of one micro-batch.

    Each device receives its shard of the reader's layout, and sends at least its own; gradients go back alike.
    """
    fit = links.fit("transfer", num_devices)
    table = {}
    for w in set(ways):
        for r in set(ways):
            coarse = math.prod(_common(w, r))
            there = (bundle.moved_bytes + bundle.still_bytes) * share / coarse
            back = bundle.moved_bytes * share / coarse
            table[w, r] = sum(fit.time_s(b) for b in (there + bundle.whole_bytes, back) if b > 0)
    return np.array([[table[w, r] for r in ways] for w in ways])


def edge_tables(
    found: Sequence[Bundle], strategies: Sequence[Strategy], candidate: Candidate, num_devices: int, links: Links
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], FloatArray, FloatArray, FloatArray]:
    """(writer, reader) pairs, the tensor each carries, and seconds by the strategies at both ends.

    Seconds are those inside a stage and between stages, [edges, strategies, strategies], and of a relay that keeps the
    strategy, [edges, strategies].

    Args:
        found: what crosses.
        strategies: on the sub-mesh of a stage.
        candidate: stages and micro-batches.
        num_devices: of a stage.
        links: times of collectives.
    """
    share = 1.0 / candidate.num_microbatches
    ways, k = [(s.batch_ways, s.sequence_ways) for s in strategies], len(strategies)
    edges: list[tuple[int, int]] = []
    tensor: list[int] = []
    tables: list[tuple[FloatArray, FloatArray]] = []
    known: dict[tuple[float, float, float], tuple[FloatArray, FloatArray]] = {}
    for t, bundle in enumerate(found):
        key = (bundle.moved_bytes, bundle.still_bytes, bundle.whole_bytes)
        if key not in known:
            inside = reshard_seconds(bundle, ways, num_devices, links, share)
            across = np.zeros((k, k))
            if candidate.num_stages > 1:
                across = transfer_seconds(bundle, ways, num_devices, links, share)
            known[key] = inside, across
        for reader in bundle.readers:
            edges.append((bundle.writer, reader))
            tensor.append(t)
            tables.append(known[key])
    if not edges:
        return (), (), np.zeros((0, k, k)), np.zeros((0, k, k)), np.zeros((0, k))
    reshard = np.stack([t[0] for t in tables])
    cross = np.stack([t[1] for t in tables])
    return tuple(edges), tuple(tensor), reshard, cross, np.stack([np.diagonal(t[1]) for t in tables])
