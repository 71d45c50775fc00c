"""What has to stand in the environment before jax starts."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from uniap_jax.cli.output import UsageError

DEVICE_FLAG = "--xla_force_host_platform_device_count"
# The CPU client sizes its thread pool by this. Devices that meet in a collective each hold a thread, so a pool of as
# many threads as cores waits for itself for good.
THREADS = "NPROC"
FEWEST_THREADS = 64


def set_environment(
    devices: int | None, *, absent: bool = False, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Asks for virtual CPU devices and a thread pool that is large enough for them.

    Args:
        devices: number of virtual CPU devices; None leaves jax's own choice of platform alone.
        absent: planning is for devices that are not here. Nothing runs then, and jax's plugin for NVIDIA cards would
            look for a driver and take its compiler away where there is none.
        environ: of the process.

    Raises:
        UsageError: jax has already started, too late to change it.
    """
    if devices is None:
        if absent:
            environ.setdefault("JAX_PLATFORMS", "cpu")
        return
    kept = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_FLAG)]
    environ["XLA_FLAGS"] = " ".join([*kept, f"{DEVICE_FLAG}={devices}"])
    environ["JAX_PLATFORMS"] = "cpu"
    threads = environ.get(THREADS, "")
    environ[THREADS] = str(max(FEWEST_THREADS, 8 * devices, int(threads) if threads.isdigit() else 0))
    if "jax" in sys.modules:
        _check_started(devices)


def _check_started(devices: int) -> None:
    """What was just set still counts where jax is imported but has not looked at its devices yet."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if len(jax.devices()) < devices:
        raise UsageError(
            f"--devices {devices} was asked for after jax had started with {len(jax.devices())}",
            devices=devices,
            started=len(jax.devices()),
        )
