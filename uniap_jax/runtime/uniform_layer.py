"""Forward and backward of one layer as two functions, with exactly the arrays that go from one to the other.

What the forward pass keeps is split three ways: arrays that are inputs of the layer are handed in again, arrays made
from the batch and constants alone are made again (a causal mask costs nothing to build and much to keep), the rest is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from uniap_jax.core.jax_compat import ClosedJaxpr, Literal
from uniap_jax.core.jaxprs import close, inner_jaxprs, live_eqns, open_jaxpr, variables
from uniap_jax.runtime.products import without_transposes
from uniap_jax.runtime.programs import is_differentiable

RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
"""Not made again: drawing is dear, and what is kept of it is small."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPass:
    """A layer, differentiated.

    Attributes:
        moving: for each input, whether it has a gradient.
        forward: `forward(inputs) -> (outputs, kept)`.
        backward: `backward(inputs, kept, gradients of the outputs) -> gradients of the moving inputs`; of outputs and
            inputs that have none, None. Reads of `inputs` what is not kept.
        kept: shapes of what is kept.
        reads_back: which inputs `backward` reads.
    """

    moving: tuple[bool, ...]
    forward: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    reads_back: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Residuals:
    """Where each residual of the backward pass comes from: ("input", i), ("rebuilt", i), ("kept", i)."""

    origin: tuple[tuple[str, int], ...]
    kept: tuple[int, ...]
    rebuild: ClosedJaxpr


def differentiate(body: ClosedJaxpr, *, keep: str, trained: Sequence[bool], shared: Sequence[bool]) -> LayerPass:
    """Splits a layer into forward and backward.

    Args:
        body: of the layer, without constants.
        keep: "all", "dots" or "inputs".
        trained: which inputs have a gradient that is wanted.
        shared: which inputs are there again at the backward pass and need not be kept.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in body.in_avals]
    moving = tuple(t and is_differentiable(a.dtype) for t, a in zip(trained, avals, strict=True))
    smooth = [is_differentiable(a.dtype) for a in body.out_avals]
    count = len(smooth)
    trees: list[Any] = []

    def linearized(*inputs: Any) -> list[Any]:
        function = _moving_only(body, keep, moving, smooth, inputs)
        outs, pull, rough = jax.vjp(function, *_where(inputs, moving), has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        trees[:] = [tree]
        smooth_outs, rough_outs = iter(outs), iter(rough)
        return [*(next(smooth_outs) if s else next(rough_outs) for s in smooth), *leaves]

    traced = jax.make_jaxpr(linearized)(*avals)
    tree = trees[0]
    residuals = _sort_residuals(traced, count, moving, shared)
    leaf_avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.out_avals[count:]]
    out_avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a, s in zip(body.out_avals, smooth, strict=True) if s]
    pull = jax.make_jaxpr(lambda leaves, cts: jax.tree.unflatten(tree, leaves)(list(cts)))(leaf_avals, out_avals)
    pulled = without_transposes(pull)

    def forward(inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = _evaluate(traced, inputs)
        return values[:count], [values[count + i] for i in residuals.kept]

    def backward(inputs: Sequence[Any], kept: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        rebuilt = _evaluate(residuals.rebuild, inputs)
        places = {"input": inputs, "rebuilt": rebuilt, "kept": kept}
        leaves = [places[kind][i] for kind, i in residuals.origin]
        found = iter(_evaluate(pulled, [*leaves, *_where(gradients, smooth)]))
        return [next(found) if m else None for m in moving]

    read = {i for kind, i in residuals.origin if kind == "input"}
    return LayerPass(
        moving=moving,
        forward=forward,
        backward=backward,
        kept=tuple(leaf_avals[i] for i in residuals.kept),
        reads_back=frozenset(read | _needed(residuals.rebuild)),
    )


def _moving_only(
    body: ClosedJaxpr, keep: str, moving: Sequence[bool], smooth: Sequence[bool], inputs: Sequence[Any]
) -> Callable[..., tuple[list[Any], list[Any]]]:
    def compute(*values: Any) -> list[Any]:
        return list(jax.core.eval_jaxpr(open_jaxpr(body), body.consts, *values))

    if keep == "inputs":
        compute = jax.checkpoint(compute, prevent_cse=False)
    elif keep == "dots":
        compute = jax.checkpoint(compute, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)

    def run(*values: Any) -> tuple[list[Any], list[Any]]:
        moved = iter(values)
        outs = compute(*(next(moved) if m else x for m, x in zip(moving, inputs, strict=True)))
        return _where(outs, smooth), [o for o, s in zip(outs, smooth, strict=True) if not s]

    return run


def _where(values: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [v for v, c in zip(values, chosen, strict=True) if c]


def _evaluate(jaxpr: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    return list(jax.core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr.consts, *inputs))


def _sort_residuals(traced: ClosedJaxpr, count: int, moving: Sequence[bool], shared: Sequence[bool]) -> _Residuals:
    jaxpr = open_jaxpr(traced)
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    stirred = {v for v, m, s in zip(jaxpr.invars, moving, shared, strict=True) if m or not s}
    for eqn in jaxpr.eqns:
        if _draws(eqn) or any(v in stirred for v in variables(eqn.invars)):
            stirred.update(eqn.outvars)
    origin: list[tuple[str, int]] = []
    kept: list[int] = []
    place: dict[Any, int] = {}
    rebuilt: dict[Any, int] = {}
    for i, atom in enumerate(jaxpr.outvars[count:]):
        key = id(atom) if isinstance(atom, Literal) else atom
        if not isinstance(atom, Literal) and atom in position and shared[position[atom]]:
            origin.append(("input", position[atom]))
        elif isinstance(atom, Literal) or atom not in stirred:
            origin.append(("rebuilt", rebuilt.setdefault(key, len(rebuilt))))
        else:
            if key not in place:
                place[key] = len(kept)
                kept.append(i)
            origin.append(("kept", place[key]))
    atoms = {(id(a) if isinstance(a, Literal) else a): a for a in jaxpr.outvars[count:]}
    wanted = [atoms[k] for k in rebuilt]
    eqns, _ = live_eqns([e for e in jaxpr.eqns if not any(v in stirred for v in e.outvars)], wanted)
    program = close([*jaxpr.constvars, *jaxpr.invars], wanted, eqns)
    consts = list(traced.consts)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.in_avals]
    bound = jax.make_jaxpr(lambda *xs: jax.core.eval_jaxpr(open_jaxpr(program), (), *consts, *xs))(*shapes)
    return _Residuals(origin=tuple(origin), kept=tuple(kept), rebuild=bound)


def _draws(eqn: Any) -> bool:
    """Whether an equation draws random bits, at any depth."""
    return eqn.primitive.name in RANDOM or any(_draws(e) for j in inner_jaxprs(eqn) for e in open_jaxpr(j).eqns)


def _needed(program: ClosedJaxpr) -> set[int]:
    """Inputs that a program reads."""
    jaxpr = open_jaxpr(program)
    read = {v for e in jaxpr.eqns for v in variables(e.invars)} | set(variables(jaxpr.outvars))
    return {i for i, v in enumerate(jaxpr.invars) if v in read}
