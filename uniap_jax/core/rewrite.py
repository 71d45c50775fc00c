"""What sharded parameters alone do not give a layer under tensor parallelism: one backward reduction per input.

XLA reduces the gradient of an activation once per projection that reads it (q, k, v; gate, up). Here projections of
one input whose outputs are sharded become one product with the weights laid side by side on every device, as
Megatron-LM does by hand; a fused projection (q, k and v in one weight) is first cut into its pieces, so that every
device holds its heads of each. The arithmetic of every output element is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.dim_classes import View
from uniap_jax.core.dim_shape_rules import shape_of
from uniap_jax.core.dims import TensorSplit
from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import flatten, open_jaxpr
from uniap_jax.core.padding import filled, padded_layer
from uniap_jax.core.rewrite_pieces import Held, evaluate, follow, per_piece

_SAME = ("convert_element_type", "copy", "copy_p", "transpose", "reshape")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """Over what a layer's classes are sharded: mesh, axes, and how many ways in all."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    degree: int

    def lay(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Pins one dimension to the tensor axes (None: no dimension), the others whole."""
        spec = PartitionSpec(*[self.axes if d == dim else None for d in range(x.ndim)])
        laid: jax.Array = lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return laid


def tensor_rewrite(layer: Layer, split: TensorSplit, ways: Ways) -> ClosedJaxpr:
    """The layer's jaxpr as the ways over which its classes are sharded compute it.

    Takes and returns what `layer.jaxpr` does. Projections are merged, and dimensions that do not divide are made
    longer inside. Where there is nothing to do it is `layer.jaxpr` itself.
    """
    if split.reason or not split.pads:
        return merged(layer, split, ways)
    inner = merged(padded_layer(layer, split.pads), split, ways)

    def run(*args: jax.Array) -> list[jax.Array]:
        return list(jax.core.eval_jaxpr(inner.jaxpr, inner.consts, *_filled(split, args, ways)))

    return jax.make_jaxpr(run)(*_shapes(layer))


def _filled(split: TensorSplit, args: Sequence[jax.Array], ways: Ways) -> list[jax.Array]:
    """The arguments of a layer, parameters filled up and moved from where they are stored to where they are used.

    A parameter is filled up while it is split along another dimension, which moves nothing; then the devices exchange
    parts of it, and of its gradient on the way back. Without the pins XLA gathers it.
    """
    given = list(args)
    for i, dim in enumerate(split.stored):
        if pads := [p for p in split.pads if p.param == i]:
            longer = ways.lay(filled(ways.lay(args[i], dim), pads), dim)
            given[i] = ways.lay(longer, pads[0].dim)
    return given


def merged(layer: Layer, split: TensorSplit, ways: Ways) -> ClosedJaxpr:
    """The layer's jaxpr with projections merged for the ways over which its classes are sharded.

    Args:
        layer: with its dimensions as long as `split.pads` says.
        split: what is sharded.
        ways: over what.
    """
    if split.reason or not split.chosen:
        return layer.jaxpr
    evaluator = _Evaluator(ways)

    def run(*args: jax.Array) -> list[jax.Array]:
        return [h.whole() for h in evaluator.body(layer.jaxpr, _inputs(split, args, ways))]

    rewritten = jax.make_jaxpr(run)(*_shapes(layer))
    return rewritten if evaluator.merged else layer.jaxpr


def _shapes(layer: Layer) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in layer.jaxpr.jaxpr.invars]


def _inputs(split: TensorSplit, args: Sequence[jax.Array], ways: Ways) -> list[Held]:
    """The arguments of a layer, parameters with the dimension that is sharded, fused ones in pieces."""
    views, held = {v.param: v for v in split.views}, []
    for i, x in enumerate(args):
        if i in views:
            held.append(_cut(x, views[i], split.stored[i], ways))
        else:
            param = i < len(split.params)
            held.append(Held(arrays=(x,), sharded=split.params[i] if param else None, param=param))
    return held


def _cut(x: jax.Array, view: View, stored: int | None, ways: Ways) -> Held:
    """A fused parameter in pieces, each sharded.

    It is seen as (pieces, n) while it is split along another dimension, or whole; so the cut moves nothing. Then the
    devices exchange parts of it, and of its gradient on the way back. Without the pins XLA cuts it across the pieces
    first and then shuffles them.
    """
    d = view.dim
    kept = stored if stored is None or stored < d else stored + 1
    seen = ways.lay(x, stored).reshape(*x.shape[:d], view.outer, -1, *x.shape[d + 1 :])
    seen = ways.lay(ways.lay(seen, kept), d + 1)
    pieces = tuple(lax.index_in_dim(seen, i, axis=d, keepdims=False) for i in range(view.outer))
    return Held(arrays=pieces, joined=d, sharded=d, param=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """A product of an activation with a weight whose free dimension is sharded.

    Attributes:
        eqn: the product.
        x: the activation.
        x_dims: its summed dimensions, in order.
        weight: the weight.
        w_dims: its summed dimensions, in the order of `x_dims`.
        left: whether the weight is the left operand, whose dimensions come first in the result.
    """

    eqn: JaxprEqn
    x: Var
    x_dims: tuple[int, ...]
    weight: Held
    w_dims: tuple[int, ...]
    left: bool

    @property
    def free(self) -> list[int]:
        """Dimensions of the weight that stay."""
        return [d for d in range(self.weight.arrays[0].ndim) if d not in self.w_dims]


class _Evaluator:
    """Evaluates jaxprs with projections of one input merged; weights are prepared before anything reads them."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self.merged = 0

    def body(self, jaxpr: Any, inputs: Sequence[Held]) -> list[Held]:
        tape = flatten(jaxpr)
        env: dict[Any, Held] = {v: Held(arrays=(c,)) for v, c in tape.consts.items()}
        env.update(zip(tape.invars, inputs, strict=True))
        weights = _weight_eqns(tape.eqns, {v for v, h in zip(tape.invars, inputs, strict=True) if h.param})
        later = [e for i, e in enumerate(tape.eqns) if i not in weights]
        for i in sorted(weights):
            self._plain(tape.eqns[i], env)
        columns = self._columns(later, env)
        for i, eqn in enumerate(later):
            if eqn.outvars and eqn.outvars[0] in env:
                continue
            if i in columns and (len(columns[i]) > 1 or columns[i][0].weight.joined is not None):
                env.update(self._merge(columns[i], env))
            else:
                self._eqn(eqn, env)
        return [_read(env, v) for v in tape.outvars]

    def _columns(self, eqns: Sequence[JaxprEqn], env: dict[Any, Held]) -> dict[int, list[Column]]:
        """Groups of products that read one activation alike, by the position of each of their products."""
        same: dict[Any, Any] = {}
        names: dict[Any, Any] = {}
        groups: dict[Any, list[Column]] = {}
        where: dict[int, list[Column]] = {}
        for i, eqn in enumerate(eqns):
            if eqn.primitive.name in _SAME and not isinstance(eqn.invars[0], Literal):
                made = (eqn.primitive.name, names.get(eqn.invars[0], id(eqn.invars[0])), str(eqn.params))
                names[eqn.outvars[0]] = same.setdefault(made, id(eqn.outvars[0]))
            column = _column(eqn, env)
            if column is not None:
                alike = str([eqn.params[k] for k in ("precision", "preferred_element_type")])
                key = (names.get(column.x, id(column.x)), column.x_dims, alike, str(column.weight.arrays[0].dtype))
                where[i] = groups.setdefault(key, [])
                where[i].append(column)
        return where

    def _merge(self, columns: list[Column], env: dict[Any, Held]) -> dict[Any, Held]:
        """One product with all weights side by side; every device gets its part of each."""
        self.merged += 1
        first, ways = columns[0], self._ways
        flat = [_beside(w, c, ways.degree) for c in columns for w in c.weight.arrays]
        weight = ways.lay(jnp.concatenate(flat, -1), len(first.x_dims))
        x, n = _read(env, first.x).whole(), len(first.x_dims)
        params = first.eqn.params
        out = lax.dot_general(
            x,
            weight,
            ((first.x_dims, tuple(range(n))), ((), ())),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        results, start = {}, 0
        for c in columns:
            arrays = []
            for w in c.weight.arrays:
                size = w.size // (ways.degree * math.prod(w.shape[d] for d in c.w_dims))
                arrays.append(_apart(lax.slice_in_dim(out, start, start + size, axis=-1), w, c, ways.degree))
                start += size
            joined = None
            if c.weight.joined is not None:
                joined = c.free.index(c.weight.joined) + (0 if c.left else x.ndim - n)
            results[c.eqn.outvars[0]] = Held(arrays=tuple(arrays), joined=joined)
        return results

    def _eqn(self, eqn: JaxprEqn, env: dict[Any, Held]) -> None:
        ins = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in ("checkpoint", "remat2", "remat"):
            env.update(zip(eqn.outvars, self._remat(eqn, ins), strict=True))
        elif eqn.primitive.name == "scan":
            env.update(zip(eqn.outvars, self._scan(eqn, ins), strict=True))
        else:
            self._plain(eqn, env)

    def _plain(self, eqn: JaxprEqn, env: dict[Any, Held]) -> None:
        """The equation as it stands, on pieces where it can be."""
        ins = [_read(env, v) for v in eqn.invars]
        outs = per_piece(eqn, ins) if any(h.joined is not None for h in ins) else None
        if outs is None:
            outs = [Held(arrays=(x,)) for x in evaluate(eqn, [h.whole() for h in ins])]
        if all(h.param or isinstance(v, Literal) for h, v in zip(ins, eqn.invars, strict=True)) and eqn.invars:
            outs = [replace(h, param=True, sharded=follow(eqn, ins, h)) for h in outs]
        env.update(zip(eqn.outvars, outs, strict=True))

    def _remat(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        body, known = eqn.params["jaxpr"], [replace(h, arrays=()) for h in ins]

        def run(*arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
            held = [replace(h, arrays=a) for h, a in zip(known, arrays, strict=True)]
            return [h.whole() for h in self.body(body, held)]

        kept = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return [Held(arrays=(x,)) for x in kept(*[h.arrays for h in ins])]

    def _scan(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        body = open_jaxpr(eqn.params["jaxpr"])
        ranks = [(len(shape_of(v)), len(shape_of(w))) for v, w in zip(eqn.invars, body.invars, strict=True)]
        scanned = sum(outer != inner for outer, inner in ranks)
        kept = [len(shape_of(v)) == len(shape_of(w)) for v, w in zip(eqn.outvars, body.outvars, strict=True)]
        carries = kept.count(True)
        first = len(ins) - scanned - carries
        consts, carry, xs = ins[:first], ins[first : first + carries], ins[first + carries :]

        def turn(state: list[jax.Array], rows: list[tuple[jax.Array, ...]]) -> tuple[list[jax.Array], list[jax.Array]]:
            now = [
                Held(arrays=r, param=h.param, joined=_inner(h.joined), sharded=_inner(h.sharded))
                for r, h in zip(rows, xs, strict=True)
            ]
            outs = self.body(eqn.params["jaxpr"], [*consts, *(Held(arrays=(s,)) for s in state), *now])
            return [h.whole() for h in outs[:carries]], [h.whole() for h in outs[carries:]]

        last, stacked = lax.scan(
            turn,
            [h.whole() for h in carry],
            [h.arrays if h.joined != 0 else (h.whole(),) for h in xs],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [Held(arrays=(x,)) for x in (*last, *stacked)]


def _inner(dim: int | None) -> int | None:
    """Where a dimension of scanned arrays is in one turn; None for the scanned one."""
    return dim - 1 if dim else None


def _read(env: dict[Any, Held], atom: Any) -> Held:
    return Held(arrays=(atom.val,)) if isinstance(atom, Literal) else env[atom]


def _weight_eqns(eqns: Sequence[JaxprEqn], params: set[Any]) -> set[int]:
    """Positions of equations that read parameters alone; they can be done before all others."""
    found: set[int] = set()
    known = set(params)
    for i, eqn in enumerate(eqns):
        reads = [v for v in eqn.invars if not isinstance(v, Literal)]
        if reads and not eqn.effects and all(v in known for v in reads):
            found.add(i)
            known.update(eqn.outvars)
    return found


def _column(eqn: JaxprEqn, env: dict[Any, Held]) -> Column | None:
    """Reads a product as activation times sharded weight; None where it is something else."""
    if eqn.primitive.name != "dot_general" or any(isinstance(v, Literal) for v in eqn.invars):
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    held = [env.get(v) for v in eqn.invars]
    sides = [i for i, h in enumerate(held) if h is not None and h.param]
    if len(sides) != 1 or lb or rb:
        return None
    side, weight, x = sides[0], held[sides[0]], eqn.invars[1 - sides[0]]
    w_dims, x_dims = (lc, rc) if side == 0 else (rc, lc)
    if isinstance(x, Literal) or weight is None or weight.sharded is None or weight.sharded in w_dims:
        return None
    order = sorted(range(len(x_dims)), key=lambda i: x_dims[i])
    return Column(
        eqn=eqn,
        x=x,
        x_dims=tuple(x_dims[i] for i in order),
        weight=weight,
        w_dims=tuple(w_dims[i] for i in order),
        left=side == 0,
    )


def _beside(w: jax.Array, column: Column, degree: int) -> jax.Array:
    """A weight as [summed dimensions, device, its part of all else]."""
    assert column.weight.sharded is not None
    n, at = len(column.w_dims), column.free.index(column.weight.sharded) + len(column.w_dims)
    w = lax.transpose(w, (*column.w_dims, *column.free))
    shape = w.shape
    w = w.reshape(*shape[:at], degree, shape[at] // degree, *shape[at + 1 :])
    return jnp.moveaxis(w, at, n).reshape(*shape[:n], degree, -1)


def _apart(out: jax.Array, w: jax.Array, column: Column, degree: int) -> jax.Array:
    """The inverse of `_beside` for a result: [kept dimensions of x, device, part] as the product would have been."""
    assert column.weight.sharded is not None
    kept, at = out.ndim - 2, column.free.index(column.weight.sharded)
    sizes = [w.shape[d] for d in column.free]
    cut = [n // degree if i == at else n for i, n in enumerate(sizes)]
    out = jnp.moveaxis(out.reshape(*out.shape[:kept], degree, *cut), kept, kept + at)
    out = out.reshape(*out.shape[:kept], *sizes)
    if not column.left:
        return out
    return lax.transpose(out, (*range(kept, out.ndim), *range(kept)))
