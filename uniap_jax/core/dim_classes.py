"""Which dimensions of a program's arrays shard together: union-find over dimensions and what is known of each class.

Assumption: sharding a dimension cuts it into equal contiguous pieces. Two dimensions are in one class when cutting
both leaves an equation local to each piece. A dimension of size 1 is in no class (`None`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Node = int
Dims = tuple[Node | None, ...]
PIECES = "cut into equal pieces"
CROSSES = "whole where it crosses to another layer"
MINOR = "the faster part of a joined dimension"
SUMMED_BETWEEN = "summed between two activations"
TWICE = "there twice in one value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Why a class cannot be sharded, and where that was seen."""

    reason: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A parameter dimension that must be seen as (outer, inner) for its inner part to be sharded, as a fused q, k, v.

    Attributes:
        param: position among the layer's parameters.
        dim: the joined dimension.
        outer: number of pieces it joins, the slower-varying factor.
    """

    param: int
    dim: int
    outer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DimClass:
    """Dimensions that shard together.

    Attributes:
        index: of the class within its layer.
        size: greatest common divisor of the sizes of its dimensions; degrees must divide it.
        members: number of array dimensions in it, parameters and intermediate values.
        params: (parameter, dimension) pairs sharded with it.
        views: parameter dimensions that join several pieces of it.
        flops: floating-point operations of the forward pass that shrink with it.
        contracted: whether it is summed over on the way, so that the result leaves the layer whole.
        lookup: whether it is only ever the dimension a table is looked up along.
        conflicts: indices of classes that share a value with it; only one of the two can be sharded.
        weighted: whether it is summed over with a weight, as features are and positions are not.
        stacked: whether it is a batch dimension of products with weights, as experts stacked in one array are.
        blocks: why it cannot be sharded at all; empty where it can.
        even: whether all its dimensions have its size.
    """

    index: int
    size: int
    members: int
    params: tuple[tuple[int, int], ...]
    views: tuple[View, ...]
    flops: float
    contracted: bool
    lookup: bool
    conflicts: frozenset[int]
    weighted: bool
    stacked: bool
    blocks: tuple[Block, ...]
    even: bool


class ClassBuilder:
    """Collects unions and facts while a program is walked; `classes` reads them off."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._blocks: dict[Node, list[Block]] = defaultdict(list)
        self._contracted: set[Node] = set()
        self._looked_up: set[Node] = set()
        self._weighted: set[Node] = set()
        self._stacked: set[Node] = set()
        self._flops: dict[Node, float] = defaultdict(float)
        self._joint: list[tuple[Node, ...]] = []
        self._chains: list[tuple[Node, tuple[tuple[int, Node | None], ...], str]] = []
        self._values: dict[Dims, None] = {}
        self._params: list[Dims] = []
        self._boundary: list[Dims] = []
        self._turns = 1
        self.notes: dict[str, str] = {}

    def new(self, size: int) -> Node | None:
        """A dimension of its own; None where there is nothing to cut (size 1 or 0)."""
        if size <= 1:
            return None
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def fresh(self, shape: tuple[int, ...]) -> Dims:
        """Dimensions of their own for a whole array."""
        dims = tuple(self.new(n) for n in shape)
        self.value(dims)
        return dims

    def root(self, node: Node) -> Node:
        """The class a dimension is in."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def unite(self, a: Node | None, b: Node | None) -> Node | None:
        """Puts two dimensions in one class; one of size 1 (None) follows nothing."""
        if a is None or b is None:
            return b if a is None else a
        self._parent[self.root(b)] = self.root(a)
        return a

    def block(self, node: Node | None, reason: str, source: str) -> None:
        """Forbids to shard a dimension's class."""
        if node is not None:
            self._blocks[node].append(Block(reason=reason, source=source))

    def contract(self, node: Node | None) -> None:
        """Says that a dimension is summed over."""
        if node is not None:
            self._contracted.add(node)

    def weigh(self, node: Node | None) -> None:
        """Says that a dimension is summed over with a weight."""
        if node is not None:
            self._weighted.add(node)

    def stack(self, node: Node | None) -> None:
        """Says that weights are stacked along a dimension, each for its own part of an activation."""
        if node is not None:
            self._stacked.add(node)

    def look_up(self, node: Node | None) -> None:
        """Says that a dimension is indexed by data."""
        if node is not None:
            self._looked_up.add(node)

    def work(self, nodes: set[Node], flops: float) -> None:
        """Counts operations that shrink when any of the dimensions is sharded."""
        for node in nodes:
            self._flops[node] += flops * self._turns

    @contextmanager
    def repeated(self, turns: int) -> Iterator[None]:
        """Work counted inside is done `turns` times."""
        before, self._turns = self._turns, self._turns * turns
        yield
        self._turns = before

    def joint(self, nodes: list[Node | None]) -> None:
        """Dimensions that act as one merged dimension, slowest first: only the first that is free keeps its class."""
        known = tuple(n for n in nodes if n is not None)
        if len(known) > 1:
            self._joint.append(known)

    def chain(self, whole: Node, factors: tuple[tuple[int, Node | None], ...], source: str) -> None:
        """A dimension seen as (size, dimension) factors, slowest first; the caller unites the first with the whole."""
        self._chains.append((whole, factors, source))

    def value(self, dims: Dims) -> None:
        """An array that exists: at most one of its dimensions can be sharded."""
        self._values[dims] = None

    def param(self, dims: Dims) -> None:
        """The next parameter of the layer."""
        self._params.append(dims)

    def boundary(self, dims: Dims) -> None:
        """An array that crosses to another layer and is whole there."""
        self._boundary.append(dims)

    def classes(self) -> tuple[DimClass, ...]:
        """Every class with what forbids to shard it; in order of first appearance."""
        return _Resolver(self).resolve()

    def numbers(self, arrays: Iterable[Dims | None]) -> list[Dims]:
        """For each array the index of the class that each dimension is in; () for constants."""
        order = self._order()
        return [tuple(None if n is None else order[self.root(n)] for n in dims or ()) for dims in arrays]

    def _order(self) -> dict[Node, int]:
        """Classes by their root, in order of first appearance."""
        roots = dict.fromkeys(self.root(node) for node in range(len(self._parent)))
        return {r: i for i, r in enumerate(roots)}


class _Resolver:
    """Turns the facts about dimensions into facts about classes."""

    def __init__(self, builder: ClassBuilder) -> None:
        self._b = builder
        self._root = builder.root
        self._blocks: dict[Node, list[Block]] = defaultdict(list)
        self._views: dict[Node, set[tuple[Node, int]]] = defaultdict(set)

    def resolve(self) -> tuple[DimClass, ...]:
        b, root = self._b, self._root
        members: dict[Node, list[Node]] = defaultdict(list)
        for node in range(len(b._parent)):
            members[root(node)].append(node)
        for node, blocks in b._blocks.items():
            self._blocks[root(node)].extend(blocks)
        for dims in b._boundary:
            for n in dims:
                if n is not None:
                    self._add(root(n), CROSSES)
        conflicts = self._conflicts()
        self._joints()
        self._chains()
        order = {r: i for i, r in enumerate(members)}
        contracted = {root(n) for n in b._contracted}
        looked_up = {root(n) for n in b._looked_up}
        weighted, stacked = {root(n) for n in b._weighted}, {root(n) for n in b._stacked}
        flops = self._flops()
        return tuple(
            DimClass(
                index=i,
                size=math.gcd(*(b._size[n] for n in nodes)),
                members=len(nodes),
                params=self._param_dims(r),
                views=tuple(
                    View(param=p, dim=d, outer=outer)
                    for whole, outer in sorted(self._views[r])
                    for p, d in self._param_dims(whole)
                ),
                flops=flops[r],
                contracted=r in contracted or r in looked_up,
                lookup=r in looked_up and not flops[r],
                conflicts=frozenset(order[c] for w in {r, *(w for w, _ in self._views[r])} for c in conflicts[w]),
                weighted=r in weighted,
                stacked=r in stacked,
                blocks=tuple(self._blocks[r]),
                even=len({b._size[n] for n in nodes}) == 1,
            )
            for i, (r, nodes) in enumerate(members.items())
        )

    def _flops(self) -> dict[Node, float]:
        """Work of each class, that of the dimensions that join pieces of it included."""
        own: dict[Node, float] = defaultdict(float)
        for node, amount in self._b._flops.items():
            own[self._root(node)] += amount
        total = defaultdict(float, own)
        for r, views in self._views.items():
            total[r] += sum(own[whole] for whole in {w for w, _ in views})
        return total

    def _add(self, r: Node, reason: str, source: str = "") -> None:
        if not any(k.reason == reason for k in self._blocks[r]):
            self._blocks[r].append(Block(reason=reason, source=source))

    def _whole(self, r: Node) -> bool:
        """Whether nothing but being cut into pieces forbids to shard it."""
        return all(k.reason == PIECES for k in self._blocks[r])

    def _param_dims(self, r: Node) -> tuple[tuple[int, int], ...]:
        params = self._b._params
        return tuple(
            (p, d) for p, dims in enumerate(params) for d, n in enumerate(dims) if n is not None and self._root(n) == r
        )

    def _conflicts(self) -> dict[Node, set[Node]]:
        found: dict[Node, set[Node]] = defaultdict(set)
        for dims in self._b._values:
            roots = [self._root(n) for n in dims if n is not None]
            for r in set(roots):
                found[r].update(set(roots) - {r})
                if roots.count(r) > 1:
                    self._add(r, TWICE)
        return found

    def _joints(self) -> None:
        """Of dimensions contracted together, or made together by one parameter, the slowest keeps its class."""
        minors = []
        for nodes in self._b._joint:
            free = [r for r in map(self._root, nodes) if not self._blocks[r]]
            minors += [r for r in free[1:] if r != free[0]]
        for r in minors:
            self._add(r, MINOR)

    def _chains(self) -> None:
        """Of a reshaped dimension the slowest factor keeps the class, or the next where the slowest is cut up."""
        changed = True
        while changed:
            before = sum(map(len, self._blocks.values()))
            for whole, factors, source in self._b._chains:
                self._chain(self._root(whole), factors, source)
            changed = before != sum(map(len, self._blocks.values()))

    def _chain(self, whole: Node, factors: tuple[tuple[int, Node | None], ...], source: str) -> None:
        outer, promoted = factors[0][0], bool(self._blocks[whole]) and self._whole(whole)
        contracted = {self._root(n) for n in self._b._contracted}
        for size, node in factors[1:]:
            r = None if node is None else self._root(node)
            if r is not None and r != whole:
                if promoted and whole not in contracted:
                    self._views[r].add((whole, outer))
                else:
                    self._views[r].discard((whole, outer))
                    self._add(r, MINOR, source)
                promoted = promoted and bool(self._blocks[r]) and self._whole(r)
            outer *= size
