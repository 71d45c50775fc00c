"""What a plan's prediction rests on and no clock or compiler was asked for."""

from __future__ import annotations

from uniap_jax.core.costs import Candidate
from uniap_jax.core.equal_stages import ticking_run
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Key
from uniap_jax.cost_model.assemble import TableModel

GUESSED = {"described", "scaled"}


def unmeasured(model: TableModel, plan: Plan) -> tuple[Key, ...]:
    """Entries of the model's profile that a plan rests on and whose time or memory is described or scaled.

    None without a profile, or with one that no compiler was asked for: there all of them are.
    """
    if model.profile is None or not model.profile.jax_version:
        return ()
    known, found = model.profile.table(), dict[Key, None]()
    as_one = plan.executor == "program"
    run = ticking_run(model.graph, model.cluster.platform, plan.num_stages) if as_one else None
    for layer, chosen in zip(model.graph.layers, plan.layers, strict=True):
        key = model.entry(layer, chosen.strategy, model.batch_size // plan.num_microbatches)
        if key in known:
            cost = model.stage_cost(layer.index, chosen.strategy, Candidate.of(plan), chosen.stage)
            ticks = run is not None and run.first <= layer.index < run.last
            if GUESSED & {cost.origin, cost.memory_origin} or (ticks and cost.ticking is None):
                found[key] = None
    return tuple(found)
