"""Bytes that kernels move through a device's main memory, for a compiler that fuses as XLA does.

An element-wise value exists in memory only where a kernel needs it there; any other kernel computes it again from what
does exist. A reduction does so too, and reductions and element-wise kernels that read the same are one kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from uniap_jax.core.dim_classes import Node
from uniap_jax.core.dim_shape_rules import CONST
from uniap_jax.core.kernels import FUSED, HEAVY, LOOPS, PICKING, PRODUCTS, RANDOM, RANDOM_COPIES, READERS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Value:
    """An array that programs make or are given.

    Attributes:
        index: unique.
        nbytes: its size.
        dims: classes of its dimensions.
        kind: of `dim_shape_rules`: depends on parameters or on activations, or on neither.
        cheap: a cheap function of parameters and constants.
    """

    index: int
    nbytes: float
    dims: tuple[Node | None, ...] | None
    kind: int
    cheap: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """One equation as it was met.

    Attributes:
        name: of the primitive.
        flops: of matrix products.
        dtype: of their operands; "" elsewhere.
        ins: what it reads.
        outs: what it makes.
        summed: dimensions that it sums over.
        one_each: it adds one number to each row.
    """

    name: str
    flops: float
    dtype: str
    ins: list[Value]
    outs: list[Value]
    summed: list[Node]
    one_each: bool


def kernel_bytes(events: Sequence[Event], results: Collection[int], *, tpu: bool) -> list[float]:
    """Bytes that each equation's kernel reads and writes; 0 where it has none of its own.

    Args:
        events: of one program.
        results: indices of what it hands over.
        tpu: as XLA fuses for TPUs: kernels of matrix products compute what they read, and what is computed of their
            results alone; one number added to each row is a comparison; the smaller of a value and what it is computed
            from is read.
    """
    used = _used(events, results)
    own = {i for i, e in enumerate(events) if i in used and e.name in HEAVY and not (tpu and e.one_each)}
    needing = READERS - PRODUCTS if tpu else READERS
    needed = {v.index for i in own if events[i].name in needing for v in events[i].ins} | set(results)
    products = {v.index for e in events if e.name in PRODUCTS for v in e.outs}
    reach: dict[int, dict[int, Value]] = {}
    joined: set[frozenset[int]] = set()

    def taken(event: Event, read: dict[int, Value], *, fuses: bool) -> float:
        """Bytes read; none where a kernel before, of those that fuse, read the same."""
        total = _total(read.values())
        if not fuses:
            return min(total, _total([*event.ins[1:], *event.outs])) if event.name in PICKING else total
        live = [v for v in read.values() if v.kind != CONST]
        joins = frozenset(read) in joined or (tpu and len(live) == 1 and live[0].index in products)
        joined.add(frozenset(read))
        return 0.0 if joins else total

    found = []
    for i, e in enumerate(events):
        every = {k: s for v in e.ins for k, s in reach.get(v.index, {v.index: v}).items()}
        read = {k: s for k, s in every.items() if s.nbytes}
        there = [v for v in e.outs if i in own or (v.kind != CONST and v.index in needed)]
        for v in e.outs:
            again = i not in own and (v not in there or (tpu and _total(read.values()) < v.nbytes))
            reach[v.index] = read if again else {v.index: v}
        if i not in used:
            found.append(0.0)
        elif e.name in RANDOM:
            found.append(2.0 * RANDOM_COPIES * _total([*e.ins, *e.outs]))
        elif there:
            fuses = i not in own or e.name not in READERS
            found.append((taken(e, read, fuses=fuses) + _total(there)) * _turns(e))
        else:
            found.append(0.0)
    return found


def _used(events: Sequence[Event], results: Collection[int]) -> set[int]:
    """Positions of what the results follow from; differentiation leaves more behind."""
    wanted, found = set(results), set[int]()
    for i in reversed(range(len(events))):
        if any(v.index in wanted for v in events[i].outs):
            found.add(i)
            wanted |= {v.index for v in events[i].ins}
    return found


def held_when_fused(events: Sequence[Event], residuals: Sequence[Value]) -> list[Value]:
    """What stays alive between the directions of one program.

    XLA makes cheap element-wise values again inside the kernels that read them, from values that exist anyway:
    results of kernels and of expensive functions, and what a kernel of the forward reads. A value is made again where
    that takes no more bytes than keeping it.
    """
    made = {v.index: e for e in events for v in e.outs}
    exist = {v.index for e in events if e.name in READERS for v in e.ins}

    def stays(v: Value) -> bool:
        event = made.get(v.index)
        return event is None or v.index in exist or event.name in HEAVY or event.name not in FUSED

    def sources(v: Value) -> dict[int, Value]:
        found: dict[int, Value] = {}
        pending, seen = [v], set()
        while pending:
            x = pending.pop()
            if x.index in seen or x.cheap:
                continue
            seen.add(x.index)
            if stays(x):
                found[x.index] = x
            else:
                pending.extend(made[x.index].ins)
        return found

    held = {r.index: r for r in residuals if stays(r)}
    for r in sorted((r for r in residuals if not stays(r)), key=lambda r: r.nbytes):
        more = {i: v for i, v in sources(r).items() if i not in held}
        held |= more if sum(v.nbytes for v in more.values()) <= r.nbytes else {r.index: r}
    return list(held.values())


def _total(values: Iterable[Value]) -> float:
    return sum(v.nbytes for v in values)


def _turns(event: Event) -> float:
    """A loop reads its operands about once a turn; its flops say how long it is better than its shapes do."""
    return 1.0 if event.name not in LOOPS else 2.0
