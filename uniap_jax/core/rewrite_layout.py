"""Spreads the layout of a layer's edges through its inside: every value that holds a split dimension is pinned.

Megatron's classes need no pins inside, for sharded weights say it all. The sequence and experts do: with the edges
alone pinned along the sequence, XLA gathers every weight instead of the activation (sequence parallelism becomes
context parallelism), and it may keep experts where the tokens are. Pins move data and change no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.dim_classes import ClassBuilder, Dims
from uniap_jax.core.dim_rules import ELEMENTWISE
from uniap_jax.core.dim_shape_rules import LIVE, PARAM, shape_of
from uniap_jax.core.dim_walk import Held, Walker, enter
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.grouped import spread_groups
from uniap_jax.core.jax_compat import ClosedJaxpr, JaxprEqn, Literal
from uniap_jax.core.jaxprs import INLINED, inner_jaxprs, open_jaxpr, scan_counts
from uniap_jax.core.rewrite import Ways, tensor_rewrite
from uniap_jax.core.rewrite_pieces import evaluate
from uniap_jax.core.sharding import assign_axes, layer_splits, sequence_axes
from uniap_jax.core.strategy import Strategy

_REMAT = ("checkpoint", "remat2", "remat")
_STAYS = ELEMENTWISE | {"transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "split", "concatenate"}
"""What is done to an expert's results on the device of the expert."""
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Where the split dimensions of a layer's inputs and outputs are; None for an array that has none.

    Attributes:
        num_params: of the inputs, the first are parameters,
        num_operands: and these many operands follow.
        batch: dimension of each input and output that the batch axes split.
        sequence: that the sequence axes split.
        tensor: that the tensor axes split; of parameters.
        stored: along which they split parameters whose parts are exchanged before they are used.
        expert: that the expert axes split; of parameters.
        batch_axes: axes of the batch, those of the experts last.
        sequence_axes: of the sequence.
        tensor_axes: of tensor ways.
        expert_axes: of experts.
    """

    num_params: int
    num_operands: int
    batch: tuple[int | None, ...]
    sequence: tuple[int | None, ...]
    tensor: tuple[int | None, ...]
    stored: tuple[int | None, ...]
    expert: tuple[int | None, ...]
    batch_axes: Axes
    sequence_axes: Axes
    tensor_axes: Axes
    expert_axes: Axes


def laid_out(graph: LayerGraph, layer: Layer, strategy: Strategy, mesh: Mesh | AbstractMesh) -> Layer:
    """A layer as it is computed under its strategy: with its projections merged and its inside pinned.

    Args:
        graph: of the layer.
        layer: as traced.
        strategy: of the layer.
        mesh: of its stage.

    Raises:
        StrategyError: the strategy is illegal for this layer.
    """
    axes, splits = assign_axes(strategy, strategy.num_devices), layer_splits(graph, layer, strategy)
    jaxpr = tensor_laid_out(graph, layer, strategy, mesh).jaxpr
    if strategy.sequence_ways > 1 or strategy.expert > 1:
        params, operands = (None,) * len(layer.params), (None,) * len(layer.operands)
        moved = splits.tensor.moved
        edges = Edges(
            num_params=len(params),
            num_operands=len(operands),
            batch=(*params, *operands, *(graph.values[v].batch_dim for v in (*layer.reads, *layer.writes))),
            sequence=(*params, *operands, *splits.sequence.reads, *splits.sequence.writes),
            tensor=tuple(None if p in moved else d for p, d in enumerate(splits.tensor.params)),
            stored=tuple(d if p in moved else None for p, d in enumerate(splits.tensor.stored)),
            expert=splits.expert.params,
            batch_axes=axes.batch,
            sequence_axes=sequence_axes(strategy, axes),
            tensor_axes=axes.tensor,
            expert_axes=axes.expert,
        )
        jaxpr = spread(jaxpr, edges, mesh)
    return replace(layer, jaxpr=jaxpr)


def tensor_laid_out(graph: LayerGraph, layer: Layer, strategy: Strategy, mesh: Mesh | AbstractMesh) -> Layer:
    """A layer as its tensor ways compute it, its inside not pinned.

    Raises:
        StrategyError: the strategy is illegal for this layer.
    """
    if strategy.tensor == 1:
        return layer
    axes, split = assign_axes(strategy, strategy.num_devices), layer_splits(graph, layer, strategy).tensor
    ways = Ways(mesh=mesh, axes=axes.tensor, degree=strategy.tensor)
    spread_out = spread_groups(layer, split, mesh, axes.batch + axes.tensor)
    return replace(layer, jaxpr=tensor_rewrite(spread_out, split, ways))


def spread(jaxpr: ClosedJaxpr, edges: Edges, mesh: Mesh | AbstractMesh) -> ClosedJaxpr:
    """The same program with its values pinned as its edges are."""
    layout = _Layout(jaxpr, edges, dict(mesh.shape))
    pinned = _Pinned(layout, mesh)

    def run(*args: jax.Array) -> list[jax.Array]:
        return pinned.body(jaxpr, list(args), ())

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
    return jax.make_jaxpr(run)(*shapes)


class _Layout:
    """What is known of the dimensions of every value in a program."""

    def __init__(self, jaxpr: ClosedJaxpr, edges: Edges, sizes: dict[str, int]) -> None:
        self._b, self._edges, self._sizes = ClassBuilder(), edges, sizes
        self._walker = Walker(self._b)
        held = enter(self._b, jaxpr, edges.num_params, edges.num_operands)
        outs = self._walker.body(jaxpr, held)
        ends = [h.dims for h in (*held, *outs)]
        self._batch = self._roots(ends, edges.batch)
        self._sequence = self._roots(ends, edges.sequence) - self._batch
        laid = self._laid(jaxpr, ()) - self._roots(ends[: edges.num_params], edges.stored)
        self._tensor = self._roots(ends[: edges.num_params], edges.tensor) | laid
        self._expert = self._roots(ends[: edges.num_params], edges.expert)
        self.expert_ways = math.prod(sizes[a] for a in edges.expert_axes)

    def _roots(self, ends: Sequence[Dims | None], dims: Sequence[int | None]) -> set[int]:
        nodes = [e[d] for e, d in zip(ends, dims, strict=True) if e is not None and d is not None and d < len(e)]
        return {self._b.root(n) for n in nodes if n is not None}

    def _laid(self, jaxpr: Any, path: tuple[int, ...]) -> set[int]:
        """Classes of dimensions that a rewriting has pinned to the tensor axes."""
        found: set[int] = set()
        for i, eqn in enumerate(open_jaxpr(jaxpr).eqns):
            for body in inner_jaxprs(eqn) if _enters(eqn) else ():
                found |= self._laid(body, (*path, i))
            if eqn.primitive.name == "sharding_constraint" and (*path, i) in self._walker.seen:
                dims, spec = self._walker.seen[(*path, i)][1][0].dims, eqn.params["sharding"].spec
                for node, names in zip(dims or (), spec, strict=False):
                    if node is not None and names in (self._edges.tensor_axes, *self._edges.tensor_axes):
                        found.add(self._b.root(node))
        return found

    def held(self, path: tuple[int, ...]) -> tuple[list[Held], list[Held]]:
        """Inputs and results of an equation; none where it was not walked."""
        return self._walker.seen.get(path, ([], []))

    def spec(self, dims: Dims, shape: tuple[int, ...], *, inside: bool) -> PartitionSpec | None:
        """The layout of a value, or None where nothing is known of it.

        An axis goes to the experts inside them, else to what tensor ways split, else to the sequence, else to the
        batch. A dimension of which nothing is known is left to the compiler.
        """
        e, roots = self._edges, [None if n is None else self._b.root(n) for n in dims]
        placed: dict[int, Axes] = {}
        wanted = [(self._expert, e.expert_axes)] if inside else []
        wanted += [(self._tensor, e.tensor_axes), (self._sequence, e.sequence_axes), (self._batch, e.batch_axes)]
        for classes, axes in wanted:
            dim = next((d for d, r in enumerate(roots) if r in classes and d not in placed), None)
            used = {a for names in placed.values() for a in names}
            free = tuple(a for a in axes if a not in used)
            if dim is not None and free and shape[dim] % math.prod(self._sizes[a] for a in free) == 0:
                placed[dim] = free
        if not placed:
            return None
        return PartitionSpec(*[placed.get(d, PartitionSpec.UNCONSTRAINED) for d in range(len(dims))])

    def stacked(self, held: Held, kind: int) -> bool:
        """Whether a value of a kind has experts along one of its dimensions."""
        return held.kind == kind and any(n is not None and self._b.root(n) in self._expert for n in held.dims or ())


def _enters(eqn: JaxprEqn) -> bool:
    """Whether a body is opened: its values are pinned one by one."""
    return eqn.primitive.name in (*INLINED, *_REMAT, "scan")


class _Pinned:
    """Evaluates a program with its values pinned."""

    def __init__(self, layout: _Layout, mesh: Mesh | AbstractMesh) -> None:
        self._layout, self._mesh = layout, mesh

    def body(self, jaxpr: Any, inputs: Sequence[Any], path: tuple[int, ...]) -> list[Any]:
        opened = open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=True))
        env.update(zip(opened.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        inside: set[Any] = set()
        for i, eqn in enumerate(opened.eqns):
            here, args = (*path, i), [read(v) for v in eqn.invars]
            ins, held = self._layout.held(here)
            at_experts = self._at_experts(eqn, ins, held, inside)
            if len(ins) == len(args):
                args = self._moved(eqn, args, ins, inside, at_experts)
            outs = self._equation(eqn, args, here)
            if not _enters(eqn) and len(held) == len(outs):
                outs = [self._pin(x, h, at_experts) for x, h in zip(outs, held, strict=True)]
            inside.update(eqn.outvars if at_experts else ())
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in opened.outvars]

    def _at_experts(self, eqn: JaxprEqn, ins: list[Held], outs: list[Held], inside: set[Any]) -> bool:
        """Whether an equation is done where the experts are: products with them, and what happens to their results."""
        if not any(self._layout.stacked(h, LIVE) for h in outs):
            return False
        if eqn.primitive.name == "dot_general":
            return any(self._layout.stacked(h, PARAM) for h in ins)
        return eqn.primitive.name in _STAYS and any(not isinstance(v, Literal) and v in inside for v in eqn.invars)

    def _moved(self, eqn: JaxprEqn, args: list[Any], ins: list[Held], inside: set[Any], at_experts: bool) -> list[Any]:
        """Activations sent to the experts, or from them back to the devices of their examples.

        Results that what follows only sums over the experts stay where they are if the sum is smaller to send.
        """
        sizes = [math.prod(shape_of(v)) for v in eqn.outvars]
        moved = []
        for x, h, v in zip(args, ins, eqn.invars, strict=True):
            leaves = not isinstance(v, Literal) and v in inside and not at_experts
            if at_experts and self._layout.stacked(h, LIVE):
                moved.append(self._pin(x, h, True))
            elif leaves and math.prod(shape_of(v)) <= self._layout.expert_ways * max(sizes):
                moved.append(self._pin(x, h, False))
            else:
                moved.append(x)
        return moved

    def _pin(self, x: Any, held: Held, inside: bool) -> Any:
        if held.kind != LIVE or held.dims is None or not jnp.issubdtype(x.dtype, np.generic):
            return x
        spec = self._layout.spec(held.dims, x.shape, inside=inside)
        return x if spec is None else lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def _equation(self, eqn: JaxprEqn, args: list[Any], path: tuple[int, ...]) -> list[Any]:
        name = eqn.primitive.name
        if name in INLINED:
            return self.body(next(inner_jaxprs(eqn)), args, path)
        if name in _REMAT:
            again = jax.checkpoint(
                lambda *xs: self.body(eqn.params["jaxpr"], xs, path),
                prevent_cse=eqn.params["prevent_cse"],
                policy=eqn.params["policy"],
            )
            return list(again(*args))
        if name == "scan":
            return self._scan(eqn, args, path)
        return evaluate(eqn, args)

    def _scan(self, eqn: JaxprEqn, args: list[Any], path: tuple[int, ...]) -> list[Any]:
        first, carries, _ = scan_counts(eqn)
        consts, carry, xs = args[:first], args[first : first + carries], args[first + carries :]

        def turn(state: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self.body(eqn.params["jaxpr"], [*consts, *state, *rows], path)
            return outs[:carries], outs[carries:]

        p = eqn.params
        last, stacked = lax.scan(turn, carry, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return [*last, *stacked]
