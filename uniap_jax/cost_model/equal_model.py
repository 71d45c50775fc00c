"""What a cost model says of one program for all stages: which candidates there are, and their tables."""

from __future__ import annotations

from collections.abc import Sequence

from uniap_jax.core.costs import Candidate
from uniap_jax.core.described import divisors
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.plan import SCHEDULES
from uniap_jax.cost_model.equal_stages import EqualStages
from uniap_jax.cost_model.numbers import Numbers


class EqualModel:
    """What a cost model says of one program for all stages, found as it is asked for.

    Args:
        model: whose numbers are used.
    """

    def __init__(self, model: Numbers) -> None:
        self._model = model
        self._known: dict[int, EqualStages | StrategyError] = {}

    def candidates(self, splits: Sequence[int]) -> tuple[Candidate, ...]:
        """Every P over 1 that divides the devices and a run of equal layers, under either schedule.

        Args:
            splits: numbers of micro-batches.
        """
        degrees = [p for p in divisors(self._model.num_devices)[1:] if isinstance(self._stages(p), EqualStages)]
        return tuple(
            Candidate(num_stages=p, num_microbatches=c, schedule=s) for p in degrees for c in splits for s in SCHEDULES
        )

    def tables(self, candidate: Candidate) -> EqualTables:
        """The tables of one candidate.

        Raises:
            StrategyError: the model has no run of equal layers that the stages divide.
        """
        found = self._stages(candidate.num_stages)
        if isinstance(found, StrategyError):
            raise found
        return found.tables(candidate)

    def _stages(self, num_stages: int) -> EqualStages | StrategyError:
        if num_stages not in self._known:
            try:
                self._known[num_stages] = EqualStages(self._model, num_stages)
            except StrategyError as error:
                self._known[num_stages] = error
        return self._known[num_stages]
