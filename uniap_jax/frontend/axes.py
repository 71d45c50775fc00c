"""Steps written for `pmap`: a named axis of size one is the whole batch, so its reductions are the identity.

A step that averages over `axis_name="batch"` is traced under a vmapped axis of size 1 (by the user, or by
`parallelize(axis_name=...)`). Inside the recorded loss the axis would be unbound once the trace has ended, so
reductions over it are taken out while its size is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from uniap_jax.core.errors import TraceError
from uniap_jax.core.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, build_jaxpr
from uniap_jax.core.jaxprs import flatten, inner_jaxprs, open_jaxpr

REDUCTIONS = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_reduce"})


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _named(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in REDUCTIONS and all(isinstance(a, str) for a in _axes(eqn))


def _uses_axes(jaxpr: Any) -> bool:
    return any(_named(e) or any(map(_uses_axes, inner_jaxprs(e))) for e in open_jaxpr(jaxpr).eqns)


def without_axes(jaxpr: Any) -> Any:
    """The same jaxpr with reductions over named axes of size one taken out.

    Raises:
        TraceError: an axis has more than one member, so the loss is not that of the whole batch.
    """
    if not _uses_axes(jaxpr):
        return jaxpr
    tape = flatten(jaxpr)
    alias: dict[Var, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else alias.get(atom, atom)

    eqns = []
    for eqn in tape.eqns:
        operands = [read(a) for a in eqn.invars]
        if _named(eqn):
            for axis in _axes(eqn):
                _check_size(axis)
            alias.update(zip(eqn.outvars, operands, strict=True))
        elif any(map(_uses_axes, inner_jaxprs(eqn))):
            eqns.append(eqn.replace(invars=operands, params=_inner(eqn.params), effects=frozenset()))
        else:
            eqns.append(eqn.replace(invars=operands))
    assert not tape.consts, "constants are hoisted before"
    return build_jaxpr(tape.invars, [read(a) for a in tape.outvars], eqns)


def _inner(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a call with the axes taken out of its body."""

    def clean(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return without_axes(value)
        return open_jaxpr(without_axes(value)) if isinstance(value, Jaxpr) else value

    return {name: clean(value) for name, value in params.items()}


def _check_size(axis: str) -> None:
    size = jax.lax.axis_size(axis)
    if size != 1:
        raise TraceError(
            f"the loss reduces over axis {axis!r} of size {size}; a planned step sees the whole batch at once. Bind "
            f"the axis with size 1 (parallelize(step, axis_name={axis!r})) and pass the whole batch",
            axis=axis,
            size=size,
        )


def bound_axis(train_step: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """A step written for `pmap`, with its axis bound to the whole batch."""
    if axis_name is None:
        return train_step

    @functools.wraps(train_step)
    def whole_batch(*args: Any) -> Any:
        mapped = jax.vmap(train_step, in_axes=None, out_axes=0, axis_name=axis_name, axis_size=1)
        return jax.tree.map(lambda x: x[0], mapped(*args))

    return whole_batch
