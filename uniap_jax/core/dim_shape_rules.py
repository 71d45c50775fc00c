"""What each primitive does to dimension classes: which dimensions flow through, which are summed, which stop.

A rule gets the equation and the dimensions of its inputs and returns those of its outputs. An input that depends on
constants and operands alone comes with dimensions of its own at every use: it can be cut to fit any user, and must
not join two users through, say, a mask that both read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uniap_jax.core.dim_classes import PIECES, ClassBuilder, Dims, Node
from uniap_jax.core.jax_compat import JaxprEqn

CONST, PARAM, LIVE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """One equation as its rule sees it.

    Attributes:
        classes: where unions and facts are recorded.
        eqn: the equation.
        ins: dimensions of each input.
        kinds: CONST, PARAM (made of parameters alone) or LIVE (depends on activations), per input.
        source: `file:line` of the equation.
    """

    classes: ClassBuilder
    eqn: JaxprEqn
    ins: tuple[Dims, ...]
    kinds: tuple[int, ...]
    source: str

    def shape(self, i: int) -> tuple[int, ...]:
        """Shape of an input."""
        return shape_of(self.eqn.invars[i])

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Shape of an output."""
        return shape_of(self.eqn.outvars[i])

    def stop(self, node: Node | None, reason: str) -> None:
        """Forbids to shard a dimension's class, naming this equation."""
        self.classes.block(node, reason, self.source)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Shape of a variable or literal."""
    return tuple(atom.aval.shape)


Rule = Callable[[Use], list[Dims]]


def elementwise(use: Use) -> list[Dims]:
    """Same position from the right, same class; scalars and dimensions of size 1 carry none."""
    out: list[Node | None] = [None] * len(use.out_shape())
    for dims in use.ins:
        for i, node in enumerate(reversed(dims)):
            out[-1 - i] = use.classes.unite(out[-1 - i], node)
    fitted = tuple(n if size > 1 else None for n, size in zip(out, use.out_shape(), strict=True))
    return [fitted for _ in use.eqn.outvars]


def pairwise(use: Use) -> list[Dims]:
    """Each output is its input."""
    return list(use.ins)


def unknown(use: Use) -> list[Dims]:
    """Nothing is known: every dimension stops here."""
    name = use.eqn.primitive.name
    use.classes.notes.setdefault(
        name, f"no rule for {name} at {use.source or 'unknown source'}: its dimensions are not sharded"
    )
    for dims in use.ins:
        for node in dims:
            use.stop(node, f"{name} has no rule")
    outs = [use.classes.fresh(use.out_shape(i)) for i in range(len(use.eqn.outvars))]
    for dims in outs:
        for node in dims:
            use.stop(node, f"{name} has no rule")
    return outs


def reduction(use: Use) -> list[Dims]:
    """Reduced dimensions are summed over, the others flow; variadic reductions pair their inputs."""
    axes = set(use.eqn.params.get("axes", use.eqn.params.get("dimensions", ())))
    for dims in use.ins:
        for axis in axes & set(range(len(dims))):
            use.classes.contract(dims[axis])
    whole = _merged(use, [d for d in use.ins if d])
    kept = tuple(n for i, n in enumerate(whole) if i not in axes)
    return [kept for _ in use.eqn.outvars]


def _merged(use: Use, many: list[Dims]) -> Dims:
    """Same position, same class, for arrays of one rank."""
    if not many:
        return ()
    out = list(many[0])
    for dims in many[1:]:
        out = [use.classes.unite(a, b) for a, b in zip(out, dims, strict=True)]
    return tuple(out)


def along_axis(use: Use) -> list[Dims]:
    """Scans and sorts along one axis stop it; the others flow."""
    params = use.eqn.params
    axes = {params[k] % len(use.ins[0]) for k in ("axis", "dimension", "reduction_dimension") if k in params}
    whole = _merged(use, [d for d in use.ins if d])
    name = use.eqn.primitive.name
    outs = []
    for var in use.eqn.outvars:
        shape = shape_of(var)
        for axis in axes:
            use.stop(whole[axis], f"{name} runs along it")
        made = [stopped(use, n, f"{name} runs along it") if i in axes else whole[i] for i, n in enumerate(shape)]
        outs.append(tuple(made))
    return outs


def top_k(use: Use) -> list[Dims]:
    """The last axis is ordered, which stops it."""
    dims, axis = use.ins[0], use.eqn.params.get("axis", -1) % len(use.ins[0])
    use.stop(dims[axis], "top_k runs along it")
    k = stopped(use, use.out_shape()[axis], "top_k makes it")
    return [tuple(k if i == axis else n for i, n in enumerate(dims)) for _ in use.eqn.outvars]


def broadcast_in_dim(use: Use) -> list[Dims]:
    """Mapped dimensions flow; new ones are of their own."""
    where = use.eqn.params["broadcast_dimensions"]
    source = {o: i for i, o in enumerate(where)}
    out = []
    for o, size in enumerate(use.out_shape()):
        i = source.get(o)
        same = i is not None and use.shape(0)[i] == size
        out.append(use.ins[0][i] if same and i is not None else use.classes.new(size))
    return [tuple(out)]


def transpose(use: Use) -> list[Dims]:
    """Dimensions change places."""
    return [tuple(use.ins[0][i] for i in use.eqn.params["permutation"])]


def squeeze(use: Use) -> list[Dims]:
    """Size-1 dimensions go."""
    gone = {d % len(use.ins[0]) for d in use.eqn.params["dimensions"]}
    return [tuple(n for i, n in enumerate(use.ins[0]) if i not in gone)]


def same_groups(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions of two shapes with equal products, sizes of 1 left out."""
    left = [i for i, n in enumerate(a) if n != 1]
    right = [i for i, n in enumerate(b) if n != 1]
    groups = []
    while left or right:
        xs, ys = [left.pop(0)], [right.pop(0)]
        x, y = a[xs[0]], b[ys[0]]
        while x != y:
            if x < y:
                xs.append(left.pop(0))
                x *= a[xs[-1]]
            else:
                ys.append(right.pop(0))
                y *= b[ys[-1]]
        groups.append((xs, ys))
    return groups


def reshape(use: Use) -> list[Dims]:
    """The slowest factor of a split or merged dimension keeps the class; the others are its faster parts."""
    dims, shape, new_shape = use.ins[0], use.shape(0), use.out_shape()
    if 0 in shape or use.eqn.params.get("dimensions") is not None:
        return unknown(use)
    out = [use.classes.new(n) for n in new_shape]
    for xs, ys in same_groups(shape, new_shape):
        use.classes.unite(dims[xs[0]], out[ys[0]])
        for whole, parts in ((dims[xs[0]], xs), (out[ys[0]], ys)):
            nodes = [dims[i] if parts is xs else out[i] for i in parts]
            sizes = [shape[i] if parts is xs else new_shape[i] for i in parts]
            if len(parts) > 1 and whole is not None:
                use.classes.chain(whole, tuple(zip(sizes, nodes, strict=True)), use.source)
    return [tuple(out)]


def split(use: Use) -> list[Dims]:
    """Equal pieces share one class and the joined dimension is (pieces, size of one); unequal pieces stop it."""
    axis, sizes = use.eqn.params["axis"], tuple(int(n) for n in use.eqn.params["sizes"])
    whole = use.ins[0][axis]
    if len(sizes) == 1:
        return [use.ins[0]]
    if len(set(sizes)) > 1:
        use.stop(whole, f"cut into unequal pieces {sizes}")
        pieces = [use.classes.new(n) for n in sizes]
        for piece in pieces:
            use.stop(piece, "one of several unequal pieces")
    else:
        pieces = [_piece(use, whole, len(sizes), sizes[0])] * len(sizes)
    return [(*use.ins[0][:axis], piece, *use.ins[0][axis + 1 :]) for piece in pieces]


def _piece(use: Use, whole: Node | None, outer: int, size: int) -> Node | None:
    """One class for equal pieces of a dimension."""
    use.stop(whole, PIECES)
    piece = use.classes.new(size)
    if whole is not None:
        use.classes.chain(whole, ((outer, None), (size, piece)), use.source)
    return piece


def unstack(use: Use) -> list[Dims]:
    """The unstacked dimension is cut into pieces and goes; the others flow."""
    axis = use.eqn.params["axis"] % len(use.ins[0])
    use.stop(use.ins[0][axis], PIECES)
    return [(*use.ins[0][:axis], *use.ins[0][axis + 1 :]) for _ in use.eqn.outvars]


def slice_(use: Use) -> list[Dims]:
    """Untouched dimensions flow; one of several equal pieces is a piece; other cuts stop the dimension."""
    p = use.eqn.params
    strides = p["strides"] or (1,) * len(use.ins[0])
    out = []
    for i, (node, size, n) in enumerate(zip(use.ins[0], use.shape(0), use.out_shape(), strict=True)):
        if n == size:
            out.append(node)
        elif n and strides[i] == 1 and size % n == 0 and p["start_indices"][i] % n == 0:
            out.append(_piece(use, node, size // n, n))
        else:
            use.stop(node, f"sliced {p['start_indices'][i]}:{p['limit_indices'][i]} of {size}")
            out.append(stopped(use, n, "a slice of another"))
    return [tuple(out)]


def stopped(use: Use, size: int, reason: str) -> Node | None:
    """A new dimension that cannot be sharded."""
    node = use.classes.new(size)
    use.stop(node, reason)
    return node


def resized(use: Use) -> list[Dims]:
    """Slices, pads, reversals, tiles, transforms, windows: untouched dimensions of unchanged size flow, others stop."""
    return [resize(use, use.ins[0], use.shape(0), use.out_shape(), touched(use))]


def touched(use: Use) -> set[int]:
    """Dimensions whose elements move although their number may stay."""
    p, name = use.eqn.params, use.eqn.primitive.name
    if name == "rev":
        return set(p["dimensions"])
    if name == "tile":
        return {i for i, n in enumerate(p["reps"]) if n != 1}
    if name == "fft":
        return set(range(len(use.ins[0]) - len(p["fft_lengths"]), len(use.ins[0])))
    if name == "pad":
        return {i for i, c in enumerate(p["padding_config"]) if tuple(c) != (0, 0, 0)}
    if "window_dimensions" in p:
        return {i for i, n in enumerate(p["window_dimensions"]) if n != 1}
    return set()


def resize(use: Use, dims: Dims, shape: tuple[int, ...], new: tuple[int, ...], moved: set[int]) -> Dims:
    """Dimensions of unchanged size flow unless their elements moved; the others stop."""
    out: list[Node | None] = []
    for i, node in enumerate(dims):
        if shape[i] == new[i] and i not in moved:
            out.append(node)
        else:
            use.stop(node, f"{use.eqn.primitive.name} moves along it")
            out.append(stopped(use, new[i], f"made by {use.eqn.primitive.name}"))
    return tuple(out)


def dynamic_update_slice(use: Use) -> list[Dims]:
    """Dimensions written in full flow; those written in part stop."""
    for whole, part, n, m in zip(use.ins[0], use.ins[1], use.shape(0), use.shape(1), strict=True):
        if n == m:
            use.classes.unite(whole, part)
        else:
            use.stop(whole, "dynamic_update_slice writes a part of it")
            use.stop(part, "written into a part of another")
    return [tuple(a if a is not None else None for a in use.ins[0])]


def stack(use: Use) -> list[Dims]:
    """The new dimension is of its own; the others flow."""
    whole, axis = _merged(use, list(use.ins)), use.eqn.params["axis"]
    return [(*whole[:axis], stopped(use, len(use.ins), "a stack of others"), *whole[axis:])]


def concatenate(use: Use) -> list[Dims]:
    """The joined dimension stops; the others flow."""
    axis = use.eqn.params["dimension"]
    if len(use.ins) == 1:
        return [use.ins[0]]
    for dims in use.ins:
        use.stop(dims[axis], "concatenated with others")
    whole = _merged(use, [(*dims[:axis], None, *dims[axis + 1 :]) for dims in use.ins])
    return [(*whole[:axis], stopped(use, use.out_shape()[axis], "a concatenation of others"), *whole[axis + 1 :])]
