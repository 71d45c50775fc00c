"""Grouped convolutions where tensor ways split nothing: their examples are spread over these ways as well.

XLA's partitioner gets the gradient of a grouped convolution's weight wrong where several devices hold the same
examples: it shares the work among them and then adds up the results of all, so that with examples split over 4 of 8
devices the gradient is twice what it should be (seen with jaxlib 0.10.2 and 0.12.0, on one input feature a group and
on several). Where every device has examples of its own it is right, and no work is done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.dim_classes import ClassBuilder
from uniap_jax.core.dim_shape_rules import shape_of
from uniap_jax.core.dim_walk import Walker, enter
from uniap_jax.core.dims import TensorSplit
from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, fresh_like
from uniap_jax.core.jaxprs import inner_jaxprs, open_jaxpr

Path = tuple[int, ...]


def is_grouped(eqn: JaxprEqn) -> bool:
    """Whether an equation is a convolution of groups of features."""
    return eqn.primitive.name == "conv_general_dilated" and eqn.params["feature_group_count"] > 1


def _has_groups(jaxpr: Any) -> bool:
    return any(is_grouped(e) or any(map(_has_groups, inner_jaxprs(e))) for e in open_jaxpr(jaxpr).eqns)


def spread_groups(layer: Layer, split: TensorSplit, mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> Layer:
    """The layer with the input of every grouped convolution whose features stay whole split over `axes`.

    Args:
        layer: as traced.
        split: what the tensor ways split in it.
        mesh: of its stage.
        axes: of its batch, and of its tensor ways.
    """
    if not _has_groups(layer.jaxpr):
        return layer
    whole = _whole_features(layer, split)

    def pinned(eqn: JaxprEqn, path: Path) -> list[JaxprEqn]:
        if not is_grouped(eqn) or path not in whole or isinstance(eqn.invars[0], Literal):
            return [eqn]
        x, batch = eqn.invars[0], eqn.params["dimension_numbers"].lhs_spec[0]
        spec = [axes if d == batch else PartitionSpec.UNCONSTRAINED for d in range(len(shape_of(x)))]
        laid = fresh_like(x)
        pin = _pin(x.aval, NamedSharding(mesh, PartitionSpec(*spec)))
        return [pin.replace(invars=[x], outvars=[laid]), eqn.replace(invars=[laid, *eqn.invars[1:]])]

    return replace(layer, jaxpr=_mapped(layer.jaxpr, pinned, ()))


def _whole_features(layer: Layer, split: TensorSplit) -> set[Path]:
    """Where the grouped convolutions are whose features are not split; by the equations that lead to them."""
    builder = ClassBuilder()
    walker = Walker(builder)
    held = enter(builder, layer.jaxpr, len(layer.params), len(layer.operands))
    walker.body(layer.jaxpr, held)
    nodes = [h.dims[d] for h, d in zip(held, split.params, strict=False) if h.dims is not None and d is not None]
    taken = {builder.root(n) for n in nodes if n is not None}
    found = set()
    for path, (ins, _) in walker.seen.items():
        eqn = _at(layer.jaxpr, path)
        if eqn is not None and is_grouped(eqn):
            dims = ins[1].dims or ()
            node = dims[eqn.params["dimension_numbers"].rhs_spec[0]] if dims else None
            if node is None or builder.root(node) not in taken:
                found.add(path)
    return found


def _at(jaxpr: Any, path: Path) -> JaxprEqn | None:
    """The equation that a path leads to; None within bodies of several branches."""
    eqn: JaxprEqn = open_jaxpr(jaxpr).eqns[path[0]]
    if len(path) == 1:
        return eqn
    bodies = list(inner_jaxprs(eqn))
    return _at(bodies[0], path[1:]) if len(bodies) == 1 else None


def _mapped(jaxpr: Any, change: Callable[[JaxprEqn, Path], list[JaxprEqn]], path: Path) -> Any:
    """A jaxpr with every equation changed, those in bodies too."""
    eqns = []
    for i, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        here = (*path, i)
        params = {k: _mapped(v, change, here) if _is_body(v) else v for k, v in eqn.params.items()}
        eqns += change(eqn.replace(params=params) if any(map(_is_body, params.values())) else eqn, here)
    opened = open_jaxpr(jaxpr).replace(eqns=eqns)
    return jaxpr.replace(jaxpr=opened) if isinstance(jaxpr, ClosedJaxpr) else opened


def _is_body(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr)) and _has_groups(value)


def _pin(aval: Any, sharding: NamedSharding) -> JaxprEqn:
    """The equation that pins an array."""
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    eqn: JaxprEqn = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, sharding))(shape).jaxpr.eqns[-1]
    return eqn
