"""Runs layers: the one place where a layer's jaxpr is evaluated under its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from uniap_jax.core.graph import Layer
from uniap_jax.core.jaxprs import open_jaxpr
from uniap_jax.core.sharding import LayerSharding
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.programs import constrain


def layer_function(layer: Layer, sharding: LayerSharding, keep: str, mesh: Mesh) -> Callable[..., list[Any]]:
    """A layer as a function of (params, operands, reads), laid out as its strategy says.

    Args:
        layer: whose jaxpr is evaluated.
        sharding: of its arrays.
        keep: what its forward pass keeps for the backward pass.
        mesh: of its stage.
    """
    jaxpr = open_jaxpr(layer.jaxpr)

    def compute(*inputs: Any) -> list[Any]:
        with jax.named_scope(f"layer_{layer.index}"):
            return list(jax.core.eval_jaxpr(jaxpr, layer.jaxpr.consts, *inputs))

    if keep == "inputs":
        compute = jax.checkpoint(compute)
    elif keep == "dots":
        compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.dots_saveable)
    specs = (*sharding.params, *sharding.operands, *sharding.reads)

    def run(params: Sequence[Any], operands: Sequence[Any], reads: Sequence[Any]) -> list[Any]:
        inputs = [constrain(a, mesh, s) for a, s in zip((*params, *operands, *reads), specs, strict=True)]
        return [constrain(a, mesh, s) for a, s in zip(compute(*inputs), sharding.writes, strict=True)]

    return run


def combine(pieces: Any, reduction: str, batch_dim: int | None) -> Any:
    """The whole batch's result from those of its micro-batches.

    Args:
        pieces: [micro-batches, ...] stacked results.
        reduction: "mean", "sum", "concat" or "same".
        batch_dim: of one piece, for "concat".
    """
    if reduction == "mean":
        wide = pieces.astype(jnp.promote_types(pieces.dtype, jnp.float32))
        return wide.mean(axis=0).astype(pieces.dtype)
    if reduction == "sum":
        return pieces.sum(axis=0, dtype=pieces.dtype)
    if reduction == "concat" and batch_dim is not None:
        ordered = jnp.moveaxis(pieces, 0, batch_dim)
        shape = ordered.shape
        return ordered.reshape(*shape[:batch_dim], shape[batch_dim] * shape[batch_dim + 1], *shape[batch_dim + 2 :])
    return pieces[-1]


def gradient_weight(layout: Layout) -> float:
    """What one micro-batch's gradient counts for in the whole batch's."""
    return 1.0 / layout.plan.num_microbatches if layout.graph.reductions[0] == "mean" else 1.0


def accumulator_dtype(dtype: Any) -> Any:
    """Gradients of 16 bits are added up in 32."""
    return jnp.promote_types(dtype, jnp.float32)
