"""Measures one entry after another on the devices until the budget is spent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import msgspec

from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError, TraceError
from uniap_jax.core.machine import usable_cores
from uniap_jax.core.profile import LayerCost, LinkFit, Links, Rates
from uniap_jax.core.sharding import axis_sizes, make_mesh, shard_bytes
from uniap_jax.profiler import links
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.order import Entry
from uniap_jax.profiler.programs import Arrays, Case, compile_fused, compile_split
from uniap_jax.profiler.timing import Timing, time_program
from uniap_jax.profiler.window import window_bytes

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def machine_facts(devices: Sequence[Any]) -> dict[str, Any]:
    """What a measurement depends on besides the layer."""
    return {
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "cores": usable_cores() if devices[0].platform == "cpu" else 0,
        "host_devices": len(jax.devices()),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def measure_machine(
    devices: Sequence[Any], stages: Sequence[int], cache: Cache, deadline_s: float
) -> tuple[tuple[LinkFit, ...], Rates]:
    """Collectives, transfers, update rate, dispatch and contention; from the cache where they are known."""
    if len(devices) == 1:
        facts = {"what": "machine", **machine_facts(devices)}
        rates = cache.get(facts)
        if rates is None:
            rates = {"update": links.measure_update_rate(devices), "dispatch": links.measure_dispatch(devices, 1)}
            cache.put(facts, rates)
        return (), Rates(update_bytes_per_s=rates["update"], dispatch_s=rates["dispatch"])
    fits: list[LinkFit] = []
    for kind, size, stride in _wanted_links(devices):
        fit = _cached_fit(kind, size, stride, devices, cache, deadline_s)
        if fit is not None:
            fits.append(fit)
    return tuple(fits), _rates(devices, stages, cache)


def _wanted_links(devices: Sequence[Any]) -> list[tuple[str, int, int]]:
    count = len(devices)
    sizes = [p for _, p in axis_sizes(count)]
    found, ways = [], count
    for kind in ("all_reduce", "all_gather"):
        found += [(kind, size, stride) for size, stride in links.groups(count)]
    if devices[0].platform != "cpu":  # XLA's CPU backend has none: it reduces, then slices
        found += [("reduce_scatter", size, stride) for size, stride in links.groups(count)]
    for p in reversed(sizes):
        found.append(("transfer", ways // p, 1))
        ways //= p
    return found


def _cached_fit(
    kind: str, size: int, stride: int, devices: Sequence[Any], cache: Cache, deadline_s: float
) -> LinkFit | None:
    facts = {"what": kind, "size": size, "stride": stride, **machine_facts(devices)}
    known = cache.get(facts)
    if known is not None:
        return msgspec.convert(known, LinkFit)
    if time.monotonic() > deadline_s:
        return None
    if kind == "transfer":
        fit = links.measure_transfer(len(devices) // size, devices)
    else:
        fit = links.measure_collective(kind, size, stride, devices)
    cache.put(facts, msgspec.to_builtins(fit))
    return fit


def _rates(devices: Sequence[Any], stages: Sequence[int], cache: Cache) -> Rates:
    shared = devices[0].platform == "cpu"  # other devices have cores of their own
    facts = {"what": "rates", "stages": sorted(stages), "overlap": 2, **machine_facts(devices)}
    known = cache.get(facts)
    if known is None:
        contention = [(p, links.measure_contention(p, devices)) for p in stages if p > 1] if shared else []
        fit = Rates(
            update_bytes_per_s=links.measure_update_rate(devices),
            dispatch_s=links.measure_dispatch(devices, max(stages)),
            contention=tuple(contention),
            overlap_slowdown=links.measure_overlap(devices),
        )
        known = msgspec.to_builtins(fit)
        cache.put(facts, known)
    return msgspec.convert(known, Rates)


@dataclass(slots=True, kw_only=True, eq=False)
class Measurer:
    """Measures entries and remembers what went wrong.

    Attributes:
        describer: of the graph; says what part of a measured total is gradient synchronisation.
        devices: all of them, in order.
        rates: of the machine: contention turns a stage alone into a stage among busy ones.
        cache: of earlier measurements.
        notes: what could not be measured, one sentence each.
    """

    describer: Describer
    devices: Sequence[Any]
    rates: Rates
    cache: Cache
    notes: dict[str, None] = field(default_factory=dict)
    _arrays: Arrays = field(default_factory=Arrays)

    def facts(self, entry: Entry) -> dict[str, Any]:
        """The cache key of an entry."""
        graph = self.describer.graph
        layer = graph.layers[entry.layer]
        return {
            "what": "layer",
            "signature": layer.signature,
            "shapes": [f"{a.shape}{a.dtype}" for a in layer.jaxpr.in_avals],
            "batch": graph.batch_size,
            "strategy": str(entry.strategy),
            "stages": entry.num_stages,
            "microbatches": entry.num_microbatches,
            **machine_facts(self.devices),
        }

    def known(self, entry: Entry) -> LayerCost | None:
        """What the cache has."""
        numbers = self.cache.get(self.facts(entry))
        if numbers is None:
            return None
        try:
            return self._cost(entry, numbers)
        except (KeyError, TypeError, ProfileError) as error:
            self.notes[f"a cached measurement of {entry.strategy} was refused ({error}) and made again"] = None
            return None

    def measure(self, entry: Entry) -> LayerCost | None:
        """Compiles and times an entry; None where it cannot be compiled or run, with a note."""
        try:
            numbers = self._numbers(entry)
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                self._note(entry, str(error).splitlines()[0])
                return None
            numbers = {"does_not_fit": True}
        except TraceError as error:
            self._note(entry, str(error))
            return None
        self.cache.put(self.facts(entry), numbers)
        return self._cost(entry, numbers)

    def _note(self, entry: Entry, why: str) -> None:
        name = self.describer.graph.layers[entry.layer].name
        self.notes[f"Layer {name} under {entry.strategy} could not be measured: {why}."] = None

    def _numbers(self, entry: Entry) -> dict[str, Any]:
        graph = self.describer.graph
        cut = graph if entry.num_microbatches == 1 else graph.microbatch(entry.num_microbatches)
        mesh = make_mesh(list(self.devices[: len(self.devices) // entry.num_stages]))
        case = Case(graph=cut, layer=cut.layers[entry.layer], strategy=entry.strategy, mesh=mesh)
        programs = compile_fused(case, self._arrays) if entry.num_stages == 1 else compile_split(case, self._arrays)
        timings = [time_program(p) for p in programs]
        return {
            "seconds": [t.median_s for t in timings],
            "spread": [t.spread for t in timings],
            "runs": [t.runs for t in timings],
            "memory": [p.memory for p in programs],
            **edge_bytes(case),
            "window": window_bytes(case, entry.num_microbatches) if entry.num_stages == 1 else (0.0, 0.0),
        }

    def _cost(self, entry: Entry, numbers: dict[str, Any]) -> LayerCost:
        layer, fused = self.describer.graph.layers[entry.layer], entry.num_stages == 1
        told = self.describer.cost(layer, entry.strategy, samples=entry.key.samples, fused=fused)
        if numbers.get("does_not_fit"):
            return does_not_fit(told)
        busy = self.rates.slowdown(entry.num_stages)
        timings = [
            Timing(median_s=float(s) * busy, spread=float(d), runs=int(r))
            for s, d, r in zip(numbers["seconds"], numbers["spread"], numbers["runs"], strict=True)
        ]
        total = sum(t.median_s for t in timings)
        sync = min(told.sync_s, 0.7 * timings[-1].median_s)
        share = told.forward_s / told.time_s if told.time_s > 0 else 1 / 3
        forward = (total - sync) * share if fused else timings[0].median_s
        kept, transient = memory_parts(numbers, told, fused)
        return LayerCost(
            forward_s=forward,
            backward_s=total - sync - forward,
            sync_s=sync,
            kept_bytes=kept,
            transient_bytes=transient,
            marginal_bytes=float(numbers["window"][0]),
            origin="measured",
            spread=max(t.spread for t in timings),
            runs=min(t.runs for t in timings),
        )


def does_not_fit(told: LayerCost) -> LayerCost:
    """The entry of a strategy that ran out of memory: as described, and not allowed."""
    return replace(told, origin="does_not_fit")


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


def measured_describer(describer: Describer, fits: Sequence[LinkFit], rates: Rates) -> Describer:
    """The same graph described with the machine as measured."""
    cluster = describer.cluster
    if rates.overlap_slowdown:
        cluster = replace(cluster, overlap_slowdown=rates.overlap_slowdown)
    return Describer(describer.graph, cluster, Links(cluster, fits))
