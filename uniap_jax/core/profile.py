"""What is known about running each layer under each strategy, and where the knowledge comes from. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster, check_number

SOURCES = ("measured", "compiled", "described")
ORIGINS = (*SOURCES, "scaled", "does_not_fit")
"""Of one entry: "scaled" is a described number corrected by measured or compiled neighbours of the same layer."""
MEMORY_ORIGINS = ("compiled", "scaled", "described")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "transfer")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """Which measurement an entry is.

    Attributes:
        signature: of the layer, as traced with the whole batch.
        strategy: as `str(Strategy)`; its degrees say the size of the sub-mesh.
        samples: of the global batch that one micro-batch holds.
    """

    signature: str
    strategy: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one layer as programs hold it, bytes of one device; as the fields of `LayerCost` of these names."""

    kept_bytes: float
    transient_bytes: float
    marginal_bytes: float = 0.0
    leading_bytes: float = 0.0
    alone_bytes: float = 0.0
    memory_origin: str = "described"

    def __post_init__(self) -> None:
        _check_memory(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One layer, one strategy, one micro-batch; bytes are those of one device.

    Attributes:
        forward_s: forward pass with its own collectives.
        backward_s: backward pass with its own collectives and any recompute, without gradient synchronisation.
        sync_s: all_reduce or reduce_scatter of the layer's gradients over the batch axes, once.
        kept_bytes: what the forward leaves for the backward, parameters apart.
        transient_bytes: the most that is alive inside the forward or the backward beyond arguments, kept values
            and gradients.
        marginal_bytes: what the layer adds to a program beside its state: gradients, accumulators and what it works
            with, as far as they are alive at once; with one stage the kept values too, with several those are told
            apart. 0 where no compiler was asked.
        leading_bytes: what it adds beyond that as the first of several layers on a stage.
        alone_bytes: all of that where it is the only layer of a stage. 0 where no compiler was asked.
        memory_origin: where the bytes come from: "compiled" (layers like it were, at this batch or at two others),
            "scaled" from a compiled neighbour, or "described".
        turned: memory on a stage that runs both directions as one program, as the last one does under 1F1B; None where
            that is no different, or not known.
        ticking: memory in one program for all stages, each of its ticks keeping so much; None where not known.
        origin: one of ORIGINS.
        spread: half the range between the quartiles over the median; 0 where nothing was timed.
        runs: timed runs behind the median.
    """

    forward_s: float
    backward_s: float
    sync_s: float
    kept_bytes: float
    transient_bytes: float
    marginal_bytes: float = 0.0
    leading_bytes: float = 0.0
    alone_bytes: float = 0.0
    memory_origin: str = "described"
    turned: Footprint | None = None
    ticking: Footprint | None = None
    origin: str = "described"
    spread: float = 0.0
    runs: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "sync_s", "spread"):
            check_number(name, getattr(self, name))
        _check_memory(self)
        if self.origin not in ORIGINS:
            raise ProfileError(f"origin {self.origin!r} is unknown; use one of {', '.join(ORIGINS)}", field="origin")

    @property
    def working_bytes(self) -> float:
        """The most that the layer works with beyond what it adds, wherever on a stage it lies."""
        return self.transient_bytes + self.leading_bytes

    @property
    def time_s(self) -> float:
        """Forward and backward, without gradient synchronisation."""
        return self.forward_s + self.backward_s


def _check_memory(of: Footprint | LayerCost) -> None:
    for name in ("kept_bytes", "transient_bytes", "marginal_bytes", "leading_bytes", "alone_bytes"):
        check_number(name, getattr(of, name))
    if of.memory_origin not in MEMORY_ORIGINS:
        raise ProfileError(
            f"memory_origin {of.memory_origin!r} is unknown; use one of {', '.join(MEMORY_ORIGINS)}",
            field="memory_origin",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Seconds of a collective over bytes: alpha + beta × bytes.

    Attributes:
        kind: one of COLLECTIVES; "transfer" moves an array from one stage's sub-mesh to the next.
        size: devices of the group ("transfer": of the stage).
        stride: distance of neighbours in the group; as many groups work at once.
        alpha_s: of an empty one.
        beta_s_per_byte: per byte of one device's full (gathered, unreduced) array.
        error: mean relative distance of the points from the line.
        origin: "measured" or "described".
    """

    kind: str
    size: int
    stride: int
    alpha_s: float
    beta_s_per_byte: float
    error: float = 0.0
    origin: str = "measured"

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise ProfileError(
                f"collective {self.kind!r} is unknown; use one of {', '.join(COLLECTIVES)}", field="kind"
            )
        for name in ("alpha_s", "beta_s_per_byte", "error"):
            check_number(f"{self.kind} over {self.size}: {name}", getattr(self, name))

    def time_s(self, nbytes: float) -> float:
        """Seconds for an array of `nbytes` per device."""
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Fits of the whole machine.

    Attributes:
        update_bytes_per_s: update of the optimizer, bytes read and written per device and second.
        update_leaf_s: of each parameter besides, whatever its size; 0 where it was not measured.
        dispatch_s: host time to start one program on a stage.
        contention: (stages, slowdown): how much slower a stage of n/P devices runs when all P are busy than alone.
        overlap_slowdown: of kernels and collectives that run together, 1 (free) to 2 (taking turns); 0 where it was
            not measured.
        pace_s: of a program of fixed work, where cores are shared: what was measured while it took longer is told as
            if it had not; 0 where it was not measured.
    """

    update_bytes_per_s: float = 0.0
    update_leaf_s: float = 0.0
    dispatch_s: float = 0.0
    contention: tuple[tuple[int, float], ...] = ()
    overlap_slowdown: float = 0.0
    pace_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("update_bytes_per_s", "update_leaf_s", "dispatch_s", "overlap_slowdown", "pace_s"):
            check_number(name, getattr(self, name))
        for stages, slowdown in self.contention:
            check_number(f"contention of {stages} stages", slowdown, positive=True)

    def slowdown(self, num_stages: int) -> float:
        """Of a stage when every stage is busy; 1 where nothing is known."""
        return dict(self.contention).get(num_stages, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times and memory of the layers of one model on one kind of device.

    Attributes:
        source: one of SOURCES: the best origin among the entries.
        graph_fingerprint: of the LayerGraph.
        device_kind: of the cluster.
        num_devices: of the cluster.
        batch_size: global batch.
        entries: (key, cost) sorted by key; what is missing is described from the cluster.
        links: fits of collectives; what is missing is described from the cluster.
        rates: fits of the whole machine.
        jax_version: that compiled the programs; "" where none was.
        seconds: wall time of profiling.
        notes: one sentence each.
        version: of this schema.
    """

    source: str
    graph_fingerprint: str
    device_kind: str
    num_devices: int
    batch_size: int
    entries: tuple[tuple[Key, LayerCost], ...] = ()
    links: tuple[LinkFit, ...] = ()
    rates: Rates = field(default_factory=Rates)
    jax_version: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    version: int = 1

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ProfileError(f"source {self.source!r} is unknown; use one of {', '.join(SOURCES)}", field="source")
        if self.version != 1:
            raise ProfileError(f"profile of schema version {self.version}; this version reads 1", field="version")

    def table(self) -> dict[Key, LayerCost]:
        """Entries by key."""
        return dict(self.entries)

    def counts(self) -> dict[str, int]:
        """Entries by origin, for provenance in reports."""
        found = dict.fromkeys(ORIGINS, 0)
        for _, cost in self.entries:
            found[cost.origin] += 1
        return {k: n for k, n in found.items() if n}

    def check_belongs(self, *, graph_fingerprint: str, cluster: Cluster, batch_size: int) -> None:
        """Refuses a profile of something else.

        Raises:
            ProfileError: names the first field that differs, both values and what to do.
        """
        for name, own, other in (
            ("device_kind", self.device_kind, cluster.kind),
            ("num_devices", self.num_devices, cluster.num_devices),
            ("batch_size", self.batch_size, batch_size),
            ("graph_fingerprint", self.graph_fingerprint, graph_fingerprint),
        ):
            if own != other:
                raise ProfileError(
                    f"the profile's {name} is {own!r} but the {'model' if 'graph' in name else 'job'}'s is {other!r}; "
                    "profile again, or drop profile= to plan from the cluster's description",
                    field=name,
                    profile=own,
                    wanted=other,
                )


def ring_factor(kind: str, size: int) -> float:
    """Share of an array that each device sends in a ring: 2 (g-1)/g to all_reduce, (g-1)/g to gather or scatter."""
    if size <= 1:
        return 0.0
    passes = 2.0 if kind == "all_reduce" else 1.0
    return 1.0 if kind in ("collective_permute", "transfer") else passes * (size - 1) / size


def described_link(cluster: Cluster, kind: str, size: int, stride: int) -> LinkFit:
    """Alpha-beta of a collective from the cluster's links (ring bytes; a tree's number of hops for the latency)."""
    if size <= 1 and kind != "transfer":
        return LinkFit(kind=kind, size=1, stride=stride, alpha_s=0.0, beta_s_per_byte=0.0, origin="described")
    if kind == "transfer":
        route = cluster.boundary(max(2, cluster.num_devices // max(size, 1)))
        hops = 1.0
    else:
        route = cluster.route(size, stride)
        hops = math.ceil(math.log2(size)) * (2.0 if kind == "all_reduce" else 1.0)
    return LinkFit(
        kind=kind,
        size=size,
        stride=stride,
        alpha_s=cluster.op_overhead_s + hops * route.latency_s,
        beta_s_per_byte=ring_factor(kind, size) / route.bandwidth_bytes_per_s,
        origin="described",
    )


def overlapped(kernels_s: float, collectives_s: float, slowdown: float) -> float:
    """Seconds of kernels and collectives that run together.

    While both run each is slowed, and the shorter one ends first: max + (slowdown - 1) × min; 1 hides the shorter one
    wholly, 2 is one after the other.
    """
    return max(kernels_s, collectives_s) + (slowdown - 1.0) * min(kernels_s, collectives_s)


class Links:
    """Times of collectives: the profile's fit where there is one, else the cluster's description.

    Args:
        cluster: described links.
        fits: measured ones.
    """

    def __init__(self, cluster: Cluster, fits: Iterable[LinkFit] = ()) -> None:
        self._cluster = cluster
        self._fits: Mapping[tuple[str, int, int], LinkFit] = {(f.kind, f.size, f.stride): f for f in fits}
        self._known: dict[tuple[str, int, int], LinkFit] = {}

    def fit(self, kind: str, size: int, stride: int = 1) -> LinkFit:
        """The measured fit, or one scaled from the nearest measured group of the same kind, or the described one."""
        key = (kind, size, stride)
        if key not in self._known:
            self._known[key] = self._found(kind, size, stride)
        return self._known[key]

    def _found(self, kind: str, size: int, stride: int) -> LinkFit:
        exact = self._fits.get((kind, size, stride))
        described = described_link(self._cluster, kind, size, stride)
        if exact is not None or (size <= 1 and kind != "transfer"):
            return exact or described
        same = [f for f in self._fits.values() if f.kind == kind]
        if not same:
            return described
        near = min(same, key=lambda f: (abs(math.log(f.size / size)), abs(math.log(f.stride / stride))))
        return _rescaled(near, described, described_link(self._cluster, kind, near.size, near.stride))

    def time_s(self, kind: str, nbytes: float, size: int, stride: int = 1) -> float:
        """Seconds of one collective on an array of `nbytes` per device; 0 in a group of one."""
        if nbytes <= 0 or (size <= 1 and kind != "transfer"):
            return 0.0
        return self.fit(kind, size, stride).time_s(nbytes)


def _rescaled(near: LinkFit, wanted: LinkFit, described: LinkFit) -> LinkFit:
    alpha = near.alpha_s * wanted.alpha_s / described.alpha_s if described.alpha_s else near.alpha_s
    ratio = wanted.beta_s_per_byte / described.beta_s_per_byte if described.beta_s_per_byte else 1.0
    return LinkFit(
        kind=wanted.kind,
        size=wanted.size,
        stride=wanted.stride,
        alpha_s=alpha,
        beta_s_per_byte=near.beta_s_per_byte * ratio,
        error=near.error,
        origin="described",
    )
