"""Rules for dot products, convolutions and indexing, and the table of all rules by primitive."""

from __future__ import annotations

import math

from uniap_jax.core import dim_shape_rules as shape
from uniap_jax.core.dim_classes import SUMMED_BETWEEN, Dims, Node
from uniap_jax.core.dim_shape_rules import LIVE, PARAM, Rule, Use, resize, stopped


def dot_general(use: Use) -> list[Dims]:
    """Batch dimensions unite and flow, contracted ones unite and are summed over, free ones flow."""
    (lc, rc), (lb, rb) = use.eqn.params["dimension_numbers"]
    (lhs, rhs), c = use.ins, use.classes
    batch = [c.unite(lhs[i], rhs[j]) for i, j in zip(lb, rb, strict=True)]
    summed = [c.unite(lhs[i], rhs[j]) for i, j in zip(lc, rc, strict=True)]
    lfree = [i for i, n in enumerate(lhs) if i not in (*lc, *lb)]
    rfree = [i for i, n in enumerate(rhs) if i not in (*rc, *rb)]
    out = (*batch, *(lhs[i] for i in lfree), *(rhs[i] for i in rfree))
    for node in summed:
        c.contract(node)
    _meets_weight(use, summed, batch)
    sizes = math.prod(use.shape(0)[i] for i in lc)
    c.work({n for n in (*out, *summed) if n is not None}, 2.0 * sizes * math.prod(use.out_shape()))
    order = sorted(range(len(lc)), key=lambda i: rc[i] if use.kinds[1] == PARAM else lc[i])
    c.joint([summed[i] for i in order])
    for kind, dims, free in ((use.kinds[0], lhs, lfree), (use.kinds[1], rhs, rfree)):
        if kind == PARAM:
            c.joint([dims[i] for i in free])
    # Scores of every example (queries by keys) are larger than what they are made of: not worth their reduction.
    if len(summed) == 1 and use.kinds == (LIVE, LIVE) and lb and lfree and rfree:
        use.stop(summed[0], SUMMED_BETWEEN)
    return [out]


def _meets_weight(use: Use, summed: list[Node | None], batch: list[Node | None]) -> None:
    """Notes what a product of an activation with a weight sums over, and along what weights are stacked."""
    if (use.kinds[0] == PARAM) != (use.kinds[1] == PARAM):
        for node in summed:
            use.classes.weigh(node)
        for node in batch:
            use.classes.stack(node)


def ragged_dot(use: Use) -> list[Dims]:
    """Rows grouped by data (experts without padding): the groups stop, all else is as in a dot product."""
    p, c = use.eqn.params["ragged_dot_dimension_numbers"], use.classes
    (lc, rc), (lb, rb) = p.dot_dimension_numbers
    lhs, rhs = use.ins[:2]
    for dims, grouped in ((lhs, p.lhs_ragged_dimensions), (rhs, p.rhs_group_dimensions)):
        for i in grouped:
            use.stop(dims[i], "grouped by data")
    if set(p.lhs_ragged_dimensions) & set(lc):
        return shape.unknown(use)
    batch = [c.unite(lhs[i], rhs[j]) for i, j in zip(lb, rb, strict=True)]
    summed = [c.unite(lhs[i], rhs[j]) for i, j in zip(lc, rc, strict=True)]
    for node in summed:
        c.contract(node)
    _meets_weight(use, summed, batch)
    skipped = (*rc, *rb, *p.rhs_group_dimensions)
    out = (
        *batch,
        *(n for i, n in enumerate(lhs) if i not in (*lc, *lb)),
        *(n for i, n in enumerate(rhs) if i not in skipped),
    )
    flops = 2.0 * math.prod(use.shape(0)[i] for i in lc) * math.prod(use.out_shape())
    c.work({n for n in (*out, *summed) if n is not None}, flops)
    return [out]


def convolution(use: Use) -> list[Dims]:
    """Batch and output features flow, input features are summed over, windows stop; groups are the slowest factor."""
    p, c = use.eqn.params, use.classes
    numbers, groups = p["dimension_numbers"], p["feature_group_count"]
    if p["batch_group_count"] != 1:
        return shape.unknown(use)
    lhs_spec, rhs_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    (lhs, rhs), sizes, kernel = use.ins, use.shape(0), use.shape(1)
    out: list[Node | None] = [None] * len(lhs)
    out[out_spec[0]], out[out_spec[1]] = lhs[lhs_spec[0]], rhs[rhs_spec[0]]
    if groups == 1:
        c.contract(c.unite(lhs[lhs_spec[1]], rhs[rhs_spec[1]]))
        c.weigh(lhs[lhs_spec[1]])
    else:
        grouped = c.unite(lhs[lhs_spec[1]], rhs[rhs_spec[0]])
        c.unite(grouped, c.new(groups))
        use.stop(rhs[rhs_spec[1]], "input features of a grouped convolution")
    for i in range(2, len(lhs)):
        a, k, o = lhs_spec[i], rhs_spec[i], out_spec[i]
        if kernel[k] == 1 and sizes[a] == use.out_shape()[o]:
            out[o] = lhs[a]
        else:
            use.stop(lhs[a], "a convolution window moves along it")
            use.stop(rhs[k], "a convolution window")
            out[o] = stopped(use, use.out_shape()[o], "a convolution window moves along it")
    per_output = math.prod(kernel) / kernel[rhs_spec[0]]
    nodes = {n for n in (lhs[lhs_spec[0]], lhs[lhs_spec[1]], rhs[rhs_spec[0]]) if n is not None}
    c.work(nodes, 2.0 * per_output * math.prod(use.out_shape()))
    return [tuple(out)]


def gather(use: Use) -> list[Dims]:
    """Full slices, batching and index dimensions flow; a collapsed dimension is looked up; partial slices stop."""
    p, c = use.eqn.params, use.classes
    numbers, sizes = p["dimension_numbers"], p["slice_sizes"]
    operand, indices = use.ins[0], use.ins[1]
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        c.unite(operand[i], indices[j])
    for i in numbers.collapsed_slice_dims:
        c.look_up(operand[i])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [i for i in range(len(operand)) if i not in gone]
    windows = iter(
        resize(
            use,
            tuple(operand[i] for i in kept),
            tuple(use.shape(0)[i] for i in kept),
            tuple(sizes[i] for i in kept),
            set(),
        )
    )
    rows = iter(indices[:-1])
    out = tuple(next(windows) if o in numbers.offset_dims else next(rows) for o in range(len(use.out_shape())))
    return [out]


def scatter(use: Use) -> list[Dims]:
    """Windows written in full and untouched dimensions flow; rows are summed into the dimension they index."""
    numbers, c = use.eqn.params["dimension_numbers"], use.classes
    operand, indices, updates = use.ins[:3]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        c.unite(operand[i], indices[j])
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(operand)) if i not in gone]
    for i, u in zip(windows, numbers.update_window_dims, strict=True):
        if use.shape(0)[i] == use.shape(2)[u]:
            c.unite(operand[i], updates[u])
        else:
            use.stop(operand[i], "scatter writes a part of it")
            use.stop(updates[u], "scattered into a part of another")
    rows = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    for u, node in zip(rows, indices[:-1], strict=True):
        c.contract(c.unite(updates[u], node))
    return [operand]


_ELEMENTWISE_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p copysign cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
    population_count pow pvary random_gamma real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
"""
_REDUCTIONS = "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
_ALONG = "cumsum cumprod cummax cummin cumlogsumexp sort approx_top_k"
_RESIZED = "dynamic_slice fft pad rev tile reduce_window reduce_window_sum reduce_window_max reduce_window_min"
_SCATTERS = """
    scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max scatter_add scatter_sub scatter_mul scatter_min
    scatter_max
"""

ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    **_all(_ELEMENTWISE_NAMES, shape.elementwise),
    **_all(_REDUCTIONS, shape.reduction),
    **_all(_ALONG, shape.along_axis),
    **_all(_RESIZED, shape.resized),
    **_all(_SCATTERS, scatter),
    "optimization_barrier": shape.pairwise,
    "top_k": shape.top_k,
    "broadcast_in_dim": shape.broadcast_in_dim,
    "transpose": shape.transpose,
    "squeeze": shape.squeeze,
    "reshape": shape.reshape,
    "split": shape.split,
    "stack": shape.stack,
    "unstack": shape.unstack,
    "slice": shape.slice_,
    "dynamic_update_slice": shape.dynamic_update_slice,
    "concatenate": shape.concatenate,
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": convolution,
    "gather": gather,
}


def rule_for(name: str) -> Rule:
    """The rule of a primitive, `shape.unknown` where there is none."""
    return _RULES.get(name, shape.unknown)
