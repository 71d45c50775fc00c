"""A loop over equal layers written out, so that each turn can be a layer with a plan of its own.

A loop's stacked parameters [L, ...] become L parameters, their rows, and so do the leaves of the state that belong to
them. The step keeps two forms: the user's, on stacked leaves, and one by rows, for programs that keep the rows of
different layers in different places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from uniap_jax.core.branches import without_conds
from uniap_jax.core.graph import RowStep, Step, Value
from uniap_jax.core.jax_compat import ClosedJaxpr, Var, shape_of
from uniap_jax.core.jaxprs import Tape, flatten, inner_jaxprs, live_eqns, scan_counts, variables
from uniap_jax.frontend.rows import Rows, of_row, row_vars
from uniap_jax.frontend.split import LossTape, SplitStep, bind_consts

Part = tuple[int, int | None]
"""Position of a value of the step as the user wrote it, and which row of it; None for all of it."""
RowVars = Mapping[Var, tuple[Var, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unfolded:
    """A step whose loops over layers are written out.

    Attributes:
        parts: the step on the user's leaves; the loss, what `before` hands it and what `update` gets are by rows.
        before: the same on leaves by rows.
        update: likewise.
        params: of each parameter which one of the step's it was.
        param_leaf: for each parameter, the leaf by rows that it is, or None.
        leaves: of each leaf by rows which of the user's it is.
        outputs: of each output by rows which of the user's it is.
    """

    parts: SplitStep
    before: ClosedJaxpr
    update: ClosedJaxpr
    params: tuple[Part, ...]
    param_leaf: tuple[int | None, ...]
    leaves: tuple[Part, ...]
    outputs: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnfoldedLoss:
    """A loss whose loops over layers are written out.

    Attributes:
        loss: by rows.
        params: number of rows of each parameter of the loss as it was; 0 where it is left whole.
        state: likewise of its other inputs.
        results: likewise of its results.
    """

    loss: LossTape
    params: tuple[int, ...]
    state: tuple[int, ...]
    results: tuple[int, ...]


def unfold_loss(loss: LossTape) -> UnfoldedLoss | None:
    """Writes out the loops over stacked parameters; None where there is none."""
    loops, split = _loops(loss)
    if not loops:
        return None
    rows = {v: row_vars(v) for v in split}
    program = Rows(rows, loops)
    program.add(loss.eqns)
    counts = [program.count(atom) for atom in loss.results]
    results = program.outputs(loss.results, counts)
    kept, _ = live_eqns(program.eqns, results)
    return UnfoldedLoss(
        loss=replace(
            loss,
            params=_expanded(loss.params, rows),
            state=_expanded(loss.state, rows),
            eqns=tuple(kept),
            results=results,
        ),
        params=tuple(len(rows.get(v, ())) for v in loss.params),
        state=tuple(len(rows.get(v, ())) for v in loss.state),
        results=tuple(counts),
    )


def _expanded(given: Sequence[Var], rows: RowVars) -> tuple[Var, ...]:
    return tuple(row for v in given for row in rows.get(v, (v,)))


def _parts(counts: Sequence[int]) -> tuple[Part, ...]:
    return tuple((k, i if n else None) for k, n in enumerate(counts) for i in range(max(n, 1)))


def _loops(loss: LossTape) -> tuple[list[Any], list[Var]]:
    """Scans over stacked parameters, and the inputs of the loss that they take apart."""
    made = {v: e for e in loss.eqns for v in e.outvars}
    params, inputs = set(loss.params), {*loss.params, *loss.state}
    loops, split = [], dict[Var, None]()
    for eqn in loss.eqns:
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.effects:
            continue
        if flatten(next(inner_jaxprs(eqn))).consts:
            continue
        scanned = eqn.invars[sum(scan_counts(eqn)[:2]) :]
        sources = dict.fromkeys(v for atom in scanned for v in _sources(atom, made, inputs))
        if params & sources.keys():
            loops.append(eqn)
            split |= sources
    return loops, list(split)


def _sources(atom: Any, made: Mapping[Var, Any], inputs: set[Var]) -> list[Var]:
    """Inputs whose rows make the rows of a value; none where they do not."""
    found, pending = list[Var](), variables([atom])
    while pending:
        v = pending.pop()
        if not shape_of(v).shape:
            continue
        if v in inputs:
            found.append(v)
        elif v in made and of_row(made[v], [bool(a.aval.shape) for a in made[v].invars]) is not None:
            pending += variables(made[v].invars)
    return found


def unfold(parts: SplitStep, output_leaf: Sequence[int | None], *, num_batch: int) -> Unfolded | None:
    """Writes out the loops of a step; None where there are none.

    Args:
        parts: of the step.
        output_leaf: for each output the state leaf that it replaces, or None.
        num_batch: leaves of the batch.
    """
    found = unfold_loss(parts.loss)
    if found is None:
        return None
    before, update = flatten(parts.before), without_conds(flatten(parts.update))
    handed, gotten = (*found.params, *found.state), (*found.results, *found.params)
    per_leaf = _row_counts(before, update, handed, (*[0] * num_batch, *gotten), output_leaf)
    whole = [0] * len(per_leaf)
    per_output = [0 if leaf is None else per_leaf[leaf] for leaf in output_leaf]
    owner = [(parts.param_leaf[q], i) for q, i in _parts(found.params)]
    places = {part: k for k, part in enumerate(_parts(per_leaf))}
    return Unfolded(
        parts=SplitStep(
            loss=found.loss,
            before=_rewritten(before, whole, handed),
            update=_stacked_first(flatten(parts.update), [*whole, *[0] * num_batch, *gotten]),
            param_leaf=tuple(leaf if i is None else None for leaf, i in owner),
        ),
        before=_rewritten(before, per_leaf, handed),
        update=_rewritten(update, [*per_leaf, *[0] * num_batch, *gotten], per_output),
        params=_parts(found.params),
        param_leaf=tuple(None if leaf is None else places[leaf, i] for leaf, i in owner),
        leaves=_parts(per_leaf),
        outputs=_parts(per_output),
    )


def _rows_of(tape: Tape, counts: Sequence[int]) -> dict[Var, tuple[Var, ...]]:
    """Rows of those inputs of a program that have some."""
    return {v: row_vars(v) for v, n in zip(tape.invars, counts, strict=True) if n}


def _rewritten(tape: Tape, inputs: Sequence[int], outputs: Sequence[int]) -> ClosedJaxpr:
    """A program by rows, given how many each input and output has."""
    rows = _rows_of(tape, inputs)
    program = Rows(rows)
    program.add(tape.eqns)
    outs = program.outputs(tape.outvars, outputs)
    return bind_consts(_expanded(tape.invars, rows), outs, live_eqns(program.eqns, outs)[0], tape.consts)


def _stacked_first(tape: Tape, inputs: Sequence[int]) -> ClosedJaxpr:
    """A program that takes rows and stacks them before anything else."""
    rows, program = _rows_of(tape, inputs), Rows({})
    for v, own in rows.items():
        program.stack(v, own)
    program.add(tape.eqns)
    outs = program.outputs(tape.outvars, [0] * len(tape.outvars))
    return bind_consts(_expanded(tape.invars, rows), outs, live_eqns(program.eqns, outs)[0], tape.consts)


def _row_counts(
    before: Tape, update: Tape, handed: Sequence[int], gotten: Sequence[int], output_leaf: Sequence[int | None]
) -> tuple[int, ...]:
    """How many rows each state leaf is kept in; 0 where it is left whole.

    Kept in rows are leaves that the loss reads by rows, and those whose next value comes out in rows: moments,
    averages, statistics.

    Args:
        before: from the state to what the loss reads.
        update: from state, batch, results and gradients to outputs.
        handed: rows of each output of `before`.
        gotten: rows of each input of `update` after the state.
        output_leaf: for each output of `update` the leaf that it replaces, or None.
    """
    position = {v: i for i, v in enumerate(before.invars)}
    made = {v: e for e in before.eqns for v in e.outvars}
    read = (a for a, n in zip(before.outvars, handed, strict=True) if n)
    split = {position[v] for a in read for v in _sources(a, made, set(before.invars))}
    while True:
        leaves = [int(shape_of(v).shape[0]) if i in split else 0 for i, v in enumerate(before.invars)]
        program = Rows(_rows_of(update, [*leaves, *gotten]))
        program.add(update.eqns)
        more = {
            leaf
            for atom, leaf in zip(update.outvars, output_leaf, strict=True)
            if leaf is not None and program.count(atom)
        }
        if more <= split:
            return tuple(leaves)
        split |= more


def part_names(names: Sequence[str], parts: Sequence[Part]) -> tuple[str, ...]:
    """Names of rows: the array's and the row's number."""
    return tuple(names[k] if i is None else f"{names[k]}[{i}]" for k, i in parts)


def _grouped(parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for position, (k, _) in enumerate(parts):
        groups.setdefault(k, []).append(position)
    return tuple(map(tuple, groups.values()))


def row_step(step: Step, unfolded: Unfolded) -> RowStep:
    """The form by rows of an unfolded step.

    Args:
        step: on the user's leaves.
        unfolded: that it was made from.
    """

    def values(of: Sequence[Value], parts: Sequence[Part]) -> tuple[Value, ...]:
        names = part_names([v.name for v in of], parts)
        shapes = [of[k].shape if i is None else of[k].shape[1:] for k, i in parts]
        return tuple(
            replace(of[k], shape=shape, name=name) for (k, _), shape, name in zip(parts, shapes, names, strict=True)
        )

    place = {part: position for position, part in enumerate(unfolded.leaves)}
    replaced = [(step.output_leaf[k], i) for k, i in unfolded.outputs]
    inner = replace(
        step,
        before=unfolded.before,
        update=unfolded.update,
        state=values(step.state, unfolded.leaves),
        outputs=values(step.outputs, unfolded.outputs),
        param_leaf=unfolded.param_leaf,
        output_leaf=tuple(None if leaf is None else place[leaf, i] for leaf, i in replaced),
    )
    return RowStep(
        step=inner,
        leaves=_grouped(unfolded.leaves),
        outputs=_grouped(unfolded.outputs),
        params=tuple(group for group in _grouped(unfolded.params) if len(group) > 1),
    )
