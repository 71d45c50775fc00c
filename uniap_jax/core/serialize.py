"""Plans and profiles as JSON files: strict, versioned, bounded, written by rename. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from uniap_jax.core.errors import PlanMismatchError, ProfileError, UniapError
from uniap_jax.core.plan import EXECUTORS, INTERLEAVED, SCHEDULES, STATUSES, Plan
from uniap_jax.core.profile import Profile

MAX_BYTES = 256 << 20
PLAN_FORMAT, PROFILE_FORMAT = "uniap-plan", "uniap-profile"
VERSION = 1
T = TypeVar("T")


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain lists, dicts, numbers and strings; `format` says what it is."""
    return {"format": PLAN_FORMAT, **msgspec.to_builtins(plan)}


def plan_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a plan's file; unknown fields are refused, as `load` does."""
    (schema,), parts = msgspec.json.schema_components([Plan], ref_template="#/$defs/{name}")
    assert schema == {"$ref": "#/$defs/Plan"}
    closed = {name: {**part, "additionalProperties": False} for name, part in parts.items()}
    plan = closed.pop("Plan")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **plan,
        "properties": {"format": {"const": PLAN_FORMAT}, **plan["properties"], "version": {"const": VERSION}},
        "required": ["format", *plan["required"]],
        "$defs": closed,
    }


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """A profile as plain lists, dicts, numbers and strings; `format` says what it is."""
    return {"format": PROFILE_FORMAT, **msgspec.to_builtins(profile)}


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The inverse of `plan_to_json`.

    Raises:
        PlanMismatchError: the first wrong field, with its path and what was expected.
    """
    plan = _read(data, Plan, PLAN_FORMAT, PlanMismatchError)
    for name, wrong in _plan_faults(plan):
        raise PlanMismatchError(f"plan: {name}: {wrong}; make the plan again or correct the file", field=name)
    return plan


def profile_from_json(data: dict[str, Any]) -> Profile:
    """The inverse of `profile_to_json`.

    Raises:
        ProfileError: the first wrong field, with its path and what was expected.
    """
    return _read(data, Profile, PROFILE_FORMAT, ProfileError)


def save(value: Plan | Profile, path: str | os.PathLike[str]) -> None:
    """Writes a plan or a profile; a file of that name is replaced at once, never half."""
    data = plan_to_json(value) if isinstance(value, Plan) else profile_to_json(value)
    write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def redacted(value: Plan | Profile) -> Plan | Profile:
    """Without what identifies the machine: the kind of its devices, and notes, which may name it.

    Nothing else in a plan or a profile comes from the machine but numbers. A redacted profile belongs to no cluster any
    more, so it can be read but not planned with; a redacted plan runs as before.
    """
    if isinstance(value, Profile):
        return dataclasses.replace(value, device_kind="", notes=())
    return dataclasses.replace(value, device_kind="", certificate=dataclasses.replace(value.certificate, notes=()))


def load(path: str | os.PathLike[str]) -> Plan | Profile:
    """Reads what `save` wrote.

    Raises:
        PlanMismatchError, ProfileError: not such a file, too large, of another version, or the first wrong field.
        OSError: the file cannot be read.
    """
    data = read_json(path, PlanMismatchError)
    kind = data.get("format") if isinstance(data, dict) else None
    if kind == PLAN_FORMAT:
        return plan_from_json(data)
    if kind == PROFILE_FORMAT:
        return profile_from_json(data)
    raise PlanMismatchError(
        f"{path}: format is {kind!r}; a plan says {PLAN_FORMAT!r}, a profile {PROFILE_FORMAT!r}",
        field="format",
        path=str(path),
    )


def read_json(path: str | os.PathLike[str], error: type[UniapError]) -> Any:
    """What a JSON file holds.

    Raises:
        UniapError: of the type asked for: larger than any file of ours, not JSON, or nested deeper than any of ours.
        OSError: the file cannot be read.
    """
    size = os.stat(path).st_size
    if size > MAX_BYTES:
        raise error(f"{path} has {size} bytes; at most {MAX_BYTES} are read", field="size", path=str(path))
    try:
        return msgspec.json.decode(Path(path).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise error(f"{path} is not JSON: {wrong}", field="", path=str(path)) from wrong


def write_atomically(path: Path, data: bytes) -> None:
    """Writes beside the file, then renames over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(data: Any, kind: type[T], name: str, error: type[UniapError]) -> T:
    if not isinstance(data, dict) or data.get("format") != name:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise error(f"format is {found!r}; expected {name!r}", field="format")
    if data.get("version") != VERSION:
        raise error(
            f"{name}: version is {data.get('version')!r}; this version reads {VERSION}: make the file again",
            field="version",
        )
    body = {k: v for k, v in data.items() if k != "format"}
    _refuse_unknown(body, kind, "$", error)
    _refuse_infinite(body, "$", error)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as wrong:  # says what was expected, and at which path
        raise error(f"{name}: {wrong}", field=_field_of(str(wrong))) from wrong


def _field_of(text: str) -> str:
    """layers[0].stage from "Expected `int`, got `str` - at `$.layers[0].stage`"; a missing field is named too."""
    path = re.search(r" - at `\$\.?([^`]*)`", text)
    missing = re.search(r"missing required field `([^`]*)`", text)
    return ".".join(m[1] for m in (path, missing) if m and m[1])


def _refuse_unknown(value: Any, kind: Any, path: str, error: type[UniapError]) -> None:
    """Names the first key that no field of the dataclass has; converting alone would drop it in silence."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        for key, item in value.items():
            if key not in hints:
                raise error(f"{path}.{key}: unknown field; known are {', '.join(hints)}", field=f"{path}.{key}"[2:])
            _refuse_unknown(item, hints[key], f"{path}.{key}", error)
    elif isinstance(value, (list, tuple)):
        kinds = [k for k in get_args(kind) if k is not Ellipsis]
        for i, item in enumerate(value):
            if kinds:
                _refuse_unknown(item, kinds[min(i, len(kinds) - 1)], f"{path}[{i}]", error)


def _refuse_infinite(value: Any, path: str, error: type[UniapError]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{path}: {value!r} is not a finite number", field=path[2:])
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        _refuse_infinite(item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}", error)


def _plan_faults(plan: Plan) -> list[tuple[str, str]]:
    """(field, what is wrong) of what types alone cannot say, most telling first."""
    stages, sizes = plan.num_stages, [len(d) for d in plan.stage_devices]
    sets = plan.device_sets if plan.schedule == INTERLEAVED else plan.stage_devices
    devices = [d for ds in sets for d in ds]
    found = []
    if stages < 1 or len(sizes) != stages:
        found.append(("num_stages", f"{stages} stages, but stage_devices lists {len(sizes)}"))
    if plan.num_microbatches < 1 or plan.batch_size < 1 or plan.batch_size % plan.num_microbatches:
        found.append(("num_microbatches", f"{plan.num_microbatches} does not divide batch_size {plan.batch_size}"))
    if plan.schedule not in (*SCHEDULES, INTERLEAVED):
        found.append(("schedule", f"{plan.schedule!r} is not one of {', '.join((*SCHEDULES, INTERLEAVED))}"))
    if plan.schedule == INTERLEAVED and (
        plan.stage_devices != sets * (stages // max(1, len(sets))) or plan.num_microbatches % max(1, len(sets))
    ):
        found.append(
            (
                "stage_devices",
                f"interleaved stages take turns on {len(sets)} sets of devices in one order, with micro-batches in "
                f"groups of {len(sets)}; there are {stages} stages and {plan.num_microbatches} micro-batches",
            )
        )
    if len(set(devices)) != len(devices) or min(devices, default=0) < 0 or 0 in sizes:
        found.append(("stage_devices", f"{plan.stage_devices} repeats a device, has a negative one or an empty stage"))
    for i, layer in enumerate(plan.layers):
        if not 0 <= layer.stage < stages:
            found.append((f"layers[{i}].stage", f"{layer.stage} is not one of the {stages} stages"))
        elif layer.stage < len(sizes) and layer.strategy.num_devices != sizes[layer.stage]:
            uses = f"{layer.strategy} uses {layer.strategy.num_devices} devices"
            found.append((f"layers[{i}].strategy", f"{uses}, but stage {layer.stage} has {sizes[layer.stage]}"))
    used = {layer.stage for layer in plan.layers}
    empty = next((i for i in range(len(sizes)) if i not in used), None)
    if empty is not None and plan.executor != "program":  # whose stages may share one layer, a loop
        found.append(("layers", f"stage {empty} holds no layer"))
    if plan.executor not in EXECUTORS:
        found.append(("executor", f"{plan.executor!r} is not one of {', '.join(EXECUTORS)}"))
    if plan.certificate.status not in STATUSES:
        found.append(("certificate.status", f"{plan.certificate.status!r} is not one of {', '.join(STATUSES)}"))
    for i in range(len(plan.certificate.alternatives)):
        # an alternative is a plan of its own; its certificate lists none, so this ends
        faults = _plan_faults(plan.with_alternative(i))
        found += [(f"certificate.alternatives[{i}].{name}", wrong) for name, wrong in faults]
    return found + _prediction_faults(plan)


def _prediction_faults(plan: Plan) -> list[tuple[str, str]]:
    prediction, found = plan.prediction, []
    for name, number in (
        ("prediction.step_time_s", prediction.step_time_s),
        ("certificate.bound_s", plan.certificate.bound_s),
    ):
        if not number >= 0:
            found.append((name, f"{number!r} is negative"))
    for name in ("stage_time_s", "link_time_s", "iteration_time_s", "peak_bytes", "capacity_bytes"):
        numbers = getattr(prediction, name)
        expected = plan.num_stages - (name == "link_time_s")
        if numbers and len(numbers) != expected:
            found.append((f"prediction.{name}", f"{len(numbers)} numbers for {expected}"))
        if any(not n >= 0 for n in numbers):
            found.append((f"prediction.{name}", f"{min(numbers)!r} is negative"))
    return found
