"""Values of the whole batch that no parameter enters: made once per step, ahead of the micro-batches.

How many tokens a mask leaves, or the mean of the inputs, is not to be had from a micro-batch. `before` makes such a
value from the whole batch, and every micro-batch reads it as it reads the state. A mean over what a mask leaves is
then a plain sum over examples, over a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from uniap_jax.core.jax_compat import ClosedJaxpr, Literal, Var, fresh_like, shape_of
from uniap_jax.core.jaxprs import close, inline_into, live_eqns, open_jaxpr, variables
from uniap_jax.frontend.batch_rules import WHOLE, Kind
from uniap_jax.frontend.split import LossTape

Place = tuple[int, int]
"""An equation of a loss, and which of its outputs or operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is changed in a loss so that it can run on micro-batches; places in its equations.

    Attributes:
        values: outputs that are the whole batch's and that the rest of the loss reads.
        shares: operands that are added to a sum over examples and are none: a micro-batch adds its share of them.
    """

    values: tuple[Place, ...] = ()
    shares: tuple[Place, ...] = ()


def read_ahead(loss: LossTape, kinds: Mapping[Var, Kind]) -> tuple[Place, ...]:
    """Values of the whole batch that the results, or what is made of examples or parameters, read."""
    made = {v: (i, j) for i, e in enumerate(loss.eqns) for j, v in enumerate(e.outvars)}
    found, seen, pending = set[Place](), set[Var](), variables(loss.results)
    while pending:
        v = pending.pop()
        if v in seen or v not in made:
            continue
        seen.add(v)
        if kinds.get(v) == WHOLE:
            found.add(made[v])
        else:
            pending += variables(loss.eqns[made[v][0]].invars)
    return tuple(sorted(found))


def taken_ahead(loss: LossTape, ahead: Ahead, pieces: int) -> LossTape:
    """The loss of one of `pieces` micro-batches, with the values of the whole batch among its state."""
    if ahead == Ahead():
        return loss
    whole = {v: fresh_like(v) for v in _values(loss, ahead)}
    eqns: list[Any] = []
    for i, eqn in enumerate(loss.eqns):
        operands = [_named(a, whole) for a in eqn.invars]
        for j in (j for at, j in ahead.shares if at == i):
            (operands[j],) = inline_into(_share(operands[j], pieces), [operands[j]], eqns, {}, eqn.source_info)
        eqns.append(eqn.replace(invars=operands))
    results = tuple(_named(a, whole) for a in loss.results)
    kept, _ = live_eqns(eqns, results)
    return replace(loss, state=(*loss.state, *whole.values()), eqns=tuple(kept), results=results)


def with_ahead(before: ClosedJaxpr, loss: LossTape, ahead: Ahead) -> ClosedJaxpr:
    """`before` on the leaves of state and batch, its outputs followed by the values of the whole batch.

    Args:
        before: `(*state leaves) -> (*params, *loss.state)`.
        loss: of the whole batch, as it was.
        ahead: what is taken out of it.
    """
    values = _values(loss, ahead)
    cone = close([*loss.state, *loss.batch], values, live_eqns(loss.eqns, values)[0])
    leaves = [shape_of(v) for v in open_jaxpr(before).invars]

    def run(*args: Any) -> list[Any]:
        handed = jax.core.eval_jaxpr(open_jaxpr(before), before.consts, *args[: len(leaves)])
        made = jax.core.eval_jaxpr(open_jaxpr(cone), (), *handed[len(loss.params) :], *args[len(leaves) :])
        return [*handed, *made]

    return jax.make_jaxpr(run)(*leaves, *map(shape_of, loss.batch))


def _values(loss: LossTape, ahead: Ahead) -> list[Var]:
    return [loss.eqns[i].outvars[j] for i, j in ahead.values]


def _named(atom: Any, names: Mapping[Var, Var]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _share(atom: Any, pieces: int) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda x: x / pieces)(shape_of(atom))
