"""Which residuals of a stage its backward makes again instead of getting them from the forward."""

from __future__ import annotations

from uniap_jax.core.jax_compat import Var
from uniap_jax.core.jaxprs import Tape, variables
from uniap_jax.core.kernels import CHEAP
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.stages import StageSpec

PARAM, STATE, BATCH, READ = 1, 2, 4, 8


def rebuildable(layout: Layout, spec: StageSpec, tape: Tape, emitted: int) -> tuple[Var, ...]:
    """Residuals that are cheap functions of parameters and state, or of batch and state, and that nobody returns."""
    operands = [layout.graph.operands[o].kind for o in spec.operands]
    outside = [STATE if k == "state" else BATCH for k in operands]
    origin = [PARAM] * len(spec.params) + outside + [READ] * len(spec.reads)
    mask: dict[Var, int] = dict(zip(tape.invars, origin, strict=True))
    mask.update(dict.fromkeys(tape.consts, 0))
    for eqn in tape.eqns:
        union = 0 if eqn.primitive.name in CHEAP else READ
        for v in variables(eqn.invars):
            union |= mask[v]
        mask.update(dict.fromkeys(eqn.outvars, union))
    allowed = [m for m in range(READ) if not (m & PARAM and m & BATCH)]
    given = {*tape.invars, *tape.consts, *variables(tape.outvars[:emitted])}
    residuals = dict.fromkeys(variables(tape.outvars[emitted:]))
    return tuple(v for v in residuals if v not in given and mask[v] in allowed)
