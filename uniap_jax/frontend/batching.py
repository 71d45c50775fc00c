"""How every value of the loss depends on the batch, read off two traces at different batch sizes.

Two traces of the same step at batch B and 2B have the same equations; a dimension that doubles is a batch dimension,
a constant that doubles counts examples. Following each equation once tells whether the whole batch's value is the
mean, the sum or the concatenation of its micro-batches' values, or whether rows mix (batch normalisation, contrastive
losses, a ratio of sums), in which case the batch must not be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uniap_jax.core.jax_compat import Literal, Var
from uniap_jax.core.jaxprs import inner_jaxprs, open_jaxpr
from uniap_jax.frontend.labels import source_line

FACTOR = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """Dependence of a value on the batch.

    Attributes:
        name: "const" (not at all), "count" (a number of examples), "rows" (example by example along `dim`),
            "scaled_rows" (rows over a count), "sum", "mean" (over examples), or "mixed".
        dim: the batch dimension of rows.
        position: whether rows number the examples (an iota along the batch).
        reason: for "mixed", which operation mixed the rows, and where.
    """

    name: str
    dim: int = 0
    position: bool = False
    reason: str = ""


CONST, COUNT, SUM, MEAN = Kind("const"), Kind("count"), Kind("sum"), Kind("mean")
LINEAR = ("sum", "mean")

ELEMENTWISE_LINEAR = frozenset(
    {"neg", "convert_element_type", "copy", "reduce_precision", "real", "imag", "stop_gradient"}
)
SHAPE_ONLY = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "expand_dims", "sharding_constraint"})
ROW_SAFE = frozenset(
    {
        "slice",
        "pad",
        "concatenate",
        "dynamic_slice",
        "dynamic_update_slice",
        "iota",
        "random_bits",
        "rev",
        "split",
        "gather",
        "select_n",
        "clamp",
        "conv_general_dilated",
        "reduce_precision",
        "optimization_barrier",
        "stack",
        "unstack",
        "random_wrap",
        "random_unwrap",
        "random_fold_in",
        "random_seed",
        "random_split",
        "name",
    }
)
ALONG = {  # primitives that mix only along one dimension, and the parameter that names it
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "argmax": "axes",
    "argmin": "axes",
    "reduce_max": "axes",
    "reduce_min": "axes",
    "reduce_and": "axes",
    "reduce_or": "axes",
    "reduce_prod": "axes",
    "reduce_xor": "axes",
}
BODIES = frozenset({"remat2", "checkpoint", "remat", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
NOT_ELEMENTWISE = frozenset(
    {
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter-mul",
        "scatter-min",
        "scatter-max",
        "top_k",
        "while",
        "cond",
        "all_to_all",
        "all_gather",
        "fft",
        "cholesky",
        "triangular_solve",
        "lu",
        "qr",
        "eigh",
        "svd",
        "reduce_window_sum",
        "reduce_window_max",
        "select_and_scatter_add",
        "approx_top_k",
        "rng_bit_generator",
    }
)


def grown_dims(small: Any, large: Any) -> tuple[int, ...]:
    """Dimensions that grew by FACTOR between two traces."""
    return tuple(d for d, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b)


def classify(small: Any, large: Any, batch_small: Sequence[Var], batch_large: Sequence[Var]) -> dict[Var, Kind]:
    """Kind of every variable of the first of two aligned loss tapes.

    Raises:
        ValueError: the traces do not align (the step does something else at another batch size).
    """
    kinds: dict[Var, Kind] = {v: Kind("rows", 0) for v in batch_small}
    _walk(small.eqns, large.eqns, kinds)
    return kinds


def _walk(small: Sequence[Any], large: Sequence[Any], kinds: dict[Var, Kind]) -> None:
    if len(small) != len(large):
        raise ValueError(f"{len(small)} equations at one batch size, {len(large)} at another")
    for a, b in zip(small, large, strict=True):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            raise ValueError(f"`{a.primitive.name}` at one batch size is `{b.primitive.name}` at another")
        operands = [_atom_kind(x, y, kinds) for x, y in zip(a.invars, b.invars, strict=True)]
        outs = _outputs(a, b, operands)
        kinds.update((v, k) for v, k in zip(a.outvars, outs, strict=True) if k is not CONST)


def _atom_kind(small: Any, large: Any, kinds: dict[Var, Kind]) -> Kind:
    if not isinstance(small, Literal):
        return kinds.get(small, CONST)
    if not isinstance(large, Literal) or np.array_equal(small.val, large.val):
        return CONST
    if np.array_equal(np.asarray(small.val) * FACTOR, large.val):
        return COUNT
    return Kind("mixed", reason="a constant that depends on the batch size in another way than in proportion")


def _mixed(eqn: Any, why: str) -> Kind:
    return Kind("mixed", reason=f"{why} (`{eqn.primitive.name}` at {source_line(eqn) or 'unknown source'})")


def _outputs(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    name = a.primitive.name
    for kind in operands:
        if kind.name == "mixed":
            return [kind] * len(a.outvars)
    if name in BODIES:
        return _body(a, b, operands)
    if name == "scan":
        return _scan(a, b, operands)
    names = {k.name for k in operands}
    grown = [grown_dims(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True)]
    if names <= {"const"}:
        return [_fresh(a, g) for g in grown]
    if any(len(g) > 1 for g in grown):
        return [_mixed(a, "every example meets every other")] * len(a.outvars)
    if names <= {"const", "count"}:
        return [_of_count(a, operands)] * len(a.outvars)
    if names & set(LINEAR):
        return [_of_reduced(a, operands)] * len(a.outvars)
    return [_of_rows(a, operands, g) for g in grown]


def _fresh(eqn: Any, grown: tuple[int, ...]) -> Kind:
    """A value made from nothing that depends on the batch but its size."""
    if not grown:
        return CONST
    if len(grown) > 1:
        return _mixed(eqn, "an array over pairs of examples")
    position = eqn.primitive.name == "iota" and eqn.params["dimension"] == grown[0]
    return Kind("rows", grown[0], position=position)


def _of_count(eqn: Any, operands: list[Kind]) -> Kind:
    name = eqn.primitive.name
    if name in SHAPE_ONLY or name in ELEMENTWISE_LINEAR:
        return COUNT
    if name == "mul" and sum(k.name == "count" for k in operands) == 1:
        return COUNT
    if name == "div" and operands[0].name == "count" and operands[1].name == "const":
        return COUNT
    return _mixed(eqn, "the batch size enters in another way than in proportion")


def _of_reduced(eqn: Any, operands: list[Kind]) -> Kind:
    """Of sums and means over examples: only what is linear in them keeps the name."""
    name, names = eqn.primitive.name, [k.name for k in operands]
    if "rows" in names or "scaled_rows" in names:
        return _mixed(eqn, "examples meet a statistic of the whole batch")
    if name in ELEMENTWISE_LINEAR or name in SHAPE_ONLY or name in ("reduce_sum", "slice", "concatenate", "pad"):
        return _same(eqn, names)
    if name in ("add", "sub", "add_any"):
        if set(names) <= {"mean", "const"} or set(names) == {"sum"}:
            return MEAN if "mean" in names else SUM
        return _mixed(eqn, "a sum over examples meets something that is not one")
    if name in ("mul", "dot_general") and set(names) in ({"sum", "const"}, {"mean", "const"}):
        return _same(eqn, names)
    if name == "div" and names[1] == "const":
        return _same(eqn, names)
    if name == "div" and names == ["sum", "count"]:
        return MEAN
    if name == "div" and set(names) == {"sum"}:
        return _mixed(eqn, "a ratio of two sums over examples")
    return _mixed(eqn, "a sum or mean over examples goes through a function that is not linear")


def _same(eqn: Any, names: list[str]) -> Kind:
    found = {n for n in names if n != "const"}
    if found == {"sum"}:
        return SUM
    if found == {"mean"} or (found == {"mean"} and "const" in names):
        return MEAN
    return _mixed(eqn, "sums and means over examples are mixed")


def _of_rows(eqn: Any, operands: list[Kind], grown: tuple[int, ...]) -> Kind:
    name = eqn.primitive.name
    rows = [k for k in operands if k.name in ("rows", "scaled_rows")]
    counts = [k for k in operands if k.name == "count"]
    if counts:
        if name == "div" and operands[1].name == "count" and operands[0].name == "rows" and grown:
            return Kind("scaled_rows", grown[0])
        if name == "add" and grown and all(k.position for k in rows):  # a negative index counts from the end
            return Kind("rows", grown[0], position=True)
        return _mixed(eqn, "examples are scaled by the batch size in an unusual way")
    scaled = any(k.name == "scaled_rows" for k in rows)
    if scaled and (
        name not in ELEMENTWISE_LINEAR | SHAPE_ONLY | {"reduce_sum", "mul", "add", "sub", "div"}
        or (name in ("add", "sub") and any(k.name != "scaled_rows" for k in operands))
        or (name == "mul" and sum(k.name == "scaled_rows" for k in operands) > 1)
        or (name == "div" and operands[1].name == "scaled_rows")
    ):
        return _mixed(eqn, "examples divided by the batch size go through a function that is not linear")
    check = _RULES.get(name)
    if check is not None:
        return check(eqn, operands, grown, scaled)
    if name in ALONG:
        axes = eqn.params[ALONG[name]]
        axes = (axes,) if isinstance(axes, int) else axes
        if any(k.dim in axes for k in rows):
            return _mixed(eqn, "an operation along the batch")
    elif name in NOT_ELEMENTWISE or not (name in SHAPE_ONLY or name in ROW_SAFE or _elementwise(eqn)):
        return _mixed(
            eqn, f"an operation whose effect on the batch is unknown {[v.aval.str_short() for v in eqn.invars]}"
        )
    return _rows(eqn, rows, grown, scaled)


def _elementwise(eqn: Any) -> bool:
    """Same rank, dimensions equal or 1; scalars too."""
    shape = eqn.outvars[0].aval.shape
    return all(
        v.aval.shape == ()
        or (len(v.aval.shape) == len(shape) and all(a in (b, 1) for a, b in zip(v.aval.shape, shape, strict=True)))
        for v in eqn.invars
    )


def _rows(eqn: Any, rows: list[Kind], grown: tuple[int, ...], scaled: bool = False) -> Kind:
    if len(grown) != 1:
        return _mixed(eqn, "the batch dimension is lost without a reduction")
    if _elementwise(eqn) and any(k.dim != grown[0] for k in rows):
        return _mixed(eqn, "examples meet examples in another dimension")
    moved = eqn.primitive.name in SHAPE_ONLY or eqn.primitive.name in (
        "concatenate",
        "convert_element_type",
        "select_n",
        "add",
        "lt",
        "rem",
        "slice",
    )
    return Kind("scaled_rows" if scaled else "rows", grown[0], position=moved and any(k.position for k in rows))


def _reduce_sum(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[0].dim in eqn.params["axes"]:
        return MEAN if scaled else SUM
    return _rows(eqn, operands, grown, scaled)


def _reshape(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if len(grown) != 1:
        return _mixed(eqn, "a reshape splits or loses the batch")
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if np.prod(before[: operands[0].dim]) != np.prod(after[: grown[0]]):
        return _mixed(eqn, "a reshape puts another dimension in front of the batch")
    return _rows(eqn, operands[:1], grown, scaled)


def _dot(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    (contract, _batch) = eqn.params["dimension_numbers"]
    contracted = [k.name == "rows" and k.dim in dims for k, dims in zip(operands, contract, strict=True)]
    if all(contracted):
        return SUM if not grown else _mixed(eqn, "examples are contracted and kept at once")
    if any(contracted):
        return _mixed(eqn, "examples are weighted by their place in the batch")
    return _rows(eqn, operands, grown, scaled)


def _gather(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    numbers, (operand, indices) = eqn.params["dimension_numbers"], operands
    if operand.name == "rows":
        batched = operand.dim in getattr(numbers, "operand_batching_dims", ())
        by_place = operand.dim in numbers.start_index_map and indices.position
        whole = operand.dim not in numbers.start_index_map and operand.dim not in numbers.collapsed_slice_dims
        if not (batched or by_place or whole):
            return _mixed(eqn, "examples are looked up across the batch")
    return _rows(eqn, [operand, indices], grown, scaled)


def _touches_batch(dims_of: Callable[[Any], Sequence[int]]) -> Callable[..., Kind]:
    def rule(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
        if any(k.name == "rows" and k.dim in dims_of(eqn) for k in operands):
            return _mixed(eqn, "an operation along the batch")
        return _rows(eqn, [k for k in operands if k.name == "rows"], grown, scaled)

    return rule


def _sliced_dims(eqn: Any) -> list[int]:
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [d for d, (x, y) in enumerate(zip(*shapes, strict=True)) if x != y]


def _padded_dims(eqn: Any) -> list[int]:
    return [d for d, c in enumerate(eqn.params["padding_config"]) if tuple(c) != (0, 0, 0)]


def _conv(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[1].name != "const" or operands[0].dim != eqn.params["dimension_numbers"].lhs_spec[0]:
        return _mixed(eqn, "a convolution over the batch")
    return _rows(eqn, operands[:1], grown, scaled)


def _top_k(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[0].dim == len(eqn.invars[0].aval.shape) - 1:
        return _mixed(eqn, "an operation along the batch")
    return _rows(eqn, operands[:1], grown, scaled)


_RULES: dict[str, Callable[..., Kind]] = {
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "dot_general": _dot,
    "gather": _gather,
    "conv_general_dilated": _conv,
    "top_k": _top_k,
    "concatenate": _touches_batch(lambda e: (e.params["dimension"],)),
    "rev": _touches_batch(lambda e: e.params["dimensions"]),
    "split": _touches_batch(lambda e: (e.params["axis"],)),
    "slice": _touches_batch(_sliced_dims),
    "dynamic_slice": _touches_batch(_sliced_dims),
    "dynamic_update_slice": _touches_batch(_sliced_dims),
    "pad": _touches_batch(_padded_dims),
}


def _body(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    """Walks the body of a call whose operands are the body's inputs."""
    bodies = list(zip(inner_jaxprs(a), inner_jaxprs(b), strict=True))
    if not bodies:
        return [_mixed(a, "a call without a body to look into")] * len(a.outvars)
    return _run(bodies[0], operands, len(a.outvars))


def _run(pair: tuple[Any, Any], operands: Sequence[Kind], count: int) -> list[Kind]:
    from uniap_jax.core.jaxprs import flatten

    small, large = flatten(pair[0]), flatten(pair[1])
    kinds = {v: k for v, k in zip(small.invars, operands, strict=True) if k is not CONST}
    _walk(small.eqns, large.eqns, kinds)
    return [_atom_kind(x, y, kinds) for x, y in zip(small.outvars, large.outvars, strict=True)]


def _scan(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    """A scan over something other than the batch: rows keep their place, moved by the scanned dimension."""
    bodies = list(zip(inner_jaxprs(a), inner_jaxprs(b), strict=True))
    inner = open_jaxpr(bodies[0][0])
    moved: list[Kind] = []
    for kind, outer, var in zip(operands, a.invars, inner.invars, strict=True):
        scanned = len(outer.aval.shape) == len(var.aval.shape) + 1
        if kind.name == "rows" and scanned and kind.dim == 0:
            return [_mixed(a, "a scan over the batch")] * len(a.outvars)
        shift = scanned and kind.name in ("rows", "scaled_rows")
        moved.append(Kind(kind.name, kind.dim - 1) if shift else kind)
    carries = sum(len(v.aval.shape) == len(w.aval.shape) for v, w in zip(a.outvars, inner.outvars, strict=True))
    scanned_inputs = sum(
        len(v.aval.shape) == len(w.aval.shape) + 1 for v, w in zip(a.invars, inner.invars, strict=True)
    )
    first = len(moved) - scanned_inputs - carries
    outs: list[Kind] = []
    for _ in range(3):  # a carry settles after at most two rounds: const -> rows -> rows
        outs = _run(bodies[0], moved, len(inner.outvars))
        settled = True
        for i in range(carries):
            old, new = moved[first + i], outs[i]
            if old != new and new is not CONST:
                settled = False
                moved[first + i] = new
        if settled:
            break
    else:
        return [_mixed(a, "a scan whose carry changes its dependence on the batch")] * len(a.outvars)
    stacked = [
        k if i < carries else (Kind(k.name, k.dim + 1) if k.name in ("rows", "scaled_rows") else k)
        for i, k in enumerate(outs)
    ]
    bad = next((k for k in stacked if k.name in LINEAR or k.name == "mixed"), None)
    return [_mixed(a, "a scan that reduces over the batch")] * len(a.outvars) if bad and bad.name in LINEAR else stacked
