"""The state on its devices: placed, created there, gathered from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from uniap_jax.core.errors import ExecutionError, PlanMismatchError
from uniap_jax.core.graph import Value
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.presence import absent, is_elsewhere, is_here, laid, on_devices, relaid
from uniap_jax.runtime.programs import is_key, known_mesh

log = logging.getLogger("uniap_jax")


def fits(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf is an array that already lies as planned."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False  # what nobody put anywhere is the user's own: it is copied, and outlives the step
    have = leaf.sharding
    return (
        have is sharding
        or have == sharding
        or (have.device_set == sharding.device_set and have.is_equivalent_to(sharding, leaf.ndim))
    )


def check_leaf(leaf: Any, value: Value) -> None:
    """Refuses what is not this leaf.

    Raises:
        PlanMismatchError: another shape than the one planned for.
        ExecutionError: the array was given up to an earlier step.
    """
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ExecutionError(
            f"argument leaf {value.name} was given up to an earlier call of the step, which reuses its memory: go on "
            "with the state that call returned (state, metrics = step(state, batch)), or compile the step with "
            "donation off (donate_argnums=()) to keep the old state",
            leaf=value.name,
        )
    if np.shape(leaf) != value.shape:
        raise PlanMismatchError(
            f"argument leaf {value.name} has shape {np.shape(leaf)}, the plan was made for {value.shape}",
            leaf=value.name,
            shape=np.shape(leaf),
            expected=value.shape,
        )


def place_leaf(leaf: Any, value: Value, sharding: NamedSharding) -> jax.Array:
    """A copy of a leaf as planned; never an alias, so that donating it leaves the original alone."""
    check_leaf(leaf, value)
    if jax.process_count() > 1 and (is_elsewhere(leaf) or not sharding.is_fully_addressable):
        return _place_across(leaf, value, sharding)
    if isinstance(leaf, jax.Array):
        if leaf.dtype != value.dtype and not is_key(value.dtype):
            leaf = leaf.astype(value.dtype)
        elif leaf.sharding.device_set & sharding.device_set:
            leaf = jnp.copy(leaf)  # a shard that stays on its device would be the original's own buffer
    else:
        leaf = np.array(leaf, dtype=value.dtype)
    placed: jax.Array = jax.device_put(leaf, sharding)
    return placed


def _place_across(leaf: Any, value: Value, sharding: NamedSharding) -> jax.Array:
    """A copy of a leaf on devices of several processes, each of which makes its shards.

    A leaf that is spread over more devices is whole on all of them for a moment.
    """
    if is_elsewhere(leaf) and leaf.sharding.device_set > sharding.device_set and not leaf.is_fully_replicated:
        leaf = relaid(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
    if not is_here(sharding.device_set):
        return absent(value.shape, value.dtype, sharding)
    if is_elsewhere(leaf):
        placed = relaid(on_devices(leaf, known_mesh(sharding), f"state leaf {value.name}"), sharding)
        return jnp.copy(placed)
    if not is_key(value.dtype):
        made: jax.Array = laid(np.asarray(leaf, dtype=value.dtype), sharding)
        return made
    data = laid(jax.random.key_data(leaf), NamedSharding(sharding.mesh, sharding.spec))
    keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return keys


class Placer:
    """Brings state leaves to where the plan wants them.

    Args:
        values: shapes of the leaves.
        shardings: where they belong.
        donated: leaves whose buffers are given up.
    """

    def __init__(self, values: Sequence[Value], shardings: Sequence[NamedSharding], donated: Sequence[int]) -> None:
        self._values = tuple(values)
        self._shardings = tuple(shardings)
        self._donated = tuple(donated)
        self._known: list[Sharding | None] = [None] * len(self._values)

    def __call__(self, leaves: Sequence[Any], *, quiet: bool = False) -> list[Any]:
        """Leaves as planned; those that lie there already are the same objects.

        Args:
            leaves: of the state, in flat order.
            quiet: whether moving is what was asked for, and needs no line in the log.

        Raises:
            ExecutionError: a leaf was given up to an earlier step.
            PlanMismatchError: a leaf has another shape than planned.
        """
        placed = list(leaves)
        moved: list[int] = []
        for i, leaf in enumerate(leaves):
            if self._is_as_before(i, leaf):
                continue
            if fits(leaf, self._shardings[i]):
                check_leaf(leaf, self._values[i])
                self._known[i] = leaf.sharding
            else:
                placed[i] = place_leaf(leaf, self._values[i], self._shardings[i])
                moved.append(i)
        if moved and not quiet:
            size = sum(self._values[i].nbytes for i in moved)
            log.info(
                "placed %d of %d state leaves (%.1f MiB; first: %s) as the plan lays them out; "
                "state = step.place(state, batch) does this once before the loop",
                len(moved),
                len(placed),
                size / 2**20,
                self._values[moved[0]].name,
            )
        self._separate(placed)
        return placed

    def _is_as_before(self, i: int, leaf: Any) -> bool:
        """Whether a leaf has the very layout object of the step before, as a program's outputs have.

        Asked of every leaf at every step, so nothing is asked that costs more than an attribute.
        """
        known = self._known[i]
        return (
            known is not None
            and getattr(leaf, "sharding", None) is known
            and leaf.committed
            and leaf.shape == self._values[i].shape
            and not leaf.is_deleted()
        )

    def _separate(self, placed: list[Any]) -> None:
        """Gives every donated leaf a buffer of its own."""
        if len({id(placed[i]) for i in self._donated}) == len(self._donated):
            return
        owner: dict[int, int] = {}
        pairs = [(owner.setdefault(id(placed[i]), i), i) for i in self._donated]
        same = [(self._values[a].name, self._values[b].name) for a, b in pairs if a != b]
        log.warning(
            "%d leaves of the state are the same arrays as others; all are given up to the step, so they are copied "
            "first: %s%s",
            len(same),
            "; ".join(f"{b} is {a}" for a, b in same[:3]),
            "; ..." if len(same) > 3 else "",
        )
        for first, i in pairs:
            if first != i:
                placed[i] = _copied(placed[i], self._shardings[i])


def _copied(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if not is_here(sharding.device_set):
        return absent(array.shape, array.dtype, sharding)
    copied: jax.Array = jax.device_put(jnp.copy(array), sharding)
    return copied


def check_created(values: Sequence[Value], create_state: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuses a function that makes another state.

    Raises:
        PlanMismatchError: it returns another number of leaves, or other shapes, than the plan was made for.
    """
    shapes = jax.tree.leaves(jax.eval_shape(create_state, *args))
    if [(tuple(s.shape), s.dtype) for s in shapes] != [(v.shape, v.dtype) for v in values]:
        odd = next(
            (v.name for s, v in zip(shapes, values, strict=False) if (tuple(s.shape), s.dtype) != (v.shape, v.dtype)),
            "",
        )
        raise PlanMismatchError(
            f"create_state returns {len(shapes)} leaves, the plan was made for {len(values)}; first that differs: "
            f"{odd or 'the number of leaves'}",
            leaf=odd,
            expected=len(values),
            got=len(shapes),
        )


def create(layout: Layout, create_state: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """Leaves of a new state, each computed only where it lives.

    Args:
        layout: graph under its plan.
        create_state: returns the step's non-batch argument.
        args: of `create_state`.

    Raises:
        PlanMismatchError: it returns another number of leaves, or other shapes, than the plan was made for.
    """
    values, shardings = layout.graph.step.state, layout.state_shardings
    check_created(values, create_state, args)
    created: list[Any] = [None] * len(values)
    for stage in sorted({h.stage for h in layout.leaves}, key=lambda s: -1 if s is None else s):
        mine = [i for i, h in enumerate(layout.leaves) if h.stage == stage]

        def leaves_here(*args: Any, mine: Sequence[int] = tuple(mine)) -> list[Any]:
            made = jax.tree.leaves(create_state(*args))
            return [made[i] for i in mine]

        mesh = layout.world if stage is None else layout.meshes[stage]
        if not is_here(mesh.devices.flat):
            for i in mine:
                created[i] = absent(values[i].shape, values[i].dtype, shardings[i])
            continue
        with jax.set_mesh(mesh):
            made = jax.jit(leaves_here, out_shardings=[shardings[i] for i in mine])(*loose(args))
        for i, leaf in zip(mine, made, strict=True):
            created[i] = leaf
    return created


def loose(args: Sequence[Any]) -> Any:
    """Arguments without a device of their own, so that they may go to any stage."""
    return jax.tree.map(lambda x: x if is_key(getattr(x, "dtype", np.dtype("float32"))) else np.asarray(x), tuple(args))


def gather_leaf(leaf: Any, device: Any) -> Any:
    """A leaf on one device.

    Raises:
        ExecutionError: parts of it are on other processes' devices.
    """
    if is_elsewhere(leaf):
        if not leaf.is_fully_replicated or not leaf.addressable_shards:
            raise ExecutionError(
                f"an array of shape {leaf.shape} has parts on devices of other processes, and is not gathered on "
                f"{device}; save the state with orbax, which all processes do together, and read it where it is needed",
                shape=leaf.shape,
            )
        leaf = leaf.addressable_data(0)
    return jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf
