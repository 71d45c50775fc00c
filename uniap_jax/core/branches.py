"""Conditionals as both branches and a selection, so that equations can be told apart by the arrays they touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import Tape, inline_into, inner_jaxprs


def without_conds(tape: Tape) -> Tape:
    """The same program with its conditionals replaced; for pure branches that are cheap, as an optimizer's are."""
    consts = dict(tape.consts)
    eqns: list[JaxprEqn] = []
    alias: dict[Var, Any] = {}
    for eqn in tape.eqns:
        _without_cond(_renamed(eqn, alias), eqns, alias, consts)
    outvars = tuple(a if isinstance(a, Literal) else alias.get(a, a) for a in tape.outvars)
    return replace(tape, outvars=outvars, eqns=tuple(eqns), consts=consts)


def _renamed(eqn: JaxprEqn, alias: dict[Var, Any]) -> JaxprEqn:
    renamed: JaxprEqn = eqn.replace(invars=[a if isinstance(a, Literal) else alias.get(a, a) for a in eqn.invars])
    return renamed


def _without_cond(eqn: JaxprEqn, eqns: list[JaxprEqn], alias: dict[Var, Any], consts: dict[Var, Any]) -> None:
    """Appends an equation, or the branches of a conditional and a selection of each of its outputs."""
    if eqn.primitive.name != "cond":
        eqns.append(eqn)
        return
    which, *operands = eqn.invars
    outs = []
    for branch in inner_jaxprs(eqn):
        inner: list[JaxprEqn] = []
        results = inline_into(branch, operands, inner, consts, eqn.source_info)
        for nested in inner:
            _without_cond(_renamed(nested, alias), eqns, alias, consts)
        outs.append([a if isinstance(a, Literal) else alias.get(a, a) for a in results])
    for position, var in enumerate(eqn.outvars):
        cases = [branch[position] for branch in outs]
        if all(case is cases[0] for case in cases):
            alias[var] = cases[0]
            continue
        chosen = inline_into(_selection(which, cases), [which, *cases], eqns, consts, eqn.source_info)
        alias[var] = chosen[0]


def _selection(which: Any, cases: Sequence[Any]) -> ClosedJaxpr:
    """`cases[which]`, as a program; the index is clamped as `lax.cond` and `lax.switch` do."""

    def select(index: jax.Array, *arrays: jax.Array) -> jax.Array:
        if len(arrays) == 2:
            return lax.select_n(index > 0, *arrays)
        return lax.select_n(lax.clamp(jnp.int32(0), index, jnp.int32(len(arrays) - 1)), *arrays)

    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in (which, *cases)]
    return jax.make_jaxpr(select)(*shapes)
