"""Jaxprs as data: flatten nested calls, keep what is needed, count work, name what is equal.

A `Tape` is a jaxpr without nested jits: a list of equations over fresh variables, with the arrays that the trace
closed over set apart. Everything here rewrites data; nothing is traced or evaluated.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from uniap_jax.core.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    build_jaxpr,
    fresh_like,
    shape_of,
)
from uniap_jax.core.kernels import MOVES
from uniap_jax.core.sources import inlined

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tape:
    """A flat program: `invars -> outvars` by `eqns`, reading the arrays in `consts` by variable."""

    invars: tuple[Var, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: dict[Var, Any]


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Every jaxpr among an equation's parameters, closed or open."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                yield item


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations' holder of a closed or open jaxpr."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def scan_counts(eqn: JaxprEqn) -> tuple[int, int, int]:
    """How many operands of a scan every turn reads, are carried from turn to turn, and are scanned along.

    Told by ranks, for the equation's parameters differ between versions of JAX.
    """
    body = open_jaxpr(next(inner_jaxprs(eqn)))

    def of_equal_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outer, inner, strict=True))

    carried = of_equal_rank(eqn.outvars, body.outvars)
    kept = of_equal_rank(eqn.invars, body.invars)
    return kept - carried, carried, len(eqn.invars) - kept


def flatten(jaxpr: Any) -> Tape:
    """Inlines nested jits, all the way down, over fresh variables."""
    inner = open_jaxpr(jaxpr)
    consts: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    invars = [fresh_like(v) for v in inner.invars]
    outvars = inline_into(jaxpr, invars, eqns, consts)
    return Tape(invars=tuple(invars), outvars=tuple(outvars), eqns=tuple(eqns), consts=consts)


def inline_into(
    jaxpr: Any, args: Sequence[Any], eqns: list[JaxprEqn], consts: dict[Var, Any], outer: Any = None
) -> list[Any]:
    """Appends a jaxpr's equations to `eqns` with `args` for its inputs; returns the atoms of its outputs."""
    inner = open_jaxpr(jaxpr)
    env: dict[Var, Any] = dict(zip(inner.invars, args, strict=True))
    for var, value in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True):
        env[var] = fresh_like(var)
        consts[env[var]] = value

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        source = eqn.source_info if outer is None else inlined(eqn.source_info, outer)
        operands = [read(a) for a in eqn.invars]
        if eqn.primitive.name in INLINED:
            body = next(inner_jaxprs(eqn))
            env.update(zip(eqn.outvars, inline_into(body, operands, eqns, consts, source), strict=True))
            continue
        outs = [fresh_like(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outs, strict=True))
        eqns.append(eqn.replace(invars=operands, outvars=outs, source_info=source))
    return [read(a) for a in inner.outvars]


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among atoms, literals left out."""
    return [a for a in atoms if not isinstance(a, Literal)]


def live_eqns(eqns: Sequence[JaxprEqn], wanted: Iterable[Any]) -> tuple[list[JaxprEqn], set[Var]]:
    """Equations needed for `wanted` (in order) and the variables they need from outside."""
    needed, kept = set(variables(wanted)), []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.difference_update(eqn.outvars)
            needed.update(variables(eqn.invars))
    return kept[::-1], needed


def moved(eqns: Iterable[JaxprEqn], start: Iterable[Var]) -> set[Var]:
    """Variables that hold the numbers of one of `start` and no more, in another shape or layout; those of `start` too.

    Args:
        eqns: in order.
        start: variables.
    """
    found = set(start)
    for eqn in eqns:
        sources = variables(eqn.invars)
        if eqn.primitive.name in MOVES and len(sources) == len(eqn.outvars) == 1 and sources[0] in found:
            (out,) = eqn.outvars
            if shape_of(out).size == shape_of(sources[0]).size:
                found.add(out)
    return found


def close(invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """A closed jaxpr without constants; every free variable of `eqns` must be among `invars`."""
    return build_jaxpr(invars, outvars, eqns)


# ---- counting --------------------------------------------------------------------------------------------------


def _dot_flops(eqn: JaxprEqn) -> float:
    ((lhs_contract, _), _) = eqn.params["dimension_numbers"]
    lhs = shape_of(eqn.invars[0]).shape
    return float(2.0 * math.prod(lhs[d] for d in lhs_contract) * math.prod(shape_of(eqn.outvars[0]).shape))


def _conv_flops(eqn: JaxprEqn) -> float:
    rhs = shape_of(eqn.invars[1]).shape
    per_output = math.prod(rhs[d] for d in eqn.params["dimension_numbers"].rhs_spec[1:])
    return float(2.0 * per_output * math.prod(shape_of(eqn.outvars[0]).shape))


def eqn_flops(eqn: JaxprEqn) -> float:
    """Floating-point operations of one equation; an element-wise operation counts one per element."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _dot_flops(eqn)
    if name == "conv_general_dilated":
        return _conv_flops(eqn)
    bodies = [sum(map(eqn_flops, open_jaxpr(j).eqns)) for j in inner_jaxprs(eqn)]
    if name == "scan":
        return float(eqn.params["length"]) * sum(bodies)
    if name == "cond":
        return max(bodies, default=0.0)
    if bodies:
        return bodies[0] if name.startswith("custom_") else sum(bodies)
    return float(sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars))


def total_flops(jaxpr: Any) -> float:
    """Floating-point operations of one evaluation of a jaxpr."""
    return sum(map(eqn_flops, open_jaxpr(jaxpr).eqns))


# ---- signatures ------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _param_text(value: Any) -> str:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return signature(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_param_text, value)) + ")"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return _ADDRESS.sub("", str(value))


def eqn_text(eqn: JaxprEqn) -> str:
    """Structure of one equation: operation, parameters and shapes, without names and literal values."""
    params = ";".join(f"{k}={_param_text(v)}" for k, v in sorted(eqn.params.items()))
    shapes = [a.aval.str_short() for a in (*eqn.invars, *eqn.outvars)]
    return f"{eqn.primitive.name}[{params}]{shapes}"


def signature(jaxpr: Any) -> str:
    """Equal for jaxprs that do the same operations on the same shapes, whatever their names and literal values.

    Literal values are left out on purpose: cost and splitting do not depend on them, and frameworks fold a hash of
    each layer's name into its random key.
    """
    inner = open_jaxpr(jaxpr)
    ids: dict[Var, int] = {}

    def atom(a: Any) -> str:
        if isinstance(a, Literal):
            return f"lit:{a.aval.str_short()}"
        return f"{ids.setdefault(a, len(ids))}:{a.aval.str_short()}"

    digest = hashlib.sha256()
    digest.update(",".join(map(atom, (*inner.constvars, *inner.invars))).encode())
    for eqn in inner.eqns:
        line = f"{eqn_text(eqn)}{list(map(atom, eqn.invars))}->{list(map(atom, eqn.outvars))}"
        digest.update(line.encode())
    digest.update(",".join(map(atom, inner.outvars)).encode())
    return digest.hexdigest()[:24]
