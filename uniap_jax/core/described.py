"""What a layer costs by its work and the cluster's rates alone: a roofline per kernel, alpha-beta per collective.

Kernel: max(flops / (peak × efficiency), bytes / (bandwidth × efficiency)) + overhead (Williams et al., 2009).
Counts are traced at the whole batch and at one sample (or the smallest micro-batch) and are affine in between, since
every count is a sum of products of shapes in which the batch appears at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uniap_jax.core.errors import TraceError
from uniap_jax.core.graph import Layer, LayerGraph, Value
from uniap_jax.core.machine import Cluster
from uniap_jax.core.profile import LayerCost, Links, overlapped
from uniap_jax.core.sharding import Splits, layer_splits
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.weights import ParamBytes, param_bytes
from uniap_jax.core.work import Pass, Traced, Work

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of one layer and micro-batch by what takes them, under the described rates.

    Attributes:
        flops_s: matrix products at the peak rate's share.
        memory_s: bytes of all kernels at the bandwidth's share.
        kernels_s: overhead of every kernel.
        reduce_s: partial sums of the tensor ways.
        gather_s: parameters gathered over fsdp ways.
        forward_share: of flops_s, memory_s and kernels_s together, what the forward takes.
    """

    flops_s: float
    memory_s: float
    kernels_s: float
    reduce_s: float
    gather_s: float
    forward_share: float


def divisors(n: int) -> tuple[int, ...]:
    """Every divisor, smallest first."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def base_graph(graph: LayerGraph) -> LayerGraph:
    """The graph traced with the whole batch."""
    return graph if graph.num_microbatches == 1 else graph.microbatch(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """One micro-batch of a layer on a device that has the parameters at hand.

    Attributes:
        forward_s: kernels and partial sums.
        backward_s: likewise.
        transient_bytes: of the pass that needs more.
    """

    forward_s: float
    backward_s: float
    transient_bytes: float


class Describer:
    """Costs of layers from counts and rates; every layer, `keep` and choice of split dimensions is traced once.

    Args:
        graph: traced at any number of micro-batches.
        cluster: rates.
        links: times of collectives; those of the cluster where None.

    Attributes:
        untried_splits: `splits`, of which the last was not traced yet: a trace of a large model takes seconds.
        notes: what the numbers leave out, one sentence each.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, links: Links | None = None) -> None:
        self.graph = base_graph(graph)
        self.cluster = cluster
        self.links = links or Links(cluster)
        self.untried_splits, self._small, self.notes = _splits(self.graph)
        self._pieces = self._small.num_microbatches if self._small else 1
        self._programs: dict[tuple[object, ...], Traced] = {}
        self._work: dict[tuple[object, ...], tuple[Work, Work | None]] = {}
        self._costs: dict[tuple[object, ...], LayerCost] = {}
        self._passes: dict[tuple[object, ...], Passes] = {}
        self._weights: dict[tuple[str, Strategy], ParamBytes] = {}
        self._chosen: dict[tuple[str, Strategy], Splits] = {}

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Numbers of micro-batches the batch may be cut into, micro-batches of one example among them if they trace."""
        if self._small is not None and self._pieces < self.untried_splits[-1]:
            try:
                self.graph.microbatch(self.untried_splits[-1])
            except TraceError as error:
                self.notes = (*self.notes, f"Micro-batches of one example are left out: {error}.")
                return self.untried_splits[:-1]
        return self.untried_splits

    def cost(self, layer: Layer, strategy: Strategy, *, samples: int, fused: bool) -> LayerCost:
        """One micro-batch of a layer.

        Args:
            layer: of the base graph.
            strategy: on the stage's sub-mesh.
            samples: of the global batch in one micro-batch.
            fused: forward and backward in one program (one stage) rather than in two (pipeline stages).

        Raises:
            StrategyError: the strategy is illegal for this layer.
        """
        key = (_kind(layer), strategy, samples, fused)
        if key not in self._costs:
            self._costs[key] = self._cost(layer, strategy, samples, fused)
        return self._costs[key]

    def _cost(self, layer: Layer, strategy: Strategy, samples: int, fused: bool) -> LayerCost:
        weights, held = self.weights(layer, strategy), self._as_held(strategy, fused)
        local = _local(samples, strategy)
        passes = self._both(layer, strategy, local, fused)
        gather, slowdown = self._gather_s(strategy, weights), self.cluster.overlap_slowdown
        again = gather if held.keep != "all" or not fused else 0.0
        there, back = self._exchange_s(strategy, weights)
        ahead, behind = passes.forward_s + there, passes.backward_s + back
        backward_s = overlapped(behind, again, slowdown)
        transient = self._both(layer, held, local, fused).transient_bytes
        return LayerCost(
            forward_s=overlapped(ahead, gather, slowdown),
            backward_s=backward_s,
            sync_s=overlapped(backward_s, self.sync_s(strategy, weights), slowdown) - backward_s,
            kept_bytes=self._kept(layer, held, local, fused) + self._kept_weights(held, weights, fused),
            transient_bytes=transient + self._working_weights(held, weights, fused),
        )

    def weights(self, layer: Layer, strategy: Strategy) -> ParamBytes:
        """Bytes of a layer's parameters on one device; found out once for equal layers.

        Raises:
            StrategyError: the strategy is illegal for this layer.
        """
        key = (_kind(layer), replace(strategy, keep="all"))
        if key not in self._weights:
            self._weights[key] = param_bytes(self.graph, layer, strategy)
        return self._weights[key]

    def _as_held(self, strategy: Strategy, fused: bool) -> Strategy:
        """What decides memory: XLA's CPU backend drops the barriers of `jax.checkpoint`.

        What one program computes again is there before the first backward needs it, and parameters are gathered once.
        """
        dropped = fused and self.cluster.platform == "cpu" and strategy.keep != "all"
        return replace(strategy, keep="all") if dropped else strategy

    def _counts(self, layer: Layer, strategy: Strategy) -> tuple[Work, Work | None]:
        plain = _kind(layer), replace(strategy, keep="all")
        if plain not in self._chosen:
            self._chosen[plain] = layer_splits(self.graph, layer, strategy)
        splits = self._chosen[plain]
        chosen = splits.tensor  # the degree itself changes no count, only what is split
        which = (chosen.params, chosen.views, chosen.pads, splits.sequence, splits.expert, splits.along_tensor)
        key = (_kind(layer), strategy.keep, strategy.tensor > 1, which)
        if key not in self._work:
            full = self._traced(layer, strategy, splits).work(splits)
            small = None
            if self._small is not None:
                other = self._small.layers[layer.index]
                again = layer_splits(self._small, other, strategy)
                small = self._traced(other, strategy, again).work(again)
            self._work[key] = full, small
        return self._work[key]

    def _traced(self, layer: Layer, strategy: Strategy, splits: Splits) -> Traced:
        choice = splits.tensor
        shapes = tuple(a.shape for a in layer.jaxpr.in_avals)
        key = (_kind(layer), shapes, strategy.keep, strategy.tensor > 1, choice.params, choice.views, choice.pads)
        if key not in self._programs:
            tpu = self.cluster.platform == "tpu"
            self._programs[key] = Traced(layer, choice, keep=strategy.keep, tensor=strategy.tensor, tpu=tpu)
        return self._programs[key]

    def _both(self, layer: Layer, strategy: Strategy, local: float, fused: bool) -> Passes:
        """Both passes with parameters at hand: the same for strategies that differ in how these are stored."""
        full, small = self._counts(layer, strategy)
        key = (id(full), strategy.tensor, strategy.sequence, strategy.context, strategy.expert, local, fused)
        if key not in self._passes:
            forward = self._pass(full.forward, small.forward if small else None, local)
            backward = self._pass(full.backward, small.backward if small else None, local)
            ways = strategy.tensor
            self._passes[key] = Passes(
                forward_s=self._seconds(forward, strategy, fused),
                backward_s=self._seconds(backward, strategy, fused),
                transient_bytes=max(forward.transient_bytes(ways), backward.transient_bytes(ways)),
            )
        return self._passes[key]

    def _share(self, local: float) -> tuple[float, float]:
        """Weights of the whole-batch and the smallest counts at `local` samples: affine, exact for both."""
        most, least = float(self.graph.batch_size), self.graph.batch_size / self._pieces
        return ((local - least) / (most - least), (most - local) / (most - least)) if most > least else (1.0, 0.0)

    def _mix(self, full: Any, small: Any, local: float) -> Any:
        if small is None or np.shape(full) != np.shape(small):
            return np.asarray(full) * (local / self.graph.batch_size)
        a, b = self._share(local)
        return np.maximum(a * np.asarray(full) + b * np.asarray(small), 0.0)

    def _pass(self, full: Pass, small: Pass | None, local: float) -> Pass:
        def mixed(name: str) -> Any:
            return self._mix(getattr(full, name), None if small is None else getattr(small, name), local)

        return Pass(
            flops=mixed("flops"),
            nbytes=mixed("nbytes"),
            fused_nbytes=mixed("fused_nbytes"),
            split=full.split,
            dtypes=full.dtypes,
            live=mixed("live"),
            live_split=mixed("live_split"),
            **{name: tuple(float(x) for x in mixed(name)) for name in ("reduced", "met", "exchanged")},
        )

    def parts(self, layer: Layer, strategy: Strategy, *, samples: int, fused: bool) -> Parts:
        """Forward and backward by what takes the time, for a calibration to weigh.

        Raises:
            StrategyError: the strategy is illegal for this layer.
        """
        weights, held = self.weights(layer, strategy), self._as_held(strategy, fused)
        full, small = self._counts(layer, strategy)
        local = _local(samples, strategy)
        passes = [
            self._pass(getattr(full, way), getattr(small, way) if small else None, local)
            for way in ("forward", "backward")
        ]
        timed = [self._compute(p, strategy, fused) for p in passes]
        total = [sum(t) for t in timed]
        gathers = 2 if held.keep != "all" or not fused else 1
        exchange_s = sum(self._exchange_s(strategy, weights))
        return Parts(
            flops_s=sum(t[0] for t in timed),
            memory_s=sum(t[1] for t in timed),
            kernels_s=sum(t[2] for t in timed),
            reduce_s=sum(self._reduce_s(p, strategy) for p in passes) + exchange_s,
            gather_s=gathers * self._gather_s(strategy, weights),
            forward_share=total[0] / sum(total) if sum(total) > 0 else 1 / 3,
        )

    def _compute(self, work: Pass, strategy: Strategy, fused: bool) -> tuple[float, float, float]:
        """Seconds of flops, of bytes and of overheads, each as if the others were free."""
        flops, memory, kernels_s = self._kernels(work, strategy, fused)
        return float(flops.sum()), float(memory.sum()), kernels_s

    def _kernels(self, work: Pass, strategy: Strategy, fused: bool) -> tuple[FloatArray, FloatArray, float]:
        """Of each kernel seconds of flops and of bytes; overheads of all."""
        cluster, nbytes = self.cluster, work.fused_nbytes if fused else work.nbytes
        ways = np.where(work.split, strategy.tensor, 1)
        rates = np.array([cluster.flops_per_s(d or "float32") for d in work.dtypes]) * cluster.matmul_efficiency
        count = int(np.count_nonzero((work.flops > 0) | (nbytes > 0)))
        flops_s, memory_s = work.flops / rates / ways, nbytes / cluster.streamed_bytes_per_s / ways
        return flops_s, memory_s, count * cluster.op_overhead_s

    def _reduce_s(self, work: Pass, strategy: Strategy) -> float:
        """Partial sums of tensor ways, keys and values that context ways gather, tokens sent to experts and back."""
        tensor, links = strategy.tensor, self.links
        kinds: tuple[str, ...] = ("all_reduce",)
        if strategy.sequence:  # XLA's CPU backend reduces, then slices
            kinds = ("all_reduce" if self.cluster.platform == "cpu" else "reduce_scatter", "all_gather")
        total = sum(links.time_s(kind, b, tensor, 1) for b in work.reduced for kind in kinds)
        if strategy.context > 1:
            total += sum(links.time_s("all_gather", b * strategy.context, strategy.context, tensor) for b in work.met)
        stride = strategy.context * tensor
        return total + sum(links.time_s("all_to_all", b, strategy.expert, stride) for b in work.exchanged)

    def _seconds(self, work: Pass, strategy: Strategy, fused: bool) -> float:
        flops_s, memory_s, kernels_s = self._kernels(work, strategy, fused)
        return float(np.maximum(flops_s, memory_s).sum() + kernels_s + self._reduce_s(work, strategy))

    def _exchange_s(self, strategy: Strategy, weights: ParamBytes) -> tuple[float, float]:
        """Parameters brought to where the tensor ways use them, and gradients brought back."""
        ways = strategy.tensor
        there = sum(self.links.time_s("all_to_all", b, ways, 1) for b in weights.exchanged)
        back = there + sum(self.links.time_s("all_gather", b * ways, ways, 1) for b in weights.regathered)
        return there, back + (there if strategy.keep != "all" else 0.0)

    def _gather_s(self, strategy: Strategy, weights: ParamBytes) -> float:
        if strategy.fsdp == 1 or strategy.zero < 3:
            return 0.0
        stride = strategy.expert * strategy.context * strategy.tensor
        fit = self.links.fit("all_gather", strategy.fsdp, stride)
        return weights.count * fit.alpha_s + fit.beta_s_per_byte * weights.used  # one for each array

    def sync_s(self, strategy: Strategy, weights: ParamBytes) -> float:
        """Gradients summed over the batch and context axes, once: scattered over fsdp where split, then all_reduced.

        Those of experts stay with them. XLA joins the sums of many arrays into one collective.
        """
        if strategy.batch_ways * strategy.context == 1 or not weights.count:
            return 0.0
        total, rest, inner = 0.0, weights.full_grads, strategy.expert * strategy.context * strategy.tensor
        data, stride = strategy.data * strategy.context, strategy.tensor * strategy.expert
        if strategy.zero >= 2 and self.cluster.platform != "cpu":
            stride *= 1 if strategy.context > 1 else strategy.fsdp
            if strategy.fsdp > 1:
                total += self.links.time_s("reduce_scatter", rest, strategy.fsdp, inner)
                rest = weights.grads
        else:  # XLA's CPU backend reduces over all of them, then slices
            data *= strategy.fsdp
        if data > 1:
            total += self.links.time_s("all_reduce", rest, data, stride)
        if strategy.expert > 1 and weights.shared_grads:
            shared = rest * weights.shared_grads / weights.full_grads
            stride = strategy.context * strategy.tensor
            total += self.links.time_s("all_reduce", shared, strategy.expert, stride)
        return total

    def _kept(self, layer: Layer, strategy: Strategy, local: float, fused: bool) -> float:
        full, small = self._counts(layer, strategy)

        def mixed(name: str) -> float:
            return float(self._mix(getattr(full, name), None if small is None else getattr(small, name), local))

        name = "fused" if fused else "kept"
        return mixed(name) + mixed(f"{name}_split") / strategy.tensor

    def _kept_weights(self, strategy: Strategy, weights: ParamBytes, fused: bool) -> float:
        """A fused program without recompute holds gathered parameters until the backward."""
        gathered = strategy.fsdp > 1 and strategy.zero == 3
        copied = weights.copied if strategy.keep == "all" else 0.0
        return copied + (weights.used if gathered and fused and strategy.keep == "all" else 0.0)

    def _working_weights(self, strategy: Strategy, weights: ParamBytes, fused: bool) -> float:
        """Gathered parameters, and gradients that are yet to be brought to where they are summed up."""
        copied = weights.copied if strategy.keep == "all" else 2 * weights.copied
        held = strategy.fsdp > 1 and strategy.zero == 3 and not (fused and strategy.keep == "all")
        return copied + (weights.used if held else 0.0)


def _local(samples: int, strategy: Strategy) -> float:
    """Samples' worth of activations on a device: context ways share each sample's positions."""
    return samples / (strategy.batch_ways * strategy.context)


def _kind(layer: Layer) -> str:
    return layer.signature or str(layer.index)


def batch_bytes(values: tuple[Value, ...], ways: int) -> float:
    """Bytes of values on one device, those with a batch dimension split `ways` ways."""
    return float(sum(v.nbytes / (ways if v.batch_dim is not None else 1) for v in values))


def _splits(graph: LayerGraph) -> tuple[tuple[int, ...], LayerGraph | None, tuple[str, ...]]:
    """Numbers of micro-batches the batch may be cut into, the graph of the smallest worth tracing, and notes.

    Two samples are traced rather than one: a dimension of size 1 broadcasts, and then counts are not affine.
    """
    whole = divisors(graph.batch_size)
    if graph.split_reason or len(whole) == 1:
        return (1,), None, ()
    pieces = max((d for d in whole if graph.batch_size // d >= 2), default=1)
    try:
        small = graph.microbatch(pieces if pieces > 1 else whole[-1])
    except TraceError as error:
        return (1,), None, (f"The batch is not split into micro-batches: {error}.",)
    return whole, small, ()


def cut_batch(graph: LayerGraph, pieces: int) -> LayerGraph:
    """The same layers with the shapes of one micro-batch; jaxprs stay those of the whole batch."""
    if pieces == 1:
        return graph

    def cut(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        return shape if dim is None else (*shape[:dim], max(1, shape[dim] // pieces), *shape[dim + 1 :])

    return replace(
        graph,
        values=tuple(replace(v, shape=cut(v.shape, v.batch_dim)) for v in graph.values),
        operands=tuple(replace(o, shape=cut(o.shape, o.batch_dim)) for o in graph.operands),
        num_microbatches=pieces,
    )
