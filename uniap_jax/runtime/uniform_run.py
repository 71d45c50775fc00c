"""The run of equal layers of a plan: which layers, what flows through them, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from uniap_jax.core.equal_stages import chained_output, check_equal
from uniap_jax.core.errors import StrategyError
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.jax_compat import ClosedJaxpr
from uniap_jax.core.literals import lift_literals
from uniap_jax.core.plan import Plan
from uniap_jax.core.sharding import LayerSharding, layer_sharding
from uniap_jax.core.strategy import Strategy

WHOLE = PartitionSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A value that travels with a micro-batch through the run.

    Attributes:
        kind: "chain" (each layer replaces it), "relay" (passes by unchanged) or "extra" ([layers, ...]: one entry
            from every layer, for what reads it after the run).
        value: position in the graph's values of what it holds at first; None for "extra".
        output: for "chain" and "extra", which output of the layer it takes.
        shape: of the slot, layers included.
        dtype: of the slot.
        batch_dim: dimension split over the batch axes, or None.
        spec: layout inside a stage.
    """

    kind: str
    value: int | None
    output: int | None
    shape: tuple[int, ...]
    dtype: Any
    batch_dim: int | None
    spec: PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """An input of the layers that does not depend on the micro-batch.

    Attributes:
        shape: of one layer's share.
        dtype: of the array.
        trained: whether it depends on parameters.
        compute: layout as a layer computes with it.
        stored: layout of one layer's share between its uses.
        grads: layout of one layer's share of its gradient.
    """

    shape: tuple[int, ...]
    dtype: Any
    trained: bool
    compute: PartitionSpec = WHOLE
    stored: PartitionSpec = WHOLE
    grads: PartitionSpec = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Equal layers as one body and its inputs.

    Attributes:
        count: layers, a multiple of the stages.
        body: closed jaxpr of one layer.
        sources: what each input of the body is: ("stacked", i), ("shared", i), ("batch", leaf), ("index", 0) or
            ("slot", i).
        specs: layout of each input of the body.
        stacked: inputs that every layer has its own of.
        shared: inputs that all layers have in common.
        slots: what travels with a micro-batch.
        leaving: for values read after the run, (slot, layer or None).
        params: positions in the graph's parameters that `prologue` reads.
        prologue: `prologue(params, state operands) -> (stacked [layers, ...], shared)`, once per step.
        keep: what the forward pass of a layer keeps.
        strategy: of every layer.
        homes: for each of `params` that is one layer's own, its layout; see `uniform_homes`.
    """

    count: int
    body: ClosedJaxpr
    sources: tuple[tuple[str, int], ...]
    specs: tuple[PartitionSpec, ...]
    stacked: tuple[Weight, ...]
    shared: tuple[Weight, ...]
    slots: tuple[Slot, ...]
    leaving: dict[int, tuple[int, int | None]]
    params: tuple[int, ...]
    prologue: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    keep: str
    strategy: Strategy
    homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]]


def uniform_range(graph: LayerGraph, plan: Plan) -> tuple[int, int]:
    """The layers [first, last) that fill the stages evenly; what lies before and after runs outside the pipeline.

    Raises:
        StrategyError: a stage has other layers, or another number of them, than its neighbours.
    """
    stages = [choice.stage for choice in plan.layers]
    first_end = max((i for i, s in enumerate(stages) if s == 0), default=-1)
    if sorted(stages) != stages or first_end < 0 or set(stages) != set(range(plan.num_stages)):
        raise StrategyError(
            f"stages {stages} do not follow the order of the layers over {plan.num_stages} stages, so they cannot run "
            "as one program; use executor='stages'",
            stages=tuple(stages),
        )

    def equal(i: int) -> bool:
        a, b = plan.layers[i].strategy, plan.layers[first_end].strategy
        return graph.layers[i].signature == graph.layers[first_end].signature and a == b

    low, high = first_end, first_end + 1
    while low > 0 and equal(low - 1):
        low -= 1
    while high < len(stages) and equal(high):
        high += 1
    counts = [stages[low:high].count(s) for s in range(plan.num_stages)]
    whole = [stages.count(s) for s in range(plan.num_stages)]
    share = min(counts)
    inner = range(1, plan.num_stages - 1)
    wrong = next((s for s in range(plan.num_stages) if not counts[s]), None)
    if wrong is None:
        wrong = next((s for s in inner if counts[s] != share or whole[s] != share), None)
    if wrong is not None:
        raise StrategyError(
            f"stage {wrong} has {whole[wrong]} layers, of which {counts[wrong]} equal {graph.layers[first_end].name} "
            f"(same operations, strategy {plan.layers[first_end].strategy}); equal layers per stage: {counts}. One "
            "program needs the same number on every stage, with other layers only before them on the first stage and "
            "after them on the last; use executor='stages'",
            stage=wrong,
            counts=tuple(counts),
        )
    start = first_end + 1 - share
    return start, start + share * plan.num_stages


def stacked_run(graph: LayerGraph, layers: Sequence[Layer], strategy: Strategy) -> Run:
    """Layers of one signature as a run: parameters that differ are stacked, literals that differ too.

    Raises:
        StrategyError: the layers differ in something that cannot be an input, or are wired unequally.
    """
    first, count = layers[0], len(layers)
    sharding = layer_sharding(graph, first, strategy)
    check_equal(graph, layers)
    body, literals = lift_literals([layer.jaxpr for layer in layers])
    slots, of_read = _slots(graph, layers, sharding)
    leaving = _leaving(layers, slots)
    builder = _Inputs(count)
    sources = [
        *(builder.param(graph, layers, sharding, j) for j in range(len(first.params))),
        *(builder.operand(graph, layers, j) for j in range(len(first.operands))),
        *(("slot", of_read[j]) for j in range(len(first.reads))),
        *(builder.literal(v) for v in literals),
    ]
    return Run(
        count=count,
        body=body,
        sources=tuple(sources),
        specs=(*sharding.params, *sharding.operands, *sharding.reads, *(PartitionSpec() for _ in literals)),
        stacked=tuple(builder.stacked),
        shared=tuple(builder.shared),
        slots=slots,
        leaving=leaving,
        params=tuple(builder.params),
        prologue=builder.prologue(),
        keep=strategy.keep,
        strategy=strategy,
        homes=builder.homes,
    )


class _Inputs:
    """Collects what every layer has of its own, and what they share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stacked: list[Weight] = []
        self.shared: list[Weight] = []
        self.params: dict[int, None] = {}
        self.homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]] = {}
        self._stacks: list[tuple[str, Any]] = []
        self._shares: list[tuple[str, int]] = []

    def param(self, graph: LayerGraph, layers: Sequence[Layer], sharding: LayerSharding, j: int) -> tuple[str, int]:
        """A parameter: the layers' own, or the same one for all."""
        found = [layer.params[j] for layer in layers]
        value = graph.params[found[0]]
        self.params.update(dict.fromkeys(found))
        for p in found:
            self.homes.setdefault(p, (sharding.stored[j], sharding.optimizer[j], False))
        weight = Weight(
            shape=value.shape,
            dtype=value.dtype,
            trained=True,
            compute=sharding.params[j],
            stored=sharding.stored[j],
            grads=sharding.grads[j],
        )
        return self._add("param", found, weight)

    def operand(self, graph: LayerGraph, layers: Sequence[Layer], j: int) -> tuple[str, int]:
        """An operand: of the batch, or made once per step."""
        found = [layer.operands[j] for layer in layers]
        operands = [graph.operands[o] for o in found]
        if operands[0].kind == "state":
            weight = Weight(shape=operands[0].shape, dtype=operands[0].dtype, trained=False)
            return self._add("state", [o.leaf for o in operands], weight)
        return (operands[0].kind, operands[0].leaf)

    def literal(self, values: np.ndarray) -> tuple[str, int]:
        """A constant that differs between layers: [layers, ...]."""
        self.stacked.append(Weight(shape=values.shape[1:], dtype=values.dtype, trained=False))
        self._stacks.append(("literal", values))
        return ("stacked", len(self.stacked) - 1)

    def _add(self, kind: str, found: list[int], weight: Weight) -> tuple[str, int]:
        if len(set(found)) == 1:
            self.shared.append(weight)
            self._shares.append((kind, found[0]))
            return ("shared", len(self.shared) - 1)
        self.stacked.append(weight)
        self._stacks.append((kind, found))
        return ("stacked", len(self.stacked) - 1)

    def prologue(self) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
        """The function that stacks."""
        place = {p: i for i, p in enumerate(self.params)}
        stacks, shares = tuple(self._stacks), tuple(self._shares)

        def run(params: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            def pick(kind: str, i: int) -> Any:
                return params[place[i]] if kind == "param" else state[i]

            stacked = [
                jnp.asarray(found) if kind == "literal" else jnp.stack([pick(kind, i) for i in found])
                for kind, found in stacks
            ]
            return stacked, [pick(kind, i) for kind, i in shares]

        return run


def _slots(graph: LayerGraph, layers: Sequence[Layer], sharding: LayerSharding) -> tuple[tuple[Slot, ...], list[int]]:
    """What travels, and for each read of a layer the slot it is."""
    slots: list[Slot] = []
    of_read: list[int] = []
    for j, value in enumerate(layers[0].reads):
        output = chained_output(layers, j)
        of_read.append(len(slots))
        kind = "relay" if output is None else "chain"
        slots.append(_slot(graph.values[value], kind, value, output, sharding.reads[j]))
    after = _read_after(graph, layers)
    held = {s.value for s in slots if s.kind == "relay"}
    before = [v for v in after if graph.producer[v] < layers[0].index and v not in held]
    for v in before:
        spec = _batch_spec(graph.values[v], sharding, layers[0], graph)
        slots.append(_slot(graph.values[v], "relay", v, None, spec))
    chained = {s.output for s in slots if s.kind == "chain"}
    for i, value in enumerate(layers[0].writes):
        taken = [layer.writes[i] in after for layer in layers]
        if any(taken[:-1]) or (taken[-1] and i not in chained):
            aval = graph.values[value]
            slots.append(
                Slot(
                    kind="extra",
                    value=None,
                    output=i,
                    shape=(len(layers), *aval.shape),
                    dtype=aval.dtype,
                    batch_dim=None if aval.batch_dim is None else aval.batch_dim + 1,
                    spec=PartitionSpec(None, *sharding.writes[i]),
                )
            )
    return tuple(slots), of_read


def _slot(value: Value, kind: str, number: int, output: int | None, spec: PartitionSpec) -> Slot:
    return Slot(
        kind=kind,
        value=number,
        output=output,
        shape=value.shape,
        dtype=value.dtype,
        batch_dim=value.batch_dim,
        spec=spec,
    )


def _batch_spec(value: Value, sharding: LayerSharding, layer: Layer, graph: LayerGraph) -> PartitionSpec:
    """The run's batch axes on a value that only passes by."""
    if value.batch_dim is None:
        return PartitionSpec()
    for i, spec in zip(layer.reads, sharding.reads, strict=True):
        dim = graph.values[i].batch_dim
        if dim is not None and dim < len(spec):
            return PartitionSpec(*([None] * value.batch_dim), spec[dim])
    return PartitionSpec()


def _read_after(graph: LayerGraph, layers: Sequence[Layer]) -> list[int]:
    """Values that exist once the run is over and are read by later layers or are results."""
    last = layers[-1].index
    wanted = [v for layer in graph.layers[last + 1 :] for v in layer.reads] + list(graph.results)
    return [v for v in dict.fromkeys(wanted) if graph.producer[v] <= last]


def _leaving(layers: Sequence[Layer], slots: Sequence[Slot]) -> dict[int, tuple[int, int | None]]:
    """Where each value is found after the run."""
    found: dict[int, tuple[int, int | None]] = {}
    for s, slot in enumerate(slots):
        if slot.kind == "relay" and slot.value is not None:
            found[slot.value] = (s, None)
        elif slot.kind == "extra" and slot.output is not None:
            found.update({layer.writes[slot.output]: (s, n) for n, layer in enumerate(layers)})
    for s, slot in enumerate(slots):
        if slot.kind == "chain" and slot.output is not None:
            found[layers[-1].writes[slot.output]] = (s, None)
    return found
