"""What measuring and compiling an entry have in common: the cache, what fails, and memory as the compiler says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax

from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError, TraceError
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.sharding import make_mesh, shard_bytes
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.order import Entry
from uniap_jax.profiler.programs import Arrays, Case, Direction, compile_fused, compile_split
from uniap_jax.profiler.window import window_bytes

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(slots=True, kw_only=True, eq=False)
class Prober:
    """Finds costs of entries from their compiled programs, and remembers what went wrong.

    Attributes:
        verb: what is done to an entry: "measured" or "compiled".
        what: of the cache's keys.
        describer: of the graph; says what part of a total is gradient synchronisation.
        cache: of earlier results.
        notes: what could not be done, one sentence each.
        arrays: inputs to run the programs on; None where they are only compiled.
    """

    verb: ClassVar[str]
    what: ClassVar[str]
    describer: Describer
    cache: Cache
    notes: dict[str, None] = field(default_factory=dict)
    arrays: Arrays | None = None

    def stage(self, entry: Entry) -> Sequence[Any]:
        """Devices of the stage that an entry runs on."""
        raise NotImplementedError

    def surroundings(self, entry: Entry) -> dict[str, Any]:
        """What a result depends on besides the layer."""
        raise NotImplementedError

    def times(self, programs: Sequence[Direction]) -> dict[str, Any]:
        """Times of an entry's programs, as they are kept in the cache."""
        raise NotImplementedError

    def cost(self, entry: Entry, numbers: dict[str, Any], told: LayerCost) -> LayerCost:
        """The cost from numbers of the cache; `told` is the described one."""
        raise NotImplementedError

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
            **self.surroundings(entry),
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

    def _note(self, entry: Entry, why: str) -> None:
        name = self.describer.graph.layers[entry.layer].name
        self.notes[f"Layer {name} under {entry.strategy} could not be {self.verb}: {why}."] = None

    def _numbers(self, entry: Entry) -> dict[str, Any]:
        graph = self.describer.graph
        cut = graph if entry.num_microbatches == 1 else graph.microbatch(entry.num_microbatches)
        mesh = make_mesh(list(self.stage(entry)))
        case = Case(graph=cut, layer=cut.layers[entry.layer], strategy=entry.strategy, mesh=mesh)
        fused = entry.num_stages == 1
        programs = compile_fused(case, self.arrays) if fused else compile_split(case, self.arrays)
        return {
            **self.times(programs),
            "memory": [p.memory for p in programs],
            **edge_bytes(case),
            "window": window_bytes(case, entry.num_microbatches) if fused else (0.0, 0.0),
        }

    def _cost(self, entry: Entry, numbers: dict[str, Any]) -> LayerCost:
        layer, fused = self.describer.graph.layers[entry.layer], entry.num_stages == 1
        told = self.describer.cost(layer, entry.strategy, samples=entry.key.samples, fused=fused)
        if numbers.get("does_not_fit"):
            return replace(told, origin="does_not_fit")  # as described, and not allowed
        return self.cost(entry, numbers, told)


def edge_bytes(case: Case) -> dict[str, float]:
    """Bytes per device of what the layer reads and writes, as laid out."""
    sizes, where = {name: int(size) for name, size in case.mesh.shape.items()}, case.sharding()

    def total(values: Sequence[int], specs: Sequence[Any]) -> float:
        return float(sum(shard_bytes(case.graph.values[v], s, sizes) for v, s in zip(values, specs, strict=True)))

    return {"reads": total(case.layer.reads, where.reads), "writes": total(case.layer.writes, where.writes)}


def memory_parts(numbers: dict[str, Any], told: LayerCost, fused: bool) -> tuple[float, float]:
    """(kept, working) bytes from the compiler's figures; as described where it gives none.

    Of one program the compiler says the sum; what a further equal layer does not add is working memory.
    """
    memory = numbers["memory"]
    if not all(memory):
        return told.kept_bytes, told.transient_bytes
    if fused:
        temporaries, (slope, rest) = memory[0]["temporaries"], numbers["window"]
        kept = min(told.kept_bytes, temporaries)
        return kept, float(rest) if slope else temporaries - kept
    kept = max(0.0, memory[0]["outputs"] - numbers["writes"]) + numbers["reads"]  # the backward reads its inputs again
    return kept, max(m["temporaries"] for m in memory)
