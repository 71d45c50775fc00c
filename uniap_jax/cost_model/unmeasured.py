"""What a plan's prediction rests on and no clock or compiler was asked for."""

from __future__ import annotations

from uniap_jax.core.costs import Candidate
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
    for layer, chosen in zip(model.graph.layers, plan.layers, strict=True):
        key = model.entry(layer, chosen.strategy, model.batch_size // plan.num_microbatches)
        if key in known:
            cost = model.stage_cost(layer.index, chosen.strategy, Candidate.of(plan), chosen.stage)
            if GUESSED & {cost.origin, cost.memory_origin}:
                found[key] = None
    return tuple(found)
