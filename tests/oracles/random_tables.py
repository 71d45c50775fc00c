"""Small random candidates: chains and skip edges, with and without once-per-step costs, shared tensors, holes."""

from __future__ import annotations

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables

GIB = 1024.0**3
MS = 1e-3


def random_tables(seed: int, *, chain: bool | None = None, most_layers: int = 6) -> CostTables:
    """A candidate with whole-number costs in ms and GiB, small enough for brute force; `chain` fixes the graph."""
    r = np.random.default_rng(seed)
    stages = int(r.integers(1, 5))
    layers = int(r.integers(stages, most_layers + 1))
    k = int(r.integers(1, 5 if layers < 6 else 4))
    count = int(r.choice([1, 2, 4, 8, 16]))
    edges = _edges(r, layers, bool(r.random() < 0.5) if chain is None else not chain, holes=chain is None)
    num_edges = len(edges)
    tensor = None
    if len(edges) >= layers and r.random() < 0.5:
        tensor = tuple(u if r.random() < 0.7 else 100 + e for e, (u, _) in enumerate(edges))
    shape = (layers, stages, k)
    once = r.integers(0, 20, shape) if r.random() < 0.5 else np.zeros(shape)
    reshard = r.integers(0, 12, (num_edges, k, k)) if r.random() < 0.7 else np.zeros((num_edges, k, k))
    return CostTables(
        candidate=Candidate(num_stages=stages, num_microbatches=count),
        time_s=r.integers(1, 30, shape) * MS,
        iteration_time_s=once * MS,
        memory_bytes=r.integers(1, 20, shape) * GIB,
        capacity_bytes=r.integers(10, 50, stages) * GIB,
        allowed=r.random((layers, k)) < 0.9,
        edges=edges,
        reshard_s=reshard * MS,
        cross_stage_s=r.integers(0, 40, (num_edges, k, k)) * MS,
        relay_s=r.integers(0, 15, (num_edges, k)) * MS,
        edge_tensor=tensor,
    )


def _edges(r: np.random.Generator, layers: int, skips: bool, *, holes: bool) -> tuple[tuple[int, int], ...]:
    missing = holes and r.random() < 0.15
    edges = [(u, u + 1) for u in range(layers - 1) if not (missing and r.random() < 0.4)]
    for _ in range(int(r.integers(1, 4)) if skips and layers >= 3 else 0):
        u = int(r.integers(0, layers - 2))
        v = int(r.integers(u + 2, layers))
        if (u, v) not in edges:
            edges.append((u, v))
    return tuple(edges)
