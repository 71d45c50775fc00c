"""Moving a value between layers: other batch ways on the same devices, or the next stage's devices.

The batch lies over a prefix of the sub-mesh's axes in every layer, so going from w to r ways is a local slice where
r is finer and an all_gather where it is coarser; the gradient goes the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Links
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


def reshard_seconds(bundle: Bundle, ways: Sequence[int], num_devices: int, links: Links, share: float) -> FloatArray:
    """[writer's strategy, reader's strategy] inside a stage, forward + backward of one micro-batch.

    Args:
        bundle: its bytes are of the whole batch.
        ways: batch ways of each strategy.
        num_devices: of the stage.
        links: times of collectives.
        share: of the batch in one micro-batch.
    """
    unique = sorted(set(ways))
    table = {}
    for w in unique:
        for r in unique:
            coarse, fine = min(w, r), max(w, r)
            if coarse == fine:
                table[w, r] = 0.0
                continue
            size, stride = fine // coarse, num_devices // fine
            moved = bundle.moved_bytes * share / coarse  # forward where r is coarser, its gradient where it is finer
            still = bundle.still_bytes * share / coarse if r < w else 0.0
            table[w, r] = links.time_s("all_gather", moved + still, size, stride)
    return np.array([[table[w, r] for r in ways] for w in ways])


def transfer_seconds(bundle: Bundle, ways: Sequence[int], num_devices: int, links: Links, share: float) -> FloatArray:
    """[writer's strategy, reader's strategy] to the next stage, forward + backward of one micro-batch.

    Each device receives its shard of the reader's layout, and sends at least its own; gradients go back alike.
    """
    unique = sorted(set(ways))
    fit = links.fit("transfer", num_devices)
    table = {}
    for w in unique:
        for r in unique:
            coarse = min(w, r)
            there = (bundle.moved_bytes + bundle.still_bytes) * share / coarse
            back = bundle.moved_bytes * share / coarse
            table[w, r] = sum(fit.time_s(b) for b in (there + bundle.whole_bytes, back) if b > 0)
    return np.array([[table[w, r] for r in ways] for w in ways])
