"""Accelerators that are not here, as the compilers in jax's extras describe them: programs compile, nothing runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from typing import Any

from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster
from uniap_jax.core.topology import shipped_names

TPU_SETTINGS = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""libtpu asks a metadata server who it is, and locks the chips of this host; neither is wanted here."""
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
EXTRAS = {"tpu": "tpu", "gpu": "cuda"}


def absent_devices(cluster: Cluster, num_stages: int = 1) -> list[Any]:
    """Devices of a described cluster to compile for, numbered as the cluster numbers them.

    The compilers take no part of a topology, so the devices of every pipeline stage are a topology of their own.

    Args:
        cluster: from `load_cluster`, of TPUs or NVIDIA cards.
        num_stages: whose programs are compiled, each on its own devices.

    Raises:
        ProfileError: no compiler for them is installed (says which extra has it), the compiler knows no such
            topology, or it counts other devices than the description does.
    """
    return [d for _ in range(num_stages) for d in stage_devices(cluster, num_stages)]


def stage_devices(cluster: Cluster, num_stages: int) -> list[Any]:
    """Devices of one of `num_stages` stages, as a topology of their own; the same errors as `absent_devices`."""
    if cluster.platform == "cpu":
        raise ProfileError(
            f"{cluster.name} is a host of CPUs: there is no compiler for absent ones; use --source described, or "
            "measure on the host itself",
            field="platform",
            value=cluster.platform,
        )
    _check_installed(cluster)
    from jax.experimental import topologies

    name, shape = part_of(cluster, num_stages)
    wanted = cluster.num_devices // num_stages
    topology = f"{name}:{'x'.join(map(str, shape))}"
    card = _card(name) if cluster.platform == "gpu" else ""
    try:
        if cluster.platform == "tpu":
            with _environment(TPU_SETTINGS):
                found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        else:
            nodes, cards = shape if len(shape) == 2 else (1, shape[0])
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="", topology=f"1x{nodes}x{cards}", target_config=card
            )
    except NotImplementedError as error:  # jax's, of a platform whose plugin did not register
        raise ProfileError(
            f"jax offers no {cluster.platform} compiler for {cluster.name}: its plugin looked for a driver when jax "
            "started, and withdrew; start Python with JAX_PLATFORMS=cpu, or use --source described",
            field="JAX_PLATFORMS",
            name=topology,
        ) from error
    except (RuntimeError, ValueError) as error:  # jax raises either, from C++
        raise ProfileError(
            f"the {cluster.platform} compiler has no topology {topology!r} ({str(error).splitlines()[0][:200]}); "
            "use a shape that such machines have, for example v5e:4x4, v5p:4x4x4 or h100:2x8, or --source described",
            name=topology,
        ) from error
    devices = sorted(found.devices, key=_place)
    if len(devices) != wanted:
        raise ProfileError(
            f"the compiler counts {len(devices)} devices in {topology}, its description {wanted}: "
            "they differ in what a device is, so nothing compiled would fit the description; use --source described",
            field="num_devices",
            wanted=wanted,
            found=len(devices),
        )
    return devices


def part_of(cluster: Cluster, num_stages: int) -> tuple[str, tuple[int, ...]]:
    """The machine's name, and the shape of one of `num_stages` runs of neighbours; the last axis varies fastest.

    Raises:
        ProfileError: such a run is no box of the machine's shape.
    """
    name, _, text = cluster.name.rpartition(":")
    sizes = [int(s) for s in text.split("x")]
    per_chip = cluster.num_devices // math.prod(sizes)
    left = cluster.num_devices // num_stages // per_chip
    shape: list[int] = []
    for size in reversed(sizes):
        shape.insert(0, math.gcd(left, size))
        left //= shape[0]
        if left > 1 and shape[0] < size:
            break
    if left != 1 or cluster.num_devices % (num_stages * per_chip):
        raise ProfileError(
            f"one of {num_stages} stages of {cluster.name} is no box of its {text} devices, so there is nothing to "
            "compile for; use a number of stages whose devices fill whole axes",
            field="num_stages",
            value=num_stages,
        )
    return name, tuple([1] * (len(sizes) - len(shape)) + shape)


def _check_installed(cluster: Cluster) -> None:
    if not any(find_spec(name) for name in COMPILERS[cluster.platform]):
        extra = EXTRAS[cluster.platform]
        raise ProfileError(
            f"{cluster.name} is not here, and the compiler for it is not installed; pip install 'uniap-jax[{extra}]' "
            "to compile for it, or use --source described, which compiles nothing",
            extra=extra,
            name=cluster.name,
        )


def _place(device: Any) -> tuple[Any, ...]:
    """Order of the cluster's numbering: the last axis of the torus varies fastest; cards by their number."""
    if device.platform == "tpu":
        return (*device.coords, device.core_on_chip)
    return (device.id,)


def _card(name: str) -> str:
    """The card's description in the form of XLA's GpuTargetConfigProto."""
    file = resources.files("uniap_jax").joinpath("profiles").joinpath(f"{name}.textproto")
    if not file.is_file():
        known = [
            n for n in shipped_names() if resources.files("uniap_jax").joinpath(f"profiles/{n}.textproto").is_file()
        ]
        raise ProfileError(
            f"there is no compiler description of {name!r}; known are {', '.join(known) or 'none'}; "
            "use --source described",
            name=name,
            known=tuple(known),
        )
    return file.read_text(encoding="ascii")


class _environment:
    """Settings that a library reads from the environment while it starts, taken back afterwards."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._settings}
        for name, value in self._settings.items():
            os.environ.setdefault(name, value)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
