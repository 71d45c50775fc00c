"""Scalars of a training run for TensorBoard, through tensorboardX (the extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from uniap_jax.core.errors import ExecutionError


def write_scalars(
    folder: str | Path,
    metrics: Sequence[Mapping[str, float]],
    *,
    seconds: Sequence[float],
    predicted_step_time_s: float,
) -> None:
    """Writes every metric and the measured and predicted step time, one point per step.

    Args:
        folder: where TensorBoard looks.
        metrics: per step, name to value.
        seconds: per step, measured.
        predicted_step_time_s: of the plan.

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
        for step, (values, measured) in enumerate(zip(metrics, seconds, strict=True), 1):
            for name, value in values.items():
                writer.add_scalar(f"metrics/{name}", value, step)
            writer.add_scalar("step_time_s/measured", measured, step)
            writer.add_scalar("step_time_s/predicted", predicted_step_time_s, step)
