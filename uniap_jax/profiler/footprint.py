"""Memory of a layer as programs hold it: from windows compiled for one replica, at several batches.

A device holds what it holds however many replicas work beside it, so one compile serves every number of data ways,
every number of stages and every number of micro-batches that leave it as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from types import MappingProxyType
from typing import Any

import jax

from uniap_jax.core.described import Describer
from uniap_jax.core.equal_body import body_of
from uniap_jax.core.equal_stages import EqualRun
from uniap_jax.core.errors import ProfileError, StrategyError, TraceError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.profile import Footprint, LayerCost
from uniap_jax.core.replicated import reduces_once
from uniap_jax.core.sharding import make_mesh
from uniap_jax.core.strategy import DEGREES, Strategy
from uniap_jax.profiler.order import Entry
from uniap_jax.profiler.probe import COMPILE_S, Prober
from uniap_jax.profiler.timing import Durations
from uniap_jax.profiler.window import (
    Need,
    Neighbourhood,
    Run,
    Way,
    compiled_as,
    footprint,
    neighbourhood,
    ticks_need,
    window_facts,
    window_need,
    window_piece,
)

Runs = Mapping[int, EqualRun]
"""By the number of stages, the layers that one program for all stages runs as ticks; see `ticking_run`."""
NO_RUNS: Runs = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What decides the memory of an entry.

    Attributes:
        layer: first of its kind.
        way: how its stage is run.
    """

    layer: int
    way: Way

    @property
    def family(self) -> Replica:
        """All that differ in their samples alone."""
        return replace(self, way=replace(self.way, samples=0))


def replica_of(entry: Entry, graph: LayerGraph, platform: str, *, turned: bool = False) -> Replica:
    """The replica of an entry: all data ways at once where the batch cannot be split.

    Two of them where replicas wait for each other's gradients and that takes memory. On a GPU, where the compiler joins
    small gradients for one collective and computes them right before it, so that what they are computed from stays
    alive for several layers; most of what recomputing would free does. On a CPU in a backward that hands its gradients
    over: what replicas bring to a collective and what they take from it lie beside each other.

    Args:
        entry: of a profile.
        graph: of the entry.
        platform: of the devices.
        turned: whether its stage runs both directions as one program though it is not the only one.
    """
    only, summed, data = entry.num_stages == 1, entry.num_microbatches > 1, entry.strategy.data
    mapped = summed and reduces_once(graph, graph.layers[entry.layer], entry.strategy)
    handed = not only and not summed
    meet = data % 2 == 0 and not mapped and (platform == "gpu" or (platform == "cpu" and handed))
    ways = 1 if graph.split_reason else data // 2 if meet else data
    way = Way(
        strategy=replace(entry.strategy, data=data // ways),
        samples=entry.key.samples // ways,
        turned=only or turned,
        only=only,
        summed=summed,
        mapped=mapped,
        consumed=platform == "tpu" and only and not summed,
    )
    return Replica(layer=entry.layer, way=way)


def ticked_replica(entry: Entry, graph: LayerGraph, runs: Runs) -> Replica | None:
    """The stage of one program that an entry's layer would be in; None where it is in none.

    Args:
        entry: of a profile.
        graph: of the entry.
        runs: those whose ticks are compiled.
    """
    strategy, stages = entry.strategy, entry.num_stages
    run = runs.get(stages)
    if run is None or strategy.sequence_ways * strategy.expert * strategy.context > 1:
        return None
    if graph.layers[run.first].signature != graph.layers[entry.layer].signature:
        return None
    way = Way(strategy=strategy, samples=entry.key.samples, turned=True, only=False, summed=True)
    ticks = entry.num_microbatches + stages - 1
    return Replica(layer=entry.layer, way=replace(way, depth=run.count // stages, ticks=ticks))


class Footprints:
    """Memory of every entry from that of a few.

    Args:
        describer: of the graph.
        known: what was measured.
    """

    def __init__(self, describer: Describer, known: Mapping[Replica, Footprint]) -> None:
        self._describer, self._known = describer, dict(known)
        self._families: dict[Replica, list[Replica]] = {}
        for replica in sorted(self._known, key=lambda r: r.way.samples):
            self._families.setdefault(replica.family, []).append(replica)

    def has(self, wanted: Replica) -> bool:
        """Whether it was measured, or lies on the line through two batches that were."""
        return wanted in self._known or len(self._families.get(wanted.family, ())) > 1

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
        share = (wanted.way.samples - a.way.samples) / (b.way.samples - a.way.samples)
        low, high = self._known[a], self._known[b]

        def mixed(name: str) -> float:
            ends: tuple[float, float] = (getattr(low, name), getattr(high, name))
            return max(0.0, (1 - share) * ends[0] + share * ends[1])

        return Footprint(
            kept_bytes=mixed("kept_bytes"),
            transient_bytes=mixed("transient_bytes"),
            marginal_bytes=mixed("marginal_bytes") if low.marginal_bytes and high.marginal_bytes else 0.0,
            leading_bytes=mixed("leading_bytes"),
            alone_bytes=mixed("alone_bytes"),
            memory_origin="compiled",
        )

    def _scaled(self, wanted: Replica, near: Replica) -> Footprint:
        """Activations by what is described of both; gradients and gathered parameters are known."""
        known, told, there = self._known[near], self._activations(wanted), self._activations(near)
        marginal = 0.0
        if known.marginal_bytes:
            measured = max(0.0, known.marginal_bytes - self._of_params(near))
            grown = (
                _ratio(told.kept_bytes, there.kept_bytes)
                if near.way.turned
                else _ratio(wanted.way.local, near.way.local)
            )
            marginal = self._of_params(wanted) + measured * grown
        transient = _ratio(told.transient_bytes, there.transient_bytes)
        beyond = (known.alone_bytes - known.marginal_bytes) * transient
        return Footprint(
            kept_bytes=known.kept_bytes * _ratio(told.kept_bytes, there.kept_bytes),
            transient_bytes=known.transient_bytes * transient,
            marginal_bytes=marginal,
            leading_bytes=known.leading_bytes * _ratio(wanted.way.local, near.way.local),
            alone_bytes=max(0.0, marginal + beyond) if marginal else 0.0,
            memory_origin="scaled",
        )

    def _activations(self, replica: Replica) -> LayerCost:
        """Described of as many samples on a device without gathered parameters."""
        layer, way = self._describer.graph.layers[replica.layer], replica.way
        plain = replace(way.strategy, fsdp=1, zero=3)
        return self._describer.cost(layer, plain, samples=way.samples // way.strategy.fsdp, fused=way.turned)

    def _of_params(self, replica: Replica) -> float:
        """Of what one more layer adds: gradients, sums of them, and parameters gathered for the backward."""
        way = replica.way
        weights = self._describer.weights(self._describer.graph.layers[replica.layer], way.strategy)
        gathered = weights.gathered
        sums = weights.grads if way.summed else 0.0
        if way.consumed:
            return gathered
        if way.turned:
            return weights.full_grads + sums + gathered
        return gathered + (sums or weights.grads)


def _ratio(wanted: float, near: float) -> float:
    return wanted / near if near > 0 else 1.0


def _alike(a: Replica, b: Replica) -> bool:
    """Whether one says something of the other: the same layer, in programs of one kind, keeping alike."""

    def kind(replica: Replica) -> tuple[Any, ...]:
        way = replica.way
        return replica.layer, way.turned, way.depth > 0, way.strategy.keep

    return kind(a) == kind(b)


def _apart(one: Replica, other: Replica) -> float:
    """How unlike two replicas of a layer are, in doublings of a degree or of the batch."""
    a, b = one.way, other.way
    pairs = [(a.local, b.local)] + [(getattr(a.strategy, n), getattr(b.strategy, n)) for n in DEGREES]
    moved = sum(abs(math.log2(x / y)) for x, y in pairs)
    others: list[bool] = [a.strategy.zero != b.strategy.zero, a.strategy.sequence != b.strategy.sequence]
    others += [getattr(a, name) != getattr(b, name) for name in ("summed", "mapped", "only", "consumed")]
    return moved + sum(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """A replica whose memory is sought.

    Attributes:
        key: the replica.
        num_stages: of the first entry that asks for it.
    """

    key: Replica
    num_stages: int

    @property
    def layer(self) -> int:
        """First of its kind."""
        return self.key.layer

    @property
    def strategy(self) -> Strategy:
        """Of the replica."""
        return self.key.way.strategy


def replicas_of(entry: Entry, graph: LayerGraph, platform: str, runs: Runs = NO_RUNS) -> tuple[Replica, ...]:
    """All that an entry's memory may follow from: of a stage that is not the only one, as it may be run."""
    ways = (False, True) if entry.num_stages > 1 else (False,)
    ticked = ticked_replica(entry, graph, runs)
    found = tuple(replica_of(entry, graph, platform, turned=turned) for turned in ways)
    return found if ticked is None else (*found, ticked)


def by_variety(ranked: Sequence[Entry], graph: LayerGraph, platform: str, runs: Runs = NO_RUNS) -> list[Sought]:
    """Different replicas: of each family the largest batch, then the smallest, then the rest; last those that tick.

    Args:
        ranked: most valuable first.
        graph: of the entries.
        platform: of the devices.
        runs: those whose ticks are compiled.
    """
    families: dict[Replica, dict[Replica, Sought]] = {}
    for entry in ranked:
        for replica in replicas_of(entry, graph, platform, runs):
            one = Sought(key=replica, num_stages=entry.num_stages)
            families.setdefault(replica.family, {}).setdefault(replica, one)
    rounds: dict[tuple[bool, int], list[Sought]] = {}
    for found in families.values():
        sizes = sorted(found, key=lambda r: r.way.samples)
        order = [*sizes[-1:], *sizes[:-1][:1], *sizes[1:-1]]
        for i, replica in enumerate(order):
            rounds.setdefault((replica.way.depth > 0, i), []).append(found[replica])
    return [one for i in sorted(rounds) for one in rounds[i]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprinter:
    """Finds the memory of replicas by compiling windows of the graph.

    Attributes:
        describer: of the graph.
        prober: says where windows are compiled, and keeps what is found.
        meeting: whether gradients of different parameters meet in the update.
        runs: those whose ticks are compiled.
        needs: of windows, by their layers and how they are run; None where the compiler says nothing.
        locks: of windows that are being compiled.
        missing: windows that the cache does not have.
        around: of each kind of layer under each strategy, its neighbourhood.
        compiles: of windows.
    """

    describer: Describer
    prober: Prober
    meeting: bool
    runs: Runs = field(default_factory=dict)
    needs: dict[tuple[Run, Way], Need | None] = field(default_factory=dict)
    locks: dict[tuple[Run, Way], Lock] = field(default_factory=dict)
    missing: set[tuple[Run, Way]] = field(default_factory=set)
    around: dict[tuple[int, Strategy], Neighbourhood] = field(default_factory=dict)
    compiles: Durations = field(default_factory=lambda: Durations(COMPILE_S))

    def known(self, sought: Sought) -> Footprint | None:
        """From windows that were compiled before; None where one was not."""
        around = self._around(sought.key)
        if not all(self._cached(layers, sought.key.way) for layers in around.windows):
            return None
        return self._found(sought.key, around)

    def measure(self, sought: Sought) -> Footprint | None:
        """Compiled now; None where the step does other things with so few samples or does not compile."""
        graph, way, around = self.describer.graph, sought.key.way, self._around(sought.key)
        try:
            for layers in around.windows:
                with self.locks.setdefault((layers, compiled_as(way)), Lock()):
                    if not self._cached(layers, way):
                        self._compile(layers, way)
        except TraceError:
            return None
        except (ProfileError, StrategyError, jax.errors.JaxRuntimeError) as error:
            why, name = str(error).splitlines()[0], graph.layers[sought.layer].name
            self.prober.notes[f"Memory of layer {name} under {way.strategy} is described: {why}."] = None
            return None
        return self._found(sought.key, around)

    def expected_s(self, sought: Sought) -> float:
        """One window is as good as another."""
        around, way = self._around(sought.key), sought.key.way
        return self.compiles.next_s * sum(not self._cached(layers, way) for layers in around.windows)

    def _around(self, replica: Replica) -> Neighbourhood:
        name = replica.layer, replica.way.strategy
        if replica.way.depth:
            return Neighbourhood(alone=(replica.layer,))
        if name not in self.around:
            self.around[name] = neighbourhood(self.describer.graph, *name)
        return self.around[name]

    def _found(self, replica: Replica, around: Neighbourhood) -> Footprint | None:
        layer, way = self.describer.graph.layers[replica.layer], replica.way
        told = self.describer.cost(layer, way.strategy, samples=way.samples, fused=way.turned)
        weights = self.describer.weights(layer, way.strategy)
        return footprint(
            around, way, lambda layers: self.needs[layers, compiled_as(way)], told, weights, meeting=self.meeting
        )

    def _cached(self, layers: Run, way: Way) -> bool:
        """Whether a window is known; looks it up."""
        name = layers, compiled_as(way)
        if name not in self.needs:
            numbers = None if name in self.missing else self.prober.cache.get(self._facts(layers, way))
            if numbers is None:
                self.missing.add(name)
                return False
            self.needs[name] = Need(**numbers) if numbers else None
        return True

    def _facts(self, layers: Run, way: Way) -> dict[str, Any]:
        """The cache key of a window."""
        surroundings = self.prober.surroundings(way.strategy.num_devices)
        return {**window_facts(self.describer.graph, layers, compiled_as(way)), **surroundings}

    def _compile(self, layers: Run, way: Way) -> None:
        pieces = self.describer.graph.batch_size // way.samples
        cut = self.describer.graph if pieces == 1 else self.describer.graph.microbatch(pieces)
        mesh = make_mesh(list(self.prober.stage(way.strategy.num_devices)))
        with self.compiles.one():
            if way.depth:
                run = self.runs[self.describer.cluster.num_devices // mesh.size]
                need = ticks_need(body_of(cut, run), way, mesh)
            else:
                need = window_need(window_piece(cut, layers, way, mesh), compiled_as(way))
        self.needs[layers, compiled_as(way)] = need
        self.prober.cache.put(self._facts(layers, way), {} if need is None else asdict(need))
