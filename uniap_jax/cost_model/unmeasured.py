"""What a plan's prediction rests on and no clock or compiler was asked for."""

from __future__ import annotations

from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Key
from uniap_jax.cost_model.assemble import TableModel


def unmeasured(model: TableModel, plan: Plan) -> tuple[Key, ...]:
    """Entries of the model's profile that a plan rests on and that are only described; none without a profile."""
    if model.profile is None or model.profile.source == "described":
        return ()
    known, found = model.profile.table(), dict[Key, None]()
    for layer, chosen in zip(model.graph.layers, plan.layers, strict=True):
        key = model.entry(layer, chosen.strategy, model.batch_size // plan.num_microbatches)
        if key in known and known[key].origin in ("described", "scaled"):
            found[key] = None
    return tuple(found)
