"""Lagrangian prices of a candidate's constraints; `bounds` says what they bound."""

from __future__ import annotations

from dataclasses import dataclass

from uniap_jax.core.costs import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Multipliers:
    """Prices of the constraints.

    Attributes:
        time: [stages] t.
        link: [stages - 1] s.
        iteration: [stages] d.
        memory: [stages] m, seconds per byte.
    """

    time: FloatArray
    link: FloatArray
    iteration: FloatArray
    memory: FloatArray
