"""Our search on the planning instances of Hetu-Galvatron's shipped profiles, against what its own search found.

    python -m benchmarks.galvatron FOLDER [NAME ...]

FOLDER holds `NAME.json` (an instance), `price.py` (Galvatron's cost model restated; it prices every plan here, ours and
theirs) and `results/NAME.search.json` (Galvatron's plan with the CPU seconds of its search). One line per instance.

The strategy space is Galvatron's: tensor or Ulysses sequence parallelism of 1 to 8, the rest data parallelism with
ZeRO-2 or ZeRO-3, with or without checkpointing, per layer; one strategy for embedding and head together. Two things
couple layers beyond stages and are enumerated outside: that common strategy, and the largest tensor group, which sizes
a buffer.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from uniap_jax.core.costs import Assignment, Candidate, CostTables, evaluate
from uniap_jax.planner.bounds import Multipliers, quick_bound
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.interval import ChainRefinement

MIB = 1024.0**2
Spec = dict[str, Any]


def load_price(folder: Path) -> ModuleType:
    """The module that prices plans."""
    spec = importlib.util.spec_from_file_location("galvatron_price", folder / "price.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of everything that is enumerated outside the tables.

    Attributes:
        stages: pp.
        chunks: micro-batches.
        group: largest tensor or sequence group where a tensor group is used; 0 for no tensor parallelism at all.
        embed: strategy of embedding and head.
    """

    stages: int
    chunks: int
    group: int
    embed: tuple[tuple[str, Any], ...]


class Space:
    """Galvatron's search space over one instance as cost tables."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inst = model.inst
        self.limits = self.inst["search_space"]
        self.ids = [i for i, t in enumerate(self.inst["layertypes"]) for _ in range(t["layer_num"])]
        self._layers: dict[tuple[int, int], tuple[list[Spec], np.ndarray, np.ndarray, np.ndarray]] = {}

    def groups(self, size: int) -> list[tuple[int, int]]:
        """(tp, sp) of a stage of `size` GPUs."""
        tensor = [(t, 1) for t in powers(min(size, 8))]
        sequence = [] if self.limits.get("disable_sp") else [(1, s) for s in powers(min(size, 8)) if s > 1]
        return tensor + sequence

    def specs(self, size: int) -> list[Spec]:
        """Strategies of a layer."""
        found = []
        for (tp, sp), ckpt in itertools.product(self.groups(size), (False, True)):
            dp = size // (tp * sp)
            kinds = [self.inst["default_dp_type"], "zero3"] if dp * sp > 1 else ["ddp"]
            found += [{"tp": tp, "sp": sp, "dp": dp, "dp_type": kind, "ckpt": ckpt} for kind in kinds]
        return found

    def embeds(self, size: int) -> list[Spec]:
        """Strategies of embedding and head."""
        groups = [(1, 1)] if self.limits.get("disable_embedding_lmhead_tp") else self.groups(size)
        kinds = (self.inst["default_dp_type"], "zero3")
        return [{"tp": tp, "sp": sp, "dp_type": kind} for (tp, sp), kind in itertools.product(groups, kinds)]

    def cases(self) -> Iterator[Case]:
        """Everything to enumerate."""
        batch = self.inst["global_batch_size"]
        for stages in powers(min(self.model.world, self.limits["max_pp_deg"], len(self.ids))):
            if self.model.world % stages or (stages > 1 and stages not in self.model.p2p):
                continue
            size = self.model.world // stages
            for chunks in (c for c in range(1, batch + 1) if batch % c == 0):
                for embed in self.embeds(size):
                    fits = batch % (chunks * (size // (embed["tp"] * embed["sp"]))) == 0
                    for group in (0, *powers(min(size, 8))[1:]) if fits else ():
                        if max(embed["tp"], embed["sp"]) <= group or (group == 0 and embed["tp"] == 1):
                            yield Case(stages=stages, chunks=chunks, group=group, embed=tuple(embed.items()))

    def layer_costs(self, stages: int, chunks: int) -> tuple[list[Spec], np.ndarray, np.ndarray, np.ndarray]:
        """Strategies, and per [type, strategy] seconds without sync, extra of sync, and MiB [type, stage, strategy]."""
        if (stages, chunks) not in self._layers:
            specs, types = self.specs(self.model.world // stages), self.inst["layertypes"]
            time, sync = np.full((len(types), len(specs)), np.inf), np.zeros((len(types), len(specs)))
            memory = np.full((len(types), stages, len(specs)), np.inf)
            for (i, t), (k, s) in itertools.product(enumerate(types), enumerate(specs)):
                known = s["ckpt"] or str(max(s["tp"], s["sp"])) in t["activation_mb_per_sample"]
                if not known or self.inst["global_batch_size"] % (chunks * s["dp"]):
                    continue
                with_sync, without = self.model.layer_time(i, s, stages, chunks)
                time[i, k], sync[i, k] = without, with_sync - without
                memory[i, :, k] = [self.model.layer_memory(i, s, stages, chunks, p) for p in range(stages)]
            self._layers[stages, chunks] = specs, time, sync, memory
        return self._layers[stages, chunks]

    def buffer(self, case: Case) -> int:
        """MiB that every stage keeps for gathering activations."""
        if case.group == 0:
            return 0
        types = self.inst["layertypes"]
        samples = self.model.batch / case.chunks / (self.model.world // case.stages // case.group)
        return int(samples * types[0]["hidden_size"] * max(t["seq_len"] for t in types) * 2 / MIB)

    def tables(self, case: Case) -> CostTables | None:
        """The tables of one case, or None where embedding and head alone do not fit."""
        specs, time, sync, memory = self.layer_costs(case.stages, case.chunks)
        try:
            seconds, ends = self.model.embed(dict(case.embed), case.stages, case.chunks)
        except KeyError:
            # not profiled for this group
            return None
        room = self.model.limit_mb - self.buffer(case) - np.array(ends, dtype=float)
        if (room <= 0).any():
            return None
        group = np.array([max(s["tp"], s["sp"]) for s in specs])
        plain = np.array([s["tp"] == 1 for s in specs])
        legal = (plain if case.group == 0 else group <= case.group) & np.isfinite(time)
        k, layers = len(specs), len(self.ids)
        full = np.repeat(np.where(np.isfinite(time), time, 0.0)[self.ids][:, None], case.stages, axis=1)
        full[0, 0] += seconds[0]
        if case.stages > 1:
            full[-1, -1] += seconds[-1]
        # the first stage hides its gradient sync behind the embedding; what later stages do not hide behind earlier
        # ones' work is next to nothing, and the price knows
        once = np.zeros((layers, case.stages, k))
        once[:, 0] = sync[self.ids]
        once[0, 0] -= seconds[0]
        edges = tuple((u, u + 1) for u in range(layers - 1))
        nothing = np.broadcast_to(0.0, (len(edges), k, k))
        return CostTables(
            candidate=Candidate(num_stages=case.stages, num_microbatches=case.chunks),
            time_s=full,
            iteration_time_s=once,
            memory_bytes=np.where(np.isfinite(memory), memory, 0.0)[self.ids] * MIB,
            capacity_bytes=room * MIB,
            allowed=legal[self.ids],
            edges=edges,
            reshard_s=nothing,
            cross_stage_s=nothing,
            relay_s=nothing[:, :, 0],
        )

    def plan(self, case: Case, assignment: Assignment) -> Spec:
        """An assignment in Galvatron's form."""
        specs = self.layer_costs(case.stages, case.chunks)[0]
        return {
            "pp": case.stages,
            "chunks": case.chunks,
            "partition": [assignment.stage.count(i) for i in range(case.stages)],
            "layers": [specs[k] for k in assignment.strategy],
            "embed": dict(case.embed),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Our plan of an instance.

    Attributes:
        plan: in Galvatron's form.
        seconds: `seconds_slowest_stage` by `price.py`.
        cpu_s: CPU seconds of tables and search.
        gap: of the search under its own tables.
    """

    plan: Spec
    seconds: float
    cpu_s: float
    gap: float


def search(model: Any) -> Answer:
    """The best plan over all cases, least bound first."""
    started, clock = time.process_time(), Clock(limit_s=600.0)
    space = Space(model)
    queue: list[tuple[float, int, Case, ChainRefinement | None]] = []
    for number, case in enumerate(space.cases()):
        tables = space.tables(case)
        bound = math.inf if tables is None else quick_bound(tables)
        if math.isfinite(bound):
            queue.append((bound, number, case, None))
    heapq.heapify(queue)
    best, value, priced, lower = None, math.inf, math.inf, math.inf
    hints: dict[tuple[int, int], Multipliers] = {}
    while queue and queue[0][0] < value:
        _, number, case, work = heapq.heappop(queue)
        if work is None:
            tables = space.tables(case)
            assert tables is not None
            work = ChainRefinement(tables, hint=hints.get((case.stages, case.chunks)))
        seen = work.plan
        work.step(upper=value * (1 - 1e-9), clock=clock)
        if work.plan is not None and work.plan is not seen:
            price = evaluate(work.tables, work.plan)
            value = min(value, price.step_time_s) if price.feasible else value
            plan = space.plan(case, work.plan)
            result = model.evaluate(plan)
            if result["fits"] and result["seconds_slowest_stage"] < priced:
                best, priced = plan, result["seconds_slowest_stage"]
        hints.setdefault((case.stages, case.chunks), work.prices)
        if work.stuck:
            lower = min(lower, work.lower)
        elif not work.done:
            heapq.heappush(queue, (work.lower, number, case, work))
    assert best is not None
    gap = max(0.0, (value - min(lower, value)) / value)
    return Answer(plan=best, seconds=priced, cpu_s=time.process_time() - started, gap=gap)


def main() -> None:
    """Runs the instances and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    price = load_price(options.folder)
    out = sys.stdout
    out.write("| instance | ours, s | Galvatron, s | ratio | our CPU s | its CPU s | times | gap |\n")
    out.write("| --- | --- | --- | --- | --- | --- | --- | --- |\n")
    for path in sorted(options.folder.glob("*.json")):
        if options.names and path.stem not in options.names:
            continue
        model = price.Model(json.loads(path.read_text()))
        answer = search(model)
        theirs = json.loads((options.folder / "results" / f"{path.stem}.search.json").read_text())
        found = model.evaluate(theirs["plan"])["seconds_slowest_stage"] if theirs.get("plan") else math.nan
        out.write(
            f"| {path.stem} | {answer.seconds:.4f} | {found:.4f} | {answer.seconds / found:.4f} | {answer.cpu_s:.2f} | "
            f"{theirs['cpu_s']:.0f} | {theirs['cpu_s'] / answer.cpu_s:.0f} | {answer.gap:.1e} |\n"
        )
        out.flush()


if __name__ == "__main__":
    main()
