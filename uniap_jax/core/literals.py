"""Layers that are equal but for constants: one jaxpr in which the constants that differ are inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import close, flatten, inner_jaxprs, open_jaxpr

CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
"""Calls whose operands are their body's inputs, so that another input can be handed in."""


class NotEqual(ValueError):
    """Layers differ in a constant that cannot become an input."""


def lift_literals(jaxprs: Sequence[ClosedJaxpr]) -> tuple[ClosedJaxpr, list[np.ndarray]]:
    """The first of several jaxprs of one signature, with the constants that differ as further inputs.

    Frameworks fold a hash of each layer's name into its random key; such numbers are all that tells layers apart.

    Args:
        jaxprs: of one signature.

    Returns:
        The jaxpr `(*its inputs, *constants) -> its outputs`, and for each constant its values [jaxprs, ...].

    Raises:
        NotEqual: constants differ inside a loop or a custom derivative, where they cannot be handed in.
    """
    inner = [open_jaxpr(j) for j in jaxprs]
    new: list[tuple[Var, np.ndarray]] = []
    eqns = _lift_eqns([j.eqns for j in inner], new)
    outvars = [_lift_atom(atoms, new) for atoms in zip(*(j.outvars for j in inner), strict=True)]
    lifted = close([*inner[0].invars, *(v for v, _ in new)], outvars, eqns)
    return lifted, [values for _, values in new]


def _lift_atom(atoms: Sequence[Any], new: list[tuple[Var, np.ndarray]]) -> Any:
    if not isinstance(atoms[0], Literal):
        return atoms[0]
    values = [np.asarray(a.val) for a in atoms]
    if all(equal_values(v, values[0]) for v in values):
        return atoms[0]
    aval: Any = atoms[0].aval
    var = Var(aval)
    new.append((var, np.stack(values).astype(aval.dtype)))
    return var


def _lift_eqns(bodies: Sequence[Sequence[JaxprEqn]], new: list[tuple[Var, np.ndarray]]) -> list[Any]:
    return [_lift_eqn(eqns, new) for eqns in zip(*bodies, strict=True)]


def _lift_eqn(eqns: Sequence[JaxprEqn], new: list[tuple[Var, np.ndarray]]) -> Any:
    first = eqns[0]
    invars = [_lift_atom(atoms, new) for atoms in zip(*(e.invars for e in eqns), strict=True)]
    if not any(_differ(bodies) for bodies in zip(*map(inner_jaxprs, eqns), strict=True)):
        return first.replace(invars=invars)
    if first.primitive.name not in CHECKPOINTS:
        raise NotEqual(f"a constant differs between them inside `{first.primitive.name}`")
    tapes = [flatten(next(inner_jaxprs(e))) for e in eqns]
    if any(t.consts for t in tapes):
        raise NotEqual(f"arrays are closed over inside `{first.primitive.name}`")
    inside: list[tuple[Var, np.ndarray]] = []
    body_eqns = _lift_eqns([t.eqns for t in tapes], inside)
    outvars = [_lift_atom(atoms, inside) for atoms in zip(*(t.outvars for t in tapes), strict=True)]
    body = close([*tapes[0].invars, *(v for v, _ in inside)], outvars, body_eqns)
    handed = [(Var(v.aval), values) for v, values in inside]
    new.extend(handed)
    return first.replace(invars=[*invars, *(v for v, _ in handed)], params={**first.params, "jaxpr": body.jaxpr})


def _differ(bodies: Sequence[Any]) -> bool:
    """Whether literals of aligned jaxprs differ, at any depth."""
    tapes = [open_jaxpr(b) for b in bodies]
    for eqns in zip(*(t.eqns for t in tapes), strict=True):
        for atoms in zip(*(e.invars for e in eqns), strict=True):
            if isinstance(atoms[0], Literal) and any(not equal_values(atoms[0].val, a.val) for a in atoms):
                return True
        if any(_differ(inner) for inner in zip(*map(inner_jaxprs, eqns), strict=True)):
            return True
    outs = zip(*(t.outvars for t in tapes), strict=True)
    return any(
        isinstance(atoms[0], Literal) and any(not equal_values(atoms[0].val, a.val) for a in atoms) for atoms in outs
    )


def equal_values(a: Any, b: Any) -> bool:
    """Whether two constants are equal; a NaN equals itself, in types that numpy does not know too."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and (a.tobytes() == b.tobytes() or np.array_equal(a, b))
