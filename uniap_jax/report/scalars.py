"""Scalars of a training run for TensorBoard, through a writer of tensorboardX or clu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from uniap_jax.core.errors import ExecutionError


class AddsScalars(Protocol):
    """What is used of `tensorboardX.SummaryWriter` and of torch's and flax's writers of that kind."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Takes one point."""
        ...


class WritesScalars(Protocol):
    """What is used of `clu.metric_writers.MetricWriter`."""

    def write_scalars(self, step: int, scalars: Mapping[str, float], /) -> object:
        """Takes the points of one step."""
        ...


def step_scalars(
    metrics: Sequence[Mapping[str, float]],
    *,
    seconds: Sequence[float],
    predicted_step_time_s: float,
    live_bytes: Sequence[float] = (),
) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, scalars by name) of every step, from 1: metrics, step time measured and predicted, memory in use.

    Args:
        metrics: per step, name to value.
        seconds: per step, measured.
        predicted_step_time_s: of the plan.
        live_bytes: per step, most bytes in use on a device; () where the platform does not tell.
    """
    for step, (values, measured) in enumerate(zip(metrics, seconds, strict=True), 1):
        found = {f"metrics/{name}": value for name, value in values.items()}
        found |= {"step_time_s/measured": measured, "step_time_s/predicted": predicted_step_time_s}
        if live_bytes:
            found["memory_bytes/live"] = live_bytes[step - 1]
        yield step, found


def add_scalars(writer: AddsScalars, points: Iterator[tuple[int, dict[str, float]]]) -> None:
    """Hands every point to a writer of tensorboardX's kind."""
    for step, scalars in points:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)


def write_scalars_to(writer: WritesScalars, points: Iterator[tuple[int, dict[str, float]]]) -> None:
    """Hands every step's points to a writer of clu's kind."""
    for step, scalars in points:
        writer.write_scalars(step, scalars)


def write_scalars(folder: str | Path, points: Iterator[tuple[int, dict[str, float]]]) -> None:
    """Writes a folder that TensorBoard reads, with tensorboardX (the extra `report`).

    Raises:
        ExecutionError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise ExecutionError(
            "tensorboardX is not installed; pip install 'uniap-jax[report]', or leave --tensorboard out",
            package="tensorboardX",
        ) from None
    with SummaryWriter(str(folder)) as writer:
        add_scalars(writer, points)
