"""Tables in files: researchers bring their own costs as JSON (milliseconds, GiB)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables
from uniap_jax.core.errors import ProfileError

GIB = 1024.0**3
MS = 1e-3

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
    try:
        data = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"{path} is not JSON: {error}; see docs for the format of cost tables", path=str(path)
        ) from None
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
            edge_tensor=tuple(int(t) for t in data["edge_tensor"]) if data.get("edge_tensor") is not None else None,
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
    if not np.isfinite(array).all() or (array < 0).any():
        raise ProfileError(f"{source}: field {name!r} has entries that are negative or not finite", field=name)
    return array
