"""A captured step with every 16-bit float computed in 32 bits: what is left when rounding is taken away.

Under 16 bits two right programs of one step differ by what rounding makes of the order of their sums; a ReLU or a
maximum makes much of it. The widened step has the same layers, edges, splits and programs, so a plan that moves or
adds the wrong numbers shows there, and rounding does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from uniap_jax.core.graph import Layer, LayerGraph, Step, Value
from uniap_jax.core.jax_compat import ClosedJaxpr, Jaxpr, Literal, Var, fresh_like, shape_of
from uniap_jax.core.jaxprs import INLINED, close, inner_jaxprs, open_jaxpr
from uniap_jax.core.reference import reference_results

WIDE = np.dtype("float32")
ISLANDS = ("bitcast_convert_type",)
"""Bits are bits: these run as they are, with casts around them."""


def is_narrow(dtype: Any) -> bool:
    """Whether a type is a float of less than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < WIDE.itemsize


def wide_dtype(dtype: Any) -> Any:
    """float32 for narrower floats, else the type itself."""
    return WIDE if is_narrow(dtype) else dtype


def wide_array(array: Any) -> Any:
    """An array of the wide type; exact."""
    narrow = isinstance(array, (jax.Array, np.ndarray)) and is_narrow(array.dtype)
    return jnp.asarray(array).astype(WIDE) if narrow else array


def widened(graph: LayerGraph) -> LayerGraph:
    """The same step and layers in 32 bits; a plan for one is a plan for the other.

    Called as `step(state leaves, batch leaves)` on leaves that went through `wide_array`.
    """
    step = _wide_step(graph.step)
    wide = _wide_layers(graph, step)
    return replace(wide, step=replace(step, flat=_flat(wide)))


def _wide_step(step: Step) -> Step:
    rows = step.by_rows
    return replace(
        step,
        before=widen(step.before),
        update=widen(step.update),
        state=_wide_values(step.state),
        batch=_wide_values(step.batch),
        outputs=_wide_values(step.outputs),
        flatten=lambda state, batch: (list(state), list(batch)),
        unflatten=lambda outputs, *_: list(outputs),
        state_result=list,
        by_rows=None if rows is None else replace(rows, step=_wide_step(rows.step)),
    )


def _wide_layers(graph: LayerGraph, step: Step) -> LayerGraph:
    return replace(
        graph,
        layers=tuple(map(_wide_layer, graph.layers)),
        params=_wide_values(graph.params),
        operands=tuple(replace(v, dtype=wide_dtype(v.dtype)) for v in graph.operands),
        values=_wide_values(graph.values),
        step=step,
        microbatch=lambda count: _wide_layers(graph.microbatch(count), step),
    )


def _wide_values(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(replace(v, dtype=wide_dtype(v.dtype)) for v in values)


def _wide_layer(layer: Layer) -> Layer:
    return replace(layer, jaxpr=widen(layer.jaxpr))


def _flat(graph: LayerGraph) -> Callable[..., list[Any]]:
    """The whole step on one device."""
    results, update = reference_results(graph), graph.step.update

    def flat(*leaves: Any) -> list[Any]:
        found, grads = results(*leaves)
        return list(jax.core.eval_jaxpr(update.jaxpr, update.consts, *leaves, *found, *grads))

    return flat


def widen(jaxpr: Any) -> ClosedJaxpr:
    """A closed jaxpr without 16-bit floats at its edges or in its equations, rules of one's own excepted."""
    inner, consts = open_jaxpr(jaxpr), tuple(getattr(jaxpr, "consts", ()))
    shapes = []
    for var in inner.invars:
        shape = shape_of(var)
        shapes.append(jax.ShapeDtypeStruct(shape.shape, wide_dtype(shape.dtype), weak_type=shape.weak_type))
    return jax.make_jaxpr(lambda *args: _evaluate(inner, consts, args))(*shapes)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, map(wide_array, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return env[atom]
        return np.asarray(atom.val).astype(WIDE) if is_narrow(shape_of(atom).dtype) else atom.val

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _apply(eqn, list(map(read, eqn.invars))), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _apply(eqn: Any, ins: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in INLINED:
        body = next(inner_jaxprs(eqn))
        return _evaluate(open_jaxpr(body), getattr(body, "consts", ()), ins)
    touched = any(is_narrow(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)) or any(inner_jaxprs(eqn))
    own = name.startswith("custom_")
    if not touched or name in ISLANDS or (own and not all(map(_moves, eqn.outvars))):
        return _island(eqn, ins)
    if own:
        return list((_own_jvp if name == "custom_jvp_call" else _own_vjp)(eqn)(*ins))
    params = {key: _wide_param(value) for key, value in eqn.params.items()}
    outs = eqn.primitive.bind(*ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _alone(eqn: Any) -> Callable[..., list[Any]]:
    """One equation as it was traced, as a function of its operands."""
    inputs = [fresh_like(v) for v in eqn.invars]  # one each: the same variable may be several operands
    jaxpr = close(inputs, eqn.outvars, [eqn.replace(invars=inputs)]).jaxpr
    return lambda *operands: list(jax.core.eval_jaxpr(jaxpr, (), *operands))


def _island(eqn: Any, ins: list[Any]) -> list[Any]:
    """One equation as it was traced, its inputs cast to the types it knows and its outputs widened."""
    given = [
        jnp.asarray(x, v.aval.dtype) if is_narrow(v.aval.dtype) else x for v, x in zip(eqn.invars, ins, strict=True)
    ]
    return list(map(wide_array, _alone(eqn)(*given)))


def _moves(atom: Any) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _run(jaxpr: Any, *args: Any) -> list[Any]:
    return list(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(args)))


def _body(eqn: Any) -> Callable[..., list[Any]]:
    body = next(inner_jaxprs(eqn))
    return lambda *operands: _evaluate(open_jaxpr(body), getattr(body, "consts", ()), operands)


def _of_moving(eqn: Any) -> tuple[list[int], list[Any], Callable[..., list[Any]]]:
    """Places of the operands that have a derivative, shapes of all, and the equation as a function of those of them."""
    moving = [i for i, v in enumerate(eqn.invars) if _moves(v)]
    alone = _alone(eqn)

    def function(operands: Sequence[Any], *own: Any) -> list[Any]:
        full = list(operands)
        for i, value in zip(moving, own, strict=True):
            full[i] = value
        return alone(*full)

    return moving, [shape_of(v) for v in eqn.invars], function


def _own_jvp(eqn: Any) -> Callable[..., list[Any]]:
    """A call with a forward rule of its own: what the rule computes, in 32 bits."""
    moving, shapes, function = _of_moving(eqn)
    wide = jax.custom_jvp(_body(eqn))

    def push(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(lambda *own: function(operands, *own), [operands[i] for i in moving], list(tangents))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        pushed = widen(jax.make_jaxpr(push)(shapes, [shapes[i] for i in moving]))
        outs = _run(pushed, list(primals), [tangents[i] for i in moving])
        return outs[: len(eqn.outvars)], outs[len(eqn.outvars) :]

    wide.defjvp(rule)
    return wide


def _own_vjp(eqn: Any) -> Callable[..., list[Any]]:
    """A call with a backward rule of its own: what its two halves compute, in 32 bits."""
    moving, shapes, function = _of_moving(eqn)
    wide, count, trees = jax.custom_vjp(_body(eqn)), len(eqn.outvars), list[Any]()

    def forward(operands: Sequence[Any]) -> Any:
        outs, pull = jax.vjp(lambda *own: function(operands, *own), *(operands[i] for i in moving))
        leaves, tree = jax.tree.flatten(pull)
        trees[:] = [tree]
        return outs, leaves

    def run_forward(*operands: Any) -> Any:
        outs = _run(widen(jax.make_jaxpr(forward)(shapes)), list(operands))
        return outs[:count], outs[count:]

    def run_backward(leaves: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        narrow = jax.make_jaxpr(forward)(shapes).out_avals
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in narrow]
        pulled = jax.make_jaxpr(lambda left, outs: jax.tree.unflatten(trees[0], left)(outs))(
            given[count:], given[:count]
        )
        grads: list[Any] = [None] * len(shapes)
        for i, grad in zip(moving, _run(widen(pulled), list(leaves), list(cotangents)), strict=True):
            grads[i] = grad
        return tuple(grads)

    wide.defvjp(run_forward, run_backward)
    return wide


def _wide_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return widen(value)
    if isinstance(value, Jaxpr):
        return open_jaxpr(widen(value))
    if isinstance(value, tuple) and any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value):
        return tuple(map(_wide_param, value))
    return WIDE if isinstance(value, np.dtype) and is_narrow(value) else value
