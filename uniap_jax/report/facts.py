"""Facts that are no plan, for the terminal: a profile, a check, what `doctor` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.text import Text

from uniap_jax.core.plan_text import SOURCE_NAMES, format_bytes, format_seconds
from uniap_jax.core.profile import Profile
from uniap_jax.report.table import make_console, make_table


def fact_rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of nested facts; of a list of mappings, those that differ in nothing but `id` share a row."""
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from fact_rows(value, f"{name}.")
        elif isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
            yield from ((name, f"{count} × {told}") for told, count in _counted(value).items())
        elif isinstance(value, list | tuple):
            yield from ((name, str(v)) for v in value or ("none",))
        else:
            yield name, _told(key, value)


def _counted(items: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in items:
        told = ", ".join(f"{k} {_told(k, v)}" for k, v in item.items() if k != "id" and v is not None)
        counts[told] = counts.get(told, 0) + 1
    return counts


def _told(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, float) and key.endswith(("_s", "seconds")):
        return format_seconds(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_facts(facts: Mapping[str, Any], stream: TextIO) -> None:
    """Two columns: what, and its value."""
    make_console(stream).print(make_table(("what", "found"), fact_rows(facts)))


def profile_rows(profile: Profile) -> Iterator[Sequence[str]]:
    """A row for each layer signature, strategy and micro-batch size."""
    for key, cost in profile.entries:
        yield (
            key.signature[:10],
            key.strategy,
            str(key.samples),
            format_seconds(cost.forward_s),
            format_seconds(cost.backward_s),
            format_seconds(cost.sync_s),
            format_bytes(cost.kept_bytes),
            format_bytes(cost.transient_bytes),
            cost.origin,
            f"{100 * cost.spread:.0f} %" if cost.runs else "",
        )


def print_profile(profile: Profile, stream: TextIO) -> None:
    """Layers by strategy, then links."""
    console = make_console(stream)
    header = ("layer", "strategy", "samples", "forward", "backward", "sync", "kept", "transient", "origin", "spread")
    title = (
        f"{len(profile.entries)} entries, {SOURCE_NAMES[profile.source]}, {profile.num_devices} × {profile.device_kind}"
    )
    console.print(make_table(header, profile_rows(profile), title=title, right=(2, 3, 4, 5, 6, 7, 9)))
    rows = (
        (f.kind, str(f.size), str(f.stride), format_seconds(f.alpha_s), _bandwidth(f.beta_s_per_byte), f.origin)
        for f in profile.links
    )
    if profile.links:
        console.print(
            make_table(("collective", "devices", "stride", "latency", "rate", "origin"), rows, right=(1, 2, 3, 4))
        )
    for note in (*profile.notes, f"took {format_seconds(profile.seconds)}"):
        console.print(Text(note))


def _bandwidth(beta_s_per_byte: float) -> str:
    return f"{1e-9 / beta_s_per_byte:.3g} GB/s" if beta_s_per_byte > 0 else "unlimited"


def print_check(facts: Mapping[str, Any], stream: TextIO) -> None:
    """What `check` compared, a row for each step, then the state and the verdict; notes of the plan stand there."""
    console = make_console(stream)
    rows = [
        (
            str(number),
            f"{step['loss']:.6f}",
            f"{step['planned_loss']:.6f}",
            f"{step['loss_rel_diff']:.1e}",
            f"{step['grad_rel_diff']:.1e}",
            step["grad_leaf"],
        )
        for number, step in enumerate(facts["per_step"], 1)
    ]
    header = ("step", "loss, one device", "loss, plan", "relative", "gradient, relative", "worst in")
    console.print(make_table(header, rows, right=(0, 1, 2, 3, 4)))
    console.print(
        Text(f"state: differs by at most {facts['state_abs_diff']:.1e}, in {facts['state_leaf'] or 'nothing'}")
    )
    told = facts["plan"]["certificate"]["notes"]
    for note in (n for n in facts["notes"] if n not in told):
        console.print(Text(f"note: {note}"))
    loss, grad = facts["tolerance"]
    verdict = "ok" if facts["ok"] else "FAILED"
    console.print(f"{verdict}: tolerance {loss:.0e} for the loss, {grad:.0e} for gradients, both relative")


def print_verify(facts: Mapping[str, Any], stream: TextIO) -> None:
    """Predicted and compiled peak of each stage."""
    rows = (
        (
            str(s["stage"]),
            format_bytes(s["predicted_bytes"]),
            format_bytes(s["compiled_bytes"]),
            f"{100 * s['rel_error']:.1f} %",
        )
        for s in facts["stages"]
    )
    header = ("stage", "predicted peak", "compiled peak", "difference")
    make_console(stream).print(make_table(header, rows, title="memory of a device", right=(1, 2, 3)))
    for program in facts["programs"]:
        counts = [(what, str(number)) for what, number in program.get("axes", {}).items()]
        if counts:
            make_console(stream).print(make_table(("collective", "number"), counts, title=program["name"], right=(1,)))
