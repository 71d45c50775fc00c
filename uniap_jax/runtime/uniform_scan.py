"""A loop over layers (`nn.scan`, `nnx.scan`, `lax.scan` over stacked parameters) as a run of equal layers.

The layer that holds the loop is cut into what comes before it, the loop, and what comes after it; each turn of the
loop is one layer of the run. Stacked parameters keep the user's layout, [layers, ...], and are split over the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph, Operand, Value
from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from uniap_jax.core.jaxprs import close, eqn_flops, flatten, inner_jaxprs, live_eqns, open_jaxpr, signature, variables
from uniap_jax.core.plan import Plan
from uniap_jax.core.sharding import LayerSharding, layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.runtime.uniform_run import Run, Slot, Weight
from uniap_jax.runtime.uniform_stage import EVERYWHERE, STAGE
from uniap_jax.runtime.uniform_static import with_static_reads


def scan_layer(graph: LayerGraph, plan: Plan) -> int | None:
    """The layer whose loop can be split over the stages: the heaviest loop whose length they divide."""
    found = [
        (eqn_flops(e), -layer.index)
        for layer in graph.layers
        for e in open_jaxpr(layer.jaxpr).eqns
        if e.primitive.name == "scan" and e.params["length"] % plan.num_stages == 0 and e.params["length"] > 1
    ]
    return -max(found)[1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanParts:
    """A graph in which one loop is a layer of its own.

    Attributes:
        graph: with the layer cut in up to three.
        first: layers before this one come before the loop.
        last: layers from this one on come after it.
        origin: for each layer, the layer of the original graph it is part of.
        run: the loop.
    """

    graph: LayerGraph
    first: int
    last: int
    origin: tuple[int, ...]
    run: Run


def split_scan(graph: LayerGraph, index: int, strategy: Strategy) -> ScanParts:
    """Cuts a layer around its heaviest loop.

    Raises:
        StrategyError: the loop runs backwards, or over values that come from the batch.
    """
    cut = _Cut(graph, with_static_reads(graph, graph.layers[index]))
    before, inside, after = cut.layers()
    pieces = [piece for piece in (before, inside, after) if piece is not None]
    later = [*pieces, *graph.layers[index + 1 :]]
    early = _read_by(graph.layers[:index], later, graph.results)
    origin = [*early, *([index] * len(pieces)), *range(index + 1, len(graph.layers))]
    layers = [*(graph.layers[i] for i in early), *later]
    numbered = tuple(replace(piece, index=i) for i, piece in enumerate(layers))
    whole = replace(graph, layers=numbered, values=(*graph.values, *cut.new_values))
    first = len(early) + (before is not None)
    return ScanParts(
        graph=whole,
        first=first,
        last=first + 1,
        origin=tuple(origin),
        run=_run(whole, numbered[first], cut, strategy),
    )


def _read_by(early: Sequence[Layer], later: Sequence[Layer], results: Sequence[int]) -> list[int]:
    """Early layers that somebody still reads."""
    wanted, kept = {*results, *(v for layer in later for v in layer.reads)}, []
    for layer in reversed(early):
        if wanted & set(layer.writes):
            kept.append(layer.index)
            wanted |= set(layer.reads)
    return kept[::-1]


class _Cut:
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

    def layers(self) -> tuple[Layer | None, Layer, Layer | None]:
        """The layer in three; a part that computes nothing is None."""
        if not all(map(self.is_static, self.scanned)):
            self._refuse("each turn reads a slice of something computed from the batch")
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


# ---- the loop as a run -----------------------------------------------------------------------------------------


def _run(graph: LayerGraph, layer: Layer, cut: _Cut, strategy: Strategy) -> Run:
    kinds = [*(_const_kind(cut, c) for c in cut.consts), *(["slot"] * cut.num_carry), *(["stacked"] * len(cut.scanned))]
    sharding, layouts = _body_sharding(graph, cut, kinds, strategy)
    avals = [v.aval for v in open_jaxpr(cut.body).invars]
    stacked: list[Weight] = []
    shared: list[Weight] = []
    slots: list[Slot] = []
    sources: list[tuple[str, int]] = []
    statics: dict[str, list[Any]] = {"stacked": [], "shared": []}
    for position, (atom, kind, aval) in enumerate(zip(cut.eqn.invars, kinds, avals, strict=True)):
        layout = layouts[position]
        if kind in statics:
            into = stacked if kind == "stacked" else shared
            sources.append((kind, len(into)))
            statics[kind].append(atom)
            into.append(
                Weight(
                    shape=tuple(aval.shape),
                    dtype=aval.dtype,
                    trained=isinstance(atom, Var) and atom in cut.trained,
                    compute=layout.compute,
                    stored=layout.stored,
                    grads=layout.grads,
                )
            )
        elif kind == "slot":
            turn = position - cut.num_consts
            chained = turn >= 0
            number = cut.entering[turn] if chained else cut.values[atom]
            sources.append(("slot", len(slots)))
            how = ("chain", turn) if chained else ("relay", None)
            slots.append(_slot(graph, number, *how, layout.compute))
        else:
            operand = graph.operands[cut.operands[atom]]
            sources.append((operand.kind, operand.leaf))
    after = {v for other in graph.layers[layer.index + 1 :] for v in other.reads} | set(graph.results)
    leaving: dict[int, tuple[int, int | None]] = {
        cut.final[s.output]: (i, None) for i, s in enumerate(slots) if s.kind == "chain" and s.output is not None
    }
    for i in range(cut.num_carry, len(cut.final)):
        if cut.final[i] in after:
            leaving[cut.final[i]] = (len(slots), None)
            slots.append(_slot(graph, cut.final[i], "extra", i, PartitionSpec(None, *sharding.writes[i])))
    for number in sorted(v for v in after if graph.producer[v] < layer.index):
        place = next((i for i, s in enumerate(slots) if s.kind == "relay" and s.value == number), len(slots))
        if place == len(slots):
            slots.append(_slot(graph, number, "relay", None, PartitionSpec()))
        leaving[number] = (place, None)
    params, prologue = _prologue(cut, statics["stacked"], statics["shared"])
    return Run(
        count=cut.length,
        body=cut.body,
        sources=tuple(sources),
        specs=tuple(x.compute for x in layouts),
        stacked=tuple(stacked),
        shared=tuple(shared),
        slots=tuple(slots),
        leaving=leaving,
        params=params,
        prologue=prologue,
        keep=strategy.keep,
        strategy=strategy,
        homes=_homes(cut, kinds, layouts),
    )


def _const_kind(cut: _Cut, atom: Any) -> str:
    if cut.is_static(atom):
        return "shared"
    return "operand" if cut.is_operand(atom) else "slot"


def _slot(graph: LayerGraph, number: int, kind: str, output: int | None, spec: PartitionSpec) -> Slot:
    value = graph.values[number]
    return Slot(
        kind=kind,
        value=None if kind == "extra" else number,
        output=output,
        shape=value.shape,
        dtype=value.dtype,
        batch_dim=value.batch_dim,
        spec=spec,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Layout of one input of a turn."""

    compute: PartitionSpec = EVERYWHERE
    stored: PartitionSpec = EVERYWHERE
    grads: PartitionSpec = EVERYWHERE
    optimizer: PartitionSpec = EVERYWHERE


def _body_sharding(
    graph: LayerGraph, cut: _Cut, kinds: Sequence[str], strategy: Strategy
) -> tuple[LayerSharding, list[_Layout]]:
    """One turn of the loop as a layer under the strategy."""
    body, rows = open_jaxpr(cut.body), graph.batch_size // graph.num_microbatches
    trained = [
        isinstance(atom, Var) and atom in cut.trained and kind in ("stacked", "shared")
        for atom, kind in zip(cut.eqn.invars, kinds, strict=True)
    ]
    groups: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, (t, kind) in enumerate(zip(trained, kinds, strict=True)):
        groups[0 if t else 2 if kind == "slot" else 1].append(i)

    def value(var: Any, batched: bool) -> dict[str, Any]:
        shape = tuple(var.aval.shape)
        dim = next((d for d, size in enumerate(shape) if size == rows), None) if batched else None
        return {"shape": shape, "dtype": var.aval.dtype, "batch_dim": dim}

    params = tuple(Value(**value(body.invars[i], False)) for i in groups[0])
    operands = tuple(Operand(kind="state", **value(body.invars[i], kinds[i] == "operand")) for i in groups[1])
    reads = [Value(**value(body.invars[i], True)) for i in groups[2]]
    writes = [Value(**value(v, True)) for v in body.outvars]
    jaxpr = close([body.invars[i] for g in groups for i in g], body.outvars, body.eqns)
    turn = replace(
        cut.layer,
        jaxpr=jaxpr,
        params=tuple(range(len(params))),
        operands=tuple(range(len(operands))),
        reads=tuple(range(len(reads))),
        writes=tuple(range(len(reads), len(reads) + len(writes))),
        signature=f"{signature(jaxpr)}-{len(params)}-{len(operands)}",
    )
    alone = replace(graph, params=params, operands=operands, values=(*reads, *writes))
    sharding = layer_sharding(alone, turn, strategy)
    layouts = [_Layout() for _ in kinds]
    for at, i in enumerate(groups[0]):
        layouts[i] = _Layout(
            compute=sharding.params[at],
            stored=sharding.stored[at],
            grads=sharding.grads[at],
            optimizer=sharding.optimizer[at],
        )
    for specs, group in ((sharding.operands, groups[1]), (sharding.reads, groups[2])):
        for spec, i in zip(specs, group, strict=True):
            layouts[i] = _Layout(compute=spec)
    return sharding, layouts


def _prologue(
    cut: _Cut, stacked: list[Any], shared: list[Any]
) -> tuple[tuple[int, ...], Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]]:
    """Parameters that the loop reads, and the function that makes its inputs from them once per step."""
    outs = [*stacked, *shared]
    eqns, _ = live_eqns(cut.rest, outs)
    read = {v for e in eqns for v in variables(e.invars)} | set(variables(outs))
    params = [v for v in cut.params if v in read]
    operands = [v for v in cut.operands if v in read]
    program: ClosedJaxpr = close([*params, *operands], outs, eqns)
    leaves = [cut.graph.operands[cut.operands[v]].leaf for v in operands]

    def run(chosen: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = jax.core.eval_jaxpr(open_jaxpr(program), (), *chosen, *(state[i] for i in leaves))
        return list(made[: len(stacked)]), list(made[len(stacked) :])

    return tuple(cut.params[v] for v in params), run


def _homes(
    cut: _Cut, kinds: Sequence[str], layouts: Sequence[_Layout]
) -> dict[int, tuple[PartitionSpec, PartitionSpec, bool]]:
    """Parameters that the loop runs over: as it reads them, their layers split over the stages."""
    homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]] = {}
    for atom, kind, layout in zip(cut.eqn.invars, kinds, layouts, strict=True):
        if isinstance(atom, Literal) or kind not in ("stacked", "shared"):
            continue
        for var in _behind(cut, atom):
            if kind == "stacked":
                home = (PartitionSpec(STAGE, *layout.stored), PartitionSpec(STAGE, *layout.optimizer), True)
            else:
                home = (layout.stored, layout.optimizer, False)
            homes.setdefault(cut.params[var], home)
    return homes


def _behind(cut: _Cut, atom: Var) -> list[Var]:
    """Parameters of the same shape that a value is made from: itself, or what a cast reads."""
    if atom in cut.params:
        return [atom]
    _, free = live_eqns(cut.rest, [atom])
    return [v for v in cut.params if v in free and v.aval.shape == atom.aval.shape]
