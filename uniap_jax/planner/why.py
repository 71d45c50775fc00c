"""Why a plan is what it is: what binds, and the best plans of problems with more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from uniap_jax.core.costs import Candidate, CostTables, Evaluation
from uniap_jax.core.plan import Binding, WhatIf
from uniap_jax.planner.bounds import with_unlimited_memory
from uniap_jax.planner.search import Incumbent, Priced, SearchResult

MORE_MEMORY = 1.1
MORE, UNLIMITED = "10 % more memory", "unlimited memory"

MATTERS = 1e-6
"""Relative gain below which a change does not matter."""

TablesOf = Callable[[Candidate], CostTables]


def with_more_memory(tables: CostTables) -> CostTables:
    """The same tables on devices with MORE_MEMORY times the memory."""
    return replace(tables, capacity_bytes=tables.capacity_bytes * MORE_MEMORY)


def what_ifs(best: Priced, solve_relaxed: Callable[[Callable[[CostTables], CostTables]], SearchResult]) -> list[WhatIf]:
    """The best plans with more memory; nothing is searched twice where memory does not bind.

    Args:
        best: plan of the problem as it is.
        solve_relaxed: searches the problem with changed tables, from that plan on.
    """
    free = _what_if(UNLIMITED, best, solve_relaxed(with_unlimited_memory))
    if free.bound_s >= best.value * (1 - MATTERS):
        return [replace(free, what=MORE), free]
    return [_what_if(MORE, best, solve_relaxed(with_more_memory)), free]


def _what_if(what: str, best: Priced, result: SearchResult) -> WhatIf:
    found = result.best or best
    return WhatIf(
        what=what,
        step_time_s=found.value,
        bound_s=min(result.bound_s, found.value),
        num_stages=found.candidate.num_stages,
        num_microbatches=found.candidate.num_microbatches,
    )


def first_incumbent(tables_of: TablesOf, best: Priced) -> Incumbent:
    """The plan at hand as the first one of a relaxed problem."""
    incumbent = Incumbent()
    incumbent.offer(tables_of(best.candidate), best.assignment, best.engine)
    return incumbent


def bindings(tables: CostTables, price: Evaluation, unlimited_s: float | None) -> tuple[Binding, ...]:
    """What the step time is made of and whether memory is behind it, what matters most first.

    TPI = (sum p + sum o - slowest) + c slowest + max g: filling, pace, once per step.

    Args:
        tables: of the plan's candidate.
        price: of the plan.
        unlimited_s: step time of the best plan with unlimited memory, None where it was not searched.
    """
    total, count = price.step_time_s, tables.candidate.num_microbatches
    stages, links, once = (np.array(x) for x in (price.stage_time_s, price.link_time_s, price.iteration_time_s))
    slowest = max(float(stages.max()), float(links.max(initial=0.0)))
    on_link = float(stages.max()) < slowest
    parts = [
        Binding(
            kind="link" if on_link else "stage",
            index=int((links if on_link else stages).argmax()),
            seconds=count * slowest,
            share=count * slowest / total if total else 0.0,
        )
    ]
    fill = float(stages.sum() + links.sum()) - slowest
    for kind, index, seconds in (("fill", 0, fill), ("once", int(once.argmax()), float(once.max()))):
        if seconds > MATTERS * total:
            parts.append(Binding(kind=kind, index=index, seconds=seconds, share=seconds / total))
    parts.sort(key=lambda part: -part.seconds)
    if unlimited_s is not None and unlimited_s < total * (1 - MATTERS):
        full = np.array(price.stage_memory_bytes) / tables.capacity_bytes
        stage = int(full.argmax())
        parts.insert(0, Binding(kind="memory", index=stage, seconds=total - unlimited_s, share=float(full[stage])))
    return tuple(parts)
