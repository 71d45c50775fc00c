"""Consecutive layers as the stage they would be: one function, and the programs that stages run it by.

A pipeline stage runs its forward and its backward as two programs, with the kept values in between; inputs, what is an
input in another shape, and cheap functions of parameters or of the batch alone, are not kept but made again. A last
stage that turns round at once is one program, which adds to sums of gradients that it is given. So is the only stage,
which adds them up in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from uniap_jax.core.jax_compat import Literal
from uniap_jax.core.jaxprs import Tape, flatten, live_eqns, moved
from uniap_jax.core.kernels import CHEAP
from uniap_jax.core.vjp import is_float, layer_avals
from uniap_jax.profiler.programs import Arrays, Case, Direction, as_function, case_function, compile_on, drawn, pin


class Placed(NamedTuple):
    """An array as programs take it or give it.

    Attributes:
        shape: with its dtype.
        spec: its layout on the sub-mesh.
    """

    shape: Any
    spec: Any

    def stacked(self, number: int) -> Placed:
        """As many of them, one behind the other."""
        shape = jax.ShapeDtypeStruct((number, *self.shape.shape), self.shape.dtype)
        return Placed(shape, PartitionSpec(None, *self.spec))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive layers as one function `(params, operands, reads) -> (writes, results)`.

    Attributes:
        case: the first of them.
        run: the function.
        params: of all layers, each once; as they are stored.
        operands: each once.
        of_batch: for each operand whether every micro-batch has its own.
        reads: what earlier layers wrote.
        writes: what leaves it and has a gradient.
        results: what leaves it and has none.
        sums: of the gradients, as they are added up.
    """

    case: Case
    run: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    params: tuple[Placed, ...]
    operands: tuple[Placed, ...]
    of_batch: tuple[bool, ...]
    reads: tuple[Placed, ...]
    writes: tuple[Placed, ...]
    results: tuple[Placed, ...]
    sums: tuple[Placed, ...]

    @property
    def moving(self) -> list[Placed]:
        """Reads that have a gradient."""
        return [r for r in self.reads if is_float(r.shape)]

    def vjp(self, params: Sequence[Any], operands: Any, reads: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """Writes, results, and the pull-back of the writes to parameters and moving reads."""
        flags = [is_float(r) for r in reads]

        def of(params: Any, moving: Any) -> tuple[list[Any], list[Any]]:
            it = iter(moving)
            return self.run(params, operands, [next(it) if f else r for f, r in zip(flags, reads, strict=True)])

        moving = [r for r, f in zip(reads, flags, strict=True) if f]
        writes, pull, results = jax.vjp(of, self.case.view(params), moving, has_aux=True)
        return writes, results, pull

    def added(self, totals: Sequence[Any], grads: Sequence[Any], weight: float = 1.0) -> list[Any]:
        """Gradients as they are laid out, added to what was summed so far; `()` where nothing was."""
        if totals:
            grads = [t + weight * g.astype(t.dtype) for t, g in zip(totals, grads, strict=True)]
        return [pin(g, self.case.mesh, s.spec) for g, s in zip(grads, self.sums, strict=True)]


def piece_of(cases: Sequence[Case], ends: Collection[int] | None = None) -> Piece:
    """Consecutive layers of one graph, each reading what those before it wrote.

    Args:
        cases: the layers, in order, on one sub-mesh under strategies of equal axes.
        ends: values that have a gradient; None for all that could.
    """
    graph, layers, where = cases[0].graph, [c.layer for c in cases], [c.sharding() for c in cases]
    shapes = [layer_avals(layer) for layer in layers]
    written = {v for layer in layers for v in layer.writes}
    inside = {layer.index for layer in layers}
    wanted = {v for layer in graph.layers if layer.index not in inside for v in layer.reads} | set(graph.results)
    params = _each((x.params, a[0], w.stored) for x, a, w in zip(layers, shapes, where, strict=True))
    grads = _each((x.params, a[0], w.grads) for x, a, w in zip(layers, shapes, where, strict=True))
    operands = _each((x.operands, a[1], w.operands) for x, a, w in zip(layers, shapes, where, strict=True))
    reads = _each((x.reads, a[2], w.reads) for x, a, w in zip(layers, shapes, where, strict=True))
    reads = {v: r for v, r in reads.items() if v not in written}
    outs = _each((x.writes, x.jaxpr.out_avals, w.writes) for x, w in zip(layers, where, strict=True))
    leaving = {v: o for v, o in outs.items() if v in wanted or len(layers) == 1}
    writes = {v: o for v, o in leaving.items() if is_float(o.shape) and (ends is None or v in ends)}
    results = {v: o for v, o in leaving.items() if v not in writes and ends is not None}
    runs = [case_function(c) for c in cases]

    def run(p: Sequence[Any], o: Sequence[Any], r: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        known = dict(zip(reads, r, strict=True))
        weights, others = dict(zip(params, p, strict=True)), dict(zip(operands, o, strict=True))
        for layer, step in zip(layers, runs, strict=True):
            given = [weights[i] for i in layer.params], [others[i] for i in layer.operands]
            known.update(zip(layer.writes, step(*given, [known[v] for v in layer.reads]), strict=True))
        return [known[v] for v in writes], [known[v] for v in results]

    return Piece(
        case=cases[0],
        run=run,
        params=tuple(params.values()),
        operands=tuple(operands.values()),
        of_batch=tuple(graph.operands[o].kind == "batch" for o in operands),
        reads=tuple(reads.values()),
        writes=tuple(writes.values()),
        results=tuple(results.values()),
        sums=tuple(_summed(g, cases[0].mapped) for g in grads.values()),
    )


def _each(groups: Iterable[tuple[Sequence[int], Sequence[Any], Sequence[PartitionSpec]]]) -> dict[int, Placed]:
    """Arrays by their position in the graph, as the first that names them has them."""
    found: dict[int, Placed] = {}
    for names, shapes, specs in groups:
        for name, a, spec in zip(names, shapes, specs, strict=True):
            found.setdefault(name, Placed(jax.ShapeDtypeStruct(a.shape, a.dtype), spec))
    return found


def _summed(grad: Placed, mapped: bool) -> Placed:
    lead, spec = ((1,), (None,)) if mapped else ((), ())
    dtype = jnp.promote_types(grad.shape.dtype, jnp.float32)
    return Placed(jax.ShapeDtypeStruct((*lead, *grad.shape.shape), dtype), PartitionSpec(*spec, *grad.spec))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halves:
    """A piece as two functions, and what goes from one to the other.

    Attributes:
        ahead: `ahead(params, operands, reads as one list) -> (writes, results, kept as one list)`.
        kept: shapes of what the first hands to the second.
        inputs: positions in that list of what the second is given again.
        behind: `behind(those inputs, kept, cotangents) -> (gradients of parameters, of moving reads)`.
    """

    ahead: Callable[[Sequence[Any]], list[Any]]
    kept: tuple[Any, ...]
    inputs: tuple[int, ...]
    behind: Callable[[Sequence[Any], Sequence[Any], Any], tuple[list[Any], list[Any]]]


def halves(piece: Piece, *, stay: bool) -> Halves:
    """Forward and backward of a piece.

    Args:
        piece: to differentiate.
        stay: whether what it reads is there again for the backward; otherwise it is kept as far as it is needed.
    """
    structure, emitted = list[Any](), len(piece.writes) + len(piece.results)

    def forward(params: Any, operands: Any, reads: Any) -> Any:
        outs, results, pull = piece.vjp(params, operands, reads)
        leaves, tree = jax.tree.flatten(pull)
        structure[:] = [tree]
        return [*outs, *results], leaves

    groups = piece.params, piece.operands, piece.reads
    tape = flatten(jax.make_jaxpr(forward)(*([x.shape for x in g] for g in groups)))
    residuals, first_read = tape.outvars[emitted:], len(piece.params) + len(piece.operands)
    there = tape.invars if stay else tape.invars[:first_read]
    again = {*_cheap(tape, [*tape.invars[:first_read], *tape.consts]), *moved(tape.eqns, there[first_read:])}
    known = {*again, *there}
    kept = [v for v in dict.fromkeys(r for r in residuals if not isinstance(r, Literal)) if v not in known]
    wanted = [r for r in residuals if not isinstance(r, Literal) and r not in kept]
    needed = live_eqns(tape.eqns, wanted)[1]
    inputs = [i for i, v in enumerate(tape.invars) if v in needed]
    remake = as_function(tape, [tape.invars[i] for i in inputs], wanted)

    def behind(given: Any, held: Any, cotangents: Any) -> Any:
        values = dict(zip([*wanted, *kept], [*remake(given), *held], strict=True))
        leaves = [r.val if isinstance(r, Literal) else values[r] for r in residuals]
        return jax.tree.unflatten(structure[0], leaves)(cotangents)

    return Halves(
        ahead=as_function(tape, tape.invars, [*tape.outvars[:emitted], *kept]),
        kept=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in kept),
        inputs=tuple(inputs),
        behind=behind,
    )


def compile_split(piece: Piece, arrays: Arrays | None, *, summed: bool = False) -> tuple[Direction, Direction]:
    """Forward `-> (writes, results, kept)` and backward `(inputs, kept, cotangents, sums) -> gradients`.

    Args:
        piece: what to compile and where.
        arrays: of the arguments to run them with; None where they are only compiled.
        summed: whether gradients are added to sums that the backward is given, whose buffers it takes where nothing
            is run.
    """
    half, emitted = halves(piece, stay=True), [x.spec for x in (*piece.writes, *piece.results)]
    flat = [*piece.params, *piece.operands, *piece.reads]
    first = compile_piece(piece, half.ahead, [flat], [*emitted, *([None] * len(half.kept))], arrays)

    def behind(given: Any, held: Any, cotangents: Any, totals: Any) -> Any:
        grads, into = half.behind(given, held, cotangents)
        return [*piece.added(totals, grads), *into]

    layouts = first.compiled.output_shardings[len(emitted) :]
    held = [Placed(shape, layout) for shape, layout in zip(half.kept, layouts, strict=True)]
    given = [[flat[i] for i in half.inputs], held, piece.writes, piece.sums if summed else ()]
    donated = (3,) if summed and arrays is None else ()
    return first, compile_piece(piece, behind, given, _gradients(piece), arrays, donate=donated)


def compile_turned(piece: Piece, *, summed: bool) -> Direction:
    """Both directions at once: `(params, operands, reads, cotangents, sums) -> (results, gradients)`.

    Args:
        piece: what to compile and where.
        summed: whether gradients are added to sums that it is given, whose buffers it takes.
    """

    def both(params: Any, operands: Any, reads: Any, cotangents: Any, totals: Any) -> Any:
        _, results, pull = piece.vjp(params, operands, reads)
        grads, into = pull(cotangents)
        return [*results, *piece.added(totals, grads), *into]

    given = [piece.params, piece.operands, piece.reads, piece.writes, piece.sums if summed else ()]
    outs = [*(r.spec for r in piece.results), *_gradients(piece)]
    return compile_piece(piece, both, given, outs, None, donate=(4,) if summed else ())


def compile_loop(piece: Piece, number: int) -> Direction:
    """Both directions of every micro-batch in turn: `(params, operands, reads, cotangents) -> (results, gradients)`.

    Args:
        piece: what to compile and where.
        number: of micro-batches.
    """

    def accumulated(params: Any, operands: Any, reads: Any, cotangents: Any) -> Any:
        still = [o for o, b in zip(operands, piece.of_batch, strict=True) if not b]

        def body(total: list[Any], now: Any) -> tuple[list[Any], list[Any]]:
            batch, fixed = iter(now[0]), iter(still)
            here = drawn([next(batch) if b else next(fixed) for b in piece.of_batch])
            _, results, pull = piece.vjp(params, here, now[1])
            grads, into = pull(now[2])
            return piece.added(total, grads, 1 / number), [*results, *into]

        zeros = [pin(jnp.zeros(s.shape.shape, s.shape.dtype), piece.case.mesh, s.spec) for s in piece.sums]
        moving = [o for o, b in zip(operands, piece.of_batch, strict=True) if b]
        total, each = lax.scan(body, zeros, (moving, reads, cotangents))
        return [*each[: len(piece.results)], *total, *each[len(piece.results) :]]

    operands = [o.stacked(number) if b else o for o, b in zip(piece.operands, piece.of_batch, strict=True)]
    given = [piece.params, operands, *([x.stacked(number) for x in g] for g in (piece.reads, piece.writes))]
    outs = [r.stacked(number) for r in piece.results], piece.sums, [r.stacked(number) for r in piece.moving]
    return compile_piece(piece, accumulated, given, [o.spec for group in outs for o in group], None)


def _gradients(piece: Piece) -> list[PartitionSpec]:
    """Of parameters, then of what is read."""
    return [x.spec for x in (*piece.sums, *piece.moving)]


def compile_piece(
    piece: Piece,
    function: Callable[..., Any],
    given: Sequence[Sequence[Placed]],
    outs: Sequence[PartitionSpec | None],
    arrays: Arrays | None,
    *,
    donate: tuple[int, ...] = (),
) -> Direction:
    """A program over a piece's sub-mesh: arguments group by group, and a layout of each result."""
    shapes, specs = ([[x[i] for x in group] for group in given] for i in range(2))
    return compile_on(piece.case, function, shapes, specs, outs, arrays, donate=donate)


def _cheap(tape: Tape, start: Sequence[Any]) -> set[Any]:
    """Variables that cheap equations make of `start` alone."""
    found = set(start)
    for eqn in tape.eqns:
        if eqn.primitive.name in CHEAP and all(isinstance(v, Literal) or v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found
