"""The captured model: layers (jaxpr pieces), the values that cross between them, and the rest of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from uniap_jax.core.jax_compat import ClosedJaxpr

Allowed = tuple[frozenset[str] | None, ...]
"""For each dimension of a parameter the kinds of ways that may split it ("tensor", "fsdp", "expert"), None for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Shape of an array that a layer reads or writes.

    Attributes:
        shape: dimensions.
        dtype: numpy-style dtype; extended for typed PRNG keys.
        batch_dim: the dimension that grows with the global batch, or None where the value does not depend on it.
        name: pytree path or a description, for people.
    """

    shape: tuple[int, ...]
    dtype: Any
    batch_dim: int | None = None
    name: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(map(int, self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (unsharded) array; a typed PRNG key counts as its data."""
        itemsize = getattr(self.dtype, "itemsize", 4)
        return self.size * int(itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand(Value):
    """A value the loss reads without being differentiated with respect to it.

    Attributes:
        kind: "state" (computed once per step by `Step.before`, from the state or the whole batch), "batch" (a leaf of
            the batch, split over micro-batches along its leading dimension), or "index" (int32 scalar: which
            micro-batch this is).
        leaf: for "state", the position after the parameters among the outputs of `Step.before`;
            for "batch", the position among the batch leaves.
    """

    kind: str
    leaf: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A piece of the loss: `jaxpr(*params, *operands, *reads) -> writes`.

    Attributes:
        index: position in trace order.
        name: for people: module path, or what it does.
        source: `file:line` of its first equation, "" where unknown.
        jaxpr: closed jaxpr without constants of its own.
        params: positions in `LayerGraph.params`.
        operands: positions in `LayerGraph.operands`.
        reads: positions in `LayerGraph.values` of what earlier layers wrote.
        writes: positions in `LayerGraph.values` of what this layer writes.
        signature: equal for layers whose jaxprs are equal up to names; such layers share profiles.
        flops: floating-point operations of its forward pass.
        allowed: for each of `params` what may split its dimensions, () for anything; () where nothing is kept for any.
    """

    index: int
    name: str
    source: str
    jaxpr: ClosedJaxpr
    params: tuple[int, ...]
    operands: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signature: str
    flops: float
    allowed: tuple[Allowed, ...] = ()

    def may(self, param: int, dim: int, role: str) -> bool:
        """Whether ways of a kind may split a dimension of `params[param]`."""
        dims = self.allowed[param] if self.allowed else ()
        kept = dims[dim] if dim < len(dims) else None
        return kept is None or role in kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The train step around the loss, as flat programs.

    Attributes:
        before: `(*state_leaves, *batch_leaves) -> (*params, *state operands)`; what the loss needs once per step,
            whatever the number of micro-batches.
        update: `(*state_leaves, *batch_leaves, *results, *grads) -> outputs`; results are the loss and its
            auxiliary outputs for the whole batch, grads are in the order of `LayerGraph.params`.
        state: shapes of the state leaves (every argument that is not batch), in flat order.
        batch: shapes of the batch leaves, leading dimension = global batch.
        outputs: shapes of the outputs of the step.
        param_leaf: for each parameter, the state leaf it is (None where `before` computes it, a cast for example).
        output_leaf: for each output, the state leaf that it replaces (same pytree path, shape and dtype), or None
            for metrics.
        flatten: `flatten(*args) -> (state leaves, batch leaves)` of a call, checked against the traced trees.
        unflatten: `unflatten(outputs, *args) -> result` of the user's step; for nnx objects it also writes the new
            values into the objects among `args`.
        state_result: `state_result(state leaves)`: the user's non-batch argument (a tuple where there are several).
        flat: `flat(*state leaves, *batch leaves) -> outputs`: the user's own step, not captured; the reference.
        by_rows: the same step on rows of stacked leaves, where loops over layers were unfolded.
    """

    before: ClosedJaxpr
    update: ClosedJaxpr
    state: tuple[Value, ...]
    batch: tuple[Value, ...]
    outputs: tuple[Value, ...]
    param_leaf: tuple[int | None, ...]
    output_leaf: tuple[int | None, ...]
    flatten: Callable[..., tuple[list[Any], list[Any]]]
    unflatten: Callable[..., Any]
    state_result: Callable[..., Any]
    flat: Callable[..., list[Any]]
    by_rows: RowStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowStep:
    """A step whose stacked leaves [L, ...] are taken apart, so that rows of different layers may live apart.

    Attributes:
        step: on leaves by rows; its `flatten`, `unflatten`, `state_result` and `flat` are those of the user's leaves.
        leaves: for each of the user's state leaves the positions of its rows in `step.state`; one where it is whole.
        outputs: likewise for each output, in `step.outputs`.
        params: per stacked parameter the positions of its rows in `LayerGraph.params`.
    """

    step: Step
    leaves: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    params: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerGraph:
    """A train step as layers in trace order; edges go forward only.

    Attributes:
        layers: in trace order, which is a topological order.
        params: differentiated leaves.
        operands: everything else the loss reads from outside.
        values: what layers write: activations that cross and results that leave.
        results: positions in `values` of the loss (first) and its auxiliary outputs.
        reductions: for each result, how the whole batch's comes from the micro-batches': "mean", "sum",
            "concat" (along the batch dimension) or "same" (does not depend on the batch).
        step: the rest of the train step.
        batch_size: global batch.
        num_microbatches: 1, or how many pieces the batch that these jaxprs see has been cut into.
        microbatch: re-traces at another number of micro-batches, same cuts: `graph.microbatch(4)`.
        split_reason: why the batch must not be split into micro-batches; "" where it may.
        split_cause: kind of that reason: "statistic" (examples meet in the loss: a normalisation, a ratio of sums),
            "unknown" (an operation whose effect on the batch is not known), or "shapes" (the step is written for one
            batch size); "" where the batch may be split.
        fingerprint: of the loss jaxpr, shapes and cuts; what a plan is checked against.
        notes: what tracing wants people to know, one sentence each.
    """

    layers: tuple[Layer, ...]
    params: tuple[Value, ...]
    operands: tuple[Operand, ...]
    values: tuple[Value, ...]
    results: tuple[int, ...]
    reductions: tuple[str, ...]
    step: Step
    batch_size: int
    num_microbatches: int
    microbatch: Callable[[int], LayerGraph]
    split_reason: str
    fingerprint: str
    notes: tuple[str, ...] = field(default=())
    split_cause: str = ""

    @property
    def by_rows(self) -> LayerGraph:
        """The same layers with a step on rows of stacked leaves; itself where no loop was unfolded."""
        rows, again = self.step.by_rows, self.microbatch
        if rows is None:
            return self
        return replace(self, step=rows.step, microbatch=lambda count: again(count).by_rows)

    @property
    def producer(self) -> dict[int, int]:
        """Layer that writes each value."""
        return {v: layer.index for layer in self.layers for v in layer.writes}

    @property
    def edges(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """(writer, reader, values) of every pair of layers that share values, in order."""
        producer = self.producer
        found: dict[tuple[int, int], list[int]] = {}
        for layer in self.layers:
            for v in layer.reads:
                found.setdefault((producer[v], layer.index), []).append(v)
        return tuple((u, v, tuple(vals)) for (u, v), vals in sorted(found.items()))

    @property
    def unique(self) -> dict[str, tuple[int, ...]]:
        """Layers by signature, in order of first appearance."""
        groups: dict[str, list[int]] = {}
        for layer in self.layers:
            groups.setdefault(layer.signature, []).append(layer.index)
        return {s: tuple(g) for s, g in groups.items()}

    def layer_values(self, layer: Layer) -> tuple[Value, ...]:
        """Shapes of the inputs of a layer's jaxpr: params, operands, reads."""
        return (
            *(self.params[i] for i in layer.params),
            *(self.operands[i] for i in layer.operands),
            *(self.values[i] for i in layer.reads),
        )
