"""Over which axes of a mesh the collectives of a compiled program go."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def collectives_by_axis(text: str, mesh: Mesh) -> dict[str, int]:
    """Collectives of a program by kind and axes: {"all-reduce over stage, x0": 3}.

    Devices of a program are numbered in the order of its mesh, which is what XLA's groups speak of.

    Args:
        text: optimised HLO.
        mesh: that the program was compiled for.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        for kind in _COLLECTIVE.findall(line):
            axes = _axes(_groups(line, mesh.size), mesh)
            key = f"{kind} over {', '.join(axes)}" if axes else f"{kind} over one device"
            found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items()))


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _groups(line: str, size: int) -> list[list[int]]:
    """Groups of devices that talk to each other; all of them where the line names none."""
    listed, iota, pairs = _LISTED.search(line), _IOTA.search(line), _PAIRS.search(line)
    if iota:
        shape, base = _numbers(iota[1]), _numbers(iota[2])
        order = np.arange(math.prod(base)).reshape(base)
        if iota[3]:
            order = order.transpose(_numbers(iota[3]))
        return [list(map(int, group)) for group in order.reshape(shape)]
    found = listed or pairs
    inner = [_numbers(g) for g in re.findall(r"\{([\d,]+)\}", found[1])] if found else []
    return inner or [list(range(size))]


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> list[str]:
    """Axes along which members of a group differ."""
    varies: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.asarray(group), mesh.devices.shape))
        varies |= {d for d in range(len(places)) if len(set(places[d].tolist())) > 1}
    return [str(mesh.axis_names[d]) for d in sorted(varies)]
