"""What each primitive does with longer dimensions, so that the places that were added to them never matter.

A rule replaces what is in the added places in two situations. Where a value without the dimension enters (the free
dimension of a product's weight, a broadcast), the result is set there: so gradients of the added places are zero, and
none comes back to what entered. Where the dimension is summed over or searched, it is set to what the sum or the search
does not notice. In between, what an element-wise function makes of the added places is of no concern, not even a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from uniap_jax.core.dim_rules import ELEMENTWISE
from uniap_jax.core.dim_shape_rules import same_groups, shape_of
from uniap_jax.core.jax_compat import JaxprEqn
from uniap_jax.core.sources import source_line

Sizes = Mapping[int, tuple[int, int]]


class NotPaddedError(Exception):
    """An equation cannot be computed on longer dimensions; the text says which and where."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Long:
    """A value of which some dimensions are longer than in the program.

    Attributes:
        array: the value.
        true: by dimension, its size in the program.
        clean: whether the added places are known to be zero, and what becomes of their gradient does not matter.
        made: of a value without longer dimensions, the equation and the inputs that made it.
    """

    array: Any
    true: Mapping[int, int] = field(default_factory=dict)
    clean: bool = False
    made: tuple[JaxprEqn, tuple[Long, ...]] | None = None

    def cut(self) -> Any:
        """The value as it is in the program."""
        if not self.true:
            return self.array
        return lax.slice(self.array, [0] * self.array.ndim, [self.true.get(d, n) for d, n in enumerate(_shape(self))])

    def sizes(self) -> Sizes:
        """Of the longer dimensions: in the program, and as they are."""
        return {d: (n, int(self.array.shape[d])) for d, n in self.true.items()}

    def set(self, dims: Sequence[int], value: Any) -> Any:
        """The array with `value` in the added places of some dimensions."""
        array = self.array
        for d in dims:
            if d in self.true and not (self.clean and not value):
                inside = lax.broadcasted_iota(np.int32, array.shape, d) < self.true[d]
                array = lax.select(inside, array, lax.full_like(array, value))
        return array


def padded_rule(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    """Results of an equation of whose inputs some have longer dimensions.

    Raises:
        NotPaddedError: there is no rule, or the rule has no answer.
    """
    name = eqn.primitive.name
    if name not in _RULES:
        raise NotPaddedError(f"{name} has no rule for a dimension that is made longer{_at(eqn)}")
    return _RULES[name](eqn, ins)


def longer(held: Long, sizes: Sizes) -> Long:
    """A value with dimensions made longer: made again where that is cheap, broadcast, or filled with zeros.

    Args:
        held: the value.
        sizes: by dimension, its size in the program and the longer one; a dimension of size 1 is broadcast to it.
    """
    shape = _shape(held)
    missing = {d: n for d, n in sizes.items() if d not in held.true}
    if not missing:
        return held
    array = None if held.true or held.made is None else _again(*held.made, missing)
    true = {**held.true, **{d: n for d, (n, _) in missing.items()}}
    if array is not None:
        return Long(array=array, true=true)
    ones = {d: n for d, n in missing.items() if shape[d] == 1 and n[0] != 1}
    config = [(0, missing[d][1] - n if d in missing and d not in ones else 0, 0) for d, n in enumerate(shape)]
    array = lax.pad(jnp.asarray(held.array), np.zeros((), held.array.dtype), config)
    if not ones:
        return Long(array=array, true=true, clean=held.clean or not held.true)
    spread = [ones[d][1] if d in ones else n for d, n in enumerate(array.shape)]
    array = lax.broadcast_in_dim(array, spread, tuple(range(array.ndim)))
    return Long(array=Long(array=array, true=true).set(tuple(ones), 0), true=true)


def _again(eqn: JaxprEqn, ins: tuple[Long, ...], sizes: Sizes) -> Any:
    """What an equation makes at other sizes; None where making it again is not cheap, or not possible."""
    name, p, old = eqn.primitive.name, eqn.params, shape_of(eqn.outvars[0])
    shape = tuple(sizes[d][1] if d in sizes else n for d, n in enumerate(old))
    if any(old[d] != n for d, (n, _) in sizes.items()):
        return None
    if name == "iota" and not ins:
        return lax.broadcasted_iota(p["dtype"], shape, p["dimension"])
    if name == "broadcast_in_dim" and len(ins) == 1:
        where = tuple(p["broadcast_dimensions"])
        inner = {i: sizes[o] for i, o in enumerate(where) if o in sizes}
        operand = longer(ins[0], inner)
        new = {d: n for d, (n, _) in sizes.items() if d not in where}
        return Long(array=lax.broadcast_in_dim(operand.array, shape, where), true=new).set(tuple(new), 0)
    if name in ELEMENTWISE and all(len(_shape(h)) in (0, len(old)) for h in ins):
        return _bound(eqn, [longer(h, sizes).array if _shape(h) else h.array for h in ins])[0]
    return None


def _shape(held: Long) -> tuple[int, ...]:
    return tuple(jnp.shape(held.array))


def _at(eqn: JaxprEqn) -> str:
    line = source_line(eqn)
    return f" ({line})" if line else ""


def _refuse(eqn: JaxprEqn, why: str) -> NotPaddedError:
    return NotPaddedError(f"{eqn.primitive.name} {why}{_at(eqn)}")


def _bound(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """The equation's operation on arrays of other sizes."""
    outs = eqn.primitive.bind(*map(jnp.asarray, args), **{**eqn.params, **changed})
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _alike(ins: Sequence[Long]) -> list[Long]:
    """Arrays of one rank, or scalars, with the same dimensions made longer in all."""
    sizes = {d: size for h in ins for d, size in h.sizes().items()}
    return [longer(h, sizes) if _shape(h) else h for h in ins]


def _elementwise(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    given = _alike(ins)
    true = next(h.true for h in given if h.true)
    clean = eqn.primitive.name == "convert_element_type" and given[0].clean
    return [Long(array=x, true=true, clean=clean) for x in _bound(eqn, [h.array for h in given])]


def _pairwise(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    outs = _bound(eqn, [h.array for h in ins])
    return [Long(array=x, true=h.true) for x, h in zip(outs, ins, strict=True)]


def _broadcast(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    held, where = ins[0], tuple(eqn.params["broadcast_dimensions"])
    sizes = {where[d]: _shape(held)[d] for d in held.true}
    shape = tuple(sizes.get(d, n) for d, n in enumerate(eqn.params["shape"]))
    array = lax.broadcast_in_dim(held.array, shape, where)
    return [Long(array=array, true={where[d]: n for d, n in held.true.items()})]


def _transpose(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    (held,), order = ins, tuple(eqn.params["permutation"])
    true = {order.index(d): n for d, n in held.true.items()}
    return [Long(array=lax.transpose(held.array, order), true=true, clean=held.clean)]


def _squeeze(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    rank = len(_shape(ins[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    stay = [d for d in range(rank) if d not in gone]
    array = lax.squeeze(ins[0].array, tuple(gone))
    return [Long(array=array, true={stay.index(d): n for d, n in ins[0].true.items()})]


def _reshape(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    old, new = shape_of(eqn.invars[0]), list(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None:
        raise _refuse(eqn, "reorders a dimension that is made longer")
    same = {xs[0]: ys[0] for xs, ys in same_groups(old, tuple(new)) if len(xs) == len(ys) == 1}
    if any(d not in same for d in ins[0].true):
        raise _refuse(eqn, "joins or cuts a dimension that is made longer")
    for d in ins[0].true:
        new[same[d]] = _shape(ins[0])[d]
    return [Long(array=lax.reshape(ins[0].array, new), true={same[d]: n for d, n in ins[0].true.items()})]


def _identity(name: str, dtype: Any) -> Any:
    """What a reduction does not notice; None where nothing is known."""
    least: Any
    most: Any
    if dtype == np.bool_:
        least, most = False, True
    elif jnp.issubdtype(dtype, np.integer):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        least, most = -np.inf, np.inf
    if jnp.issubdtype(dtype, np.complexfloating) and name not in ("reduce_sum", "reduce_prod"):
        return None
    fixed = {"reduce_sum": 0, "reduce_prod": 1, "reduce_or": 0, "reduce_xor": 0, "reduce_and": -1}
    if name in fixed:
        return True if (name, dtype) == ("reduce_and", np.bool_) else fixed[name]
    return least if name in ("reduce_max", "argmax") else most


def _reduction(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    (held,), axes, name = ins, tuple(eqn.params["axes"]), eqn.primitive.name
    value = _identity(name, held.array.dtype)
    if value is None:
        raise _refuse(eqn, f"of {held.array.dtype} along a dimension that is made longer")
    stay = [d for d in range(len(_shape(held))) if d not in axes]
    true = {stay.index(d): n for d, n in held.true.items() if d in stay}
    return [Long(array=x, true=true) for x in _bound(eqn, [held.set(axes, value)])]


def _along_axis(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    given = _alike(ins)
    true, p, rank = next(h.true for h in given if h.true), eqn.params, len(_shape(given[0]))
    named = [p[k] for k in ("axis", "dimension", "reduction_dimension") if k in p]
    axes = {a % rank for a in named or [-1]}  # top_k of JAX 0.10 names none
    if axes & set(true):
        raise _refuse(eqn, "runs along a dimension that is made longer")
    return [Long(array=x, true=true) for x in _bound(eqn, [h.array for h in given])]


def _dot_general(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    """Added places are zero in what is summed over, and set to zero in the result."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    paired = [*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)]
    lhs = longer(ins[0], {i: ins[1].sizes()[j] for i, j in paired if j in ins[1].true})
    rhs = longer(ins[1], {j: ins[0].sizes()[i] for i, j in paired if i in ins[0].true})
    out = _bound(eqn, [lhs.set(lc, 0), rhs.set(rc, 0)])[0]
    lfree = [i for i in range(len(_shape(lhs))) if i not in (*lc, *lb)]
    rfree = [i for i in range(len(_shape(rhs))) if i not in (*rc, *rb)]
    order = [(lhs, i) for i in (*lb, *lfree)] + [(rhs, i) for i in rfree]
    made = Long(array=out, true={o: h.true[i] for o, (h, i) in enumerate(order) if i in h.true})
    return [Long(array=made.set(range(len(lb), out.ndim), 0), true=made.true)]


def _gather(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    """Indices keep meaning what they did: those beyond the true size are clipped to it, or out of bounds."""
    operand, indices, numbers = ins[0], ins[1], eqn.params["dimension_numbers"]
    batching = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if set(indices.true) - {j for i, j in batching if i in operand.true}:
        raise _refuse(eqn, "is indexed along a dimension that is made longer")
    indices = longer(indices, {j: operand.sizes()[i] for i, j in batching if i in operand.true})
    sizes = list(eqn.params["slice_sizes"])
    array = indices.array
    for d, size in operand.true.items():
        if d in numbers.collapsed_slice_dims:
            array = _in_bounds(array, numbers.start_index_map, d, size, str(eqn.params["mode"]))
        elif d not in numbers.operand_batching_dims:
            if sizes[d] != size:
                raise _refuse(eqn, "takes a part of a dimension that is made longer")
            sizes[d] = _shape(operand)[d]
    out = _bound(eqn, [operand.array, array], slice_sizes=tuple(sizes))[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([d for d in range(len(_shape(operand))) if d not in gone])
    rows = iter(range(array.ndim - 1))
    true = {}
    for o in range(out.ndim):
        held, d = (operand, next(windows)) if o in numbers.offset_dims else (indices, next(rows))
        if d in held.true:
            true[o] = held.true[d]
    return [Long(array=out, true=true)]


def _in_bounds(indices: Any, index_map: Sequence[int], dim: int, size: int, mode: str) -> Any:
    """Indices into a longer dimension that do what they did to the dimension as it was."""
    if dim not in index_map or "PROMISE" in mode:
        return indices
    one = lax.broadcasted_iota(np.int32, indices.shape, indices.ndim - 1) == list(index_map).index(dim)
    most = size - 1 if "CLIP" in mode else np.iinfo(indices.dtype).max
    beyond = lax.bitwise_and(one, lax.ge(indices, lax.full_like(indices, size)))
    return lax.select(beyond, lax.full_like(indices, most), indices)


def _concatenate(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    given, axis = _alike(ins), eqn.params["dimension"]
    if axis in given[0].true:
        raise _refuse(eqn, "joins a dimension that is made longer with others")
    return [Long(array=lax.concatenate([h.array for h in given], axis), true=given[0].true)]


def _resized(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    """Slices, pads and reversals that leave the longer dimensions alone."""
    held, p, name = ins[0], eqn.params, eqn.primitive.name
    if any(h.true for h in ins[1:]):
        raise _refuse(eqn, "reads a dimension that is made longer as a place or a value")
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    moved = set(p.get("dimensions", ())) if name == "rev" else set()
    moved |= {i for i, c in enumerate(p.get("padding_config", ())) if tuple(c) != (0, 0, 0)}
    if any(old[d] != new[d] or d in moved for d in held.true):
        raise _refuse(eqn, "cuts or moves a dimension that is made longer")
    longer_sizes = {d: _shape(held)[d] for d in held.true}
    changed = {
        key: tuple(longer_sizes.get(d, n) for d, n in enumerate(p[key]))
        for key in ("limit_indices", "slice_sizes")
        if p.get(key) is not None
    }
    arrays = [held.array, *(h.array for h in ins[1:])]
    return [Long(array=_bound(eqn, arrays, **changed)[0], true=held.true)]


def _split(eqn: JaxprEqn, ins: Sequence[Long]) -> list[Long]:
    if eqn.params["axis"] in ins[0].true:
        raise _refuse(eqn, "cuts a dimension that is made longer")
    return [Long(array=x, true=ins[0].true) for x in _bound(eqn, [ins[0].array])]


Rule = Callable[[JaxprEqn, Sequence[Long]], list[Long]]
_UNLIKE = {"sharding_constraint"}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE - _UNLIKE, _elementwise),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _reduction),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), _reduction),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k"), _along_axis),
    **dict.fromkeys(("slice", "dynamic_slice", "pad", "rev"), _resized),
    "optimization_barrier": _pairwise,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "split": _split,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "gather": _gather,
}
