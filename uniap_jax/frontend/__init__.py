"""From a train step to layers: capture, split around the loss, cut. One door: `trace`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from uniap_jax.core.errors import TraceError
from uniap_jax.core.graph import LayerGraph, Operand, Step, Value
from uniap_jax.core.jax_compat import Literal, Var, no_mesh, shape_of
from uniap_jax.frontend.ahead import Ahead, cut_rows, taken_ahead, with_ahead
from uniap_jax.frontend.arguments import Arguments
from uniap_jax.frontend.batch_rules import CONST, Kind
from uniap_jax.frontend.batching import FACTOR, Misaligned, classify, grown_dims
from uniap_jax.frontend.capture import Captured, capture
from uniap_jax.frontend.cut import cut_points, mark_layer, marked_places, weigh
from uniap_jax.frontend.layers import Cut, build_layers, loop_notes
from uniap_jax.frontend.names import AxisRules, with_rules
from uniap_jax.frontend.place import placed
from uniap_jax.frontend.rng import CannotSlice, slice_random_bits
from uniap_jax.frontend.split import LossTape, SplitStep, split_step
from uniap_jax.frontend.unfold import Unfolded, part_names, row_step, unfold, unfold_loss

__all__ = ["AxisRules", "mark_layer", "trace"]

REDUCTIONS = {"mean": "mean", "sum": "sum", "rows": "concat", "const": "same"}


def trace(
    train_step: Callable[..., Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = (1,),
    static_argnums: int | Sequence[int] = (),
    logical_axis_rules: AxisRules | None = None,
    unfold_scans: bool = False,
) -> LayerGraph:
    """Captures a train step and cuts its loss into layers; nothing is computed or compiled.

    Args:
        train_step: the user's step; plain, or under `jax.jit` or `nnx.jit`.
        *args: an example call; arrays or `jax.ShapeDtypeStruct`s.
        batch_argnums: arguments whose leaves have the global batch as leading dimension.
        static_argnums: arguments handed to the step as they are.
        logical_axis_rules: what may split the dimensions that a Flax model names, for example
            (("mlp", "tensor"), ("embed", "fsdp"), ("kv", None)); None leaves all to the search.
        unfold_scans: whether a loop over layers with stacked parameters (`nn.scan`, `nnx.scan`, `lax.scan`) is written
            out, each turn a layer of its own, instead of being one layer.

    Returns:
        The graph of layers, in trace order.

    Raises:
        TraceError: no gradient, several, arguments that cannot be traced, or a rule for a split that does not exist.
    """
    batch_argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    arguments = Arguments(args, batch_argnums=batch_argnums, static_argnums=static_argnums)
    with no_mesh():
        graph = _Tracer(train_step, arguments, unfold_scans=unfold_scans).graph()
        return graph if logical_axis_rules is None else with_rules(graph, arguments.dim_names(args), logical_axis_rules)


def _fingerprint(cut: Cut, params: Sequence[Value], step: Step) -> str:
    """What a plan is checked against: names and shapes of the state, shapes of the batch, and where layers are cut.

    Equations stay out of it: another JAX version writes them another way for the same model.
    """
    shapes = [(v.name, v.shape, str(v.dtype)) for v in (*params, *step.state, *step.batch)]
    layers = [(layer.params, layer.reads, layer.writes) for layer in cut.layers]
    values = [(shape_of(a).shape, str(shape_of(a).dtype)) for a in cut.values]
    return hashlib.sha256(repr((shapes, layers, values)).encode()).hexdigest()[:32]


def _unfolded(captured: Captured) -> Unfolded | None:
    """A step with its loops written out, what its loss makes of parameters beside the readers; None without loops."""
    parts, arguments = split_step(captured), captured.arguments
    output_leaf = arguments.output_leaf(parts.update.out_avals)
    found = unfold(parts, output_leaf, num_batch=len(arguments.batch))
    return found and replace(found, parts=replace(found.parts, loss=placed(found.parts.loss)))


def _split(captured: Captured) -> SplitStep:
    """The parts of a step, what its loss makes of parameters beside the readers."""
    parts = split_step(captured)
    return replace(parts, loss=placed(parts.loss))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batching:
    """What two traces tell about the batch; `reductions`, `cause` and `reason` are those of `LayerGraph`."""

    ahead: Ahead
    reductions: tuple[str, ...]
    dims: dict[Var, int | None]
    cause: str
    reason: str


def _split_reason(loss: LossTape, kinds: Sequence[Kind]) -> tuple[str, str]:
    """Cause and reason why the batch must not be split, empty where it may; from the kinds of the results."""
    for i, (atom, kind) in enumerate(zip(loss.results, kinds, strict=True)):
        what = "the loss" if i == 0 else f"auxiliary output {i - 1} of the loss"
        if kind.name == "mixed":
            why = f"{what} is not a mean, a sum or a list over examples: {kind.reason}"
            return "statistic" if kind.known else "unknown", why
        if kind.name not in REDUCTIONS or (i == 0 and kind.name == "rows"):
            return "unknown", f"{what} is not a mean, a sum or a list over examples"
        if kind.name == "rows" and i and not getattr(atom.aval, "shape", ()):
            return "unknown", f"{what} cannot be put together from micro-batches"
    return "", ""


class _Tracer:
    """One traced call; re-traces it at other batch sizes with the same cuts."""

    def __init__(self, step: Callable[..., Any], arguments: Arguments, *, unfold_scans: bool = False) -> None:
        self.step, self.arguments = step, arguments
        self.captured = capture(step, arguments)
        self.unfolded = _unfolded(self.captured) if unfold_scans else None
        parts = self.unfolded.parts if self.unfolded is not None else _split(self.captured)
        self.loss, self.batching = parts.loss, self._batching(parts.loss)
        self.whole = self._taken(parts)
        self.index = Var(jax.make_jaxpr(lambda i: i)(jax.ShapeDtypeStruct((), jnp.int32)).in_avals[0])
        work = weigh(self.whole.loss)
        if not work.order:
            raise TraceError("the loss does not depend on the parameters it is differentiated by")
        marks = marked_places(self.whole.loss, work.order)
        self.order, self.starts = work.order, (0, *cut_points(work, tuple(marks)))
        self.marks = tuple(marks.get(end, "") for end in (*self.starts[1:], len(self.order)))
        self._cache: dict[int, LayerGraph] = {}
        self._lock = threading.Lock()

    def _retrace(self, size: int) -> LossTape:
        loss = split_step(capture(self.step, self.arguments.resized(size))).loss
        found = unfold_loss(loss) if self.unfolded is not None else None
        return placed(loss if found is None else found.loss)

    def _taken(self, parts: SplitStep) -> SplitStep:
        """The parts of the step with what is made of the whole batch ahead of the loss."""
        ahead, dims = self.batching.ahead, self.batching.dims
        loss = taken_ahead(parts.loss, ahead, parts.loss, 1)
        pairs = zip(loss.results, parts.loss.results, strict=True)
        dims.update({a: dims.get(b) for a, b in pairs if not isinstance(a, Literal)})
        return replace(parts, loss=loss, before=with_ahead(parts.before, parts.loss, ahead))

    def _batching(self, loss: LossTape) -> _Batching:
        """What becomes of the batch, from a second trace at twice its size."""
        try:
            large = self._retrace(self.arguments.batch_size * FACTOR)
        except (TypeError, ValueError, AssertionError) as error:  # JAX's, or the user's own check of a shape
            return self._unfollowed(loss, f"the step does not trace at another batch size ({_first_line(error)})")
        try:
            kinds, ahead = classify(loss, large)
        except Misaligned as error:
            return self._unfollowed(loss, f"the step does something else at another batch size ({_first_line(error)})")
        dims: dict[Var, int | None] = dict.fromkeys(loss.batch, 0)
        for a, b in zip(loss.eqns, large.eqns, strict=True):
            for x, y in zip(a.outvars, b.outvars, strict=True):
                grown = grown_dims(x.aval, y.aval)
                dims[x] = grown[0] if grown else None
        results = [CONST if isinstance(a, Literal) else kinds.get(a, CONST) for a in loss.results]
        cause, reason = _split_reason(loss, results)
        reductions = tuple(REDUCTIONS.get(kind.name, "same") for kind in results)
        return _Batching(ahead=ahead, reductions=reductions, dims=dims, cause=cause, reason=reason)

    def _unfollowed(self, loss: LossTape, reason: str) -> _Batching:
        """A step written for one batch size only: it can be planned, but its batch cannot be followed."""
        reductions = tuple("concat" if a in loss.batch else "same" for a in loss.results)
        dims: dict[Var, int | None] = dict.fromkeys(loss.batch, 0)
        return _Batching(ahead=Ahead(), reductions=reductions, dims=dims, cause="shapes", reason=reason)

    def _value(self, atom: Any, name: str = "") -> Value:
        dim = None if isinstance(atom, Literal) else self.batching.dims.get(atom)
        return Value(shape=tuple(atom.aval.shape), dtype=atom.aval.dtype, batch_dim=dim, name=name)

    def graph(self) -> LayerGraph:
        """The graph of the whole batch."""
        cut = build_layers(
            self.whole.loss, self.order, self.starts, self.index, params=self._param_names(), names=self.marks
        )
        step = self._step()
        graph = LayerGraph(
            layers=cut.layers,
            params=self._params(),
            operands=self._operands(self.whole.loss, 1),
            values=self._values(cut),
            results=cut.results,
            reductions=self.batching.reductions,
            step=step,
            batch_size=self.arguments.batch_size,
            num_microbatches=1,
            microbatch=self.microbatch,
            split_reason=self.batching.reason,
            split_cause=self.batching.cause,
            fingerprint=_fingerprint(cut, self._params(), step),
            notes=(*self._split_notes(), *loop_notes(cut.layers)),
        )
        self._cache[1] = graph
        return graph

    def _split_notes(self) -> tuple[str, ...]:
        reason = self.batching.reason
        return (f"The batch is not split into micro-batches: {reason}.",) if reason else ()

    def _values(self, cut: Cut) -> tuple[Value, ...]:
        writer = {v: layer.name for layer in cut.layers for v in layer.writes}
        return tuple(self._value(a, f"output of {writer[i]}") for i, a in enumerate(cut.values))

    def _param_names(self) -> list[str]:
        names, leaves = self.arguments.state_names, self.whole.param_leaf
        if self.unfolded is not None:
            names, leaves = part_names(names, self.unfolded.leaves), self.unfolded.param_leaf
        return [f"parameter {i}" if leaf is None else names[leaf] for i, leaf in enumerate(leaves)]

    def _params(self) -> tuple[Value, ...]:
        return tuple(
            Value(shape=shape_of(v).shape, dtype=shape_of(v).dtype, name=name)
            for v, name in zip(self.whole.loss.params, self._param_names(), strict=True)
        )

    def _operands(self, loss: LossTape, pieces: int) -> tuple[Operand, ...]:
        state = [
            Operand(shape=shape_of(v).shape, dtype=shape_of(v).dtype, kind="state", leaf=i, name=f"operand {i}")
            for i, v in enumerate(loss.state)
        ]
        batch = [
            Operand(
                shape=(s.shape[0] // pieces, *s.shape[1:]), dtype=s.dtype, batch_dim=0, kind="batch", leaf=i, name=n
            )
            for i, (s, n) in enumerate(zip(self.arguments.batch, self.arguments.batch_names, strict=True))
        ]
        return (*state, *batch, Operand(shape=(), dtype=jnp.dtype("int32"), kind="index", name="micro-batch"))

    def _step(self) -> Step:
        a, outs = self.arguments, self.whole.update.out_avals
        step = Step(
            before=self.whole.before,
            update=self.whole.update,
            state=tuple(
                Value(shape=s.shape, dtype=s.dtype, name=n) for s, n in zip(a.state, a.state_names, strict=True)
            ),
            batch=tuple(
                Value(shape=s.shape, dtype=s.dtype, batch_dim=0, name=n)
                for s, n in zip(a.batch, a.batch_names, strict=True)
            ),
            outputs=tuple(
                Value(shape=tuple(s.shape), dtype=s.dtype, name=n) for s, n in zip(outs, a.out_names, strict=True)
            ),
            param_leaf=self.whole.param_leaf,
            output_leaf=a.output_leaf(outs),
            flatten=a.flatten,
            unflatten=a.unflatten,
            state_result=a.state_result,
            flat=lambda *leaves: self.captured.flat(*leaves),  # its own function: jit caches traces by identity
        )
        if self.unfolded is None:
            return step
        before = with_ahead(self.unfolded.before, self.loss, self.batching.ahead)
        return replace(step, by_rows=row_step(step, replace(self.unfolded, before=before)))

    def microbatch(self, count: int) -> LayerGraph:
        """The same layers at batch B/count.

        Raises:
            TraceError: the batch does not divide, or must not be split; says why.
        """
        with self._lock, no_mesh():
            if count not in self._cache:
                self._cache[count] = self._microbatch(count)
            return self._cache[count]

    def _microbatch(self, count: int) -> LayerGraph:
        whole, size = self._cache[1], self.arguments.batch_size
        if size % count:
            raise TraceError(
                f"batch size {size} cannot be split into {count} micro-batches; use a divisor of {size}",
                batch_size=size,
                num_microbatches=count,
            )
        if whole.split_reason:
            raise TraceError(
                f"the batch cannot be split into {count} micro-batches: {whole.split_reason}; use num_microbatches=1",
                num_microbatches=count,
                reason=whole.split_reason,
            )
        loss = self._retrace(size // count)
        if [e.primitive for e in loss.eqns] != [e.primitive for e in self.loss.eqns]:
            # one example is where this happens: JAX leaves out what broadcasts or reshapes a dimension of size 1
            raise TraceError(
                f"the batch cannot be split into {count} micro-batches: on {size // count} of its {size} examples the "
                "step runs other operations; use fewer micro-batches",
                num_microbatches=count,
                examples=size // count,
            )
        loss = taken_ahead(loss, self.batching.ahead, self.loss, count)
        try:
            eqns = slice_random_bits(loss.eqns, self.whole.loss.eqns, self.index)
        except CannotSlice as error:
            raise TraceError(
                f"the batch cannot be split into {count} micro-batches without changing its random numbers: {error}; "
                "use num_microbatches=1",
                num_microbatches=count,
                reason=str(error),
            ) from error
        before, loss = loss.eqns, cut_rows(replace(loss, eqns=tuple(eqns)), self.whole.loss, self.index)
        order, starts = self._moved(before, loss.eqns)
        cut = build_layers(loss, order, starts, self.index, params=self._param_names())
        return replace(
            whole,
            layers=tuple(
                replace(a, name=b.name, source=b.source) for a, b in zip(cut.layers, whole.layers, strict=True)
            ),
            operands=self._operands(loss, count),
            values=tuple(replace(v, shape=tuple(a.aval.shape)) for v, a in zip(whole.values, cut.values, strict=True)),
            num_microbatches=count,
        )

    def _moved(self, before: Sequence[Any], after: Sequence[Any]) -> tuple[list[int], tuple[int, ...]]:
        """`order` after equations were put in between; those put in depend on no parameter."""
        place = {e.outvars[0]: i for i, e in enumerate(after)}
        return [place[before[i].outvars[0]] for i in self.order], self.starts
