"""Programs on stacked arrays [L, ...] rewritten to work on their L rows.

What treats every row alike and apart (element-wise operations, reductions over other dimensions) becomes L equations; a
reduction over the rows becomes L reductions and their combination. Anything else gets the rows stacked again and stays
as it was: always right, if no longer row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from uniap_jax.core.dim_rules import ELEMENTWISE
from uniap_jax.core.jax_compat import Literal, Var, shape_of
from uniap_jax.core.jaxprs import inline_into, inner_jaxprs, open_jaxpr, scan_counts

_JOINS: dict[str, Callable[..., Any]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
"""What puts the reductions of rows together."""

OfRow = Callable[..., Any]


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def row_vars(var: Var) -> tuple[Var, ...]:
    """New variables for the rows of a stacked array."""
    program = open_jaxpr(jax.make_jaxpr(_cut)(shape_of(var), jax.ShapeDtypeStruct((), np.int32)))
    return tuple(Var(program.outvars[0].aval) for _ in range(shape_of(var).shape[0]))


def of_row(eqn: Any, split: Sequence[bool]) -> OfRow | None:
    """What an equation does to each row, as a function of its operands' rows; None where it is not row by row.

    Args:
        eqn: with at least one operand in rows.
        split: which operands are in rows; scalars are handed to every row, other operands by their rows.
    """
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.outvars) != 1 or any(True for _ in inner_jaxprs(eqn)) or eqn.effects:
        return None
    outer = _shape(eqn.outvars[0])
    if name in ELEMENTWISE and name != "sharding_constraint":
        shapes = {_shape(a) for a in eqn.invars}
        alike = shapes <= {outer, ()} and all(_shape(a) == outer for a, s in zip(eqn.invars, split, strict=True) if s)
        return (lambda *rows: eqn.primitive.bind(*rows, **params)) if alike else None
    if len(eqn.invars) != 1 or not split[0]:
        return None
    first = _shape(eqn.invars[0])
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        kept = bool(dims) and dims[0] == 0 and outer[0] == first[0]
        return (lambda x: lax.broadcast_in_dim(x, outer[1:], [d - 1 for d in dims[1:]])) if kept else None
    if name == "transpose" and params["permutation"][0] == 0:
        return lambda x: lax.transpose(x, [d - 1 for d in params["permutation"][1:]])
    if name == "reshape" and params["dimensions"] is None and outer[:1] == first[:1]:
        return lambda x: lax.reshape(x, outer[1:])
    if name == "squeeze" and 0 not in params["dimensions"]:
        return lambda x: lax.squeeze(x, [d - 1 for d in params["dimensions"]])
    if name in _JOINS and 0 not in params["axes"]:
        return _reduction(eqn)
    return None


def _reduction(eqn: Any) -> OfRow:
    """The reduction of one row over the dimensions beside the first."""
    axes = tuple(d - 1 for d in eqn.params["axes"] if d)
    return lambda x: eqn.primitive.bind(x, **{**eqn.params, "axes": axes}) if axes else x


class Rows:
    """A program in the making, some of whose arrays are in rows.

    Args:
        rows: variables of stacked arrays and the atoms of their rows.
        unfolded: scans to be written out.

    Attributes:
        rows: also of what the equations added so far make.
        eqns: of the rewritten program.
    """

    def __init__(self, rows: Mapping[Var, tuple[Any, ...]], unfolded: Sequence[Any] = ()) -> None:
        self.rows, self.eqns = dict(rows), list[Any]()
        self._unfolded = {id(e) for e in unfolded}
        self._names: dict[Var, Any] = {}  # variables of the program as it was that are others in this one
        self._alike: dict[Var, Any] = {}  # broadcasts whose rows are all the same
        self._made: dict[tuple[Any, int | None], Any] = {}  # arrays that were stacked, rows that were taken

    def add(self, eqns: Sequence[Any]) -> None:
        """Rewrites equations, in order."""
        for given in eqns:
            eqn = given.replace(invars=[self.named(a) for a in given.invars])
            split = [self.is_split(a) for a in eqn.invars]
            if id(given) in self._unfolded:
                self._write_out(eqn)
            elif not any(split):
                self._keep(eqn)
            elif (function := of_row(eqn, split)) is not None:
                self._by_rows(eqn, split, function)
            elif eqn.primitive.name in _JOINS:
                self._joined(eqn)
            else:
                self._keep(eqn.replace(invars=[self.whole(a, eqn) for a in eqn.invars]))

    def named(self, atom: Any) -> Any:
        """A variable of the program as it was, in this one."""
        return atom if isinstance(atom, Literal) else self._names.get(atom, atom)

    def is_split(self, atom: Any) -> bool:
        """Whether a value is in rows."""
        return not isinstance(atom, Literal) and atom in self.rows

    def whole(self, atom: Any, at: Any = None) -> Any:
        """A value as one array: stacked, where it is in rows."""
        atom = self.named(atom)
        if not self.is_split(atom):
            return atom
        if (atom, None) not in self._made:
            self._made[atom, None] = self._emit(_stacked, self.rows[atom], at)
        return self._made[atom, None]

    def each(self, atom: Any, count: int, at: Any = None) -> tuple[Any, ...]:
        """The rows of a value: known, or taken from the array; the same for all rows of a broadcast."""
        atom = self.named(atom)
        return self.rows[atom] if self.is_split(atom) else tuple(self._row(atom, i, at) for i in range(count))

    def count(self, atom: Any) -> int:
        """Number of rows of a value; 0 where it is one array."""
        atom = self.named(atom)
        return len(self.rows[atom]) if self.is_split(atom) else 0

    def stack(self, var: Var, rows: tuple[Var, ...]) -> None:
        """Has a variable stand for one array of some rows."""
        self._names[var] = self._emit(_stacked, rows, None)

    def outputs(self, atoms: Sequence[Any], counts: Sequence[int]) -> tuple[Any, ...]:
        """Atoms of the program's outputs: values in rows where `counts` says how many, whole where it is 0."""
        return tuple(
            out for a, n in zip(atoms, counts, strict=True) for out in (self.each(a, n) if n else (self.whole(a),))
        )

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _row(self, atom: Any, i: int, at: Any) -> Any:
        alike = self._alike.get(atom)
        key = (atom, i if alike is None else 0)
        if key not in self._made:
            self._made[key] = (
                self._taken(atom, i, at) if alike is None else self._emit(_row_of_broadcast(alike), alike.invars, alike)
            )
        return self._made[key]

    def _taken(self, atom: Any, i: int, at: Any) -> Any:
        """A row cut out of an array; its number is a literal, so that the program is the same for every row."""
        number = jax.ShapeDtypeStruct((), np.int32)
        program = jax.make_jaxpr(_cut)(shape_of(atom), number)
        return self._instance(program, [atom, Literal(np.int32(i), open_jaxpr(program).invars[1].aval)], at)

    def _keep(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        spreads = eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1 and _shape(eqn.outvars[0])
        if spreads and 0 not in eqn.params["broadcast_dimensions"]:
            self._alike[eqn.outvars[0]] = eqn

    def _by_rows(self, eqn: Any, split: Sequence[bool], function: OfRow) -> None:
        count = next(len(self.rows[a]) for a, s in zip(eqn.invars, split, strict=True) if s)
        per_row = [
            self.each(a, count, eqn) if s or _shape(a) else (a,) * count for a, s in zip(eqn.invars, split, strict=True)
        ]
        program = jax.make_jaxpr(function)(*(shape_of(atoms[0]) for atoms in per_row))
        made = tuple(self._instance(program, atoms, eqn) for atoms in zip(*per_row, strict=True))
        self.rows[eqn.outvars[0]] = made

    def _joined(self, eqn: Any) -> None:
        """A reduction over the rows, of each row first."""
        rows, join = self.rows[eqn.invars[0]], _JOINS[eqn.primitive.name]
        program = jax.make_jaxpr(_reduction(eqn))(shape_of(rows[0]))
        total, *parts = (self._instance(program, [row], eqn) for row in rows)
        for part in parts:
            total = self._emit(join, [total, part], eqn)
        self._names[eqn.outvars[0]] = total

    def _write_out(self, eqn: Any) -> None:
        """A scan turn by turn."""
        (body,), (shared, carried, _) = inner_jaxprs(eqn), scan_counts(eqn)
        length = int(eqn.params["length"])
        consts, carry = (
            [self.whole(a, eqn) for a in eqn.invars[:shared]],
            [self.whole(a, eqn) for a in eqn.invars[shared : shared + carried]],
        )
        scanned = [self.each(a, length, eqn) for a in eqn.invars[shared + carried :]]
        turns: list[list[Any]] = [[] for _ in range(length)]
        for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
            own = [rows[turn] for rows in scanned]
            made = inline_into(body, [*consts, *carry, *own], self.eqns, {}, eqn.source_info)
            carry, turns[turn] = made[:carried], made[carried:]
        self._names.update(zip(eqn.outvars[:carried], carry, strict=True))
        self.rows.update(zip(eqn.outvars[carried:], zip(*turns, strict=True), strict=True))

    def _emit(self, function: Callable[..., Any], atoms: Sequence[Any], at: Any) -> Any:
        return self._instance(jax.make_jaxpr(function)(*map(shape_of, atoms)), atoms, at)

    def _instance(self, program: Any, atoms: Sequence[Any], at: Any) -> Any:
        """Appends a program of one result, as if written where `at` is; returns its result."""
        made: list[Any] = []
        (result,) = inline_into(program, atoms, made, {})
        self.eqns += made if at is None else [e.replace(source_info=at.source_info) for e in made]
        return result


def _stacked(*rows: Any) -> Any:
    return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)


def _cut(array: Any, i: Any) -> Any:
    rest = array.shape[1:]
    return lax.squeeze(lax.dynamic_slice_p.bind(array, i, *[np.int32(0)] * len(rest), slice_sizes=(1, *rest)), (0,))


def _row_of_broadcast(eqn: Any) -> Callable[..., Any]:
    dims, shape = [d - 1 for d in eqn.params["broadcast_dimensions"]], eqn.params["shape"][1:]
    return lambda x: lax.broadcast_in_dim(x, shape, dims)
