"""Several stages: one program per stage and direction, driven by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uniap_jax.core.errors import ExecutionError
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.programs import Program


class Pipeline:
    """Runs a plan of several stages."""

    def __init__(self, layout: Layout, donated: Sequence[int]) -> None:
        raise ExecutionError(f"{layout.plan.num_stages} stages cannot be run yet", num_stages=layout.plan.num_stages)

    programs: tuple[Program, ...]

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs."""
        raise NotImplementedError
