"""What goes from stage to stage, and between one stage and the layers on all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.sharding import assign_axes
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.programs import is_key
from uniap_jax.runtime.uniform_run import Slot

STAGE = "stage"
ON_STAGE = PartitionSpec(STAGE)
EVERYWHERE = PartitionSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Slots on their way; all but `collect` are called inside a manual region over the stages.

    Attributes:
        mesh: (stage, x0, x1, ...).
        strategy: whose batch axes slots have between stages.
    """

    mesh: Mesh
    strategy: Strategy

    @property
    def num_stages(self) -> int:
        """P."""
        return int(self.mesh.shape[STAGE])

    def step(self, values: Sequence[Any], step: int) -> list[Any]:
        """To the next stage (1) or the one before (-1); what arrives from nowhere is zero."""
        pairs = [(s, s + step) for s in range(self.num_stages) if 0 <= s + step < self.num_stages]
        return [lax.ppermute(x, STAGE, pairs) for x in values]

    def emit(self, x: Any, slot: Slot, source: int) -> Any:
        """One stage's value on its way to all: rows spread over the stages where they divide.

        The rows of a device of the batch axes go to the devices of the same place on every stage: (batch axes, stage,
        row), so that coming back they meet where they were.
        """
        if not self._splits(slot):
            return x[None]
        assert slot.batch_dim is not None
        dim, ways = slot.batch_dim, self.strategy.batch_ways
        shape = (*x.shape[:dim], ways, self.num_stages, x.shape[dim] // ways // self.num_stages, *x.shape[dim + 1 :])
        pieces = pin(self.mesh, x.reshape(shape), slot.spec)
        met = lax.all_to_all(pieces, STAGE, dim + 1, dim + 1, tiled=True)
        return lax.slice_in_dim(met, source, source + 1, axis=dim + 1)

    def emitted_spec(self, slot: Slot) -> PartitionSpec:
        """Of what `emit` returns, as it leaves the manual region."""
        if not self._splits(slot) or slot.batch_dim is None:
            return ON_STAGE
        return PartitionSpec(*([None] * (slot.batch_dim + 1)), STAGE)

    def collect(self, x: Any, slot: Slot, source: int) -> Any:
        """The value that one stage emitted, on all devices."""
        if not self._splits(slot) or slot.batch_dim is None:
            return x[source]
        axes = assign_axes(self.strategy, self.strategy.num_devices)
        spec = PartitionSpec(*([None] * slot.batch_dim), (*axes.batch, STAGE))
        return lax.with_sharding_constraint(x.reshape(slot.shape), NamedSharding(self.mesh, spec))

    def _splits(self, slot: Slot) -> bool:
        ways = self.strategy.batch_ways * self.num_stages
        return slot.batch_dim is not None and slot.shape[slot.batch_dim] % ways == 0


def pin(mesh: Mesh, x: Any, spec: PartitionSpec) -> Any:
    """A layout over the automatic axes, inside a manual region over the stages."""
    if mesh.size == mesh.shape[STAGE] or not x.shape or is_key(x.dtype):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))
