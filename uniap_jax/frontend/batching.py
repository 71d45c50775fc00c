"""How every value of the loss depends on the batch, read off two traces at different batch sizes.

Two traces of the same step at batch B and 2B have the same equations; a dimension that doubles is a batch dimension,
a constant that doubles counts examples. Following each equation once tells whether the whole batch's value is the
mean, the sum or the concatenation of its micro-batches' values, or whether rows mix (batch normalisation, contrastive
losses, a ratio of sums), in which case the batch must not be split. Where no parameter enters, they may: what comes of
it is made ahead, from the whole batch (`frontend.ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from uniap_jax.core.jax_compat import Literal, Var, shape_of
from uniap_jax.core.jaxprs import flatten, inner_jaxprs, open_jaxpr, scan_counts
from uniap_jax.core.literals import equal_values
from uniap_jax.frontend.ahead import Ahead, Place, read_ahead
from uniap_jax.frontend.batch_rules import (
    ALONG,
    BODIES,
    CONST,
    COUNT,
    ELEMENTWISE_LINEAR,
    LINEAR,
    MEAN,
    NOT_ELEMENTWISE,
    ROW_SAFE,
    RULES,
    SHAPE_ONLY,
    SUM,
    Kind,
    added_to_sum,
    elementwise,
    mixed,
    numbers_examples,
    rows,
)
from uniap_jax.frontend.cut import dependent
from uniap_jax.frontend.split import LossTape

FACTOR = 2


class Misaligned(ValueError):
    """Two traces of a step at different batch sizes are not the same equations."""


def grown_dims(small: Any, large: Any) -> tuple[int, ...]:
    """Dimensions that grew by FACTOR between two traces.

    Raises:
        Misaligned: the number of dimensions changed.
    """
    if len(small.shape) != len(large.shape):
        raise Misaligned(f"shape {small.shape} at one batch size is {large.shape} at another")
    return tuple(d for d, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b)


def classify(small: LossTape, large: LossTape) -> tuple[dict[Var, Kind], Ahead]:
    """Kind of every variable of the first of two aligned losses, and what is to be changed for micro-batches.

    Raises:
        Misaligned: the step does something else at another batch size.
    """
    kinds: dict[Var, Kind] = {v: Kind("rows", 0) for v in small.batch}
    if len(small.state) != len(large.state):
        raise Misaligned("the loss reads other arrays of the step at another batch size")
    kinds |= {a: k for a, b in zip(small.state, large.state, strict=True) if (k := _handed(a, b)) is not CONST}
    bound, found = dependent(small), _Changes()
    for i, (a, b, operands) in enumerate(_aligned(small.eqns, large.eqns, kinds)):
        follow = found.of if bound & set(a.outvars) else found.of_free
        _tell(kinds, a, follow(i, a, b, operands))
    return kinds, found.ahead(read_ahead(small, kinds))


@dataclass(slots=True, eq=False)
class _Changes:
    """What has to be changed in the equations of a loss, outside of bodies, so that micro-batches can run them."""

    numbers: list[Place] = field(default_factory=list)
    literals: list[Place] = field(default_factory=list)
    shares: list[Place] = field(default_factory=list)

    def ahead(self, values: tuple[Place, ...]) -> Ahead:
        """Beside the values that are made ahead."""
        return Ahead(
            values=values, numbers=tuple(self.numbers), literals=tuple(self.literals), shares=tuple(self.shares)
        )

    def of(self, i: int, a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
        """Kinds of what equation `i` makes of parameters."""
        operands = self._kept(i, a, operands, "mixed")
        if others := added_to_sum(a, operands):
            self.shares += ((i, j) for j in others)
            return [SUM]
        if numbers_examples(a, operands):
            self.numbers += ((i, j) for j, k in enumerate(operands) if k.position)
            operands = [replace(k, position=False) for k in operands]
        outs = _outputs(a, b, operands)
        if any(k.name == "mixed" for k in outs):
            outs = _outputs(a, b, self._kept(i, a, operands, "count"))
        return outs

    def of_free(self, i: int, a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
        """Kinds of what it makes without parameters: where examples meet in that, it can be made ahead."""
        operands = self._kept(i, a, operands, "mixed")

        def ahead(kind: Kind, x: Var, y: Var) -> Kind:
            along = _rows_along(x, y)
            if along is not None:
                return Kind("rows", along, whole=True) if kind.name == "mixed" else kind
            met = kind.name in (*LINEAR, "mixed") or (kind.name == "const" and any(k.whole for k in operands))
            return Kind("const", whole=True) if met and not grown_dims(x.aval, y.aval) else kind

        outs = _outputs(a, b, operands)
        return [ahead(*each) for each in zip(outs, a.outvars, b.outvars, strict=True)]

    def _kept(self, i: int, eqn: Any, operands: list[Kind], kind: str) -> list[Kind]:
        """Kinds of operands whose literals of a kind stay those of the whole batch."""
        kept = [isinstance(a, Literal) and k.name == kind for a, k in zip(eqn.invars, operands, strict=True)]
        self.literals += ((i, j) for j, here in enumerate(kept) if here)
        return [CONST if here else k for k, here in zip(operands, kept, strict=True)]


def _handed(small: Var, large: Var) -> Kind:
    """What the loss reads of what the step made before: rows where it is as long as the batch."""
    along = _rows_along(small, large)
    if along is None and grown_dims(small.aval, large.aval):
        why = f"the step makes an array {small.aval.str_short()} over pairs of examples outside of the loss"
        return Kind("mixed", reason=why, known=False)
    return CONST if along is None else Kind("rows", along)


def _rows_along(small: Var, large: Var) -> int | None:
    """The one dimension that grew with the batch, None where there is none or several."""
    grown = grown_dims(small.aval, large.aval)
    doubled = [d for d in grown if shape_of(large).shape[d] == FACTOR * shape_of(small).shape[d]]
    return doubled[0] if len(grown) == len(doubled) == 1 else None


def _walk(small: Sequence[Any], large: Sequence[Any], kinds: dict[Var, Kind]) -> None:
    for a, b, operands in _aligned(small, large, kinds):
        _tell(kinds, a, _outputs(a, b, operands))


def _tell(kinds: dict[Var, Kind], eqn: Any, outs: Sequence[Kind]) -> None:
    kinds.update((v, k) for v, k in zip(eqn.outvars, outs, strict=True) if k is not CONST)


def _aligned(
    small: Sequence[Any], large: Sequence[Any], kinds: dict[Var, Kind]
) -> Iterator[tuple[Any, Any, list[Kind]]]:
    """Equations of both traces with the kinds of their operands, as `kinds` is filled."""
    if len(small) != len(large):
        raise Misaligned(f"{len(small)} equations at one batch size, {len(large)} at another")
    for a, b in zip(small, large, strict=True):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            raise Misaligned(f"`{a.primitive.name}` at one batch size is `{b.primitive.name}` at another")
        yield a, b, [_atom_kind(x, y, kinds) for x, y in zip(a.invars, b.invars, strict=True)]


def _atom_kind(small: Any, large: Any, kinds: dict[Var, Kind]) -> Kind:
    if not isinstance(small, Literal):
        return kinds.get(small, CONST)
    if not isinstance(large, Literal) or equal_values(small.val, large.val):
        return CONST
    if np.array_equal(np.asarray(small.val) * FACTOR, large.val):
        return COUNT
    why = "a constant that depends on the batch size in another way than in proportion"
    return Kind("mixed", reason=why, known=False)


def _outputs(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    name = a.primitive.name
    for kind in operands:
        if kind.name == "mixed":
            return [kind] * len(a.outvars)
    if name in BODIES:
        return _body(a, b, operands)
    if name == "scan":
        return _scan(a, b, operands)
    if name == "random_gamma" and operands[0].name == "const":
        return [mixed(a, "random numbers that are drawn for all examples at once", known=False)] * len(a.outvars)
    names = {k.name for k in operands}
    grown = [grown_dims(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True)]
    if names <= {"const"}:
        return [_fresh(a, g) for g in grown]
    if any(len(g) > 1 for g in grown):
        return [mixed(a, "every example meets every other")] * len(a.outvars)
    if names <= {"const", "count"}:
        return [_of_count(a, operands)] * len(a.outvars)
    if names & set(LINEAR):
        return [_of_reduced(a, operands)] * len(a.outvars)
    found = [_of_rows(a, operands, g) for g in grown]
    if not numbers_examples(a, operands):
        return found
    more = mixed(a, "the place of an example in the batch is more than an index", known=False)
    return [k if k.name == "mixed" else more for k in found]


def _fresh(eqn: Any, grown: tuple[int, ...]) -> Kind:
    """A value made from nothing that depends on the batch but its size."""
    if not grown:
        return CONST
    if len(grown) > 1:
        return mixed(eqn, "an array over pairs of examples")
    position = eqn.primitive.name == "iota" and eqn.params["dimension"] == grown[0]
    return Kind("rows", grown[0], position=position)


def _of_count(eqn: Any, operands: list[Kind]) -> Kind:
    name = eqn.primitive.name
    if name in SHAPE_ONLY or name in ELEMENTWISE_LINEAR:
        return COUNT
    if name == "mul" and sum(k.name == "count" for k in operands) == 1:
        return COUNT
    if name == "div" and operands[0].name == "count" and operands[1].name == "const":
        return COUNT
    return mixed(eqn, "the batch size enters in another way than in proportion")


def _of_reduced(eqn: Any, operands: list[Kind]) -> Kind:
    """Of sums and means over examples: only what is linear in them keeps the name."""
    name, names = eqn.primitive.name, [k.name for k in operands]
    if "rows" in names or "scaled_rows" in names:
        return mixed(eqn, "examples meet a statistic of the whole batch")
    if name in ("concatenate", "pad", "stack") and set(names) == {"sum", "const"}:
        return mixed(eqn, "a sum over examples is put beside something that is not one")
    if (
        name in ELEMENTWISE_LINEAR
        or name in SHAPE_ONLY
        or name in ("reduce_sum", "slice", "concatenate", "pad", "stack")
    ):
        return _same(eqn, names)
    if name in ("add", "sub", "add_any"):
        if set(names) <= {"mean", "const"} or set(names) == {"sum"}:
            return MEAN if "mean" in names else SUM
        return mixed(eqn, "a sum over examples meets something that is not one")
    if name in ("mul", "dot_general") and set(names) in ({"sum", "const"}, {"mean", "const"}):
        return _same(eqn, names)
    if name == "select_n" and names[0] == "const" and set(names[1:]) in ({"sum"}, {"mean"}, {"mean", "const"}):
        return _same(eqn, names)
    if name == "div" and names[1] == "const":
        return _same(eqn, names)
    if name == "div" and names == ["sum", "count"]:
        return MEAN
    if name == "div" and set(names) == {"sum"}:
        return mixed(eqn, "a ratio of two sums over examples")
    return mixed(eqn, "a sum or mean over examples goes through a function that is not linear")


def _same(eqn: Any, names: list[str]) -> Kind:
    found = {n for n in names if n != "const"}
    if found == {"sum"}:
        return SUM
    if found == {"mean"}:
        return MEAN
    return mixed(eqn, "sums and means over examples are mixed")


def _of_rows(eqn: Any, operands: list[Kind], grown: tuple[int, ...]) -> Kind:
    name = eqn.primitive.name
    along = [k for k in operands if k.name in ("rows", "scaled_rows")]
    counts = [k for k in operands if k.name == "count"]
    if counts:
        if name == "div" and operands[1].name == "count" and operands[0].name == "rows" and grown:
            return Kind("scaled_rows", grown[0])
        if name == "add" and grown and all(k.position for k in along):  # a negative index counts from the end
            return Kind("rows", grown[0], position=True)
        return mixed(eqn, "examples are scaled by the batch size in an unusual way")
    scaled = any(k.name == "scaled_rows" for k in along)
    if scaled and (
        name not in ELEMENTWISE_LINEAR | SHAPE_ONLY | {"reduce_sum", "mul", "add", "sub", "div"}
        or (name in ("add", "sub") and any(k.name != "scaled_rows" for k in operands))
        or (name == "mul" and sum(k.name == "scaled_rows" for k in operands) > 1)
        or (name == "div" and operands[1].name == "scaled_rows")
    ):
        return mixed(eqn, "examples divided by the batch size go through a function that is not linear")
    check = RULES.get(name)
    if check is not None:
        return check(eqn, operands, grown, scaled)
    if name in ALONG:
        axes = eqn.params[ALONG[name]]
        axes = (axes,) if isinstance(axes, int) else axes
        if any(k.dim in axes for k in along):
            return mixed(eqn, "an operation along the batch")
    elif name in NOT_ELEMENTWISE or not (name in SHAPE_ONLY or name in ROW_SAFE or elementwise(eqn)):
        shapes = [v.aval.str_short() for v in eqn.invars]
        return mixed(eqn, f"an operation whose effect on the batch is unknown {shapes}", known=False)
    return rows(eqn, along, grown, scaled)


def _body(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    """Walks the body of a call whose operands are the body's inputs."""
    bodies = list(zip(inner_jaxprs(a), inner_jaxprs(b), strict=True))
    if not bodies:
        return [mixed(a, "a call without a body to look into", known=False)] * len(a.outvars)
    return _run(bodies[0], operands, len(a.outvars))


def _run(pair: tuple[Any, Any], operands: Sequence[Kind], count: int) -> list[Kind]:
    small, large = flatten(pair[0]), flatten(pair[1])
    kinds = {v: k for v, k in zip(small.invars, operands, strict=True) if k is not CONST}
    _walk(small.eqns, large.eqns, kinds)
    return [_atom_kind(x, y, kinds) for x, y in zip(small.outvars, large.outvars, strict=True)]


def _scan(a: Any, b: Any, operands: list[Kind]) -> list[Kind]:
    """A scan over something other than the batch: rows keep their place, moved by the scanned dimension."""
    bodies = list(zip(inner_jaxprs(a), inner_jaxprs(b), strict=True))
    inner = open_jaxpr(bodies[0][0])
    moved: list[Kind] = []
    for kind, outer, var in zip(operands, a.invars, inner.invars, strict=True):
        scanned = len(outer.aval.shape) == len(var.aval.shape) + 1
        if kind.name == "rows" and scanned and kind.dim == 0:
            return [mixed(a, "a scan over the batch")] * len(a.outvars)
        shift = scanned and kind.name in ("rows", "scaled_rows")
        moved.append(replace(kind, dim=kind.dim - 1) if shift else kind)
    first, carries, _ = scan_counts(a)
    outs: list[Kind] = []
    for _ in range(3):  # a carry settles after at most two rounds: const -> rows -> rows
        outs = _run(bodies[0], moved, len(inner.outvars))
        settled = True
        for i in range(carries):
            old, new = moved[first + i], outs[i]
            if old != new and new is not CONST:
                settled = False
                moved[first + i] = new
        if settled:
            break
    else:
        return [mixed(a, "a scan whose carry changes its dependence on the batch", known=False)] * len(a.outvars)
    stacked = [
        k if i < carries else (replace(k, dim=k.dim + 1) if k.name in ("rows", "scaled_rows") else k)
        for i, k in enumerate(outs)
    ]
    bad = next((k for k in stacked if k.name in LINEAR or k.name == "mixed"), None)
    return [mixed(a, "a scan that reduces over the batch")] * len(a.outvars) if bad and bad.name in LINEAR else stacked
