"""Which residuals of a stage its backward makes again instead of getting them from the forward."""

from __future__ import annotations

from uniap_jax.core.jax_compat import JaxprEqn, Var, shape_of
from uniap_jax.core.jaxprs import Tape, moved, variables
from uniap_jax.core.kernels import CHEAP
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.stages import StageSpec

PARAM, STATE, BATCH, READ = 1, 2, 4, 8


def rebuildable(layout: Layout, spec: StageSpec, tape: Tape, emitted: int) -> tuple[Var, ...]:
    """Residuals that nobody returns and that cost next to nothing to make again.

    Cheap functions of parameters and state, or of batch and state, and what is a read in another shape: the read itself
    stays on its stage until the backward anyway.
    """
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
    reshaped = moved(_in_place(tape, spec), tape.invars[len(origin) - len(spec.reads) :])
    return tuple(v for v in residuals if v not in given and (mask[v] in allowed or v in reshaped))


def _in_place(tape: Tape, spec: StageSpec) -> list[JaxprEqn]:
    """Equations but those that lay a read out otherwise than it arrives: to make such again would take a collective."""
    arrives = dict(zip(tape.invars[len(tape.invars) - len(spec.reads) :], spec.arrives, strict=True))

    def stays(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name != "sharding_constraint":
            return True
        (of,) = eqn.invars
        return of not in arrives or arrives[of].is_equivalent_to(eqn.params["sharding"], shape_of(of).ndim)

    return [eqn for eqn in tape.eqns if stays(eqn)]
