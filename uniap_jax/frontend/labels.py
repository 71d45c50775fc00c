"""Names of layers for people: module paths from name stacks, source lines from tracebacks. Nothing decides by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from uniap_jax.core.jaxprs import eqn_flops
from uniap_jax.core.sources import source_line


def module_path(eqn: Any) -> tuple[str, ...]:
    """Module path of an equation, outermost first; () for plain functions."""
    return tuple(part for part in str(eqn.source_info.name_stack).split("/") if part)


def layer_name(eqns: Sequence[Any], index: int) -> str:
    """The deepest module path that holds most of the work, else the source line, else the index."""
    paths = [(module_path(e), eqn_flops(e) + 1.0) for e in eqns]
    name: list[str] = []
    total = sum(w for _, w in paths)
    while paths:
        votes: Counter[str] = Counter()
        for path, weight in paths:
            if len(path) > len(name):
                votes[path[len(name)]] += weight  # type: ignore[assignment]
        best = votes.most_common(1)
        if not best or best[0][1] < 0.6 * total:
            break
        name.append(best[0][0])
        paths = [(p, w) for p, w in paths if p[: len(name)] == tuple(name)]
    if name:
        return "/".join(name)
    heaviest = max(eqns, key=eqn_flops, default=None)
    return (heaviest is not None and source_line(heaviest)) or f"layer {index}"


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """The same names, numbered where they repeat."""
    totals, seen, out = Counter(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        out.append(f"{name}#{seen[name]}" if totals[name] > 1 else name)
    return tuple(out)
