"""Memory of a layer as programs hold it: compiled for one replica, with one layer and with two, at several batches.

A device holds what it holds however many replicas work beside it, so one compile serves every number of data ways,
every number of stages and every number of micro-batches that leave it as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError, TraceError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Footprint, LayerCost
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.sharding import make_mesh, shard_bytes
from uniap_jax.core.strategy import DEGREES, Strategy
from uniap_jax.core.weights import ParamBytes
from uniap_jax.profiler.order import Entry
from uniap_jax.profiler.probe import Prober
from uniap_jax.profiler.programs import Case, Direction, compile_split
from uniap_jax.profiler.window import links_of, window_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What decides the memory of an entry.

    Attributes:
        layer: first of its kind.
        strategy: with data ways only where gradients meet over them in the program itself, and that changes its memory.
        samples: of its replicas together and one micro-batch.
        fused: forward and backward in one program.
        summed: gradients of several micro-batches are added up.
        mapped: the runtime maps the layer over replicas, so that gradients meet once a step.
    """

    layer: int
    strategy: Strategy
    samples: int
    fused: bool
    summed: bool
    mapped: bool = False

    @property
    def local(self) -> float:
        """Samples on a device."""
        return self.samples / (self.strategy.batch_ways * self.strategy.context)

    @property
    def family(self) -> Replica:
        """All that differ in their samples alone."""
        return replace(self, samples=0)


def replica_of(entry: Entry, graph: LayerGraph, platform: str) -> Replica:
    """The replica of an entry; two of them where they wait for each other's gradients on a GPU.

    Its compiler joins small gradients for one collective and computes them right before it, so that what they are
    computed from stays alive for several layers; most of what recomputing would free does.

    Args:
        entry: of a profile.
        graph: of the entry.
        platform: of the devices.
    """
    summed = entry.num_microbatches > 1
    mapped = summed and reduces_once(graph, graph.layers[entry.layer], entry.strategy)
    together = 2 if platform == "gpu" and entry.strategy.data > 1 and not mapped else 1
    ways = entry.strategy.data // together if entry.strategy.data % together == 0 else entry.strategy.data
    return Replica(
        layer=entry.layer,
        strategy=replace(entry.strategy, data=entry.strategy.data // ways),
        samples=entry.key.samples // ways,
        fused=entry.num_stages == 1,
        summed=summed,
        mapped=mapped,
    )


def measure_footprint(case: Case, replica: Replica, told: LayerCost, weights: ParamBytes) -> Footprint:
    """What the compiler says; as described where it says nothing.

    Args:
        case: the replica's layer on its devices.
        replica: what is sought.
        told: its described cost, for what the compiler does not tell apart.
        weights: of the layer's parameters.
    """
    return _fused(case, replica, told, weights) if replica.fused else _split(case, replica, told, weights)


def _fused(case: Case, replica: Replica, told: LayerCost, weights: ParamBytes) -> Footprint:
    slope, rest = window_bytes(case, 2 if replica.summed else 1)
    if slope or not rest:
        return Footprint(kept_bytes=told.kept_bytes, transient_bytes=rest or told.transient_bytes, marginal_bytes=slope)
    rest -= weights.full_grads + (weights.grads if replica.summed else 0.0)
    kept = min(told.kept_bytes, max(0.0, rest))
    return Footprint(kept_bytes=kept, transient_bytes=max(0.0, rest - kept), marginal_bytes=0.0)


def _split(case: Case, replica: Replica, told: LayerCost, weights: ParamBytes) -> Footprint:
    """Of a stage: beside what is in flight it holds the sums of gradients and what its larger program works with."""
    links, edges = links_of(case), edge_bytes(case)
    one = _stage(case, replica, 1, {}, edges)
    if one is None:
        return Footprint(kept_bytes=told.kept_bytes, transient_bytes=told.transient_bytes, marginal_bytes=0.0)
    if links is None:
        working = max(0.0, one.own - (weights.full_grads if replica.summed else weights.grads))
        return Footprint(kept_bytes=one.held + edges["reads"], transient_bytes=working, marginal_bytes=0.0)
    two = _stage(case, replica, 2, links, edges)
    assert two is not None
    more = max(0.0, two.own - one.own)
    return Footprint(
        kept_bytes=max(0.0, two.held - one.held),
        transient_bytes=max(0.0, one.own - more),
        marginal_bytes=(weights.grads if replica.summed else 0.0) + more,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Bytes of equal layers as a stage.

    Attributes:
        held: what the forward leaves for the backward.
        own: what the larger of both programs needs beside it, its arguments and the sums.
    """

    held: float
    own: float


def _stage(
    case: Case, replica: Replica, number: int, links: Mapping[int, int], edges: Mapping[str, float]
) -> _Stage | None:
    forward, backward = compile_split(case, None, number=number, links=links, summed=replica.summed)
    if not forward.memory or not backward.memory:
        return None
    held = max(0.0, forward.memory["outputs"] - edges["writes"])
    return _Stage(held=held, own=max(_own(forward) - held, _own(backward)))


def _own(program: Direction) -> float:
    """What a program needs beside its arguments."""
    memory = program.memory
    return memory["temporaries"] + memory["outputs"] - memory["aliased"]


def edge_bytes(case: Case) -> dict[str, float]:
    """Bytes per device of what the layer reads and writes, as laid out."""
    sizes, where = {name: int(size) for name, size in case.mesh.shape.items()}, case.sharding()

    def total(values: Sequence[int], specs: Sequence[Any]) -> float:
        return float(sum(shard_bytes(case.graph.values[v], s, sizes) for v, s in zip(values, specs, strict=True)))

    return {"reads": total(case.layer.reads, where.reads), "writes": total(case.layer.writes, where.writes)}


class Footprints:
    """Memory of every entry from that of a few.

    Args:
        describer: of the graph.
        known: what was measured.
    """

    def __init__(self, describer: Describer, known: Mapping[Replica, Footprint]) -> None:
        self._describer, self._known = describer, dict(known)
        self._families: dict[Replica, list[Replica]] = {}
        for replica in sorted(self._known, key=lambda r: r.samples):
            self._families.setdefault(replica.family, []).append(replica)

    def of(self, wanted: Replica, told: LayerCost) -> Footprint:
        """As measured; on the line through two batches, scaled from the nearest of its layer, or as described."""
        if wanted in self._known:
            return self._known[wanted]
        kin = self._families.get(wanted.family, [])
        if len(kin) > 1:
            return self._between(wanted, sorted(kin, key=lambda r: _apart(r, wanted))[:2])
        near = min((r for r in self._known if _alike(r, wanted)), key=lambda r: _apart(r, wanted), default=None)
        if near is None:
            return Footprint(kept_bytes=told.kept_bytes, transient_bytes=told.transient_bytes)
        return self._scaled(wanted, near)

    def _between(self, wanted: Replica, kin: Sequence[Replica]) -> Footprint:
        a, b = kin
        share = (wanted.samples - a.samples) / (b.samples - a.samples)
        low, high = self._known[a], self._known[b]

        def mixed(name: str) -> float:
            ends: tuple[float, float] = (getattr(low, name), getattr(high, name))
            return max(0.0, (1 - share) * ends[0] + share * ends[1])

        return Footprint(
            kept_bytes=mixed("kept_bytes"),
            transient_bytes=mixed("transient_bytes"),
            marginal_bytes=mixed("marginal_bytes") if low.marginal_bytes and high.marginal_bytes else 0.0,
        )

    def _scaled(self, wanted: Replica, near: Replica) -> Footprint:
        """Activations by what is described of both; gradients and gathered parameters are known."""
        known, told, there = self._known[near], self._activations(wanted), self._activations(near)
        marginal = 0.0
        if known.marginal_bytes:
            measured = max(0.0, known.marginal_bytes - self._of_params(near))
            grown = _ratio(told.kept_bytes, there.kept_bytes) if near.fused else _ratio(wanted.local, near.local)
            marginal = self._of_params(wanted) + measured * grown
        return Footprint(
            kept_bytes=known.kept_bytes * _ratio(told.kept_bytes, there.kept_bytes),
            transient_bytes=known.transient_bytes * _ratio(told.transient_bytes, there.transient_bytes),
            marginal_bytes=marginal,
        )

    def _activations(self, replica: Replica) -> LayerCost:
        """Described of as many samples on a device without gathered parameters."""
        layer, ways = self._describer.graph.layers[replica.layer], replica.strategy.fsdp
        plain = replace(replica.strategy, fsdp=1, zero=3)
        return self._describer.cost(layer, plain, samples=replica.samples // ways, fused=replica.fused)

    def _of_params(self, replica: Replica) -> float:
        """Of what one more layer adds: gradients, sums of them, and parameters gathered for the backward."""
        weights = self._describer.weights(self._describer.graph.layers[replica.layer], replica.strategy)
        gathered = weights.used if weights.used > weights.stored else 0.0
        sums = weights.grads if replica.summed else 0.0
        if replica.fused:
            return weights.full_grads + sums + gathered
        return gathered + (sums or weights.grads)


def _ratio(wanted: float, near: float) -> float:
    return wanted / near if near > 0 else 1.0


def _alike(a: Replica, b: Replica) -> bool:
    """Whether one says something of the other: the same layer, in one program or in two, keeping alike."""
    return (a.layer, a.fused, a.strategy.keep) == (b.layer, b.fused, b.strategy.keep)


def _apart(a: Replica, b: Replica) -> float:
    """How unlike two replicas of a layer are, in doublings of a degree or of the batch."""
    pairs = [(a.local, b.local)] + [(getattr(a.strategy, n), getattr(b.strategy, n)) for n in DEGREES]
    moved = sum(abs(math.log2(x / y)) for x, y in pairs)
    others: list[bool] = [a.strategy.zero != b.strategy.zero, a.strategy.sequence != b.strategy.sequence]
    others += [a.summed != b.summed, a.mapped != b.mapped]
    return moved + sum(others)


def by_variety(ranked: Sequence[Entry], graph: LayerGraph, platform: str) -> list[Entry]:
    """Entries of different replicas: of each family the largest batch, then the smallest, then those between.

    Args:
        ranked: most valuable first.
        graph: of the entries.
        platform: of the devices.
    """
    families: dict[Replica, dict[Replica, Entry]] = {}
    for entry in ranked:
        replica = replica_of(entry, graph, platform)
        families.setdefault(replica.family, {}).setdefault(replica, entry)
    rounds: dict[int, list[Entry]] = {}
    for found in families.values():
        sizes = sorted(found, key=lambda r: r.samples)
        order = [*sizes[-1:], *sizes[:-1][:1], *sizes[1:-1]]
        for i, replica in enumerate(order):
            rounds.setdefault(i, []).append(found[replica])
    return [e for i in sorted(rounds) for e in rounds[i]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprinter:
    """Finds the memory of entries by compiling them for one replica.

    Attributes:
        describer: of the graph.
        prober: says where entries are compiled, and keeps what is found.
    """

    describer: Describer
    prober: Prober

    def facts(self, replica: Replica) -> dict[str, Any]:
        """The cache key of a replica."""
        layer = self.describer.graph.layers[replica.layer]
        return {
            "what": "footprint",
            "signature": layer.signature,
            "shapes": [f"{a.shape}{a.dtype}" for a in layer.jaxpr.in_avals],
            "batch": self.describer.graph.batch_size,
            "strategy": str(replica.strategy),
            "samples": replica.samples,
            "fused": replica.fused,
            "summed": replica.summed,
            "mapped": replica.mapped,
            **self.prober.surroundings(replica.strategy.num_devices),
        }

    def known(self, entry: Entry) -> tuple[Replica, Footprint] | None:
        """What the cache has."""
        replica = replica_of(entry, self.describer.graph, self.describer.cluster.platform)
        numbers = self.prober.cache.get(self.facts(replica))
        return None if numbers is None else (replica, Footprint(**numbers))

    def measure(self, entry: Entry) -> tuple[Replica, Footprint] | None:
        """Compiled now; None where the step does other things with so few samples or does not compile."""
        graph = self.describer.graph
        replica = replica_of(entry, graph, self.describer.cluster.platform)
        layer = graph.layers[entry.layer]
        told = self.describer.cost(layer, replica.strategy, samples=replica.samples, fused=replica.fused)
        try:
            pieces = graph.batch_size // replica.samples
            cut = graph if pieces == 1 else graph.microbatch(pieces)
            mesh = make_mesh(list(self.prober.stage(replica.strategy.num_devices)))
            here = cut.layers[entry.layer]
            case = Case(graph=cut, layer=here, strategy=replica.strategy, mesh=mesh, mapped=replica.mapped)
            found = measure_footprint(case, replica, told, self.describer.weights(layer, replica.strategy))
        except TraceError:
            return None
        except (ProfileError, jax.errors.JaxRuntimeError) as error:
            why = str(error).splitlines()[0]
            self.prober.notes[f"Memory of layer {layer.name} under {replica.strategy} is described: {why}."] = None
            return None
        self.prober.cache.put(self.facts(replica), asdict(found))
        return replica, found
