"""The optimizer step as a flat list of equations, and which parameter each leaf of the state belongs to.

Nothing here knows optax: a moment, an accumulator or an average belongs to the parameter whose gradient or value
flows into its next value without changing shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from uniap_jax.core.branches import without_conds
from uniap_jax.core.graph import LayerGraph, Step, Value
from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import close, flatten, live_eqns, variables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A flat program with named inputs.

    Attributes:
        sources: what each input variable is: ("state", leaf), ("batch", leaf), ("result", position) or
            ("grad", parameter).
        outvars: variables or literals, in the order of the step's outputs.
        eqns: without nested jits and conditionals.
        consts: arrays the trace closed over, by variable.
    """

    sources: dict[Var, tuple[str, int]]
    outvars: tuple[Any, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: dict[Var, Any]

    def cone(self, wanted: Iterable[Any], eqns: Sequence[JaxprEqn] | None = None) -> tuple[ClosedJaxpr, list[Var]]:
        """A program that computes `wanted` from what `eqns` leave open, and the variables it reads."""
        outs = list(wanted)
        kept, free = live_eqns(self.eqns if eqns is None else eqns, outs)
        inputs = [v for v in _in_order(kept, outs) if v in free]
        return close(inputs, outs, kept), inputs


def _in_order(eqns: Sequence[JaxprEqn], outs: Sequence[Any]) -> list[Var]:
    """Variables in the order of their first reading."""
    seen: dict[Var, None] = {}
    for eqn in eqns:
        seen.update(dict.fromkeys(variables(eqn.invars)))
    seen.update(dict.fromkeys(variables(outs)))
    return list(seen)


def update_flow(graph: LayerGraph) -> Flow:
    """`step.update` as a flow; a conditional becomes both its branches and a selection.

    Both branches of an optimizer's conditional are pure and cheap next to a step, and unlike a conditional their
    equations can be told apart by the arrays they touch.
    """
    step = graph.step
    kinds = (
        *(("state", i) for i in range(len(step.state))),
        *_batch_kinds(step),
        *(("result", i) for i in range(len(graph.results))),
        *(("grad", i) for i in range(len(graph.params))),
    )
    return _flow(step.update, kinds)


def before_flow(graph: LayerGraph) -> Flow:
    """`step.before` as a flow; outputs are the parameters, then the state operands."""
    step = graph.step
    return _flow(step.before, (*(("state", i) for i in range(len(step.state))), *_batch_kinds(step)))


def _batch_kinds(step: Step) -> list[tuple[str, int]]:
    return [("batch", i) for i in range(len(step.batch))]


def _flow(jaxpr: ClosedJaxpr, kinds: Sequence[tuple[str, int]]) -> Flow:
    tape = without_conds(flatten(jaxpr))
    sources = dict(zip(tape.invars, kinds, strict=True))
    return Flow(sources=sources, outvars=tape.outvars, eqns=tape.eqns, consts=tape.consts)


def leaf_params(graph: LayerGraph, flow: Flow) -> tuple[int | None, ...]:
    """For each state leaf the parameter it belongs to: is, or is a moment, accumulator or average of; else None."""
    step = graph.step
    own = {leaf: p for p, leaf in enumerate(step.param_leaf) if leaf is not None}
    origins = _origins(flow, own)
    found: list[int | None] = [own.get(i) for i in range(len(step.state))]
    for atom, leaf in zip(flow.outvars, step.output_leaf, strict=True):
        if leaf is None or found[leaf] is not None:
            continue
        shape = step.state[leaf].shape
        near = set() if isinstance(atom, Literal) else set(origins.get(atom, ()))
        near = {p for p in near if graph.params[p].shape == shape}
        if len(near) != 1:  # scalars meet in norms, zeros come from nowhere: ask the names
            near = _by_name(step.state[leaf], graph.params, near or range(len(graph.params)))
        found[leaf] = near.pop() if len(near) == 1 else None
    return tuple(found)


def _origins(flow: Flow, own: dict[int, int]) -> dict[Var, frozenset[int]]:
    """Parameters whose value or gradient reaches each variable through arrays of one shape."""
    origins: dict[Var, frozenset[int]] = {}
    for var, (kind, i) in flow.sources.items():
        if kind == "grad":
            origins[var] = frozenset({i})
        elif kind == "state" and i in own:
            origins[var] = frozenset({own[i]})
    empty: frozenset[int] = frozenset()
    for eqn in flow.eqns:
        inputs = [(a.aval, origins[a]) for a in variables(eqn.invars) if a in origins]
        for out in eqn.outvars:
            shape = getattr(out.aval, "shape", ())
            reached = empty.union(*(o for aval, o in inputs if getattr(aval, "shape", ()) == shape))
            if reached:
                origins[out] = reached
    return origins


_TOKEN = re.compile(r"\[[^\]]*\]|\.\w+")


def _by_name(leaf: Value, params: Sequence[Value], among: Iterable[int]) -> set[int]:
    """Parameters of the leaf's shape whose path shares the longest ending with the leaf's."""
    tokens = _TOKEN.findall(leaf.name)

    def shared(p: int) -> int:
        mine = _TOKEN.findall(params[p].name)
        count = 0
        while count < min(len(tokens), len(mine)) and tokens[-1 - count] == mine[-1 - count]:
            count += 1
        return count

    score = {p: shared(p) for p in among if params[p].shape == leaf.shape}
    best = max(score.values(), default=0)
    return {p for p, s in score.items() if s == best and best > 0}
