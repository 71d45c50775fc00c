"""A layer as a function, under what it keeps and how it is split, and its forward and backward as traced programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import Literal


def layer_function(layer: Layer, keep: str) -> Callable[..., list[Any]]:
    """`f(params, operands, reads) -> writes` of a layer under a policy of what the forward keeps."""

    def plain(params: Sequence[Any], operands: Sequence[Any], reads: Sequence[Any]) -> list[Any]:
        return list(jax.core.eval_jaxpr(layer.jaxpr.jaxpr, layer.jaxpr.consts, *params, *operands, *reads))

    if keep == "all":
        return plain
    policy = jax.checkpoint_policies.dots_saveable if keep == "dots" else None
    return jax.checkpoint(plain, policy=policy)


def is_float(aval: Any) -> bool:
    """Whether a value has a gradient."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def layer_avals(layer: Layer) -> tuple[list[Any], list[Any], list[Any]]:
    """Shapes of a layer's parameters, operands and reads."""
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in layer.jaxpr.in_avals]
    p, o = len(layer.params), len(layer.operands)
    return avals[:p], avals[p : p + o], avals[p + o :]


def traced_vjp(layer: Layer, keep: str) -> tuple[Any, Any, list[int | None]]:
    """Forward `(*inputs) -> (*writes, *residuals)`, backward `(*residuals, *cotangents) -> (*grads)`.

    The list says for each residual which input it is, None where it is computed.
    """
    function, groups = layer_function(layer, keep), layer_avals(layer)
    params, operands, reads = groups
    tree: list[Any] = []

    def forward(params: list[Any], operands: list[Any], reads: list[Any]) -> tuple[list[Any], list[Any]]:
        moving = [r for r in reads if is_float(r)]

        def of_floats(p: list[Any], r: list[Any]) -> list[Any]:
            it = iter(r)
            outs = function(p, operands, [next(it) if is_float(x) else x for x in reads])
            return [o for o in outs if is_float(o)]

        outs, pull = jax.vjp(of_floats, list(params), moving)
        leaves, structure = jax.tree.flatten(pull)
        tree[:] = [structure, outs]
        full = iter(outs)
        writes = [next(full) if is_float(a) else jnp.zeros(a.shape, a.dtype) for a in layer.jaxpr.out_avals]
        return writes, leaves

    traced = jax.make_jaxpr(forward)(params, operands, reads)
    structure, outs = tree[0], [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in tree[1]]
    number = len(layer.jaxpr.out_avals)
    ins = {v: i for i, v in enumerate(traced.jaxpr.invars)}
    residuals = traced.jaxpr.outvars[number:]
    where = [None if isinstance(v, Literal) else ins.get(v) for v in residuals]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in residuals]

    def backward(leaves: list[Any], cotangents: list[Any]) -> Any:
        return jax.tree.unflatten(structure, leaves)(cotangents)

    return traced, jax.make_jaxpr(backward)(avals, outs), where
