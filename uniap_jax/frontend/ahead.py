"""Values of the whole batch that no parameter enters: made once per step, ahead of the micro-batches.

How many tokens a mask leaves, the mean of the inputs, the number of an example: a micro-batch cannot tell. `before`
makes such a value from the whole batch, and every micro-batch reads it as it reads the state; of one that is as long as
the batch it takes its rows. A mean over what a mask leaves is then a plain sum over examples, over a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from uniap_jax.core.jax_compat import ClosedJaxpr, Literal, Var, fresh_like, shape_of
from uniap_jax.core.jaxprs import close, inline_into, live_eqns, open_jaxpr, variables
from uniap_jax.frontend.batch_rules import Kind
from uniap_jax.frontend.split import LossTape

Place = tuple[int, int]
"""An equation of a loss, and which of its outputs or operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is changed in a loss so that it can run on micro-batches; places in its equations.

    Attributes:
        values: outputs that are made ahead and that the rest of the loss reads.
        numbers: operands that number the examples, and are more than an index to each its own.
        literals: numbers that depend on the batch size (one over it): they stay the whole batch's.
        shares: operands that are added to a sum over examples and are none: a micro-batch adds its share of them.
    """

    values: tuple[Place, ...] = ()
    numbers: tuple[Place, ...] = ()
    literals: tuple[Place, ...] = ()
    shares: tuple[Place, ...] = ()


def read_ahead(loss: LossTape, kinds: Mapping[Var, Kind]) -> tuple[Place, ...]:
    """Values made ahead that the results, or what is made of examples or parameters, read."""
    made = {v: (i, j) for i, e in enumerate(loss.eqns) for j, v in enumerate(e.outvars)}
    found, seen, pending = set[Place](), set[Var](), variables(loss.results)
    while pending:
        v = pending.pop()
        if v in seen or v not in made:
            continue
        seen.add(v)
        if v in kinds and kinds[v].whole:
            found.add(made[v])
        else:
            pending += variables(loss.eqns[made[v][0]].invars)
    return tuple(sorted(found))


def taken_ahead(loss: LossTape, ahead: Ahead, whole: LossTape, pieces: int) -> LossTape:
    """The loss of one of `pieces` micro-batches, with what is made ahead among its state.

    Args:
        loss: of a micro-batch.
        ahead: what to change.
        whole: the loss of the whole batch, as it was.
        pieces: number of micro-batches.
    """
    if ahead == Ahead():
        return loss
    values, numbers = _read(loss, ahead)
    named, numbered = ({v: fresh_like(v) for v in group} for group in (values, numbers))
    eqns: list[Any] = []
    for i, eqn in enumerate(loss.eqns):
        names = [numbered if (i, j) in ahead.numbers else named for j in range(len(eqn.invars))]
        operands = [_named(a, n) for a, n in zip(eqn.invars, names, strict=True)]
        for j in (j for at, j in ahead.literals if at == i):
            operands[j] = whole.eqns[i].invars[j]
        for j in (j for at, j in ahead.shares if at == i):
            (operands[j],) = inline_into(_share(operands[j], pieces), [operands[j]], eqns, {}, eqn.source_info)
        eqns.append(eqn.replace(invars=operands))
    results = tuple(_named(a, named) for a in loss.results)
    kept, _ = live_eqns(eqns, results)
    state = (*loss.state, *named.values(), *numbered.values())
    return replace(loss, state=state, eqns=tuple(kept), results=results)


def cut_rows(loss: LossTape, whole: LossTape, index: Var) -> LossTape:
    """The loss of a micro-batch that takes its rows of what `before` made for the whole batch.

    Args:
        loss: of a micro-batch, after `taken_ahead`.
        whole: of the whole batch, likewise.
        index: scalar int32 variable, which micro-batch.
    """
    state, eqns = list(loss.state), list[Any]()
    for i, (here, full) in enumerate(zip(loss.state, whole.state, strict=True)):
        if shape_of(here).shape != shape_of(full).shape:
            state[i] = fresh_like(full)
            inline_into(_rows(here, full), [state[i], index], eqns, {})
            eqns[-1] = eqns[-1].replace(outvars=[here])
    return replace(loss, state=tuple(state), eqns=(*eqns, *loss.eqns))


def _rows(here: Var, full: Var) -> ClosedJaxpr:
    (dim,) = (d for d, n in enumerate(shape_of(full).shape) if n != shape_of(here).shape[d])
    rows = shape_of(here).shape[dim]

    def run(array: Any, index: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(array, index * rows, rows, dim)

    return jax.make_jaxpr(run)(shape_of(full), jax.ShapeDtypeStruct((), jnp.int32))


def with_ahead(before: ClosedJaxpr, loss: LossTape, ahead: Ahead) -> ClosedJaxpr:
    """`before` on the leaves of state and batch, its outputs followed by what is made ahead.

    Args:
        before: `(*state leaves) -> (*params, *loss.state)`.
        loss: of the whole batch, as it was.
        ahead: what is taken out of it.
    """
    values = [v for group in _read(loss, ahead) for v in group]
    cone = close([*loss.state, *loss.batch], values, live_eqns(loss.eqns, values)[0])
    leaves = [shape_of(v) for v in open_jaxpr(before).invars]

    def run(*args: Any) -> list[Any]:
        handed = jax.core.eval_jaxpr(open_jaxpr(before), before.consts, *args[: len(leaves)])
        made = jax.core.eval_jaxpr(open_jaxpr(cone), (), *handed[len(loss.params) :], *args[len(leaves) :])
        return [*handed, *made]

    return jax.make_jaxpr(run)(*leaves, *map(shape_of, loss.batch))


def _read(loss: LossTape, ahead: Ahead) -> tuple[list[Var], list[Var]]:
    """Variables that are made ahead: those that all read so, and numbers of examples that some do."""
    numbers = dict.fromkeys(loss.eqns[i].invars[j] for i, j in ahead.numbers)
    return [loss.eqns[i].outvars[j] for i, j in ahead.values], list(numbers)


def _named(atom: Any, names: Mapping[Var, Var]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _share(atom: Any, pieces: int) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda x: x / pieces)(shape_of(atom))
