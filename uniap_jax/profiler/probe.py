"""What measuring and compiling an entry have in common: the cache, and what fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax

from uniap_jax.core.described import Describer
from uniap_jax.core.errors import OUT_OF_MEMORY, ProfileError, TraceError
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.sharding import make_mesh
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.order import Entry, described
from uniap_jax.profiler.piece import compile_split, piece_of
from uniap_jax.profiler.programs import Arrays, Case, Direction, compile_fused
from uniap_jax.profiler.timing import Durations

COMPILE_S = 1.0
"""Of a layer, before one was compiled."""


@dataclass(slots=True, kw_only=True, eq=False)
class Prober(ABC):
    """Finds times of entries from their compiled programs, and remembers what went wrong; memory is as described.

    Attributes:
        verb: what is done to an entry: "measured" or "compiled".
        what: of the cache's keys.
        describer: of the graph; says what part of a total is gradient synchronisation.
        cache: of earlier results.
        notes: what could not be done, one sentence each.
        arrays: inputs to run the programs on; None where they are only compiled.
        compiles: of an entry's programs.
    """

    verb: ClassVar[str]
    what: ClassVar[str]
    describer: Describer
    cache: Cache
    notes: dict[str, None] = field(default_factory=dict)
    arrays: Arrays | None = None
    compiles: Durations = field(default_factory=lambda: Durations(COMPILE_S))

    @abstractmethod
    def stage(self, size: int) -> Sequence[Any]:
        """Devices of a stage of `size` devices."""

    @abstractmethod
    def surroundings(self, size: int) -> dict[str, Any]:
        """What a result on `size` devices depends on besides the layer."""

    @abstractmethod
    def times(self, programs: Sequence[Direction]) -> dict[str, Any]:
        """Times of an entry's programs, as they are kept in the cache."""

    @abstractmethod
    def cost(self, entry: Entry, numbers: dict[str, Any], told: LayerCost) -> LayerCost:
        """The cost from numbers of the cache; `told` is the described one."""

    def facts(self, entry: Entry) -> dict[str, Any]:
        """The cache key of an entry."""
        graph = self.describer.graph
        layer = graph.layers[entry.layer]
        return {
            "what": self.what,
            "signature": layer.signature,
            "shapes": [f"{a.shape}{a.dtype}" for a in layer.jaxpr.in_avals],
            "batch": graph.batch_size,
            "strategy": str(entry.strategy),
            "stages": entry.num_stages,
            "microbatches": entry.num_microbatches,
            "programs": 6,
            **self.surroundings(entry.strategy.num_devices),
        }

    def known(self, entry: Entry) -> LayerCost | None:
        """What the cache has."""
        numbers = self.cache.get(self.facts(entry))
        if numbers is None:
            return None
        try:
            return self._cost(entry, numbers)
        except (KeyError, TypeError, ValueError) as error:
            self.notes[f"a cached result for {entry.strategy} was refused ({error}) and {self.verb} again"] = None
            return None

    def measure(self, entry: Entry) -> LayerCost | None:
        """The cost, kept in the cache; None where it cannot be found, with a note."""
        try:
            numbers = self._numbers(entry)
            cost = self._cost(entry, numbers)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                self._note(entry, str(error).splitlines()[0])
                return None
            numbers = {"does_not_fit": True}
            cost = self._cost(entry, numbers)
        except (TraceError, ProfileError) as error:
            self._note(entry, str(error))
            return None
        self.cache.put(self.facts(entry), numbers)
        return cost

    def expected_s(self, entry: Entry) -> float:
        """One compile is as good as another."""
        return self.compiles.next_s

    def _note(self, entry: Entry, why: str) -> None:
        name = self.describer.graph.layers[entry.layer].name
        self.notes[f"Layer {name} under {entry.strategy} could not be {self.verb}: {why}."] = None

    def _numbers(self, entry: Entry) -> dict[str, Any]:
        graph = self.describer.graph
        cut = graph if entry.num_microbatches == 1 else graph.microbatch(entry.num_microbatches)
        mesh = make_mesh(list(self.stage(entry.strategy.num_devices)))
        case = Case(graph=cut, layer=cut.layers[entry.layer], strategy=entry.strategy, mesh=mesh)
        programs: Sequence[Direction]
        with self.compiles.one():
            if entry.num_stages == 1:
                programs = compile_fused(case, self.arrays)
            else:
                programs = compile_split(piece_of([case]), self.arrays, summed=entry.num_microbatches > 1)
        return self.times(programs)

    def _cost(self, entry: Entry, numbers: dict[str, Any]) -> LayerCost:
        told = described(entry, self.describer)
        if numbers.get("does_not_fit"):
            return replace(told, origin="does_not_fit")  # as described, and not allowed
        return self.cost(entry, numbers, told)
