"""One turn of a loop over layers as a layer of its own: what is executed on a stage, and what is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from uniap_jax.core.graph import Allowed, LayerGraph, Operand, Value
from uniap_jax.core.jax_compat import Var
from uniap_jax.core.jaxprs import close, open_jaxpr, signature
from uniap_jax.core.loop_cut import ScanCut


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A turn and what its inputs are.

    Attributes:
        graph: with the turn as its only layer; parameters are one turn's share.
        kinds: of each input of the loop's body: "stacked", "shared", "operand" (of the batch) or "slot".
        params: inputs that are trained weights, in the order of the graph's parameters.
        operands: inputs that depend on neither parameters nor activations.
        reads: inputs that travel with a micro-batch.
    """

    graph: LayerGraph
    kinds: tuple[str, ...]
    params: tuple[int, ...]
    operands: tuple[int, ...]
    reads: tuple[int, ...]


def kinds_of(cut: ScanCut) -> tuple[str, ...]:
    """What each input of a loop's body is."""

    def constant(atom: Any) -> str:
        if cut.is_static(atom):
            return "shared"
        return "operand" if cut.is_operand(atom) else "slot"

    return (*map(constant, cut.consts), *(["slot"] * cut.num_carry), *(["stacked"] * len(cut.scanned)))


def turn_of(graph: LayerGraph, cut: ScanCut) -> Turn:
    """A turn of a cut loop.

    Args:
        graph: that the loop is in.
        cut: around it.
    """
    kinds, body = kinds_of(cut), open_jaxpr(cut.body)
    rows = graph.batch_size // graph.num_microbatches
    trained = [
        isinstance(atom, Var) and atom in cut.trained and kind in ("stacked", "shared")
        for atom, kind in zip(cut.eqn.invars, kinds, strict=True)
    ]
    groups: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, (t, kind) in enumerate(zip(trained, kinds, strict=True)):
        groups[0 if t else 2 if kind == "slot" else 1].append(i)

    def value(var: Any, batched: bool) -> dict[str, Any]:
        shape = tuple(var.aval.shape)
        dim = next((d for d, size in enumerate(shape) if size == rows), None) if batched else None
        return {"shape": shape, "dtype": var.aval.dtype, "batch_dim": dim}

    params = tuple(Value(**value(body.invars[i], False)) for i in groups[0])
    operands = tuple(Operand(kind="state", **value(body.invars[i], kinds[i] == "operand")) for i in groups[1])
    reads = [Value(**value(body.invars[i], True)) for i in groups[2]]
    writes = [Value(**value(v, True)) for v in body.outvars]
    jaxpr = close([body.invars[i] for g in groups for i in g], body.outvars, body.eqns)
    layer = replace(
        cut.layer,
        index=0,
        jaxpr=jaxpr,
        params=tuple(range(len(params))),
        operands=tuple(range(len(operands))),
        reads=tuple(range(len(reads))),
        writes=tuple(range(len(reads), len(reads) + len(writes))),
        signature=f"{signature(jaxpr)}-{len(params)}-{len(operands)}",
        flops=cut.layer.flops / cut.length,
        allowed=_allowed(cut, [(i, kinds[i]) for i in groups[0]]),
    )
    alone = replace(graph, layers=(layer,), params=params, operands=operands, values=(*reads, *writes))
    return Turn(graph=alone, kinds=kinds, params=tuple(groups[0]), operands=tuple(groups[1]), reads=tuple(groups[2]))


def _allowed(cut: ScanCut, params: Sequence[tuple[int, str]]) -> tuple[Allowed, ...]:
    """What may split the dimensions of a turn's parameters: what may split those of the loop's."""
    known = dict(zip(cut.layer.jaxpr.jaxpr.invars, cut.layer.allowed, strict=False))
    of_loop = [(known.get(cut.eqn.invars[i], ()), kind) for i, kind in params]
    found = tuple(dims[1:] if kind == "stacked" else dims for dims, kind in of_loop)
    return found if any(found) else ()
