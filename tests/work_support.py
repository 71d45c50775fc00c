"""One function as a layer."""

import jax
import jax.numpy as jnp

from uniap_jax.core.graph import Layer
from uniap_jax.core.jaxprs import signature, total_flops


def layer(function, params, reads, dtype=jnp.float32):
    """Of parameters and reads of these shapes."""
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in (*params, *reads)]
    jaxpr = jax.make_jaxpr(function)(*shapes)
    return Layer(
        index=0,
        name="layer",
        source="",
        jaxpr=jaxpr,
        params=tuple(range(len(params))),
        operands=(),
        reads=tuple(range(len(reads))),
        writes=(0,),
        signature=signature(jaxpr),
        flops=total_flops(jaxpr),
    )
