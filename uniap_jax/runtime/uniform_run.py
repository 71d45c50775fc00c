"""The run of equal layers of a plan: which layers, what flows through them, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
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
        stored: layout of one layer's share between its uses.
        grads: layout of one layer's share of its gradient.
    """

    shape: tuple[int, ...]
    dtype: Any
    trained: bool
    stored: PartitionSpec = WHOLE
    grads: PartitionSpec = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring layers of a stage that have one strategy.

    Attributes:
        size: layers.
        strategy: of each.
        specs: layout of each input of the body.
        slots: layout of each slot inside the group.
        stacked: inputs that every layer has its own of.
    """

    size: int
    strategy: Strategy
    specs: tuple[PartitionSpec, ...]
    slots: tuple[PartitionSpec, ...]
    stacked: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Equal layers as one body and its inputs.

    Attributes:
        count: layers, a multiple of the stages.
        body: closed jaxpr of one layer.
        sources: what each input of the body is: ("stacked", i), ("shared", i), ("batch", leaf), ("index", 0) or
            ("slot", i).
        groups: of every stage's layers, in order.
        shared: inputs that all layers have in common.
        slots: what travels with a micro-batch.
        leaving: for values read after the run, (slot, layer or None).
        params: positions in the graph's parameters that `prologue` reads.
        prologue: `prologue(params, state operands) -> (stacked [layers, ...], shared)`, once per step.
        homes: for each of `params` that is one layer's own, its layout; see `uniform_homes`.
    """

    count: int
    body: ClosedJaxpr
    sources: tuple[tuple[str, int], ...]
    groups: tuple[Group, ...]
    shared: tuple[Weight, ...]
    slots: tuple[Slot, ...]
    leaving: dict[int, tuple[int, int | None]]
    params: tuple[int, ...]
    prologue: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]]

    @property
    def stacked(self) -> tuple[Weight, ...]:
        """Inputs that every layer has its own of, laid out as in the first group."""
        return self.groups[0].stacked

    @property
    def strategy(self) -> Strategy:
        """Of the first layer of a stage: what goes from stage to stage is laid out so."""
        return self.groups[0].strategy


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

    low, high = first_end, first_end + 1
    kind = graph.layers[first_end].signature
    while low > 0 and graph.layers[low - 1].signature == kind:
        low -= 1
    while high < len(stages) and graph.layers[high].signature == kind:
        high += 1
    counts = [stages[low:high].count(s) for s in range(plan.num_stages)]
    whole = [stages.count(s) for s in range(plan.num_stages)]
    inner = range(1, plan.num_stages - 1)
    wrong = next((s for s in range(plan.num_stages) if not counts[s]), None)
    if wrong is None:
        wrong = next((s for s in inner if counts[s] != min(counts) or whole[s] != min(counts)), None)
    if wrong is not None:
        raise StrategyError(
            f"stage {wrong} has {whole[wrong]} layers, of which {counts[wrong]} have the operations of "
            f"{graph.layers[first_end].name}; such layers per stage: {counts}. One program needs the same number on "
            "every stage, with other layers only before them on the first stage and after them on the last; use "
            "executor='stages'",
            stage=wrong,
            counts=tuple(counts),
        )
    least = 1 if plan.num_stages == 2 else min(counts)
    spans = [(first_end + 1 - n, first_end + 1 + n * (plan.num_stages - 1)) for n in range(min(counts), least - 1, -1)]
    odd = [_odd_layer(plan, *span) for span in spans]
    if None not in odd:
        layer = odd[0]
        assert layer is not None
        twin = spans[0][0] + (layer - spans[0][0]) % min(counts)
        raise StrategyError(
            f"layer {plan.layers[layer].name} of stage {stages[layer]} has strategy {plan.layers[layer].strategy}, and "
            f"{plan.layers[twin].name}, at the same place of stage 0, has {plan.layers[twin].strategy}. One program "
            "needs the same strategies on every stage; use executor='stages'",
            stage=stages[layer],
            counts=tuple(counts),
        )
    return spans[odd.index(None)]


def _odd_layer(plan: Plan, first: int, last: int) -> int | None:
    """The first layer of [first, last) whose strategy is not that of its place on the first stage."""
    share = (last - first) // plan.num_stages
    strategies = [choice.strategy for choice in plan.layers]
    return next((i for i in range(first + share, last) if strategies[i] != strategies[i - share]), None)


def stacked_run(graph: LayerGraph, layers: Sequence[Layer], strategies: Sequence[Strategy]) -> Run:
    """Layers of one signature as a run: parameters that differ are stacked, literals that differ too.

    Args:
        graph: that they are of.
        layers: of all stages.
        strategies: of one stage's layers.

    Raises:
        StrategyError: the layers differ in something that cannot be an input, or are wired unequally.
    """
    first, count = layers[0], len(layers)
    kinds = {s: layer_sharding(graph, first, s) for s in strategies}
    shardings = [kinds[s] for s in strategies]
    groups = [(s, len(list(same))) for s, same in groupby(strategies)]
    check_equal(graph, layers)
    body, literals = lift_literals([layer.jaxpr for layer in layers])
    slots, of_read = _slots(graph, layers, shardings[0])
    builder = _Inputs([kinds[s] for s, _ in groups], shardings)
    sources = [
        *(builder.param(graph, layers, j) for j in range(len(first.params))),
        *(builder.operand(graph, layers, j) for j in range(len(first.operands))),
        *(("slot", of_read[j]) for j in range(len(first.reads))),
        *(builder.literal(v) for v in literals),
    ]

    def group(number: int, strategy: Strategy, size: int) -> Group:
        own = kinds[strategy]
        return Group(
            size=size,
            strategy=strategy,
            specs=(*own.gathered, *own.operands, *own.reads, *(PartitionSpec() for _ in literals)),
            slots=tuple(s.spec for s in _slots(graph, layers, own)[0]),
            stacked=tuple(weights[number] for weights in builder.stacked),
        )

    return Run(
        count=count,
        body=body,
        sources=tuple(sources),
        groups=tuple(group(i, *g) for i, g in enumerate(groups)),
        shared=tuple(builder.shared),
        slots=slots,
        leaving=_leaving(layers, slots),
        params=tuple(builder.params),
        prologue=builder.prologue(),
        homes=builder.homes,
    )


class _Inputs:
    """Collects what every layer has of its own, and what they share.

    Args:
        kinds: layouts of each group.
        shardings: layouts of each layer of a stage.
    """

    def __init__(self, kinds: Sequence[LayerSharding], shardings: Sequence[LayerSharding]) -> None:
        self.kinds, self.shardings = tuple(kinds), tuple(shardings)
        self.stacked: list[tuple[Weight, ...]] = []
        self.shared: list[Weight] = []
        self.params: dict[int, None] = {}
        self.homes: dict[int, tuple[PartitionSpec, PartitionSpec, bool]] = {}
        self._stacks: list[tuple[str, Any]] = []
        self._shares: list[tuple[str, int]] = []

    def param(self, graph: LayerGraph, layers: Sequence[Layer], j: int) -> tuple[str, int]:
        """A parameter: the layers' own, or the same one for all."""
        found = [layer.params[j] for layer in layers]
        value = graph.params[found[0]]
        self.params.update(dict.fromkeys(found))
        for p, sharding in zip(found, cycle(self.shardings), strict=False):
            self.homes.setdefault(p, (sharding.stored[j], sharding.optimizer[j], False))
        weights = [
            Weight(shape=value.shape, dtype=value.dtype, trained=True, stored=kind.stored[j], grads=kind.grads[j])
            for kind in self.kinds
        ]
        return self._add("param", found, weights)

    def operand(self, graph: LayerGraph, layers: Sequence[Layer], j: int) -> tuple[str, int]:
        """An operand: of the batch, or made once per step."""
        found = [layer.operands[j] for layer in layers]
        operands = [graph.operands[o] for o in found]
        if operands[0].kind == "state":
            weight = Weight(shape=operands[0].shape, dtype=operands[0].dtype, trained=False)
            return self._add("state", [o.leaf for o in operands], [weight] * len(self.kinds))
        return (operands[0].kind, operands[0].leaf)

    def literal(self, values: np.ndarray) -> tuple[str, int]:
        """A constant that differs between layers: [layers, ...]."""
        weight = Weight(shape=values.shape[1:], dtype=values.dtype, trained=False)
        self.stacked.append((weight,) * len(self.kinds))
        self._stacks.append(("literal", values))
        return ("stacked", len(self.stacked) - 1)

    def _add(self, kind: str, found: list[int], weights: Sequence[Weight]) -> tuple[str, int]:
        if len(set(found)) == 1:
            self.shared.append(weights[0])
            self._shares.append((kind, found[0]))
            return ("shared", len(self.shared) - 1)
        self.stacked.append(tuple(weights))
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
