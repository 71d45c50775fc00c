"""Llama-like chains with analytic costs: a cost model for benchmarks and tests of the planner, no devices, no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables
from uniap_jax.core.equal_costs import EqualTables
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.strategy import Strategy, enumerate_strategies

KEPT_SHARE = {"all": 1.0, "dots": 0.45, "inputs": 0.06}
RECOMPUTED = {"all": 3.0, "dots": 3.2, "inputs": 4.0}


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of layer: parameters, forward FLOPs per sample, bytes kept per sample without recomputation."""

    parameters: float
    flops: float
    kept_bytes: float


@dataclass(frozen=True, kw_only=True)
class LlamaChain:
    """Embedding, equal (or slightly perturbed) transformer blocks, head.

    Attributes:
        num_blocks: L; the chain has two layers more where it has ends.
        num_devices: n.
        batch_size: global batch.
        memory_gib: per device.
        max_strategies: K of every candidate, at most.
        noise: relative spread of the blocks' costs; 0 makes them equal.
        node_size: devices that share the fast link.
        fast: bytes per second inside a node.
        slow: bytes per second between nodes.
        rate: FLOP/s per device.
        split_loss: share of the rate lost with every halving of a layer (smaller matrices).
        ends: whether there are an embedding and a head.
        skips: (writer, reader) edges beyond the chain.
        shared_tensor: edges of one writer carry one tensor.
    """

    num_blocks: int
    num_devices: int
    batch_size: int
    memory_gib: float = 40.0
    max_strategies: int = 24
    noise: float = 0.0
    hidden: int = 4096
    sequence: int = 2048
    vocabulary: int = 32000
    node_size: int = 8
    fast: float = 200e9
    slow: float = 12e9
    rate: float = 140e12
    split_loss: float = 0.03
    ends: bool = True
    skips: tuple[tuple[int, int], ...] = ()
    shared_tensor: bool = True
    seed: int = 0
    graph_fingerprint: str = "llama-like chain"
    device_kind: str = "analytic"
    source: str = "described"
    split_reason: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        """Blocks, with embedding and head where the chain has ends."""
        return self.num_blocks + 2 * self.ends

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """embed, block_0, ..., head."""
        blocks = tuple(f"block_{i}" for i in range(self.num_blocks))
        return ("embed", *blocks, "head") if self.ends else blocks

    def candidates(self) -> tuple[Candidate, ...]:
        """All P | n with P <= layers and all c | B."""
        return tuple(
            Candidate(num_stages=p, num_microbatches=c, schedule="one_f_one_b" if p > 1 else "gpipe")
            for p in divisors(self.num_devices)
            if p <= self.num_layers
            for c in divisors(self.batch_size)
        )

    def stage_devices(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Consecutive devices."""
        size = self.num_devices // num_stages
        return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(num_stages))

    @cached_property
    def kinds(self) -> tuple[Kind, Kind, Kind]:
        """Embedding, block, head."""
        h, s, v = self.hidden, self.sequence, self.vocabulary
        block = 12 * h * h
        return (
            Kind(parameters=v * h, flops=2.0 * s * h, kept_bytes=2.0 * s * h),
            Kind(parameters=block, flops=2.0 * s * block + 4.0 * s * s * h, kept_bytes=34.0 * s * h),
            Kind(parameters=v * h, flops=2.0 * s * h * v, kept_bytes=6.0 * s * v),
        )

    def bandwidth(self, ways: int, *, stride: int = 1) -> float:
        """Bytes per second of a ring over `ways` devices that lie `stride` apart."""
        return self.fast if ways * stride <= self.node_size else self.slow

    def strategies(self, size: int) -> tuple[Strategy, ...]:
        """At most `max_strategies` for a sub-mesh, plain ones before recomputing ones."""
        found = enumerate_strategies(size, keeps=("all", "inputs", "dots"))
        fitting = [s for s in found if s.tensor <= self.node_size]
        order = {"all": 0, "inputs": 1, "dots": 2}
        chosen = sorted(fitting, key=lambda s: (order[s.keep], found.index(s)))[: self.max_strategies]
        return tuple(chosen)

    def refusal(self, candidate: Candidate) -> str:
        """Every candidate is possible."""
        return ""

    def equal_candidates(self) -> tuple[Candidate, ...]:
        """One program for all stages is not described."""
        return ()

    def equal_tables(self, candidate: Candidate) -> EqualTables:
        """One program for all stages is not described."""
        raise StrategyError("these chains have no tables of equal stages", num_stages=candidate.num_stages)

    def with_strategy(self, strategy: Strategy) -> LlamaChain:
        """Itself: analytic chains price what they list."""
        return self

    @cached_property
    def _cache(self) -> dict[Candidate, CostTables]:
        return {}

    def tables(self, candidate: Candidate) -> CostTables:
        """Analytic tables; the last few are kept."""
        if candidate not in self._cache:
            if len(self._cache) >= 2:
                self._cache.pop(next(iter(self._cache)))
            self._cache[candidate] = self._build(candidate)
        return self._cache[candidate]

    def _build(self, candidate: Candidate) -> CostTables:
        stages, count = candidate.num_stages, candidate.num_microbatches
        strategies = self.strategies(self.num_devices // stages)
        samples = self.batch_size / count
        in_flight = np.array([1 if stages == 1 else min(stages - i, count) for i in range(stages)], dtype=float)
        costs = [[self._costs(kind, s, samples) for s in strategies] for kind in self.kinds]
        time, once, fixed, kept = (np.array([[c[j] for c in row] for row in costs]) for j in range(4))
        kind = np.array([0, *[1] * self.num_blocks, 2] if self.ends else [1] * self.num_blocks)
        spread = np.ones(self.num_layers)
        if self.noise:
            spread = 1 + self.noise * np.random.default_rng(self.seed).standard_normal(self.num_layers)
        memory = (fixed[:, None, :] + kept[:, None, :] * in_flight[None, :, None])[kind]
        shape = memory.shape
        legal = np.array([samples % s.batch_ways == 0 and samples >= s.batch_ways for s in strategies])
        edges = tuple((u, u + 1) for u in range(self.num_layers - 1)) + self.skips
        tensor = None
        if self.skips and self.shared_tensor:
            tensor = tuple(u for u, _ in edges)
        reshard, cross = self._edges(strategies, samples)
        k = len(strategies)
        return CostTables(
            candidate=candidate,
            time_s=np.broadcast_to((time[kind] * spread[:, None])[:, None, :], shape),
            iteration_time_s=np.broadcast_to((once[kind] * spread[:, None])[:, None, :], shape),
            memory_bytes=memory * spread[:, None, None] if self.noise else memory,
            capacity_bytes=np.full(stages, self.memory_gib * 1024.0**3),
            allowed=np.broadcast_to(legal, (self.num_layers, k)),
            edges=edges,
            reshard_s=np.broadcast_to(reshard, (len(edges), k, k)),
            cross_stage_s=np.broadcast_to(cross, (len(edges), k, k)),
            relay_s=np.broadcast_to(cross.min(axis=1), (len(edges), k)),
            strategies=strategies,
            edge_tensor=tensor,
            layer_names=self.layer_names,
        )

    def _costs(self, kind: Kind, s: Strategy, samples: float) -> tuple[float, float, float, float]:
        """Seconds per micro-batch, seconds per step, bytes that stay, bytes per micro-batch in flight."""
        local = samples / s.batch_ways
        act = 2.0 * local * self.sequence * self.hidden
        compute = (
            kind.flops * local / s.tensor * RECOMPUTED[s.keep] / (self.rate * (1 - self.split_loss * np.log2(s.tensor)))
        )
        ring = (s.tensor - 1) / s.tensor
        tensor = (6 if s.keep == "inputs" else 4) * 2 * ring * act / self.bandwidth(s.tensor) if s.tensor > 1 else 0.0
        weights = 2.0 * kind.parameters / s.tensor
        gather = 3 * (s.fsdp - 1) / s.fsdp * weights / self.bandwidth(s.fsdp, stride=s.tensor)
        sync = 2 * (s.data - 1) / s.data * weights / s.fsdp / self.bandwidth(s.data, stride=s.tensor * s.fsdp)
        update = 16.0 * kind.parameters / (s.tensor * s.fsdp) / 1.5e12
        states = 16.0 * kind.parameters / (s.tensor * s.fsdp)
        kept = max(kind.kept_bytes * KEPT_SHARE[s.keep] / s.tensor, 2.0 * self.sequence * self.hidden) * local
        return compute + tensor + 0.5 * gather, sync + update, states, kept

    def _edges(self, strategies: tuple[Strategy, ...], samples: float) -> tuple[np.ndarray, np.ndarray]:
        """Resharding inside a stage and transfers between stages, [strategies, strategies]."""
        whole = 2.0 * samples * self.sequence * self.hidden
        ways = np.array([s.batch_ways for s in strategies], dtype=float)
        size = strategies[0].num_devices
        fewer, more = np.minimum.outer(ways, ways), np.maximum.outer(ways, ways)
        moved = 2 * whole / fewer * (1 - fewer / more)
        reshard = moved / self.bandwidth(size)
        cross = 2 * whole / fewer / (self.fast if 2 * size <= self.node_size else self.slow) + 1e-5
        return reshard, cross


def u_net(num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Skips of a U-Net over `num_blocks` blocks: block i of the way down feeds block L - 1 - i of the way up."""
    return tuple((1 + i, num_blocks - i) for i in range(num_blocks // 2 - 1))


def t5(num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Skips of an encoder-decoder: the last encoder block feeds every decoder block."""
    last = num_blocks // 2
    return tuple((last, v) for v in range(last + 2, num_blocks + 1))
