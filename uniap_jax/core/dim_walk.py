"""Walks a layer's jaxpr, bodies of calls and loops included, and collects its dimension classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from uniap_jax.core.dim_classes import ClassBuilder, DimClass, Dims
from uniap_jax.core.dim_rules import rule_for
from uniap_jax.core.dim_shape_rules import CONST, LIVE, PARAM, Rule, Use, shape_of, unknown
from uniap_jax.core.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import open_jaxpr
from uniap_jax.core.sources import source_line

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_INDEXED = ("gather", "dynamic_slice", "dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What walking a layer found.

    Attributes:
        classes: dimension classes of its arrays.
        notes: one sentence for each primitive without a rule.
        ins: for each input the class of each dimension; None for dimensions of size 1 and for operands.
        outs: for each output the class of each dimension.
        values: the same for every activation on the way.
    """

    classes: tuple[DimClass, ...]
    notes: tuple[str, ...]
    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    values: tuple[Dims, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A value during the walk: what it is made of and its dimensions, None for constants (fresh at every use)."""

    kind: int
    dims: Dims | None


def walk(jaxpr: ClosedJaxpr, num_params: int, num_operands: int) -> Walked:
    """Collects the classes of `jaxpr(*params, *operands, *reads) -> writes`.

    Values of rank 0 and 1 that a layer writes (losses, running statistics) are small enough to be whole at its edge;
    all dimensions of other values that it reads or writes are marked as crossing.
    """
    builder = ClassBuilder()
    held = enter(builder, jaxpr, num_params, num_operands)
    walker = Walker(builder)
    outs = walker.body(jaxpr, held)
    for out in outs:
        if out.dims is not None and len(out.dims) > 1:
            builder.boundary(out.dims)
    live = dict.fromkeys(h.dims for _, found in walker.seen.values() for h in found if h.kind == LIVE and h.dims)
    classes = builder.classes()
    return Walked(
        classes=classes,
        notes=tuple(builder.notes.values()),
        ins=tuple(builder.numbers([h.dims for h in held])),
        outs=tuple(builder.numbers([h.dims for h in outs])),
        values=tuple(dict.fromkeys(builder.numbers(live))),
    )


def enter(builder: ClassBuilder, jaxpr: ClosedJaxpr, num_params: int, num_operands: int) -> list[Held]:
    """The inputs of `jaxpr(*params, *operands, *reads)`, those but operands with dimensions of their own."""
    held = []
    for i, var in enumerate(jaxpr.jaxpr.invars):
        if num_params <= i < num_params + num_operands:
            held.append(Held(kind=CONST, dims=None))
            continue
        dims = builder.fresh(shape_of(var))
        (builder.param if i < num_params else builder.boundary)(dims)
        held.append(Held(kind=PARAM if i < num_params else LIVE, dims=dims))
    return held


def inner_jaxpr(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of a call (jit, remat, custom derivatives) whose inputs are those of the equation, else None."""
    for key in _CALLS:
        body = eqn.params.get(key)
        if isinstance(body, (Jaxpr, ClosedJaxpr)):
            opened: Jaxpr = open_jaxpr(body)
            if len(opened.invars) == len(eqn.invars) and len(opened.outvars) == len(eqn.outvars):
                return opened
    return None


class Walker:
    """Gives every value of a jaxpr its dimensions; an environment per call, since cached bodies repeat variables.

    Args:
        builder: collects what is found.

    Attributes:
        seen: (inputs, results) of every equation, by the positions of the equations that lead to it from the
            outermost body.
    """

    def __init__(self, builder: ClassBuilder) -> None:
        self._b = builder
        self._source = ""
        self._path: tuple[int, ...] = ()
        self.seen: dict[tuple[int, ...], tuple[list[Held], list[Held]]] = {}

    def body(self, jaxpr: Jaxpr | ClosedJaxpr, inputs: list[Held]) -> list[Held]:
        """Outputs of a jaxpr on these inputs."""
        opened = open_jaxpr(jaxpr)
        env: dict[Var, Held] = {v: Held(kind=CONST, dims=None) for v in opened.constvars}
        env.update(zip(opened.invars, inputs, strict=True))

        def read(atom: Any) -> Held:
            return Held(kind=CONST, dims=None) if isinstance(atom, Literal) else env[atom]

        caller, path = self._source, self._path
        for i, eqn in enumerate(opened.eqns):
            self._source, self._path = source_line(eqn) or caller, (*path, i)
            ins = [read(v) for v in eqn.invars]
            self.seen[self._path] = ins, self._equation(eqn, ins)
            env.update(zip(eqn.outvars, self.seen[self._path][1], strict=True))
        self._source, self._path = caller, path
        return [read(v) for v in opened.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        if all(h.kind == CONST for h in ins):
            return [Held(kind=CONST, dims=None)] * len(eqn.outvars)
        control = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(eqn.primitive.name)
        if control is not None:
            return control(eqn, ins)
        body = inner_jaxpr(eqn)
        return self.body(body, ins) if body is not None else self._rule(eqn, ins, rule_for(eqn.primitive.name))

    def _rule(self, eqn: JaxprEqn, ins: list[Held], rule: Rule) -> list[Held]:
        dims = tuple(self._dims(h, v) for h, v in zip(ins, eqn.invars, strict=True))
        use = Use(classes=self._b, eqn=eqn, ins=dims, kinds=tuple(h.kind for h in ins), source=self._source)
        outs = rule(use)
        kind = LIVE if eqn.primitive.name in _INDEXED else max(h.kind for h in ins)
        for out in outs:
            self._b.value(out)
        return [Held(kind=kind, dims=out) for out in outs]

    def _dims(self, held: Held, var: Any) -> Dims:
        return self._b.fresh(shape_of(var)) if held.dims is None else held.dims

    def _unite(self, a: Held, b: Held) -> Held:
        """One value out of two that take the same place, as both branches of a cond."""
        if a.dims is None or b.dims is None:
            return b if a.dims is None else a
        dims = tuple(self._b.unite(x, y) for x, y in zip(a.dims, b.dims, strict=True))
        return Held(kind=max(a.kind, b.kind), dims=dims)

    def _carry(self, held: Held, var: Any) -> Held:
        """A loop carry: an activation whatever it starts as."""
        return Held(kind=LIVE, dims=self._dims(held, var))

    def _scan(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        """The scanned dimension stops; carries unite with themselves one turn later."""
        body = open_jaxpr(eqn.params["jaxpr"])
        scanned = [len(shape_of(v)) != len(shape_of(w)) for v, w in zip(eqn.invars, body.invars, strict=True)]
        stacked = [len(shape_of(v)) != len(shape_of(w)) for v, w in zip(eqn.outvars, body.outvars, strict=True)]
        carries = stacked.count(False)
        start = len(ins) - scanned.count(True) - carries
        source, given = self._source, []
        for i, (held, var) in enumerate(zip(ins, eqn.invars, strict=True)):
            if scanned[i] and held.dims is not None:
                self._b.block(held.dims[0], "a scan runs along it", source)
                given.append(Held(kind=held.kind, dims=held.dims[1:]))
            else:
                given.append(self._carry(held, var) if start <= i < start + carries else held)
        with self._b.repeated(eqn.params["length"]):
            outs = self.body(body, given)
        results = [self._unite(a, b) for a, b in zip(given[start : start + carries], outs[:carries], strict=True)]
        for held, var in zip(outs[carries:], eqn.outvars[carries:], strict=True):
            results.append(self._stack(held, shape_of(var)[0], source))
        return results

    def _stack(self, held: Held, length: int, source: str) -> Held:
        if held.dims is None:
            return held
        turn = self._b.new(length)
        self._b.block(turn, "a scan runs along it", source)
        self._b.value((turn, *held.dims))
        return Held(kind=held.kind, dims=(turn, *held.dims))

    def _while(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        """Carries unite with themselves one turn later."""
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = [self._carry(h, v) for h, v in zip(ins[nc + nb :], eqn.invars[nc + nb :], strict=True)]
        self.body(eqn.params["cond_jaxpr"], [*ins[:nc], *carry])
        outs = self.body(eqn.params["body_jaxpr"], [*ins[nc : nc + nb], *carry])
        return [self._unite(a, b) for a, b in zip(carry, outs, strict=True)]

    def _cond(self, eqn: JaxprEqn, ins: list[Held]) -> list[Held]:
        """Branches agree on their results; the index picks one on every device alike."""
        if any(n is not None for n in ins[0].dims or ()):
            return self._rule(eqn, ins, unknown)
        branches = [self.body(b, ins[1:]) for b in eqn.params["branches"]]
        results = branches[0]
        for other in branches[1:]:
            results = [self._unite(a, b) for a, b in zip(results, other, strict=True)]
        return results
