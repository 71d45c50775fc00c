"""From cut points to layers: each a closed jaxpr with its parameters, operands and the values it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from uniap_jax.core.graph import Layer
from uniap_jax.core.jax_compat import Literal, Var
from uniap_jax.core.jaxprs import close, eqn_flops, scan_counts, signature, total_flops, variables
from uniap_jax.core.sources import source_line
from uniap_jax.frontend.cut import dependent
from uniap_jax.frontend.labels import layer_name, unique_names
from uniap_jax.frontend.split import LossTape

LOOP_SHARE = 0.5  # of the work: people are told that a heavier loop is one layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A loss in layers.

    Attributes:
        layers: in trace order.
        values: the variable of each value that crosses between layers or leaves.
        results: positions in `values` of the results.
    """

    layers: tuple[Layer, ...]
    values: tuple[Any, ...]
    results: tuple[int, ...]


def build_layers(
    loss: LossTape,
    order: Sequence[int],
    starts: Sequence[int],
    index: Var,
    *,
    params: Sequence[str],
    names: Sequence[str] = (),
) -> Cut:
    """Builds the layers that start at `starts` (places in `order`).

    What depends on the batch alone is repeated in every layer that reads it. Results that depend on no parameter
    are made by the last layer. Parameters that nothing reads (an unused head) go to a layer too, see `_unread`.

    Args:
        loss: the flat loss.
        order: indices of the equations that run once, in order.
        starts: places in `order` where layers start, 0 included.
        index: variable of the micro-batch's index.
        params: path of each parameter in the state, as `jax.tree_util.keystr` writes it.
        names: of the layers, "" where the name is to be found.
    """
    once = dependent(loss)
    helpers = {v: i for i, e in enumerate(loss.eqns) for v in e.outvars if v not in once}
    segments = [list(order[a:b]) for a, b in zip(starts, [*starts[1:], len(order)], strict=True)]
    made = {v: s for s, seg in enumerate(segments) for i in seg for v in loss.eqns[i].outvars}
    values: dict[Any, int] = {}
    writes: list[list[Any]] = [[] for _ in segments]
    for s, seg in enumerate(segments):
        for i in seg:
            for v in variables(loss.eqns[i].invars):
                if made.get(v, s) != s and v not in values:
                    values[v] = len(values)
                    writes[made[v]].append(v)
    results = []
    for atom in loss.results:  # the same atom may be several results, or a literal, or an input passed through
        key: Any = object() if isinstance(atom, Literal) else atom
        if key not in values:
            values[key] = len(values)
            writes[made.get(key, len(segments) - 1)].append(atom)
        results.append(values[key])
    numbers = _Numbers(loss, index, values)
    unread = _unread(loss, [{v for i in seg for v in variables(loss.eqns[i].invars)} for seg in segments], params)
    layers = [_layer(loss, helpers, s, seg, writes[s], unread[s], numbers) for s, seg in enumerate(segments)]
    given = names or [""] * len(layers)
    told = unique_names([name or layer.name for layer, name in zip(layers, given, strict=True)])
    named = tuple(replace(layer, name=name) for layer, name in zip(layers, told, strict=True))
    return Cut(layers=named, values=tuple(numbers.atoms(loss)), results=tuple(results))


def _unread(loss: LossTape, reads: Sequence[set[Any]], names: Sequence[str]) -> list[list[Var]]:
    """For each layer the parameters that no layer reads and that it takes: of its own module, of those the first.

    They are sharded, counted and placed with it; equal layers with equal unused parameters stay equal.
    """
    paths = [name.replace(".", "[").split("[") for name in names]
    first = {p: layer for layer, found in reversed(list(enumerate(reads))) for p in loss.params if p in found}
    readers = [(first[v], path) for v, path in zip(loss.params, paths, strict=True) if v in first]

    def closest(path: Sequence[str]) -> int:
        shared = [
            (len(list(takewhile(lambda pair: pair[0] == pair[1], zip(own, path, strict=False)))), -layer)
            for layer, own in readers
        ]
        return -max(shared, default=(0, 0))[1]

    taken: list[list[Var]] = [[] for _ in reads]
    for v, path in zip(loss.params, paths, strict=True):
        if v not in first:
            taken[closest(path)].append(v)
    return taken


class _Numbers:
    """Positions of variables among parameters, operands and values."""

    def __init__(self, loss: LossTape, index: Var, values: dict[Any, int]) -> None:
        self.params = {v: i for i, v in enumerate(loss.params)}
        self.operands = {v: i for i, v in enumerate((*loss.state, *loss.batch, index))}
        self.values = values

    def atoms(self, loss: LossTape) -> list[Any]:
        literals = iter(a for a in loss.results if isinstance(a, Literal))
        return [v if isinstance(v, Var) else next(literals) for v in self.values]

    def positions(self, atoms: Sequence[Any], loss: LossTape) -> tuple[int, ...]:
        literals = [v for v in self.values if not isinstance(v, Var)]
        found, used = [], 0
        for a in atoms:
            if isinstance(a, Literal):
                found.append(self.values[literals[used]])
                used += 1
            else:
                found.append(self.values[a])
        return tuple(found)


def loop_notes(layers: Sequence[Layer]) -> tuple[str, ...]:
    """A sentence for each loop over stacked parameters that holds most of the work: it is one layer."""
    total, notes = sum(layer.flops for layer in layers), []
    for layer in layers:
        params = {*layer.jaxpr.jaxpr.invars[: len(layer.params)]}
        for eqn in layer.jaxpr.jaxpr.eqns:
            if eqn.primitive.name != "scan" or eqn_flops(eqn) <= LOOP_SHARE * total:
                continue
            if params & {*variables(eqn.invars[sum(scan_counts(eqn)[:2]) :])}:  # over layers, not over time
                notes.append(
                    f"The {eqn.params['length']} turns of the loop in {layer.name} ({source_line(eqn)}) are one "
                    "layer: they share one strategy, and only equal stages can cut it; trace with unfold_scans=True "
                    "(--unfold-scans) to plan each."
                )
    return tuple(notes)


def _layer(
    loss: LossTape,
    helpers: dict[Var, int],
    number: int,
    segment: list[int],
    writes: list[Any],
    unread: list[Var],
    n: _Numbers,
) -> Layer:
    wanted = [v for i in segment for v in variables(loss.eqns[i].invars)] + variables(writes)
    eqns = [loss.eqns[i] for i in sorted({*segment, *_helpers(loss, helpers, wanted)})]
    inside = {v for e in eqns for v in e.outvars}
    params: dict[Any, None] = {}
    operands: dict[Any, None] = {}
    reads: dict[Any, None] = {}
    for v in [*(v for e in eqns for v in variables(e.invars)), *variables(writes)]:
        if v in inside:
            continue
        (params if v in n.params else operands if v in n.operands else reads).setdefault(v)
    params.update(dict.fromkeys(unread))
    jaxpr = close([*params, *operands, *reads], writes, eqns)
    body = [loss.eqns[i] for i in segment]
    lines = (source_line(e) for e in body)
    return Layer(
        index=number,
        name=layer_name(body, number),
        source=next((line for line in lines if line), ""),
        jaxpr=jaxpr,
        params=tuple(n.params[v] for v in params),
        operands=tuple(n.operands[v] for v in operands),
        reads=tuple(n.values[v] for v in reads),
        writes=n.positions(writes, loss),
        signature=f"{signature(jaxpr)}-{len(params)}-{len(operands)}",
        flops=total_flops(jaxpr),
    )


def _helpers(loss: LossTape, helpers: dict[Var, int], wanted: Sequence[Var]) -> set[int]:
    """Equations that depend on no parameter and lead to `wanted`."""
    found: set[int] = set()
    pending = list(wanted)
    while pending:
        i = helpers.get(pending.pop())
        if i is not None and i not in found:
            found.add(i)
            pending.extend(variables(loss.eqns[i].invars))
    return found
