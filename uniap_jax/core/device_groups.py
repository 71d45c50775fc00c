"""Which devices a collective of a compiled program joins, from any of the ways in which HLO writes its groups."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([\d,]+\))?)\))?\s*\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def device_groups(text: str) -> list[list[int]]:
    """Groups of devices, numbered as the program numbers them; none where the text names none.

    Args:
        text: an instruction, or its attributes.
    """
    if iota := _IOTA.search(text):
        return _rows(_ordered(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if mesh := _MESH.search(text):
        return _along(mesh[1], mesh[2] or "", mesh[3])
    found = _LISTED.search(text) or _PAIRS.search(text)
    return [_numbers(g) for g in re.findall(r"\{([\d,]+)\}", found[1])] if found else []


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _rows(devices: np.ndarray) -> list[list[int]]:
    return [list(map(int, row)) for row in devices]


def _ordered(shape: str, turned: str | None) -> np.ndarray:
    devices = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return devices.transpose(_numbers(turned)) if turned else devices


def _along(mesh: str, order: str, axes: str) -> list[list[int]]:
    """Groups along axes of a mesh, or along parts of them: `'x':(2)4` is the 4 in an x of 2 × 4 × the rest."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = [(a[1], int(a[2] or 1), int(a[3] or sizes[a[1]])) for a in _AXIS.finditer(axes)]
    cuts = {name: sorted({1, size, *_ends(name, wanted)}) for name, size in sizes.items()}
    parts = [(name, low, high // low) for name, ends in cuts.items() for low, high in itertools.pairwise(ends)]
    inside = [i for axis in wanted for i, part in enumerate(parts) if _within(part, axis)]
    across = [i for i in range(len(parts)) if i not in inside]
    found = _ORDER.fullmatch(order)
    devices = _ordered(found[1], found[2]) if found else np.array(_numbers(order) or range(math.prod(sizes.values())))
    members = math.prod(parts[i][2] for i in inside)
    return _rows(devices.reshape([p[2] for p in parts]).transpose([*across, *inside]).reshape(-1, members))


def _ends(name: str, wanted: list[tuple[str, int, int]]) -> list[int]:
    return [end for n, before, size in wanted if n == name for end in (before, before * size)]


def _within(part: tuple[str, int, int], axis: tuple[str, int, int]) -> bool:
    return part[0] == axis[0] and axis[1] <= part[1] and part[1] * part[2] <= axis[1] * axis[2]
