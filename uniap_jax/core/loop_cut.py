"""A layer cut around its loop: what comes before, the loop, what comes after, and what passes between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.jax_compat import JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import close, eqn_flops, flatten, inner_jaxprs, live_eqns, open_jaxpr, signature, variables


class ScanCut:
    """Bookkeeping of one cut: what each variable of the layer is."""

    def __init__(self, graph: LayerGraph, layer: Layer) -> None:
        self.graph, self.layer = graph, layer
        self.jaxpr = open_jaxpr(layer.jaxpr)
        scans = [e for e in self.jaxpr.eqns if e.primitive.name == "scan"]
        self.eqn: JaxprEqn = max(scans, key=eqn_flops)
        self.rest = [e for e in self.jaxpr.eqns if e is not self.eqn]
        p, o = len(layer.params), len(layer.operands)
        invars = self.jaxpr.invars
        self.params = dict(zip(invars[:p], layer.params, strict=True))
        self.operands = dict(zip(invars[p : p + o], layer.operands, strict=True))
        self.values: dict[Var, int] = dict(zip(invars[p + o :], layer.reads, strict=True))
        self.values.update({v: n for v, n in zip(self.jaxpr.outvars, layer.writes, strict=True) if isinstance(v, Var)})
        self.new_values: list[Value] = []
        moving = [v for v, i in self.operands.items() if graph.operands[i].kind != "state"]
        self.dynamic = _reached(self.rest, [*self.values_read(), *moving])
        self.trained = _reached(self.rest, [*self.params, *self.values_read()])
        self.downstream = _reached(self.rest, self.eqn.outvars)
        body = flatten(next(inner_jaxprs(self.eqn)))
        if body.consts or self.eqn.params["reverse"]:
            self._refuse("it runs backwards" if self.eqn.params["reverse"] else "it closes over arrays")
        self.body = close(body.invars, body.outvars, body.eqns)
        self.length = int(self.eqn.params["length"])
        self.num_carry = sum(
            len(v.aval.shape) == len(w.aval.shape)
            for v, w in zip(self.eqn.outvars, open_jaxpr(self.body).outvars, strict=True)
        )
        scanned = sum(
            len(v.aval.shape) == len(w.aval.shape) + 1
            for v, w in zip(self.eqn.invars, open_jaxpr(self.body).invars, strict=True)
        )
        self.num_consts = len(self.eqn.invars) - scanned - self.num_carry

    def values_read(self) -> list[Var]:
        """Variables of what earlier layers wrote."""
        return list(self.jaxpr.invars[len(self.layer.params) + len(self.layer.operands) :])

    def _refuse(self, why: str) -> None:
        raise StrategyError(
            f"the loop over {self.eqn.params['length']} layers in {self.layer.name} cannot be split over stages: "
            f"{why}; use one stage, or unroll the layers",
            layer=self.layer.name,
        )

    @property
    def consts(self) -> list[Any]:
        """What every turn reads."""
        return list(self.eqn.invars[: self.num_consts])

    @property
    def carry(self) -> list[Any]:
        """What goes from turn to turn, as it enters."""
        return list(self.eqn.invars[self.num_consts : self.num_consts + self.num_carry])

    @property
    def scanned(self) -> list[Any]:
        """What each turn has its own of: [layers, ...]."""
        return list(self.eqn.invars[self.num_consts + self.num_carry :])

    def is_static(self, atom: Any) -> bool:
        """Whether a value can be made once per step."""
        return isinstance(atom, Literal) or atom not in self.dynamic

    def is_operand(self, atom: Any) -> bool:
        """Whether a value is a leaf of the batch, or the micro-batch's number, as it comes."""
        return not isinstance(atom, Literal) and atom in self.operands

    def check(self) -> None:
        """Refuses a loop that cannot be split.

        Raises:
            StrategyError: it runs over values that come from the batch.
        """
        if not all(map(self.is_static, self.scanned)):
            self._refuse("each turn reads a slice of something computed from the batch")

    def layers(self) -> tuple[Layer | None, Layer, Layer | None]:
        """The layer in three; a part that computes nothing is None."""
        self.check()
        crossing = self._crossing()
        made = [v for v in crossing if v not in self.values or v in self._outputs_before()]
        self.entering = [self._number(a) for a in self.carry]
        fed = [(a, n) for a, n in zip(self.carry, self.entering, strict=True) if not self._read(a)]
        fed += [(v, self._number(v)) for v in made]
        early = dict(fed)
        before = self._part("before the loop", [*early], [*early.values()], self.rest) if early else None
        self.final = [self._number(v) for v in self.eqn.outvars]
        late = [
            (v, n)
            for v, n in zip(self.jaxpr.outvars, self.layer.writes, strict=True)
            if n not in {*early.values(), *self.final}
        ]
        after = self._part("after the loop", [v for v, _ in late], [n for _, n in late], self.rest) if late else None
        inside = self._part("", list(self.eqn.outvars), self.final, self.jaxpr.eqns)
        return before, inside, after

    def _read(self, atom: Any) -> bool:
        return isinstance(atom, Var) and atom in self.values_read()

    def _outputs_before(self) -> set[Var]:
        inner = {v for e in self.rest if e.outvars[0] not in self.downstream for v in e.outvars}
        return {v for v in self.jaxpr.outvars if isinstance(v, Var) and v in inner and v in self.trained}

    def _crossing(self) -> list[Var]:
        """Values made before the loop from parameters or activations, or read by it, that are wanted later."""
        upstream = {v for e in self.rest if e.outvars[0] not in self.downstream for v in e.outvars}
        wanted = [c for c in self.consts if not self.is_static(c) and not self.is_operand(c)]
        for e in self.rest:
            if e.outvars[0] in self.downstream:
                wanted += [v for v in variables(e.invars) if v in upstream and v in self.trained]
        wanted += self._outputs_before()
        return [v for v in dict.fromkeys(variables(wanted)) if v in upstream]

    def _number(self, atom: Any) -> int:
        """Position of a variable among the graph's values; a new one where it has none."""
        if isinstance(atom, Var) and atom in self.values:
            return self.values[atom]
        number = len(self.graph.values) + len(self.new_values)
        rows = self.graph.batch_size // self.graph.num_microbatches
        shape = tuple(atom.aval.shape)
        dim = next((d for d, size in enumerate(shape) if size == rows), None)
        name = f"inside {self.layer.name}"
        self.new_values.append(Value(shape=shape, dtype=atom.aval.dtype, batch_dim=dim, name=name))
        if isinstance(atom, Var):
            self.values[atom] = number
        return number

    def _part(self, what: str, outs: list[Any], writes: list[int], eqns: Sequence[JaxprEqn]) -> Layer:
        """Equations that make some values, from what has a number in the graph by then."""
        stop = set() if what == "before the loop" else set(self.values) - set(variables(outs))
        kept, _ = live_eqns([e for e in eqns if not any(v in stop for v in e.outvars)], outs)
        inside = {v for e in kept for v in e.outvars}
        read = dict.fromkeys([*(v for e in kept for v in variables(e.invars)), *variables(outs)])
        order = [v for v in read if v not in inside]
        params = [v for v in order if v in self.params]
        operands = [v for v in order if v in self.operands]
        reads = [v for v in order if v not in self.params and v not in self.operands]
        jaxpr = close([*params, *operands, *reads], outs, kept)
        return replace(
            self.layer,
            name=f"{self.layer.name}, {what}" if what else self.layer.name,
            jaxpr=jaxpr,
            params=tuple(self.params[v] for v in params),
            operands=tuple(self.operands[v] for v in operands),
            reads=tuple(self.values[v] for v in reads),
            writes=tuple(writes),
            signature=f"{signature(jaxpr)}-{len(params)}-{len(operands)}",
        )


def _reached(eqns: Sequence[JaxprEqn], sources: Sequence[Var]) -> set[Var]:
    """Variables that depend on `sources`."""
    found = set(sources)
    for eqn in eqns:
        if any(v in found for v in variables(eqn.invars)):
            found.update(eqn.outvars)
    return found
