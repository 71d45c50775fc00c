"""Small steps on lists of arrays that the ticks of one program take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.runtime.programs import is_key


def constrain(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """A layout of a whole array; keys have none."""
    return x if is_key(x.dtype) else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def typed(x: Any, dtype: Any) -> Any:
    """Strongly typed: what goes round a loop must not change its type."""
    return lax.convert_element_type(x, dtype)


def local(values: Sequence[Any]) -> list[Any]:
    """One stage's share inside a manual region."""
    return [x[0] for x in values]


def wide(values: Sequence[Any]) -> list[Any]:
    """One stage's share on its way out of a manual region."""
    return [x[None] for x in values]


def choose(condition: Any, yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """One list or the other."""
    return [jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def add_at(totals: Any, place: Any, new: Any, valid: Any) -> Any:
    """In the place of one layer: nothing else is read or written."""
    total = lax.dynamic_index_in_dim(totals, place, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(totals, add(total, new, valid), place, 0)


def add(total: Any, new: Any, valid: Any) -> Any:
    """A bubble's gradient may be anything, infinite too: it is left out, not multiplied by zero."""
    return total + jnp.where(valid, new, jnp.zeros_like(new)).astype(total.dtype)
