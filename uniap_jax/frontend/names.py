"""Names that Flax models give to the dimensions of their parameters, and rules that say what may split them.

Linen keeps them in boxes around arrays (`nn.with_partitioning`, `nn.with_logical_partitioning`), nnx in the metadata of
a variable. Both stay where they are; here they are only read. flax is not imported: without it there are no names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from uniap_jax.core.errors import TraceError
from uniap_jax.core.graph import Allowed, LayerGraph
from uniap_jax.core.roles import ROLES, restricted

log = logging.getLogger("uniap_jax")

AxisRules = Sequence[tuple[str, str | Sequence[str] | None]] | Mapping[str, str | Sequence[str] | None]
"""(name, role) pairs; a role is "tensor", "fsdp", "expert", several of them, or None for a dimension left whole."""
Names = tuple[Any, ...]

_ACTIVATIONS = ("data", "sequence")
"""Roles of dimensions that no parameter has; rules for them are common, and split no parameter."""
_METADATA = ("out_sharding", "sharding_names", "sharding")
"""Where versions of nnx keep names."""


def leaf_names(tree: Any) -> tuple[Names | None, ...]:
    """For each leaf of a state the names of its dimensions, None where it has none."""
    linen, nnx = sys.modules.get("flax.core.meta"), sys.modules.get("flax.nnx")
    boxes = (*((linen.AxisMetadata,) if linen else ()), *((nnx.Variable,) if nnx else ()))
    found: list[Names | None] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, boxes)):
        leaves = jax.tree.leaves(node)
        names = None
        if linen is not None and isinstance(node, linen.Partitioned):
            names = tuple(node.names)
        elif nnx is not None and isinstance(node, nnx.Variable):
            metadata = node.get_metadata()
            kept = next((metadata[k] for k in _METADATA if metadata.get(k) is not None), None)
            names = tuple(kept) if isinstance(kept, (tuple, list, PartitionSpec)) else None
        found += [names if len(leaves) == 1 else None] * len(leaves)
    return tuple(found)


def parse_rules(rules: AxisRules) -> dict[str, frozenset[str]]:
    """For each name the ways that may split its dimensions; several rules for one name add up.

    Raises:
        TraceError: a role that does not exist; names it and those that do.
    """
    found: dict[str, frozenset[str]] = {}
    for name, role in rules.items() if isinstance(rules, Mapping) else rules:
        roles = () if role is None else (role,) if isinstance(role, str) else tuple(role)
        wrong = [r for r in roles if r not in (*ROLES, *_ACTIVATIONS)]
        if wrong:
            raise TraceError(
                f"logical_axis_rules map {name!r} to {wrong[0]!r}, which is no kind of split; use "
                f"{', '.join(map(repr, ROLES))} or None (not at all), not an axis of a mesh of your own",
                name=name,
                role=wrong[0],
            )
        found[name] = found.get(name, frozenset()) | frozenset(roles) & frozenset(ROLES)
    return found


def with_rules(graph: LayerGraph, names: Sequence[Names | None], rules: AxisRules) -> LayerGraph:
    """The graph with the named dimensions of its parameters kept for what the rules say.

    Args:
        graph: traced.
        names: of each state leaf's dimensions, from `leaf_names`.
        rules: what may split a name's dimensions; dimensions without a name, or whose name has no rule, are free.
    """
    roles, unknown, allowed = parse_rules(rules), dict[str, None](), dict[int, Allowed]()
    names = _row_names(graph, names)
    for p, leaf in enumerate(graph.by_rows.step.param_leaf):
        named = names[leaf] if leaf is not None else None
        if named is None or len(named) != len(graph.params[p].shape):
            continue
        parts = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in named]
        unknown |= dict.fromkeys(n for part in parts for n in part if n not in roles)
        known = [[roles[n] for n in part if n in roles] for part in parts]
        allowed[p] = tuple(frozenset[str]().union(*some) if some else None for some in known)
    if unknown:
        log.info(
            "logical_axis_rules have no rule for %s: what splits these dimensions is left to the search",
            ", ".join(map(repr, unknown)),
        )
    elif not allowed:
        log.warning("logical_axis_rules were given, but no parameter names its dimensions")
    return restricted(graph, allowed) if any(any(d is not None for d in dims) for dims in allowed.values()) else graph


def _row_names(graph: LayerGraph, names: Sequence[Names | None]) -> list[Names | None]:
    """Names of leaves by rows: a row has no dimension of layers."""
    rows = graph.step.by_rows
    if rows is None:
        return list(names)
    pairs = zip(names, rows.leaves, strict=True)
    return [n if len(group) == 1 or n is None else n[1:] for n, group in pairs for _ in group]
