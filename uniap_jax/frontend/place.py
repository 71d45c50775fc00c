"""Where operations on parameters alone stand in the loss: with the layer that reads what they make.

Steps that cast all parameters before the first layer, or add a penalty on all of them after the last, would make that
layer read every parameter. What is made of parameters is moved to its reader, repeated for readers that are far
apart (a table of relative positions), and a penalty on a parameter is taken beside the layer that uses it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from uniap_jax.core.dim_rules import ELEMENTWISE
from uniap_jax.core.dim_shape_rules import shape_of
from uniap_jax.core.jax_compat import Literal, Var, fresh_like
from uniap_jax.core.jaxprs import inner_jaxprs, variables
from uniap_jax.frontend.cut import HEAVY
from uniap_jax.frontend.split import LossTape

APART = 4
"""Heavy operations between two readers that are far apart: less than a layer's, more than lie between q, k and v."""
_SAME_PLACE = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_AHEAD, _AFTER, _SUMMED = -1, 1, 2  # of the equation at a place

Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Made:
    """A value made of parameters, and of the batch at most element by element.

    Attributes:
        eqn: position of the equation that makes it.
        params: that it is made of.
        light: whether no heavy operation was needed.
        elements: of the parameters.
    """

    eqn: int
    params: frozenset[Var]
    light: bool
    elements: int


def placed(loss: LossTape) -> LossTape:
    """The same loss with what is made of parameters beside its readers; sums of penalties in the order of layers."""
    made = _made(loss)
    if not made:
        return loss
    eqns = list(loss.eqns)
    readers = _readers(eqns)
    places: dict[int, Place] = {}
    _penalties(eqns, made, readers, places)
    sums = _running_sums(loss, eqns, made, readers, places)
    _beside_readers(eqns, made, readers, places)
    keyed = [(places.get(i, (i, 0, i)), e) for i, e in enumerate(eqns) if i not in sums.replaced]
    ordered = sorted((*keyed, *sums.eqns), key=lambda pair: pair[0])
    return replace(loss, eqns=tuple(e for _, e in ordered))


def _light(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name not in HEAVY and (name == "custom_jvp_call" or not any(True for _ in inner_jaxprs(eqn)))


def _elements(var: Any) -> int:
    return math.prod(shape_of(var))


def _made(loss: LossTape) -> dict[Var, _Made]:
    """Values made of parameters; looking rows up by data, or anything heavy with data, starts an activation."""
    found: dict[Var, _Made] = {}
    params, data, streams = set(loss.params), set(loss.batch), set[Var]()
    for i, eqn in enumerate(loss.eqns):
        ins = variables(eqn.invars)
        sources = [frozenset({v}) if v in params else found[v].params for v in ins if v in params or v in found]
        mixed = any(v in data for v in ins)
        if any(v in streams for v in ins) or eqn.effects:
            streams.update(eqn.outvars)
        elif not sources:
            (streams if eqn.primitive.name in HEAVY else data if mixed else set[Var]()).update(eqn.outvars)
        elif mixed and eqn.primitive.name not in _SAME_PLACE:
            streams.update(eqn.outvars)
        else:
            of = frozenset[Var]().union(*sources)
            light = _light(eqn) and all(found[v].light for v in ins if v in found)
            count = sum(map(_elements, of))
            found.update((v, _Made(eqn=i, params=of, light=light, elements=count)) for v in eqn.outvars)
    return found


def _readers(eqns: Sequence[Any]) -> dict[Var, list[int]]:
    found: dict[Var, list[int]] = defaultdict(list)
    for i, eqn in enumerate(eqns):
        for v in dict.fromkeys(variables(eqn.invars)):
            found[v].append(i)
    return found


def _makers(eqns: Sequence[Any], made: dict[Var, _Made], wanted: Iterable[Var]) -> list[int]:
    """Positions of the equations on the way from parameters to `wanted`."""
    found, pending = set[int](), list(wanted)
    while pending:
        v = pending.pop()
        if v in made and made[v].eqn not in found:
            found.add(made[v].eqn)
            pending.extend(variables(eqns[made[v].eqn].invars))
    return sorted(found)


def _renamed(eqn: Any, names: dict[Var, Var]) -> Any:
    def name(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    return eqn.replace(invars=[name(a) for a in eqn.invars], outvars=[name(a) for a in eqn.outvars])


def _beside_readers(
    eqns: list[Any], made: dict[Var, _Made], readers: dict[Var, list[int]], places: dict[int, Place]
) -> None:
    """Moves what is made of parameters down to its first reader, and copies it for readers far from that one.

    Heavy work is moved only where it has one reader. A value smaller than what it is made of is not made again for
    an activation: sending it is cheaper than holding the parameters.
    """
    heavy = [0]
    for eqn in eqns:
        heavy.append(heavy[-1] + (eqn.primitive.name in HEAVY))
    light = {m.eqn: m.light for m in made.values()}
    wide = {m.eqn for v, m in made.items() if _elements(v) >= m.elements}
    for i in sorted(light, reverse=True):
        reading = sorted((places.get(r, (r, 0, r)), r) for r in {r for v in eqns[i].outvars for r in readers[v]})
        if i in places or not reading or (not light[i] and len(reading) > 1):
            continue
        groups = [reading[:1]]
        for ahead, here in pairwise(reading):
            apart = heavy[here[0][0]] - heavy[ahead[0][0]] >= APART
            copied = i in wide or here[1] >= len(heavy) - 1
            if apart and copied:
                groups.append([here])
            else:
                groups[-1].append(here)
        for group in groups[1:]:
            _copy(eqns, i, [r for _, r in group], readers)
            places[len(eqns) - 1] = _ahead(group[0][0], i)
        places[i] = _ahead(groups[0][0][0], i)


def _ahead(place: Place, eqn: int) -> Place:
    return (place[0], place[1] or _AHEAD, eqn)


def _copy(eqns: list[Any], i: int, readers: Sequence[int], of: dict[Var, list[int]]) -> None:
    """Appends a copy of an equation and has these readers read it."""
    names = {v: fresh_like(v) for v in eqns[i].outvars}
    eqns.append(_renamed(eqns[i], names))
    for r in readers:
        eqns[r] = _renamed(eqns[r], names)
    for v in dict.fromkeys(variables(eqns[i].invars)):
        of[v].append(len(eqns) - 1)


def _penalties(
    eqns: Sequence[Any],
    made: dict[Var, _Made],
    readers: dict[Var, list[int]],
    places: dict[int, Place],
) -> None:
    """Moves a scalar of one parameter (its squared norm) up to the first layer that reads the parameter."""
    uses = _uses(eqns, made, readers)
    born = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    for v, m in made.items():
        if not m.light or len(m.params) != 1 or shape_of(v) != () or not readers[v]:
            continue
        use = uses.get(next(iter(m.params)))
        chain = _own(eqns, made, readers, v)
        outside = [a for i in chain for a in variables(eqns[i].invars) if a not in made]
        if use is not None and chain[0] > use and all(born.get(a, -1) < use for a in outside):
            places.update((i, (use, _AFTER, i)) for i in chain)


def _uses(eqns: Sequence[Any], made: dict[Var, _Made], readers: dict[Var, list[int]]) -> dict[Var, int]:
    """For each parameter the first equation that puts it to an activation."""
    makers = {m.eqn for m in made.values()}
    found: dict[Var, int] = {}
    for v, reading in readers.items():
        first = next((i for i in reading if i not in makers), None)
        if first is not None:
            for p in made[v].params if v in made else (v,):
                found[p] = min(first, found.get(p, first))
    return found


def _own(eqns: Sequence[Any], made: dict[Var, _Made], readers: dict[Var, list[int]], scalar: Var) -> list[int]:
    """The equations that lead to a scalar and to nothing else."""
    chain = {made[scalar].eqn}
    for i in reversed(_makers(eqns, made, [scalar])):
        if all(r in chain for v in eqns[i].outvars for r in readers[v]):
            chain.add(i)
    return sorted(chain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """Sums of scalars taken as they come: the additions, and those they stand for."""

    eqns: list[tuple[Place, Any]]
    replaced: set[int]


def _running_sums(
    loss: LossTape,
    eqns: Sequence[Any],
    made: dict[Var, _Made],
    readers: dict[Var, list[int]],
    places: dict[int, Place],
) -> _Sums:
    """Adds moved scalars up in the order in which they are made, so that one of them is alive between two layers."""
    sums, replaced, results = list[tuple[Place, Any]](), set[int](), set(variables(loss.results))
    adds = {m.eqn for v, m in made.items() if eqns[m.eqn].primitive.name == "add" and shape_of(v) == ()}
    for root in sorted(adds, reverse=True):
        reading = readers[eqns[root].outvars[0]]
        if root in replaced or (reading and all(r in adds for r in reading)):
            continue
        tree, terms = [root], list[Any]()
        for i in tree:
            for a in eqns[i].invars:
                inner = None if isinstance(a, Literal) or a not in made else made[a].eqn
                if inner in adds and len(readers[a]) == 1 and a not in results:
                    tree.append(inner)
                else:
                    terms.append(a)
        born = [(-1, 0, -1) if isinstance(a, Literal) or a not in made else places.get(made[a].eqn) for a in terms]
        known = [b for b in born if b is not None]
        if len(known) < len(born):
            continue
        terms = [terms[k] for k in sorted(range(len(terms)), key=lambda k: (known[k], k))]
        total = terms[0]
        for k, a in enumerate(terms[1:]):
            out = eqns[root].outvars[0] if k == len(terms) - 2 else fresh_like(eqns[root].outvars[0])
            at = places[made[a].eqn] if not isinstance(a, Literal) and a in made else (-1, 0, -1)
            sums.append(((at[0], _SUMMED, k), eqns[root].replace(invars=[total, a], outvars=[out])))
            total = out
        replaced.update(tree)
    return _Sums(eqns=sums, replaced=replaced)
