"""What one layer's forward and backward do: kernels, bytes, values kept, collectives; read off traced programs.

The forward is traced with its vjp, so what is kept for the backward is what JAX keeps, under each policy. A kernel is
an equation that runs on its own (matrix products, gathers, reductions, loops) or an element-wise value that must
exist in memory; what it moves is in `traffic`.
Nothing is compiled and nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType
from numpy.typing import NDArray

from uniap_jax.core import dims
from uniap_jax.core.dim_classes import ClassBuilder, Node
from uniap_jax.core.dim_rules import rule_for
from uniap_jax.core.dim_shape_rules import CONST, LIVE, PARAM, Use, shape_of
from uniap_jax.core.dim_walk import inner_jaxpr
from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import Literal
from uniap_jax.core.jaxprs import eqn_flops, open_jaxpr
from uniap_jax.core.kernels import CHEAP, HEAVY, LOOPS, PRODUCTS, RANDOM, RANDOM_COPIES, READERS
from uniap_jax.core.padding import padded_layer
from uniap_jax.core.rewrite import Ways, merged
from uniap_jax.core.sharding import Splits
from uniap_jax.core.traffic import Event, Value, held_when_fused, kernel_bytes
from uniap_jax.core.vjp import is_float, layer_avals, traced_vjp

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One direction of one layer, unsharded.

    Attributes:
        flops: [kernels] floating-point operations.
        nbytes: [kernels] bytes read and written in a program of this direction alone; 0 where there is no such kernel.
        fused_nbytes: [kernels] likewise where both directions are one program, which hands nothing over between them.
        split: [kernels] whether tensor ways divide it.
        dtypes: [kernels] of matrix products, "" elsewhere.
        live: [equations] bytes alive that no strategy splits by tensor, arguments and kept values apart.
        live_split: [equations] bytes alive that tensor ways divide.
        reduced: bytes of each result that tensor ways leave as partial sums.
        met: bytes of each activation whose positions meet all others' (keys and values).
        exchanged: bytes of each activation that goes from its example to its expert, or back.
    """

    flops: FloatArray
    nbytes: FloatArray
    fused_nbytes: FloatArray
    split: BoolArray
    dtypes: tuple[str, ...]
    live: FloatArray
    live_split: FloatArray
    reduced: tuple[float, ...]
    met: tuple[float, ...] = ()
    exchanged: tuple[float, ...] = ()

    def transient_bytes(self, tensor: int) -> float:
        """Most bytes alive at once, with the tensor ways' share of what they divide."""
        return float((self.live + self.live_split / tensor).max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """A layer at one batch size under one `keep`, and with one choice of split dimensions.

    Attributes:
        forward: of the layer.
        backward: of the layer, recompute included.
        kept: bytes kept for the backward that tensor ways do not divide; parameters, operands and cheap functions of
            either (masks, casts) apart, for those are made again.
        kept_split: bytes kept that they do.
        fused: as `kept`, by a compiler that sees forward and backward as one program.
        fused_split: as `kept_split`, by such a compiler.
    """

    forward: Pass
    backward: Pass
    kept: float
    kept_split: float
    fused: float
    fused_split: float


class Traced:
    """A layer's forward and backward, and the kernels of their programs.

    Args:
        layer: at the batch size it was traced with.
        choice: dimensions that the tensor ways split.
        keep: what the forward keeps.
        tensor: ways; says that dimensions are split, not yet by how much.
        tpu: as of `traffic.kernel_bytes`.
    """

    def __init__(self, layer: Layer, choice: dims.TensorSplit, *, keep: str, tensor: int, tpu: bool) -> None:
        if tensor > 1:
            mesh = AbstractMesh((tensor,), ("x0",), axis_types=(AxisType.Auto,))
            layer = padded_layer(layer, choice.pads)
            layer = replace(layer, jaxpr=merged(layer, choice, Ways(mesh=mesh, axes=("x0",), degree=tensor)))
        forward, backward, where = traced_vjp(layer, keep)
        meter = _Meter()
        params, operands, _ = layer_avals(layer)
        kinds = [PARAM] * len(params) + [CONST] * len(operands)
        kinds += [LIVE] * (len(forward.jaxpr.invars) - len(kinds))
        ins = [meter.argument(v.aval, kind) for v, kind in zip(forward.jaxpr.invars, kinds, strict=True)]
        first = meter.run(forward, ins)
        number = len(layer.jaxpr.out_avals)
        kept = first.outs[number:]
        again = [ins[w] if w is not None else r for w, r in zip(where, kept, strict=True)]
        cotangents = [meter.argument(v.aval, LIVE) for v in backward.jaxpr.invars[len(again) :]]
        second = meter.run(backward, [*again, *cotangents])
        own = {r.index: r for r, w in zip(kept, where, strict=True) if w is None}
        own |= {ins[w].index: ins[w] for w in where if w is not None and w >= len(params) + len(operands)}
        grads = {r.index for r in second.outs[: sum(map(is_float, params))]}
        self._meter, self._choice, self._ins, self._outs = meter, choice, ins, first.outs[:number]
        self._own = list(own.values())
        self._runs = first, second
        self._apart = {r.index for r in (*ins, *own.values())}, grads | {r.index for r in (*again, *cotangents)}
        self._moved = _moved(first, second, self._outs, tpu=tpu)

    def work(self, splits: Splits | None = None) -> Work:
        """What they do.

        Args:
            splits: which dimensions are split; those of tensor parallelism alone where None.
        """
        meter, first = self._meter, self._runs[0]
        cuts = _cuts(meter, self._choice, splits, self._ins, self._outs)
        shares = [(r, meter.is_split(r, cuts.split)) for r in self._own if not r.cheap]
        held = held_when_fused(first.events, [r for r, _ in shares])
        fused = [(r, meter.is_split(r, cuts.split)) for r in held]
        passes = zip(self._runs, self._apart, self._moved, strict=True)
        forward, backward = (meter.summary(run, cuts, apart=apart, moved=moved) for run, apart, moved in passes)
        return Work(
            forward=forward,
            backward=backward,
            kept=sum(r.nbytes for r, s in shares if not s),
            kept_split=sum(r.nbytes for r, s in shares if s),
            fused=sum(r.nbytes for r, s in fused if not s),
            fused_split=sum(r.nbytes for r, s in fused if s),
        )


Moved = list[tuple[float, float]]
"""Bytes of each equation's kernel: in a program of its direction, and in one of both."""


def _moved(first: _Run, second: _Run, outs: list[Value], *, tpu: bool) -> tuple[Moved, Moved]:
    ends = {v.index for v in (*outs, *second.outs)}
    fused = kernel_bytes([*first.events, *second.events], ends, tpu=tpu)
    split = [kernel_bytes(r.events, {v.index for v in r.outs}, tpu=tpu) for r in (first, second)]
    count = len(first.events)
    return list(zip(split[0], fused[:count], strict=True)), list(zip(split[1], fused[count:], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    events: list[Event]
    outs: list[Value]


class _Meter:
    """Walks programs that share values, collecting events and dimension classes."""

    def __init__(self) -> None:
        self.classes = ClassBuilder()
        self._count = 0
        self._events: list[Event] = []

    def argument(self, aval: Any, kind: int) -> Value:
        """A value that exists before the program runs."""
        found = None if kind == CONST else self.classes.fresh(tuple(aval.shape))
        return self._value(aval, found, kind, kind != LIVE)

    def run(self, closed: Any, ins: list[Value]) -> _Run:
        """Walks a program on these inputs."""
        self._events = []
        outs = self._body(closed, ins)
        return _Run(events=self._events, outs=outs)

    def is_split(self, value: Value, roots: set[Node]) -> bool:
        """Whether a dimension of the value is in one of the classes."""
        return any(n is not None and self.classes.root(n) in roots for n in value.dims or ())

    def _value(self, aval: Any, found: tuple[Node | None, ...] | None, kind: int, cheap: bool) -> Value:
        self._count += 1
        size = math.prod(getattr(aval, "shape", ())) if aval is not None else 0
        itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 4)
        return Value(index=self._count, nbytes=float(size * itemsize), dims=found, kind=kind, cheap=cheap)

    def _body(self, jaxpr: Any, ins: list[Value]) -> list[Value]:
        opened = open_jaxpr(jaxpr)
        env: dict[Any, Value] = {v: self._value(v.aval, None, CONST, True) for v in opened.constvars}
        env.update(zip(opened.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            return self._value(None, None, CONST, True) if isinstance(atom, Literal) else env[atom]

        for eqn in opened.eqns:
            given = [read(v) for v in eqn.invars]
            body = None if eqn.primitive.name in LOOPS else inner_jaxpr(eqn)
            outs = self._body(body, given) if body is not None else self._equation(eqn, given)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in opened.outvars]

    def _equation(self, eqn: Any, given: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        kind = max((g.kind for g in given), default=CONST)
        found = tuple(
            self.classes.fresh(shape_of(v)) if g.dims is None else g.dims
            for g, v in zip(given, eqn.invars, strict=True)
        )
        summed: list[Node] = []
        if kind == CONST:
            shapes: list[Any] = [None for _ in eqn.outvars]
        elif name in LOOPS:
            shapes = [_like(v, given, eqn, found, self.classes) for v in eqn.outvars]
        else:
            use = Use(classes=self.classes, eqn=eqn, ins=found, kinds=tuple(g.kind for g in given), source="")
            shapes = rule_for(name)(use)
            summed = _summed(eqn, found)
        cheap = name in CHEAP and all(g.cheap for g in given)
        outs = [self._value(v.aval, s, kind, cheap) for v, s in zip(eqn.outvars, shapes, strict=True)]
        dtype = str(eqn.invars[0].aval.dtype) if name in PRODUCTS else ""
        self._events.append(
            Event(
                name=name,
                flops=eqn_flops(eqn),
                dtype=dtype,
                ins=given,
                outs=outs,
                summed=summed,
                one_each=_one_each(eqn),
            )
        )
        return outs

    def summary(self, run: _Run, cuts: _Cuts, *, apart: set[int], moved: Moved) -> Pass:
        """Kernels, live bytes and partial sums of a program; values in `apart` are counted elsewhere."""
        split = cuts.split
        results = {r.index for r in run.outs}
        read = {v.index for e in run.events if e.name in READERS for v in e.ins} | results
        kernels: list[tuple[float, tuple[float, float], bool, str]] = []
        reduced: list[float] = []
        last = {v.index: i for i, e in enumerate(run.events) for v in e.ins}
        stays: list[tuple[int, int, float, bool]] = []
        for i, (e, nbytes) in enumerate(zip(run.events, moved, strict=True)):
            made = [v for v in e.outs if v.index in read or e.name in HEAVY]
            if e.name in HEAVY or any(nbytes):
                cut = any(self.is_split(v, split) for v in (*e.ins, *e.outs))
                kernels.append((e.flops, nbytes, cut, e.dtype))
            if any(self.classes.root(n) in cuts.tensor for n in e.summed) and not self.is_split(e.outs[0], cuts.tensor):
                reduced.append(e.outs[0].nbytes)
            end = len(run.events)
            for v in made:
                if e.name in RANDOM:
                    stays.append((i, i, RANDOM_COPIES * v.nbytes, self.is_split(v, split)))
                elif v.index not in apart and not v.cheap:
                    stop = end if v.index in results else last.get(v.index, i)
                    stays.append((i, stop, v.nbytes, self.is_split(v, split)))
        return Pass(
            flops=np.array([k[0] for k in kernels]),
            nbytes=np.array([k[1][0] for k in kernels]),
            fused_nbytes=np.array([k[1][1] for k in kernels]),
            split=np.array([k[2] for k in kernels], dtype=np.bool_),
            dtypes=tuple(k[3] for k in kernels),
            live=_alive([s[:3] for s in stays if not s[3]], len(run.events)),
            live_split=_alive([s[:3] for s in stays if s[3]], len(run.events)),
            reduced=tuple(reduced),
            met=tuple(b for e in run.events for b in self._met(e, cuts.sequence)),
            exchanged=self._exchanged(run, cuts.expert),
        )

    def _met(self, event: Event, sequence: set[Node]) -> list[float]:
        """Bytes of the operand whose positions all of the other's meet: keys, and then values."""
        if event.name != "dot_general" or any(v.kind != LIVE for v in event.ins):
            return []
        counts = [self._count_of(v, sequence) for v in event.ins]
        if not all(counts) or self._count_of(event.outs[0], sequence) == 0:
            return []
        if not any(self.classes.root(n) in sequence for n in event.summed):  # queries and keys
            return [min(v.nbytes for v in event.ins)] if self._count_of(event.outs[0], sequence) > 1 else []
        return [v.nbytes for v, count in zip(event.ins, counts, strict=True) if count == 1][:1]

    def _count_of(self, value: Value, roots: set[Node]) -> int:
        return sum(n is not None and self.classes.root(n) in roots for n in value.dims or ())

    def _exchanged(self, run: _Run, expert: set[Node]) -> tuple[float, ...]:
        """Bytes of what enters the first product with experts, and of what leaves the last."""
        products = [
            e
            for e in run.events
            if e.name == "dot_general"
            and {v.kind for v in e.ins} == {PARAM, LIVE}
            and any(v.kind == PARAM and self.is_split(v, expert) for v in e.ins)
        ]
        if not products:
            return ()
        entering = next(v.nbytes for v in products[0].ins if v.kind == LIVE)
        return entering, products[-1].outs[0].nbytes


def _alive(stays: list[tuple[int, int, float]], length: int) -> FloatArray:
    change = np.zeros(length + 2)
    for start, stop, nbytes in stays:
        change[start] += nbytes
        change[stop + 1] -= nbytes
    return np.cumsum(change)[: length + 1]


def _like(var: Any, given: list[Value], eqn: Any, found: Any, classes: ClassBuilder) -> tuple[Node | None, ...]:
    """Dimensions of a loop's result: those of the first operand of its shape, else its own."""
    for v, dims_ in zip(eqn.invars, found, strict=True):
        if shape_of(v) == shape_of(var) and shape_of(v):
            return tuple(dims_)
    return classes.fresh(shape_of(var))


def _one_each(eqn: Any) -> bool:
    """Whether a scatter adds one number to each row."""
    if eqn.primitive.name not in ("scatter-add", "scatter_add"):
        return False
    where = eqn.params["dimension_numbers"]
    rows = len(shape_of(eqn.invars[0])) - 1
    return not where.update_window_dims and len(where.operand_batching_dims) == rows


def _summed(eqn: Any, found: tuple[tuple[Node | None, ...], ...]) -> list[Node]:
    """Dimensions that an equation sums over."""
    name, nodes = eqn.primitive.name, []
    if name == "dot_general":
        ((lhs, _), _) = eqn.params["dimension_numbers"]
        nodes = [found[0][d] for d in lhs]
    elif name.startswith("reduce_") and "axes" in eqn.params:
        nodes = [found[0][d] for d in eqn.params["axes"] if d < len(found[0])]
    elif name == "conv_general_dilated":
        nodes = [found[0][eqn.params["dimension_numbers"].lhs_spec[1]]]
    return [n for n in nodes if n is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """Classes that ways cut, in the meter's own numbering.

    Attributes:
        tensor: cut inside the layer by the tensor ways.
        sequence: of positions.
        expert: of experts.
        split: every class that the tensor ways cut.
    """

    tensor: set[Node]
    sequence: set[Node]
    expert: set[Node]
    split: set[Node]


def _cuts(
    meter: _Meter, choice: dims.TensorSplit, splits: Splits | None, ins: Sequence[Value], outs: Sequence[Value]
) -> _Cuts:
    """Found through the parameters and the edges that are cut."""

    def roots(values: Sequence[Value], where: Sequence[int | None]) -> set[Node]:
        nodes = [(v.dims or ())[d] for v, d in zip(values, where, strict=False) if d is not None and v.dims]
        return {meter.classes.root(n) for n in nodes if n is not None}

    tensor = roots(ins, choice.params)
    if splits is None:
        return _Cuts(tensor=tensor, sequence=set(), expert=set(), split=tensor)
    reads = ins[len(ins) - len(splits.sequence.reads) :]
    sequence = roots(reads, splits.sequence.reads) | roots(outs, splits.sequence.writes)
    return _Cuts(
        tensor=tensor,
        sequence=sequence,
        expert=roots(ins, splits.expert.params),
        split=tensor | sequence if splits.along_tensor else tensor,
    )
