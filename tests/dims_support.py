"""Layers built by hand, and the collectives of a compiled program, for the tests of dimension classes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.dims import tensor_split
from uniap_jax.core.graph import Layer
from uniap_jax.core.work import Traced, Work

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "pred": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Collective:
    """One tensor moved: tuples that XLA combined count one each."""

    op: str
    shape: tuple[int, ...]
    nbytes: int
    axes: str


def make_layer(
    f: Callable[..., Any],
    params: Sequence[Any],
    operands: Sequence[Any] = (),
    reads: Sequence[Any] = (),
    signature: str = "",
) -> Layer:
    """A layer that runs `f(*params, *operands, *reads)`."""
    jaxpr = jax.make_jaxpr(f)(*params, *operands, *reads)
    return Layer(
        index=0,
        name="layer",
        source="",
        jaxpr=jaxpr,
        params=tuple(range(len(params))),
        operands=tuple(range(len(operands))),
        reads=tuple(range(len(reads))),
        writes=tuple(range(len(jaxpr.out_avals))),
        signature=signature,
        flops=0.0,
    )


def shaped_layer(
    f: Callable[..., Any], params: Sequence[tuple[int, ...]], reads: Sequence[tuple[int, ...]], dtype: Any = np.float32
) -> Layer:
    """A layer of parameters and reads of these shapes."""
    given = ([jax.ShapeDtypeStruct(s, dtype) for s in shapes] for shapes in (params, (), reads))
    return make_layer(f, *given)


def measure_work(layer: Layer, *, keep: str, tensor: int = 1, tpu: bool = False) -> Work:
    """What a layer does where the tensor ways split what they like best."""
    return Traced(layer, tensor_split(layer, tensor), keep=keep, tensor=tensor, tpu=tpu).work()


def mesh_4x2() -> Mesh:
    """Four ways of data, two of tensor."""
    return Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))


def _groups(line: str) -> list[tuple[int, ...]]:
    """Replica groups in each of XLA's spellings."""
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    listed = pairs or re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        return [tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    if named := re.search(r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}", line):
        return _named_groups(*named.groups())
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        raise ValueError(f"unreadable replica groups: {line}")
    return [tuple(g) for g in _iota(iota.group(2), iota.group(3)).reshape(-1, _ints(iota.group(1))[-1]).tolist()]


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(shape: str, order: str | None) -> np.ndarray:
    """`[4,2]T(1,0)`: 0, 1, 2, ... in that shape, transposed."""
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _named_groups(mesh: str, order: str | None, chosen: str) -> list[tuple[int, ...]]:
    """`'data'=4,'tensor'=2`, perhaps with device ids, and `'tensor'`: devices that differ in the chosen axes."""
    names, sizes = zip(*[part.split("=") for part in mesh.split(",")], strict=True)
    over = [names.index(n) for n in chosen.split(",")]
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order or "[8]")
    if iota is None:
        raise ValueError(f"unreadable device ids: {order}")
    ids = _iota(*iota.groups()).reshape([int(n) for n in sizes])
    rest = [i for i in range(len(names)) if i not in over]
    return [tuple(g) for g in ids.transpose([*rest, *over]).reshape(-1, math.prod(ids.shape[i] for i in over)).tolist()]


def _axes(groups: list[tuple[int, ...]]) -> str:
    """Which axes of the 4x2 mesh the members of a group differ in."""
    data = any(len({d // 2 for d in g}) > 1 for g in groups)
    tensor = any(len({d % 2 for d in g}) > 1 for g in groups)
    return "+".join(n for n, yes in (("data", data), ("tensor", tensor)) if yes)


def collectives(hlo: str, axes: str | None = None, above: int = 4) -> list[Collective]:
    """Collectives of at least `above` bytes in a compiled program, those over the given mesh axes."""
    found = []
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?\S+ = (\(?.*?\)?) ([\w-]+?)(?:-start)?\(", line)
        if match is None or match.group(2) not in OPS:
            continue
        where = _axes(_groups(line))
        for dtype, text in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
            shape = tuple(int(n) for n in text.split(",") if n)
            found.append(Collective(match.group(2), shape, math.prod(shape) * _BYTES[dtype], where))
    return [c for c in found if c.nbytes >= above and (axes is None or axes in c.axes)]


def spec(rank: int, dim: int | None, axis: str) -> PartitionSpec:
    """`axis` on one dimension."""
    return PartitionSpec(*[axis if d == dim else None for d in range(rank)])


def compile_sharded(
    f: Callable[..., Any], args: Sequence[Any], dims: Sequence[int | None], batch: Sequence[int | None], mesh: Mesh
) -> tuple[Any, list[Any]]:
    """Compiles `f(*args)` with each argument's `dims` over tensor and `batch` over data; also the placed arguments."""
    specs = [
        PartitionSpec(*["tensor" if i == d else "data" if i == b else None for i in range(np.ndim(a))])
        for a, d, b in zip(args, dims, batch, strict=True)
    ]
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    return jax.jit(f).lower(*placed).compile(), placed
