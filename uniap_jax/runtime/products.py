"""Products of matrices without a transpose after them.

JAX writes the gradient of a weight as a product and its transpose. Compilers fold the transpose into the product, but
not where the sum over devices comes between the two: then every gradient is turned in memory, which costs as much as
adding it up.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from uniap_jax.core.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn
from uniap_jax.core.jaxprs import open_jaxpr, variables


def without_transposes(jaxpr: Any) -> Any:
    """The same computation; a transpose that swaps the two sides of a product becomes the product of the other order.

    Args:
        jaxpr: closed or open; loops and checkpoints inside it are rewritten too.
    """
    inner = open_jaxpr(jaxpr)
    new = inner.replace(eqns=_rewritten(inner))
    return new if type(new) is type(jaxpr) else ClosedJaxpr(new, jaxpr.consts)


def _rewritten(jaxpr: Any) -> list[JaxprEqn]:
    uses = Counter([*(v for e in jaxpr.eqns for v in variables(e.invars)), *variables(jaxpr.outvars)])
    products = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "dot_general"}
    found: list[JaxprEqn] = []
    replaced: set[int] = set()
    for eqn in jaxpr.eqns:
        source = next(iter(variables(eqn.invars)), None)
        product = products.get(source) if source is not None and eqn.primitive.name == "transpose" else None
        once = product is not None and uses[product.outvars[0]] == 1
        if product is not None and once and eqn.params["permutation"] == _swapping(product):
            found.append(_swapped(product, eqn))
            replaced.add(id(product))
        else:
            found.append(_inside(eqn))
    return [e for e in found if id(e) not in replaced]


def _swapping(product: JaxprEqn) -> tuple[int, ...]:
    """The permutation that exchanges what the left and the right side contribute to the result."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    rank, shared = len(product.outvars[0].aval.shape), len(batch)  # type: ignore[attr-defined]
    left = len(product.invars[0].aval.shape) - len(contracted) - shared  # type: ignore[attr-defined]
    return (*range(shared), *range(shared + left, rank), *range(shared, shared + left))


def _swapped(product: JaxprEqn, transpose: JaxprEqn) -> JaxprEqn:
    contracted, batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    params = {
        **product.params,
        "dimension_numbers": (contracted[::-1], batch[::-1]),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    new: JaxprEqn = product.replace(invars=product.invars[::-1], outvars=transpose.outvars, params=params)
    return new


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    body = eqn.params.get("jaxpr")
    if not isinstance(body, (Jaxpr, ClosedJaxpr)):
        return eqn
    new: JaxprEqn = eqn.replace(params={**eqn.params, "jaxpr": without_transposes(body)})
    return new
