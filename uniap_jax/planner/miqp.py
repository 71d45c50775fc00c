"""The joint problem of any DAG as a MIP: binaries x_uik with local marginals on the edges (F2), and its hybrid (F4).

Sherali-Adams style: for every edge, y over (stage, class) of the writer × (stage, class) of the reader, whose marginals
are the x; strategies whose costs on the edge are equal form one class. That is McCormick on products of one-hot vectors
tightened to the local-marginal polytope, integral on a chain but for memory, maxima and D. The hybrid adds intervals
z_iab of the spine with the least time they can take under the stage's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from uniap_jax.core.costs import Assignment, BoolArray, CostTables
from uniap_jax.planner.chain import has_spine
from uniap_jax.planner.columns import Columns
from uniap_jax.planner.infeasible import GIB
from uniap_jax.planner.mip_model import MipModel


@dataclass(slots=True, eq=False)
class JointModel:
    """A MIP with the meaning of its variables.

    Attributes:
        model: in milliseconds and GiB.
        place: variable of (layer, stage, strategy).
        stage_rows: per stage, terms of p_i as {variable: ms}.
        link_rows: per boundary, terms of o_b.
        slowest: variable T.
        iteration: variable D.
    """

    model: MipModel
    place: dict[tuple[int, int, int], int]
    stage_rows: list[dict[int, float]]
    link_rows: list[dict[int, float]]
    slowest: int
    iteration: int
    by_layer: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def assignment(self, values: Sequence[float]) -> Assignment | None:
        """Reads the answer; None where a layer does not have exactly one place."""
        chosen: dict[int, tuple[int, int]] = {}
        for (u, i, k), number in self.place.items():
            if values[number] > 0.5:
                if u in chosen:
                    return None
                chosen[u] = (i, k)
        if len(chosen) != len(self.by_layer):
            return None
        ordered = [chosen[u] for u in range(len(chosen))]
        return Assignment(stage=tuple(i for i, _ in ordered), strategy=tuple(k for _, k in ordered))


def live_nodes(tables: CostTables) -> BoolArray:
    """[layers, stages, strategies] places that legality, memory and non-empty stages leave."""
    num_layers, num_stages, _ = tables.time_s.shape
    live: BoolArray = tables.allowed[:, None, :] & (
        tables.memory_bytes <= tables.capacity_bytes[None, :, None] * (1 + 1e-9)
    )
    if has_spine(tables):
        u, i = np.arange(num_layers)[:, None], np.arange(num_stages)[None, :]
        live = live & ((u >= i) & (num_layers - u >= num_stages - i))[:, :, None]
    return live


def joint_model(tables: CostTables, *, live: BoolArray, upper: float = math.inf) -> JointModel:
    """The model F2 of one candidate.

    Args:
        tables: any DAG.
        live: places that may be used.
        upper: seconds; plans above it may be cut off.
    """
    model = MipModel()
    count, num_stages = tables.candidate.num_microbatches, tables.candidate.num_stages
    place = {
        (u, i, k): model.add(cost=tables.time_s[u, i, k] * 1e3, whole=True)
        for u, i, k in zip(*(x.tolist() for x in np.nonzero(live)), strict=True)
    }
    joint = JointModel(
        model,
        place,
        [{} for _ in range(num_stages)],
        [{} for _ in range(num_stages - 1)],
        model.add(cost=float(count - 1), upper=math.inf),
        model.add(cost=1.0, upper=math.inf),
        {u: [] for u in range(tables.num_layers)},
    )
    for node, number in place.items():
        joint.by_layer[node[0]].append(node)
        joint.stage_rows[node[1]][number] = tables.time_s[node] * 1e3
    _add_places(joint, tables)
    spine = has_spine(tables)
    for group in tables.tensors:
        shared = [_shared(joint) for _ in range(num_stages - 1)] if len(group) > 1 else None
        for e in group:
            _add_edge(joint, tables, e, shared, reach=_reach(tables.edges[e], spine, num_stages))
    for terms in (*joint.stage_rows, *joint.link_rows):
        if count > 1 and terms:
            model.add_row([*terms, joint.slowest], [*terms.values(), -1.0], "<", 0.0)
    if math.isfinite(upper):
        model.limit_cost(upper * 1e3 * (1 + 1e-9))
    return joint


def _reach(edge: tuple[int, int], spine: bool, num_stages: int) -> int:
    """How many stages an edge can span: with a spine and no empty stage, at most as many as it spans layers."""
    return min(edge[1] - edge[0], num_stages - 1) if spine else num_stages - 1


def _shared(joint: JointModel) -> int:
    """What a tensor read by several layers costs at one boundary."""
    return joint.model.add(cost=1.0, upper=math.inf)


def _add_places(joint: JointModel, tables: CostTables) -> None:
    model, num_stages = joint.model, tables.candidate.num_stages
    for nodes in joint.by_layer.values():
        model.add_row([joint.place[n] for n in nodes], [1.0] * len(nodes), "=", 1.0)
    for i in range(num_stages):
        here = [(n, number) for n, number in joint.place.items() if n[1] == i]
        numbers = [number for _, number in here]
        model.add_row(numbers, [1.0] * len(numbers), ">", 1.0)
        memory = [tables.memory_bytes[n] / GIB for n, _ in here]
        model.add_row(numbers, memory, "<", tables.capacity_bytes[i] / GIB)
        once = [(number, tables.iteration_time_s[n] * 1e3) for n, number in here if tables.iteration_time_s[n]]
        if once:
            model.add_row([*(j for j, _ in once), joint.iteration], [*(g for _, g in once), -1.0], "<", 0.0)


def _classes(rows: Sequence[tuple[bytes, ...]]) -> list[int]:
    first: dict[tuple[bytes, ...], int] = {}
    return [first.setdefault(row, k) for k, row in enumerate(rows)]


def _members(joint: JointModel, layer: int, classes: list[int]) -> dict[tuple[int, int], list[int]]:
    """Variables of a layer by (stage, class)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for u, i, k in joint.by_layer[layer]:
        groups.setdefault((i, classes[k]), []).append(joint.place[u, i, k])
    return groups


def _add_edge(joint: JointModel, tables: CostTables, e: int, shared: list[int] | None, *, reach: int) -> None:
    """Variables, marginals and costs of one edge."""
    model, (u, v) = joint.model, tables.edges[e]
    reshard, cross, relay = tables.reshard_s[e], tables.cross_stage_s[e], tables.relay_s[e]
    k = range(tables.num_strategies)
    writers = _members(joint, u, _classes([(reshard[a].tobytes(), cross[a].tobytes(), relay[a].tobytes()) for a in k]))
    readers = _members(joint, v, _classes([(reshard[:, a].tobytes(), cross[:, a].tobytes()) for a in k]))
    out: dict[tuple[int, int], list[int]] = {w: [] for w in writers}
    into: dict[tuple[int, int], list[int]] = {r: [] for r in readers}
    at: list[dict[int, float]] = [{} for _ in joint.link_rows]
    for i, g in writers:
        for j, h in readers:
            if not i <= j <= i + reach:
                continue
            inside, final, pass_on = float(reshard[g, h]) * 1e3, float(cross[g, h]) * 1e3, float(relay[g]) * 1e3
            crossing = 0.0 if i == j else final + (j - i - 1) * pass_on
            y = model.add(cost=inside if i == j else (0.0 if shared else crossing))
            out[i, g].append(y)
            into[j, h].append(y)
            if i == j:
                joint.stage_rows[i][y] = inside
            for b in range(i, j):
                at[b][y] = final if b == j - 1 else pass_on
    for node, numbers in (*writers.items(),):
        model.add_row([*out[node], *numbers], [1.0] * len(out[node]) + [-1.0] * len(numbers), "=", 0.0)
    for node, numbers in (*readers.items(),):
        model.add_row([*into[node], *numbers], [1.0] * len(into[node]) + [-1.0] * len(numbers), "=", 0.0)
    for b, terms in enumerate(at):
        costs = {y: c for y, c in terms.items() if c}
        if shared and costs:
            model.add_row([*costs, shared[b]], [*costs.values(), -1.0], "<", 0.0)
            joint.link_rows[b][shared[b]] = 1.0
        elif not shared:
            joint.link_rows[b].update(costs)


def add_intervals(joint: JointModel, tables: CostTables, columns: Columns) -> None:
    """Makes F2 the hybrid F4: stages are intervals of the spine, with the least time each can take in memory."""
    model, num_stages = joint.model, tables.candidate.num_stages
    keys = np.stack([columns.stage, columns.first, columns.last])
    unique, inverse = np.unique(keys, axis=1, return_inverse=True)
    time, iteration = np.full(unique.shape[1], np.inf), np.full(unique.shape[1], np.inf)
    np.minimum.at(time, inverse, columns.time * 1e3)
    np.minimum.at(iteration, inverse, columns.iteration * 1e3)
    intervals = list(zip(*unique.tolist(), strict=True))
    number = [model.add(whole=True) for _ in intervals]
    for i in range(num_stages):
        here = [q for q, (stage, _, _) in enumerate(intervals) if stage == i]
        model.add_row([number[q] for q in here], [1.0] * len(here), "=", 1.0)
        terms = joint.stage_rows[i]
        model.add_row([*terms, *(number[q] for q in here)], [*terms.values(), *(-time[q] for q in here)], ">", 0.0)
        if tables.candidate.num_microbatches > 1:
            model.add_row([joint.slowest, *(number[q] for q in here)], [1.0, *(-time[q] for q in here)], ">", 0.0)
        if iteration[here].any():
            model.add_row(
                [joint.iteration, *(number[q] for q in here)], [1.0, *(-iteration[q] for q in here)], ">", 0.0
            )
        for u in range(tables.num_layers):
            cover = [number[q] for q in here if intervals[q][1] <= u <= intervals[q][2]]
            inside = [joint.place[n] for n in joint.by_layer[u] if n[1] == i]
            if cover or inside:
                model.add_row([*cover, *inside], [1.0] * len(cover) + [-1.0] * len(inside), "=", 0.0)
