"""Dimensions made longer inside a layer, so that ways which do not divide them can split them: a vocabulary of 50,257.

The layer takes and returns the arrays that it did. Inside, a parameter's dimension is filled up to a multiple of the
ways, and so is the same dimension of every value on the way. What is in the added places never matters: it is
replaced where a value without the dimension enters (a product's result, a broadcast), so that its gradient is zero
there, and where the dimension is summed over or searched, by what the sum or the search does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import JaxprEqn, Literal, shape_of
from uniap_jax.core.jaxprs import close, flatten, inner_jaxprs, live_eqns, open_jaxpr
from uniap_jax.core.padding_rules import Long, longer, padded_rule
from uniap_jax.core.rewrite_pieces import evaluate

_REMAT = ("checkpoint", "remat2", "remat")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pad:
    """A dimension of a parameter that is made longer inside its layer.

    Attributes:
        param: position among the layer's parameters.
        dim: the dimension.
        size: as stored.
        padded: as computed with.
    """

    param: int
    dim: int
    size: int
    padded: int


def padded_layer(layer: Layer, pads: Sequence[Pad]) -> Layer:
    """The layer as a program whose parameters are given with these dimensions already filled up.

    Outputs have the shapes that they had. Without `pads` it is the layer itself.

    Raises:
        NotPaddedError: an equation on the way has no rule for longer dimensions; names it.
    """
    if not pads:
        return layer
    inner = open_jaxpr(layer.jaxpr)
    shapes, true = [list(v.aval.shape) for v in inner.invars], [dict[int, int]() for _ in inner.invars]
    for pad in pads:
        shapes[pad.param][pad.dim] = pad.padded
        true[pad.param][pad.dim] = pad.size
    evaluator = _Evaluator()

    def run(*args: jax.Array) -> list[Any]:
        given = [Long(array=a, true=t, clean=True) for a, t in zip(args, true, strict=True)]
        return [o.cut() for o in evaluator.body(layer.jaxpr, given)]

    avals = [jax.ShapeDtypeStruct(tuple(s), v.aval.dtype) for s, v in zip(shapes, inner.invars, strict=True)]
    traced = jax.make_jaxpr(run)(*avals)
    eqns, _ = live_eqns(traced.jaxpr.eqns, traced.jaxpr.outvars)
    told = "".join(f"/{p.param}.{p.dim}:{p.padded}" for p in pads)
    return replace(
        layer,
        jaxpr=close(traced.jaxpr.invars, traced.jaxpr.outvars, eqns),
        signature=layer.signature + told if layer.signature else "",
    )


def filled(array: Any, pads: Sequence[Pad]) -> Any:
    """A parameter with zeros added to its dimensions."""
    config = [(0, 0, 0)] * array.ndim
    for pad in pads:
        config[pad.dim] = (0, pad.padded - pad.size, 0)
    return lax.pad(array, np.zeros((), array.dtype), config) if pads else array


class _Evaluator:
    """Evaluates jaxprs on values of which some have longer dimensions."""

    def body(self, jaxpr: Any, inputs: Sequence[Long]) -> list[Long]:
        tape = flatten(jaxpr)
        env: dict[Any, Long] = {v: Long(array=c) for v, c in tape.consts.items()}
        env.update(zip(tape.invars, inputs, strict=True))

        def read(atom: Any) -> Long:
            return Long(array=atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in tape.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in tape.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Long]) -> list[Long]:
        name = eqn.primitive.name
        if not any(h.true for h in ins):
            outs = evaluate(eqn, [h.array for h in ins])
            return [Long(array=x, made=(eqn, tuple(ins))) for x in outs]
        if name in _REMAT:
            return self._called(
                eqn,
                ins,
                lambda run: jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]),
            )
        if name == "custom_jvp_call":
            return self._called(eqn, ins, lambda run: self._with_rule(eqn, ins, run))
        return padded_rule(eqn, ins)

    def _called(self, eqn: JaxprEqn, ins: list[Long], wrap: Callable[..., Any]) -> list[Long]:
        """A body of its own, under `wrap`."""
        body, found = next(inner_jaxprs(eqn)), list[Mapping[int, int]]()

        def run(*arrays: Any) -> list[Any]:
            outs = self.body(body, [replace(h, array=a, made=None) for h, a in zip(ins, arrays, strict=True)])
            found[:] = [o.true for o in outs]
            return [o.array for o in outs]

        outs = wrap(run)(*[h.array for h in ins])
        return [Long(array=x, true=t) for x, t in zip(outs, found, strict=True)]

    def _with_rule(self, eqn: JaxprEqn, ins: list[Long], run: Callable[..., list[Any]]) -> Any:
        """A function with a forward rule of its own: what the rule computes, on longer dimensions."""
        own, count = jax.custom_jvp(run), len(eqn.outvars)
        shapes = list(map(shape_of, eqn.invars))
        moving = [i for i, s in enumerate(shapes) if jax.numpy.issubdtype(s.dtype, np.inexact)]

        def push(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def function(*some: Any) -> list[Any]:
                full = list(operands)
                for i, value in zip(moving, some, strict=True):
                    full[i] = value
                return evaluate(eqn, full)

            return jax.jvp(function, [operands[i] for i in moving], list(tangents))

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            pushed = jax.make_jaxpr(push)(shapes, [shapes[i] for i in moving])
            given = [replace(h, array=p, made=None) for h, p in zip(ins, primals, strict=True)]
            given += [replace(ins[i], array=tangents[i], made=None) for i in moving]
            outs = self.body(pushed, given)
            pairs = zip(outs[:count], outs[count:], strict=True)
            return [o.array for o in outs[:count]], [longer(t, p.sizes()).array for p, t in pairs]

        own.defjvp(rule)
        return own
