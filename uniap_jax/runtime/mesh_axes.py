"""Over which axes of a mesh the collectives of a compiled program go."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from uniap_jax.core.device_groups import device_groups

_COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


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
            axes = _axes(device_groups(line) or [range(mesh.size)], mesh)
            key = f"{kind} over {', '.join(axes)}" if axes else f"{kind} over one device"
            found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items()))


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> list[str]:
    """Axes along which members of a group differ."""
    varies: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.asarray(group), mesh.devices.shape))
        varies |= {d for d in range(len(places)) if len(set(places[d].tolist())) > 1}
    return [str(mesh.axis_names[d]) for d in sorted(varies)]
