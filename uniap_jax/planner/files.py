"""Tables in files: researchers bring their own costs as JSON (milliseconds, GiB)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.serialize import read_json

GIB = 1024.0**3
MS = 1e-3
LARGEST = 1e18  # ms or GiB: no machine has more, and sums stay finite

_SIZES = ("layers", "stages", "micro_batches", "strategies")


def load_tables(path: str | Path) -> CostTables:
    """Reads the tables of one candidate.

    The file holds `layers`, `stages`, `micro_batches`, `strategies`; `time` and `memory` [layer][stage][strategy] in
    ms and GiB, `iteration_time` [layer][strategy] (or [layer][stage][strategy]), `capacity` [stage], `allowed`
    [layer][strategy], `edges` as pairs, `reshard` and `cross_stage` [edge][writer's strategy][reader's strategy],
    `relay` [edge][writer's strategy]; optionally `edge_tensor` [edge], ids of the tensors that edges carry.

    Raises:
        ProfileError: a field is missing, of the wrong shape, negative or not a number; names the field.
    """
    data = read_json(path, ProfileError)
    if not isinstance(data, dict):
        raise ProfileError(
            f"{path} holds a {type(data).__name__}, expected an object with time, memory, ...", path=str(path)
        )
    return tables_from_dict(data, source=str(path))


def tables_from_dict(data: dict[str, Any], *, source: str = "tables") -> CostTables:
    """Same as `load_tables`, from parsed JSON."""
    sizes = [_size(data, name, source) for name in _SIZES]
    layers, stages, count, k = sizes
    edges = _edges(data, source)
    iteration = _array(data, "iteration_time", source, (layers, k), (layers, stages, k))
    if iteration.ndim == 2:
        iteration = np.broadcast_to(iteration[:, None, :], (layers, stages, k))
    matrices = (len(edges), k, k)
    try:
        return CostTables(
            candidate=Candidate(
                num_stages=stages, num_microbatches=count, schedule="one_f_one_b" if stages > 1 else "gpipe"
            ),
            time_s=_array(data, "time", source, (layers, stages, k)) * MS,
            iteration_time_s=iteration * MS,
            memory_bytes=_array(data, "memory", source, (layers, stages, k)) * GIB,
            capacity_bytes=_array(data, "capacity", source, (stages,)) * GIB,
            allowed=_array(data, "allowed", source, (layers, k)).astype(np.bool_),
            edges=edges,
            reshard_s=_array(data, "reshard", source, matrices) * MS,
            cross_stage_s=_array(data, "cross_stage", source, matrices) * MS,
            relay_s=_array(data, "relay", source, (len(edges), k)) * MS,
            edge_tensor=_edge_tensor(data, len(edges), source),
        )
    except ProfileError:
        raise
    except ValueError as error:
        raise ProfileError(f"{source}: {error}", path=source) from None


def _size(data: dict[str, Any], name: str, source: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ProfileError(f"{source}: field {name!r} is {value!r}, expected a whole number of at least 1", field=name)
    return value


def _edges(data: dict[str, Any], source: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(u), int(v)) for u, v in data["edges"])
    except (KeyError, TypeError, ValueError):
        raise ProfileError(
            f"{source}: field 'edges' is missing or not a list of pairs [writer, reader]", field="edges"
        ) from None


def _edge_tensor(data: dict[str, Any], count: int, source: str) -> tuple[int, ...] | None:
    ids = data.get("edge_tensor")
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != count or not all(type(t) is int for t in ids):
        raise ProfileError(
            f"{source}: field 'edge_tensor' is not a list of {count} whole numbers, one per edge", field="edge_tensor"
        )
    return tuple(ids)


def _array(
    data: dict[str, Any], name: str, source: str, *shapes: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    if name not in data:
        raise ProfileError(f"{source}: field {name!r} is missing; expected numbers of shape {shapes[0]}", field=name)
    try:
        array = np.asarray(data[name], dtype=np.float64)
    except (TypeError, ValueError):
        raise ProfileError(f"{source}: field {name!r} is not a regular array of numbers", field=name) from None
    if array.size == 0 and 0 in shapes[0]:
        array = array.reshape(shapes[0])
    if array.shape not in shapes:
        raise ProfileError(f"{source}: field {name!r} has shape {array.shape}, expected {shapes[0]}", field=name)
    if not np.isfinite(array).all() or (array < 0).any() or (array > LARGEST).any():
        raise ProfileError(
            f"{source}: field {name!r} has entries that are negative, not finite or above {LARGEST:g}", field=name
        )
    return array
