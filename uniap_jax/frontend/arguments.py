"""Between the user's arguments and flat lists of arrays: which leaves are batch, which are state, and back again.

Objects of `flax.nnx` are split into a graph definition and arrays on the way in; on the way out the new arrays are
written into the user's own objects, as `nnx.jit` does. flax is not imported here: without it there is no such object.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from uniap_jax.core.errors import PlanMismatchError, TraceError
from uniap_jax.frontend.names import Names, leaf_names

SCALARS = (bool, int, float, complex)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_nnx(value: Any) -> bool:
    """Whether a value is an object of flax.nnx (module, optimizer, rngs)."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Pytree)


def abstract(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf; Python scalars stay weakly typed, as under `jax.jit`.

    Raises:
        TraceError: the leaf is not an array, a shape or a number.
    """
    if isinstance(leaf, SCALARS):
        dtype = jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
        return jax.ShapeDtypeStruct((), dtype, weak_type=not isinstance(leaf, bool))
    try:
        return jax.ShapeDtypeStruct(
            leaf.shape,
            jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
            weak_type=bool(getattr(leaf, "weak_type", False)),
        )
    except (AttributeError, TypeError):
        raise TraceError(
            f"argument leaf {name} is a {type(leaf).__name__}, which is neither an array nor a number; close over it, "
            "or name its argument in static_argnums",
            leaf=name,
        ) from None


class Arguments:
    """The form of one call of the user's step: trees, which arguments are batch, which are static; no arrays.

    Args:
        args: an example call; arrays, `jax.ShapeDtypeStruct`s or Python numbers at the leaves.
        batch_argnums: positions of the arguments whose leaves all have the global batch as leading dimension.
        static_argnums: positions of arguments that are passed to the step as they are.
    """

    def __init__(
        self, args: Sequence[Any], *, batch_argnums: Sequence[int], static_argnums: Sequence[int] = ()
    ) -> None:
        count = len(args)
        for kind, argnums in (("batch_argnums", batch_argnums), ("static_argnums", static_argnums)):
            wrong = [a for a in argnums if not -count <= a < count]
            if wrong:
                raise TraceError(
                    f"{kind}={tuple(argnums)} names argument {wrong[0]}, but the step was called with {count} "
                    f"arguments; use 0 to {count - 1}",
                    argnum=wrong[0],
                )
        self.batch_argnums = tuple(sorted(a % count for a in batch_argnums))
        self.static = {a % count: args[a] for a in static_argnums}
        self.count = count
        self.uses_nnx = any(is_nnx(x) for x in jax.tree.leaves(self._state_args(args), is_leaf=is_nnx))
        state, self.graphdef = self._split(self._state_args(args))
        state_paths, self.state_tree = jax.tree_util.tree_flatten_with_path(state)
        batch_paths, self.batch_tree = jax.tree_util.tree_flatten_with_path(self._batch_args(args))
        self.state_names = tuple(jax.tree_util.keystr(p) for p, _ in state_paths)
        self.batch_names = tuple(jax.tree_util.keystr(p) for p, _ in batch_paths)
        self.state = tuple(abstract(x, n) for (_, x), n in zip(state_paths, self.state_names, strict=True))
        self.batch = tuple(abstract(x, n) for (_, x), n in zip(batch_paths, self.batch_names, strict=True))
        self.batch_size = self._batch_size()
        self.num_state_args = len(self._state_args(args))
        self.out_tree: Any = None

    def resized(self, size: int) -> Arguments:
        """The same form of call with another global batch."""
        found = copy.copy(self)
        found.batch_size = size
        found.batch = tuple(
            jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, weak_type=x.weak_type) for x in self.batch
        )
        return found

    def _state_args(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(a for i, a in enumerate(args) if i not in self.batch_argnums and i not in self.static)

    def _batch_args(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args[i] for i in self.batch_argnums)

    def _split(self, state_args: tuple[Any, ...]) -> tuple[Any, Any]:
        if not self.uses_nnx:
            return state_args, None
        graphdef, state = _nnx().split(state_args)
        return state, graphdef

    def dim_names(self, args: Sequence[Any]) -> tuple[Names | None, ...]:
        """For each state leaf of a call the names that its dimensions have in Flax's metadata."""
        return leaf_names(self._split(self._state_args(args))[0])

    def _batch_size(self) -> int:
        if not self.batch:
            raise TraceError(
                f"batch_argnums={self.batch_argnums} names no arrays; the batch is what data parallelism splits. "
                "Give the positions of the arguments that hold it",
                batch_argnums=self.batch_argnums,
            )
        sizes = {n: (s.shape[0] if s.shape else None) for n, s in zip(self.batch_names, self.batch, strict=True)}
        if len(set(sizes.values())) > 1 or None in sizes.values():
            raise TraceError(
                f"the leaves of the batch disagree on the leading dimension, the global batch: {sizes}; pass what has "
                "no batch dimension in an argument that is not among batch_argnums",
                sizes=sizes,
            )
        return int(next(s for s in sizes.values() if s is not None))

    def flatten(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """State leaves and batch leaves of a call.

        Raises:
            PlanMismatchError: the call's trees or shapes differ from those traced; names the first that does.
        """
        if len(args) != self.count:
            raise PlanMismatchError(
                f"the planned step takes {self.count} arguments, got {len(args)}", expected=self.count, got=len(args)
            )
        for i, value in self.static.items():
            if args[i] is not value and args[i] != value:
                raise PlanMismatchError(
                    f"static argument {i} is {args[i]!r}, the step was planned for {value!r}", argnum=i
                )
        state, _ = self._split(self._state_args(args))
        leaves, tree = jax.tree.flatten(state)
        batch, batch_tree = jax.tree.flatten(self._batch_args(args))
        self._check(leaves, tree, state, self.state_tree, self.state, self.state_names)
        self._check(batch, batch_tree, self._batch_args(args), self.batch_tree, self.batch, self.batch_names)
        return leaves, batch

    def _check(
        self, leaves: list[Any], tree: Any, value: Any, expected: Any, shapes: Any, names: tuple[str, ...]
    ) -> None:
        if tree != expected:
            got = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(value)[0]}
            changed = sorted(got.symmetric_difference(names))
            what = f"leaf {changed[0]} is new or missing" if changed else "static fields of the tree differ"
            raise PlanMismatchError(
                f"the arguments have another structure than those the step was planned for: {what}",
                leaf=changed[0] if changed else "",
            )
        for leaf, shape, name in zip(leaves, shapes, names, strict=True):
            if getattr(leaf, "shape", None) != shape.shape and np.shape(leaf) != shape.shape:  # the first is quick
                raise PlanMismatchError(
                    f"argument leaf {name} has shape {np.shape(leaf)}, the step was planned for {shape.shape}",
                    leaf=name,
                    shape=np.shape(leaf),
                    expected=shape.shape,
                )
            if not isinstance(leaf, SCALARS) and leaf.dtype != shape.dtype:
                found = abstract(leaf, name).dtype
                if found != shape.dtype:
                    raise PlanMismatchError(
                        f"argument leaf {name} is {found}, the step was planned for {shape.dtype}",
                        leaf=name,
                        dtype=str(found),
                        expected=str(shape.dtype),
                    )

    def rebuild(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, ...]:
        """The user's arguments from flat leaves."""
        state_args = jax.tree.unflatten(self.state_tree, state)
        if self.uses_nnx:
            state_args = _nnx().merge(self.graphdef, state_args)
        batch_args = jax.tree.unflatten(self.batch_tree, batch)
        rest, cut = iter(state_args), dict(zip(self.batch_argnums, batch_args, strict=True))
        return tuple(
            cut[i] if i in cut else self.static[i] if i in self.static else next(rest) for i in range(self.count)
        )

    def result_leaves(self, args: tuple[Any, ...], result: Any) -> list[Any]:
        """Flat leaves of what the step returned (and of nnx objects it changed); remembers the trees."""
        if self.uses_nnx:
            self.out_graphdef, result = _nnx().split((self._state_args(args), result))
        paths, self.out_tree = jax.tree_util.tree_flatten_with_path(result)
        self.out_names = tuple(jax.tree_util.keystr(p) for p, _ in paths)
        return [leaf for _, leaf in paths]

    def unflatten(self, outputs: Sequence[Any], *args: Any) -> Any:
        """The user's result from flat outputs; nnx objects among `args` receive their new values."""
        result = jax.tree.unflatten(self.out_tree, outputs)
        if not self.uses_nnx:
            return result
        nnx = _nnx()
        new_args, result = nnx.merge(self.out_graphdef, result)
        theirs = jax.tree.leaves(self._state_args(args), is_leaf=is_nnx)
        ours = jax.tree.leaves(new_args, is_leaf=is_nnx)
        mine = {}
        for their, our in zip(theirs, ours, strict=True):
            if is_nnx(their):
                nnx.update(their, nnx.state(our))
                mine[id(our)] = their
        return jax.tree.map(lambda x: mine.get(id(x), x), result, is_leaf=is_nnx)

    def state_result(self, leaves: Sequence[Any]) -> Any:
        """The user's non-batch arguments with these leaves: the argument itself where there is only one."""
        state_args = jax.tree.unflatten(self.state_tree, leaves)
        if self.uses_nnx:
            state_args = _nnx().merge(self.graphdef, state_args)
        return state_args[0] if len(state_args) == 1 else tuple(state_args)

    def output_leaf(self, shapes: Sequence[Any]) -> tuple[int | None, ...]:
        """For each output, the state leaf it replaces: same path inside an argument, same shape and dtype."""
        position: dict[str, int] = {}
        for i, name in enumerate(self.state_names):
            position.setdefault(name, i)
        found: list[int | None] = []
        for name, shape in zip(self.out_names, shapes, strict=True):
            index = self._same_path(name, position)
            if index is not None and (index in found or not self._replaces(index, shape)):
                index = None
            found.append(index)
        return tuple(found)

    def _replaces(self, index: int, shape: Any) -> bool:
        """Same shape and type; a lone float among several arguments (a learning rate) is not the loss beside them."""
        leaf = self.state[index]
        whole = re.fullmatch(r"\[\d+\]", self.state_names[index]) is not None and self.num_state_args > 1
        number = whole and leaf.shape == () and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        return (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype) and not number

    def _same_path(self, name: str, position: dict[str, int]) -> int | None:
        """An output `[0].params['w']` replaces argument leaf `[0].params['w']`; a bare state result has no `[0]`."""
        if self.uses_nnx:  # outputs are ((state args), result)
            return position.get(name.removeprefix("[0]"))
        return position.get(name, position.get("[0]" + name))
