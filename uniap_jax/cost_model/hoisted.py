"""Casts of weights that a compiler makes once, ahead of a loop that reads them in every turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from uniap_jax.core.graph import Layer
from uniap_jax.core.jaxprs import inner_jaxprs, open_jaxpr


def cast_shares(layer: Layer) -> tuple[float, ...]:
    """For each parameter of a layer, bytes of its narrower copy over its own; 0 where it is read as it is.

    A weight that every turn casts to 16 bits is cast once for all turns: XLA moves what does not change out of loops
    where that makes it no larger. The copy then lives as long as the loop.
    """
    jaxpr = open_jaxpr(layer.jaxpr)
    return tuple(_cast_share(jaxpr, var) for var in jaxpr.invars[: len(layer.params)])


def _cast_share(jaxpr: Any, var: Any) -> float:
    found = {_of_reader(eqn, var) for eqn in jaxpr.eqns if any(a is var for a in eqn.invars)}
    return found.pop() if len(found) == 1 else 0.0


def _of_reader(eqn: Any, var: Any) -> float:
    if eqn.primitive.name == "convert_element_type":
        share = np.dtype(eqn.params["new_dtype"]).itemsize / np.dtype(var.aval.dtype).itemsize
        return share if share < 1 else 0.0
    bodies = [open_jaxpr(b) for b in inner_jaxprs(eqn)]
    if len(bodies) != 1 or len(bodies[0].invars) != len(eqn.invars):
        return 0.0
    inside = {_cast_share(bodies[0], v) for v, a in zip(bodies[0].invars, eqn.invars, strict=True) if a is var}
    return inside.pop() if len(inside) == 1 else 0.0
