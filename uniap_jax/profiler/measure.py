"""Measures one entry after another on the devices until the budget is spent."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import msgspec

from uniap_jax.core.described import Describer
from uniap_jax.core.jaxprs import signature
from uniap_jax.core.machine import usable_cores
from uniap_jax.core.profile import LayerCost, LinkFit, Links, Rates
from uniap_jax.core.sharding import axis_sizes
from uniap_jax.profiler import links
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.optimizer import measure_optimizer
from uniap_jax.profiler.order import Entry, described, too_large
from uniap_jax.profiler.pace import Pace
from uniap_jax.profiler.probe import Prober
from uniap_jax.profiler.programs import Arrays, Direction
from uniap_jax.profiler.timing import Timing, in_a_row_s, time_in_a_row

T = TypeVar("T")

UNSURE = 5.0
"""By how much longer than described a layer may take on a machine of which nothing is known yet."""
FIRST_LOOKS = 9
"""Rows of runs, before the machine is measured and after, of which the quicker median is the machine's own pace."""


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
    facts = {"what": "rates", "stages": sorted(stages), "version": 4, **machine_facts(devices)}
    known = cache.get(facts)
    if known is None:
        pace = Pace(devices) if shared else None
        before = pace(FIRST_LOOKS) if pace else 0.0
        contention = [(p, links.measure_contention(p, devices)) for p in stages if p > 1] if shared else []
        fit = Rates(
            update_bytes_per_s=links.measure_update_rate(devices),
            dispatch_s=links.measure_dispatch(devices, max(stages)),
            contention=tuple(contention),
            overlap_slowdown=links.measure_overlap(devices),
            pace_s=min(before, pace(FIRST_LOOKS)) if pace else 0.0,
        )
        known = msgspec.to_builtins(fit)
        cache.put(facts, known)
    return msgspec.convert(known, Rates)


@dataclass(slots=True, kw_only=True, eq=False)
class Measurer(Prober):
    """Finds costs of entries by running them.

    Attributes:
        devices: all of them, in order.
        rates: of the machine: contention turns a stage alone into a stage among busy ones, and the pace tells times
            of slow moments and of quick ones alike.
        pace: of the moment; made when first asked for.
        truths: of what is known, over what is described.
    """

    verb = "measured"
    what = "layer"
    devices: Sequence[Any]
    rates: Rates
    arrays: Arrays | None = field(default_factory=Arrays)
    pace: Pace | None = None
    truths: list[float] = field(default_factory=list)

    def stage(self, size: int) -> Sequence[Any]:
        """The first of the devices."""
        return self.devices[:size]

    def surroundings(self, size: int) -> dict[str, Any]:
        """The machine."""
        return {"memory_bytes": self.describer.cluster.memory_bytes, **machine_facts(self.devices)}

    def with_optimizer(self, deadline_s: float) -> Rates:
        """The rates with those of the step's own optimizer, where it runs and there is time for it."""
        graph = self.describer.graph
        facts = {"what": "optimizer", "update": signature(graph.step.update), **machine_facts(self.devices)}
        known = self.cache.get(facts)
        if known is None and time.monotonic() > deadline_s:
            return self.rates
        if known is None:
            arrays, usual = self.arrays or Arrays(), self.rates.update_bytes_per_s
            machine = self.describer.cluster, self.devices, arrays, usual
            try:
                (rate, leaf_s), pace = self._steadily(lambda: measure_optimizer(graph, *machine))
            except jax.errors.JaxRuntimeError as error:
                self.notes[f"The optimizer could not be measured: {str(error).splitlines()[0]}."] = None
                return self.rates
            known = {"rate": rate * pace, "leaf": leaf_s / pace}
            self.cache.put(facts, known)
        return replace(self.rates, update_bytes_per_s=known["rate"], update_leaf_s=known["leaf"])

    def times(self, programs: Sequence[Direction]) -> dict[str, Any]:
        """By the clock, and how fast the cores were meanwhile; nothing is run that needs more than a device has.

        On CPUs it would run nevertheless, for minutes: devices take from each other's memory.
        """
        if not all(p.arguments for p in programs):
            return {"does_not_fit": True}
        timings, pace = self._steadily(lambda: [time_in_a_row(p, jax.block_until_ready) for p in programs])
        return {
            "pace": pace,
            "seconds": [t.median_s for t in timings],
            "spread": [t.spread for t in timings],
            "runs": [t.runs for t in timings],
        }

    def expected_s(self, entry: Entry) -> float:
        """A compile, and as few runs as may be of what is described, of a stage that has the machine to itself.

        What holds more than there is ends where it is compiled.
        """
        if too_large(entry, self.describer):
            return self.compiles.next_s
        told = described(entry, self.describer)
        truth = statistics.median(self.truths) if self.truths else UNSURE
        alone_s = truth * (told.time_s + told.sync_s) / self.rates.slowdown(entry.num_stages)
        return self.compiles.next_s + in_a_row_s(alone_s)

    def _steadily(self, measure: Callable[[], T]) -> tuple[T, float]:
        if not self.rates.pace_s:
            return measure(), 1.0
        if self.pace is None:
            self.pace = Pace(self.devices, self.rates.pace_s)
        return self.pace.steadily(measure)

    def cost(self, entry: Entry, numbers: dict[str, Any], told: LayerCost) -> LayerCost:
        """As measured, at the machine's own pace, of a stage among busy ones."""
        fused, busy = entry.num_stages == 1, self.rates.slowdown(entry.num_stages)
        timings = [
            Timing(median_s=float(s) * busy / float(numbers["pace"]), spread=float(d), runs=int(r))
            for s, d, r in zip(numbers["seconds"], numbers["spread"], numbers["runs"], strict=True)
        ]
        total = sum(t.median_s for t in timings)
        if told.time_s > 0:
            self.truths.append(total / (told.time_s + told.sync_s))
        sync = min(told.sync_s, 0.7 * timings[-1].median_s)
        share = told.forward_s / told.time_s if told.time_s > 0 else 1 / 3
        forward = (total - sync) * share if fused else timings[0].median_s
        return LayerCost(
            forward_s=forward,
            backward_s=total - sync - forward,
            sync_s=sync,
            kept_bytes=told.kept_bytes,
            transient_bytes=told.transient_bytes,
            origin="measured",
            spread=max(t.spread for t in timings),
            runs=min(t.runs for t in timings),
        )


def measured_describer(describer: Describer, fits: Sequence[LinkFit], rates: Rates) -> Describer:
    """The same graph described with the machine as measured."""
    cluster = describer.cluster
    if rates.overlap_slowdown:
        cluster = replace(cluster, overlap_slowdown=rates.overlap_slowdown)
    return Describer(describer.graph, cluster, Links(cluster, fits))
