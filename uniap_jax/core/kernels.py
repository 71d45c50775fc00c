"""Primitives by what they cost: kernels of their own, loops, random bits, and what fuses into its readers."""

from __future__ import annotations

LOOPS = frozenset({"scan", "while", "cond"})
HEAVY = LOOPS | {
    *("dot_general", "conv_general_dilated", "gather", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "cumprod"),
    *("scatter", "scatter-add", "scatter_add", "scatter-mul", "reduce_window", "select_and_scatter_add", "argmax"),
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmin", "fft"),
    *("random_bits", "threefry2x32", "rng_bit_generator"),
    *("dynamic_update_slice", "custom_call", "cholesky", "triangular_solve", "qr", "eigh", "reduce_window_sum"),
}
RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
RANDOM_COPIES = 5.0
"""Arrays of the size of its result that a counter-based generator needs on the way, as seen in XLA's CPU programs."""
READERS = HEAVY - RANDOM - {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
"""Kernels that need their inputs in memory; a reduction fuses with what makes its input."""
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
PICKING = frozenset({"gather"})
"""Kernels that read of their first input no more than they write."""

_CHEAP_NAMES = """
    convert_element_type broadcast_in_dim reshape transpose squeeze expand_dims iota eq ne lt le gt ge and or not xor
    add sub mul neg max min select_n slice sharding_constraint copy copy_p concatenate pad rev integer_pow div sign
    abs floor exp log tanh sqrt rsqrt logistic square pow clamp reduce_precision mesh_cast real imag split
"""
CHEAP = frozenset(_CHEAP_NAMES.split())
"""What a stage's backward makes again of parameters or of the batch alone, rather than keep it."""
MOVES = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "sharding_constraint", "copy"})
"""What gives the same numbers another shape or layout, where as many come out as went in."""
FUSED = (CHEAP | {"erf_inv", "is_finite", "sin", "cos", "round", "copysign", "add_any", "one_minus_square"}) - {
    *("exp", "log", "tanh", "logistic", "pow"),
}
"""Element-wise operations that XLA copies into every kernel that reads their result."""
