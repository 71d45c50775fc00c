"""A captured step in three parts: before (state only), the loss with all that reads the batch, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from uniap_jax.core.errors import TraceError
from uniap_jax.core.jax_compat import ClosedJaxpr, Literal, Var, fresh_like, shape_of
from uniap_jax.core.jaxprs import close, inline_into, live_eqns, variables
from uniap_jax.frontend.capture import Captured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTape:
    """The loss as flat equations.

    Attributes:
        params: differentiated inputs.
        state: other inputs that do not depend on the batch; `state_source` says what each is in the step.
        batch: the batch leaves.
        eqns: only those the results need.
        results: loss first, then the auxiliary outputs that the step uses.
    """

    params: tuple[Var, ...]
    state: tuple[Var, ...]
    batch: tuple[Var, ...]
    eqns: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitStep:
    """The parts of a step, and where its gradients and results go."""

    loss: LossTape
    before: ClosedJaxpr
    update: ClosedJaxpr
    param_leaf: tuple[int | None, ...]


def bind_consts(
    invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[Any], consts: dict[Var, Any]
) -> ClosedJaxpr:
    """A closed jaxpr of `invars` alone: the arrays the trace closed over become its constants."""
    read = {v for e in eqns for v in variables(e.invars)} | set(variables(outvars))
    needed = [v for v in consts if v in read]
    inner = close([*needed, *invars], outvars, eqns)
    values = [consts[v] for v in needed]
    shapes = [shape_of(v) for v in invars]
    return jax.make_jaxpr(lambda *args: jax.core.eval_jaxpr(inner.jaxpr, (), *values, *args))(*shapes)


def _tainted(eqns: Sequence[Any], sources: Sequence[Var]) -> set[Var]:
    """Variables that depend on `sources`."""
    found = set(sources)
    for eqn in eqns:
        if any(v in found for v in variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def split_step(captured: Captured) -> SplitStep:
    """Cuts a captured step around its loss.

    Equations ahead of the loss that read the batch become part of it, so that they run once per micro-batch on that
    micro-batch's rows. Auxiliary outputs that depend on neither parameters nor batch (random counts, a parameter
    handed through) become part of the update.

    Raises:
        TraceError: a differentiated value depends on the batch.
    """
    tape, arguments = captured.tape, captured.arguments
    count = len(arguments.state)
    state_vars, batch_vars = tape.invars[:count], tape.invars[count:]
    pre, eqn = list(tape.eqns[: captured.loss]), tape.eqns[captured.loss]
    num_params = eqn.params["num_params"]
    sources, grads = eqn.invars[:num_params], eqn.outvars[len(eqn.outvars) - num_params :]
    batch_dependent = _tainted(pre, batch_vars)
    if any(v in batch_dependent for v in variables(sources)):
        raise TraceError(
            "the step differentiates with respect to something computed from the batch; only state can be "
            "differentiated. Pass it in an argument that is not among batch_argnums"
        )
    params = [fresh_like(v) for v in grads]
    eqns = [e for e in pre if any(v in batch_dependent for v in e.outvars)]
    consts = dict(tape.consts)
    body_results = inline_into(eqn.params["jaxpr"], [*params, *eqn.invars[num_params:]], eqns, consts)
    varying = _tainted(eqns, [*params, *batch_vars])
    aliases, pure = _resolve_pure(eqn, body_results, eqns, varying, dict(zip(params, sources, strict=True)))
    pre += pure
    post = [_substituted(e, aliases) for e in tape.eqns[captured.loss + 1 :]]
    outvars = [aliases.get(a, a) if not isinstance(a, Literal) else a for a in tape.outvars]

    update_eqns, read = live_eqns([*pre, *post], outvars)
    read |= set(variables(outvars))
    used = [i for i in range(len(body_results)) if i == 0 or eqn.outvars[i] in read]
    loss = _loss_tape(params, batch_vars, eqns, [body_results[i] for i in used])
    leaf = {v: i for i, v in enumerate(state_vars)}
    handed = [*sources, *loss.state]
    return SplitStep(
        loss=loss,
        before=bind_consts(state_vars, handed, live_eqns([*pre, *eqns], handed)[0], consts),
        update=bind_consts(
            [*state_vars, *batch_vars, *(eqn.outvars[i] for i in used), *grads], outvars, update_eqns, consts
        ),
        param_leaf=tuple(None if isinstance(s, Literal) else leaf.get(s) for s in sources),
    )


def _resolve_pure(
    eqn: Any, results: Sequence[Any], eqns: Sequence[Any], varying: set[Var], source: dict[Var, Any]
) -> tuple[dict[Var, Any], list[Any]]:
    """Results that need no loss: what each is in the step outside, and the equations that make them."""
    aliases: dict[Var, Any] = {}
    for i, atom in enumerate(results):
        if isinstance(atom, Literal) or atom in source or atom not in varying:
            aliases[eqn.outvars[i]] = atom if isinstance(atom, Literal) else source.get(atom, atom)
    made, _ = live_eqns(eqns, aliases.values())
    return aliases, [e for e in made if not any(v in varying for v in e.outvars)]


def _substituted(eqn: Any, aliases: dict[Var, Any]) -> Any:
    if not any(v in aliases for v in variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[a if isinstance(a, Literal) else aliases.get(a, a) for a in eqn.invars])


def _loss_tape(params: Sequence[Var], batch: Sequence[Var], eqns: Sequence[Any], results: Sequence[Any]) -> LossTape:
    kept, _ = live_eqns(eqns, results)
    inside = {*params, *batch, *(v for e in kept for v in e.outvars)}
    read = [*(v for e in kept for v in variables(e.invars)), *variables(results)]
    state = dict.fromkeys(v for v in read if v not in inside)
    return LossTape(
        params=tuple(params), state=tuple(state), batch=tuple(batch), eqns=tuple(kept), results=tuple(results)
    )
