"""The only module that knows JAX versions differ (0.10 to 0.12). Public names and `jax.extend` only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import core as jex_core

ClosedJaxpr = jex_core.ClosedJaxpr  # the same class as Jaxpr since 0.12
Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Primitive = jex_core.Primitive
Var = jex_core.Var

_TEMPLATE = jax.make_jaxpr(lambda: ())()


def no_mesh() -> AbstractContextManager[Any]:
    """Works as if the user had set no mesh: our own are entered where they are needed (also a decorator)."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def fresh_like(var: Var) -> Var:
    """A new variable of the same type."""
    return Var(var.aval)


def build_jaxpr(invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """A closed jaxpr without constants."""
    effects = jex_core.no_effects
    for eqn in eqns:
        effects = effects | eqn.effects
    template = _TEMPLATE.jaxpr
    jaxpr = template.replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=template.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(jaxpr, ())


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a variable or literal."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
