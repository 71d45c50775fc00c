"""What a compiled program does, read from its optimised HLO: kernels, bytes, FLOPs, cycles, collectives.

An instruction is a kernel unless it only names memory. A fusion costs what it reads and writes, and the matrix products
inside it; a loop costs its body times the trip count that the compiler knows. TPU programs carry the compiler's own
`estimated_cycles` per kernel, and a memory space in every layout: space 0 is HBM, others are on the chip.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from uniap_jax.core.device_groups import device_groups

BITS = {"pred": 8, "token": 0, "opaque": 0}
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
)
COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_permute",
}
CUDNN = {"__cudnn$convBackwardInput": (1, 2), "__cudnn$convBackwardFilter": (2, 0)}
"""Of cuDNN's gradients of a convolution: where among (result, operands) its results and its kernel are."""
MOST_CYCLES = 2**62
"""The compiler writes its largest integer where it has no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array in an HLO type.

    Attributes:
        dtype: as HLO names it.
        dims: sizes.
        space: memory space; 0 is the device's main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> float:
        """Bytes without padding."""
        bits = BITS[self.dtype] if self.dtype in BITS else int(re.sub(r"^[a-z]+(\d+).*$", r"\1", self.dtype))
        return math.prod(self.dims) * bits / 8

    @property
    def memory_bytes(self) -> float:
        """Bytes in main memory."""
        return self.nbytes if self.space == 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique within the program.
        opcode: as HLO names it.
        arrays: of the result, tuples flattened.
        operands: names.
        attributes: the rest of the line.
        root: whether it is the computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, *keys: str) -> tuple[str, ...]:
        """Computations named under these attributes."""
        found: list[str] = []
        for key in keys:
            for braced, single in re.findall(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                found += [n.strip().lstrip("%") for n in braced.split(",") if n.strip()] if braced else [single]
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, as often as the program runs it.

    Attributes:
        kind: one of `core.profile.COLLECTIVES`.
        nbytes: of one device's full (gathered, unreduced) array.
        size: devices of a group.
        stride: distance of neighbours in a group.
        times: how often.
        hidden: whether it runs while kernels do.
    """

    kind: str
    nbytes: float
    size: int
    stride: int
    times: float
    hidden: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, as often as the program runs it.

    Attributes:
        opcode: as HLO names it.
        flops: of matrix products and convolutions inside.
        nbytes: read from and written to main memory.
        cycles: the compiler's estimate; 0 where it gives none.
        dtype: of what its products take, else of its result.
        times: how often.
    """

    opcode: str
    flops: float
    nbytes: float
    cycles: float
    dtype: str
    times: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one run of a program does on one device.

    Attributes:
        kernels: in order.
        collectives: in order.
    """

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()

    def total(self, what: str) -> float:
        """Sum of a kernel's "flops", "nbytes" or "cycles" over the run."""
        return float(sum(getattr(k, what) * k.times for k in self.kernels))


def read_program(text: str) -> Program:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations, entry = parse(text)
    reader = _Reader(computations=computations)
    reader.walk(entry, 1.0)
    return Program(kernels=tuple(reader.kernels), collectives=tuple(reader.collectives))


_ARRAY = re.compile(r"(\w+)\[([0-9,<=?]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_SPACE = re.compile(r"S\((\d+)\)")


def arrays_of(text: str) -> tuple[Array, ...]:
    """Arrays in an HLO type, tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout or "")
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d and d != "?")
        found.append(Array(dtype=dtype, dims=sizes, space=int(space[1]) if space else 0))
    return tuple(found)


def parse(text: str) -> tuple[dict[str, tuple[Instruction, ...]], str]:
    """Computations by name, and the name of the entry.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY").strip().lstrip("%").split(" ")[0].split("(")[0]
            lines = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}") and name:
            computations[name], name = tuple(lines), ""
        elif name and (found := _instruction(line)) is not None:
            lines.append(found)
    if not entry:
        raise ValueError("the text of the program has no ENTRY computation")
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    rest = match[3]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    stop = _closing(rest, start)
    operands = re.findall(r"%([\w.\-]+)", rest[start:stop]) or [
        part.strip().split(" ")[-1] for part in rest[start + 1 : stop].split(",") if part.strip()
    ]
    return Instruction(
        name=match[2],
        opcode=rest[:start],
        arrays=arrays_of(kind),
        operands=tuple(operands),
        attributes=rest[stop + 1 :],
        root=bool(match[1]),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


@dataclass(slots=True, kw_only=True, eq=False)
class _Reader:
    computations: Mapping[str, tuple[Instruction, ...]]
    kernels: list[Kernel] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def walk(self, name: str, times: float) -> None:
        """Kernels of a computation and of the loops and branches it runs."""
        instructions = self.computations.get(name, ())
        known = {i.name: i for i in instructions}
        for i in instructions:
            if i.opcode == "while":
                for body in i.called("body"):
                    self.walk(body, times * _trips(i))
            elif i.opcode in ("call", "async-start", "conditional"):
                for body in i.called("to_apply", "calls", "branch_computations", "true_computation"):
                    self.walk(body, times)
            else:
                self._add(i, known, times)

    def _add(self, i: Instruction, known: Mapping[str, Instruction], times: float) -> None:
        self._collect(i, known, times)
        inner = [x for c in i.called("calls") for x in self.computations.get(c, ())]
        communicates = any(_kind(x.opcode) for x in (i, *inner))
        inside = {x.name: x for x in inner}
        for x in inner:
            self._collect(x, inside, times)
        if i.opcode in FREE or i.opcode.endswith("-done") or _kind(i.opcode):
            return
        products = [_product(x, inside) for x in inner] + [_product(i, known)]
        flops, largest = sum(f for f, _ in products), max(products)
        nbytes = self._bytes(i, known, inner)
        if communicates and not flops:
            nbytes = 0.0  # the collective's own traffic is in its price
        self.kernels.append(
            Kernel(
                opcode=i.opcode,
                flops=flops,
                nbytes=nbytes,
                cycles=_cycles(i),
                dtype=largest[1] if flops else i.arrays[0].dtype if i.arrays else "",
                times=times,
            )
        )

    def _collect(self, i: Instruction, known: Mapping[str, Instruction], times: float) -> None:
        kind = _kind(i.opcode)
        if not kind:
            return
        channel = re.search(r"channel_id=(\d+)", i.attributes)
        key = f"{kind} {channel[1]}" if channel else i.name
        if key in self.seen:  # fused with several kernels while it runs: each of them repeats it
            return
        self.seen.add(key)
        size, stride = group_of(i.attributes)
        nbytes = sum(a.nbytes for o in i.operands if o in known for a in known[o].arrays)
        scattered = kind == "all_reduce" and any(
            "all-reduce-scatter" in n and i in c for n, c in self.computations.items()
        )
        self.collectives.append(
            Collective(
                kind="reduce_scatter" if scattered else kind,
                nbytes=nbytes * (size if kind == "all_gather" else 1),
                size=size,
                stride=stride,
                times=times,
                hidden=_hidden(i),
            )
        )

    def _bytes(self, i: Instruction, known: Mapping[str, Instruction], inner: list[Instruction]) -> float:
        """Bytes that a kernel moves from and to main memory; of an array it reads or writes a slice of, the slice."""
        if i.opcode.endswith("-start"):
            ends = [a for o in i.operands if o in known for a in known[o].arrays[:1]]
            moved = min((a.nbytes for a in i.arrays if a.dims), default=0.0)
            return moved * sum(a.space == 0 for a in (*ends[:1], *i.arrays[1:2]))
        whole = [
            sum(a.memory_bytes for a in known[o].arrays) if o in known and known[o].opcode != "constant" else 0.0
            for o in i.operands
        ]
        written = sum(a.memory_bytes for a in i.arrays)
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * written
        if i.opcode == "dynamic-update-slice":
            return 2 * (whole[1] if len(whole) > 1 else 0.0)
        for x in inner:
            if x.opcode == "parameter":
                position = int(x.operands[0]) if x.operands and x.operands[0].isdigit() else -1
                part = _part_read(x.name, inner)
                if part is not None and 0 <= position < len(whole):
                    whole[position] = min(whole[position], part)
            if x.opcode == "dynamic-update-slice" and x.root:
                update = next((y for y in inner if len(x.operands) > 1 and y.name == x.operands[1]), None)
                written = min(written, sum(a.nbytes for a in update.arrays)) if update else written
        return sum(whole) + written


def _part_read(name: str, inner: list[Instruction]) -> float | None:
    """Bytes of the slices that a fusion takes of one of its inputs; None where it reads the whole."""
    users = [x for x in inner if name in x.operands]
    sliced = ("dynamic-slice", "gather")
    if users and all(x.opcode in sliced and x.operands[0] == name for x in users):
        return sum(a.nbytes for x in users for a in x.arrays)
    if users and all(x.opcode == "dynamic-update-slice" and x.operands[0] == name for x in users):
        return 0.0
    return None


def _kind(opcode: str) -> str:
    return COLLECTIVES.get(opcode.removesuffix("-start"), "")


def _hidden(i: Instruction) -> bool:
    """Whether kernels run beside it; the GPU compiler also writes what it waits for at once as a start and a done."""
    return "chain_id" in i.attributes or (i.opcode.endswith("-start") and '"is_sync":true' not in i.attributes)


def _trips(i: Instruction) -> float:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes)
    return float(found[1]) if found else 1.0


def _cycles(i: Instruction) -> float:
    found = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return float(found[1]) if found and int(found[1]) < MOST_CYCLES else 0.0


def _product(i: Instruction, known: Mapping[str, Instruction]) -> tuple[float, str]:
    """(FLOPs of a matrix product or convolution: 2 × results × what each of them sums, dtype of what it takes)."""
    ends = _ends(i, known)
    return _flops(i, *ends), ends[1].dtype if ends[1] is not None else ""


def _flops(i: Instruction, *ends: Array | None) -> float:
    result, first, _ = ends
    called = re.search(r'custom_call_target="(__cu\w+(?:\$\w+)+)"', i.attributes)
    target = called[1] if called else ""
    if i.opcode == "dot" or target.startswith("__cublas"):
        dims = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.attributes)
        if dims is None or first is None or result is None:
            return 0.0
        over = [int(d.strip('"')) for d in dims[1].split(",") if d]
        return 2.0 * math.prod(result.dims) * math.prod(first.dims[d] for d in over)
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    if labels is not None and (i.opcode == "convolution" or target.startswith("__cudnn$conv")):
        results, kernel = (ends[n] for n in CUDNN.get(target, (0, 2)))
        if results is not None and kernel is not None:
            summed = [n for n, label in zip(kernel.dims, labels[1], strict=False) if label != "o"]
            return 2.0 * math.prod(results.dims) * math.prod(summed)
    return 0.0


def _ends(i: Instruction, known: Mapping[str, Instruction]) -> tuple[Array | None, Array | None, Array | None]:
    """The result and the first two operands, as far as they are arrays."""
    sources = [known.get(o) for o in (*i.operands, "", "")[:2]]
    first, second = (x.arrays[0] if x is not None and x.arrays else None for x in sources)
    return i.arrays[0] if i.arrays else None, first, second


def group_of(attributes: str) -> tuple[int, int]:
    """(size, stride) of the groups of a collective."""
    group = next(iter(device_groups(attributes)), [0])
    steps = [abs(b - a) for a, b in itertools.pairwise(group)]
    return len(group), min(steps, default=1)
