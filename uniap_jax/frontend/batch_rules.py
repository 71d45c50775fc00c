"""What each primitive does to values that depend on the batch: keeps examples apart, reduces them, or mixes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from uniap_jax.core.sources import source_line


@dataclass(frozen=True, slots=True)
class Kind:
    """Dependence of a value on the batch.

    Attributes:
        name: "const" (not at all), "count" (a number of examples), "rows" (example by example along `dim`),
            "scaled_rows" (rows over a count), "sum", "mean" (over examples), or "mixed".
        dim: the batch dimension of rows.
        whole: whether it is made ahead, of the whole batch, whatever became of the examples on the way: a micro-batch
            takes it as it is ("const") or its rows of it.
        position: whether rows number the examples (an iota along the batch): good for looking up each its own alone,
            for a micro-batch counts from 0 again.
        reason: for "mixed", which operation mixed the rows, and where.
        known: for "mixed", whether examples are known to meet; False where an operation is not understood.
    """

    name: str
    dim: int = 0
    position: bool = False
    whole: bool = False
    reason: str = ""
    known: bool = True


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
INDEXING = SHAPE_ONLY | {"concatenate", "convert_element_type", "select_n", "lt", "slice", "stack"}
"""What numbers of examples go through on their way to an index."""
LOOKUPS = frozenset({"gather", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"})
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


def mixed(eqn: Any, why: str, *, known: bool = True) -> Kind:
    """Mixed, with the reason and the place."""
    place = f"(`{eqn.primitive.name}` at {source_line(eqn) or 'unknown source'})"
    return Kind("mixed", reason=f"{why} {place}", known=known)


def elementwise(eqn: Any) -> bool:
    """Same rank, dimensions equal or 1; scalars too."""
    shape = eqn.outvars[0].aval.shape
    return all(
        v.aval.shape == ()
        or (len(v.aval.shape) == len(shape) and all(a in (b, 1) for a, b in zip(v.aval.shape, shape, strict=True)))
        for v in eqn.invars
    )


def added_to_sum(eqn: Any, operands: Sequence[Kind]) -> list[int]:
    """Operands that are put to a sum over examples and are none: a term that is added, the other case of a choice.

    A sum over examples is that of the micro-batches once each of them has its share of the others.
    """
    name, kinds = eqn.primitive.name, [k.name for k in operands]
    terms = {"add": 0, "sub": 0, "add_any": 0, "select_n": 1}.get(name)
    floating = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    if terms is None or not floating or not set(kinds[:terms]) <= {"const"}:
        return []
    others = [j for j in range(terms, len(kinds)) if kinds[j] != "sum"]
    fits = len(others) < len(kinds) - terms and all(kinds[j] in ("const", "mean") for j in others)
    return others if fits else []


def numbers_examples(eqn: Any, operands: Sequence[Kind]) -> bool:
    """Whether numbers of examples become more here than an index to each example's own."""
    name, by_number = eqn.primitive.name, [k.position for k in operands]
    if not any(by_number):
        return False
    if name in LOOKUPS:
        numbers = eqn.params["dimension_numbers"]
        looked_up = numbers.start_index_map if name == "gather" else numbers.scatter_dims_to_operand_dims
        own = operands[0].name == "rows" and operands[0].dim in looked_up
        return not own or by_number[0] or any(by_number[2:])
    if name == "add":  # a negative index counts from the end
        return all(k.name != "count" for k in operands)
    if name == "select_n":
        return any(k.name == "rows" and not k.position for k in operands)
    return name not in INDEXING


def rows(eqn: Any, rows: list[Kind], grown: tuple[int, ...], scaled: bool = False) -> Kind:
    """Rows along the one dimension that grew."""
    if len(grown) != 1:
        return mixed(eqn, "the batch dimension is lost without a reduction")
    name = eqn.primitive.name  # a dimension that is as long as the batch makes others look element-wise
    if name not in SHAPE_ONLY and name not in RULES and elementwise(eqn) and any(k.dim != grown[0] for k in rows):
        return mixed(eqn, "examples meet examples in another dimension")
    return Kind(
        "scaled_rows" if scaled else "rows", grown[0], position=name in INDEXING and any(k.position for k in rows)
    )


def _reduce_sum(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[0].dim in eqn.params["axes"]:
        return MEAN if scaled else SUM
    return rows(eqn, operands, grown, scaled)


def _reshape(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if len(grown) != 1:
        return mixed(eqn, "a reshape splits or loses the batch")
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if np.prod(before[: operands[0].dim]) != np.prod(after[: grown[0]]):
        return mixed(eqn, "a reshape puts another dimension in front of the batch")
    return rows(eqn, operands[:1], grown, scaled)


def _dot(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    (contract, _batch) = eqn.params["dimension_numbers"]
    contracted = [k.name == "rows" and k.dim in dims for k, dims in zip(operands, contract, strict=True)]
    if all(contracted):
        return SUM if not grown else mixed(eqn, "examples are contracted and kept at once")
    if any(contracted):
        return mixed(eqn, "examples are weighted by their place in the batch")
    return rows(eqn, operands, grown, scaled)


def _gather(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    numbers, (operand, indices) = eqn.params["dimension_numbers"], operands
    if operand.name == "rows":
        batched = operand.dim in getattr(numbers, "operand_batching_dims", ())
        by_place = operand.dim in numbers.start_index_map and indices.position
        whole = operand.dim not in numbers.start_index_map and operand.dim not in numbers.collapsed_slice_dims
        if not (batched or by_place or whole):
            return mixed(eqn, "examples are looked up across the batch")
    return rows(eqn, [operand, indices], grown, scaled)


def _scatter(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    """Writes inside examples: the batch is written in full, or every row at the place of its own example."""
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], operands
    if operand.name != "rows":
        return mixed(eqn, "examples are written into an array that does not belong to one of them")
    placed = numbers.scatter_dims_to_operand_dims
    batching = numbers.operand_batching_dims
    if operand.dim in batching:
        at = batching.index(operand.dim)
        wanted = numbers.scatter_indices_batching_dims[at]
        fits = indices.name == "const" or (indices.name == "rows" and indices.dim == wanted)
        return rows(eqn, [operand], grown, scaled) if fits else mixed(eqn, "examples are written across the batch")
    if operand.dim in placed or operand.dim in numbers.inserted_window_dims:
        fits = operand.dim in placed and indices.position
        return rows(eqn, [operand], grown, scaled) if fits else mixed(eqn, "examples are written across the batch")
    gone = {*numbers.inserted_window_dims, *batching}
    window = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in gone]
    along = numbers.update_window_dims[window.index(operand.dim)]
    full = eqn.invars[2].aval.shape[along] == eqn.invars[0].aval.shape[operand.dim]
    fits = full and indices.name == "const" and updates.name in ("const", "rows")
    if not fits or (updates.name == "rows" and updates.dim != along):
        return mixed(eqn, "examples are written across the batch")
    return rows(eqn, [operand], grown, scaled)


def _touches_batch(dims_of: Callable[[Any], Sequence[int]]) -> Callable[..., Kind]:
    def rule(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
        if any(k.name == "rows" and k.dim in dims_of(eqn) for k in operands):
            return mixed(eqn, "an operation along the batch")
        return rows(eqn, [k for k in operands if k.name == "rows"], grown, scaled)

    return rule


def _sliced_dims(eqn: Any) -> list[int]:
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [d for d, (x, y) in enumerate(zip(*shapes, strict=True)) if x != y]


def _padded_dims(eqn: Any) -> list[int]:
    return [d for d, c in enumerate(eqn.params["padding_config"]) if tuple(c) != (0, 0, 0)]


def _transformed_dims(eqn: Any) -> list[int]:
    rank = len(eqn.invars[0].aval.shape)
    return list(range(rank - len(eqn.params["fft_lengths"]), rank))


def _window_dims(eqn: Any) -> list[int]:
    """Dimensions that a pooling window moves along, skips or fills up."""
    p = eqn.params
    dilations = zip(p["base_dilation"], p["window_dilation"], strict=True)
    still = zip(p["window_dimensions"], p["window_strides"], p["padding"], dilations, strict=True)
    return [d for d, (w, s, pad, dilated) in enumerate(still) if (w, s, tuple(pad), dilated) != (1, 1, (0, 0), (1, 1))]


def _conv(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[1].name != "const" or operands[0].dim != eqn.params["dimension_numbers"].lhs_spec[0]:
        return mixed(eqn, "a convolution over the batch")
    return rows(eqn, operands[:1], grown, scaled)


def _top_k(eqn: Any, operands: list[Kind], grown: tuple[int, ...], scaled: bool) -> Kind:
    if operands[0].dim == len(eqn.invars[0].aval.shape) - 1:
        return mixed(eqn, "an operation along the batch")
    return rows(eqn, operands[:1], grown, scaled)


RULES: dict[str, Callable[..., Kind]] = {
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "dot_general": _dot,
    "gather": _gather,
    "conv_general_dilated": _conv,
    "top_k": _top_k,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    "concatenate": _touches_batch(lambda e: (e.params["dimension"],)),
    "rev": _touches_batch(lambda e: e.params["dimensions"]),
    "split": _touches_batch(lambda e: (e.params["axis"],)),
    "slice": _touches_batch(_sliced_dims),
    "dynamic_slice": _touches_batch(_sliced_dims),
    "dynamic_update_slice": _touches_batch(_sliced_dims),
    "pad": _touches_batch(_padded_dims),
    "fft": _touches_batch(_transformed_dims),
    "tile": _touches_batch(lambda e: [d for d, times in enumerate(e.params["reps"]) if times != 1]),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _touches_batch(_window_dims)),
}
