"""One stage's forward and backward as two compiled programs on its sub-mesh, or as one.

The forward program returns what the stage writes and the residuals of `jax.vjp`; the backward program applies it.
Residuals that are inputs of the stage, or cheap functions of its parameters alone (a cast, a gather of a sharded
parameter) or of its batch alone (a mask), are not returned: the backward program makes them again.

A last stage that turns round at once, each backward right after its forward, is one program: nothing is kept between
the two, and the host has one program to queue instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from uniap_jax.core.jax_compat import Literal, Var
from uniap_jax.core.jaxprs import Tape, close, flatten, live_eqns, variables
from uniap_jax.runtime.homes import Layout
from uniap_jax.runtime.loss import accumulator_dtype, gradient_weight
from uniap_jax.runtime.programs import Program, as_function, aval_shape, build, constrain, shape_of
from uniap_jax.runtime.replicas import Replicas, replicas_of, run_stage
from uniap_jax.runtime.residuals import rebuildable
from uniap_jax.runtime.stages import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePrograms:
    """The compiled stage.

    Attributes:
        spec: what it reads and writes.
        forward: `(inputs) -> [*writes, *results, *residuals]`; inputs are params, operands, reads. Where the stage
            turns round at once, `(inputs, accumulators) -> (results, gradients, cotangents of wanted)`.
        backward: `(inputs it needs, residuals, cotangents, accumulators) -> (gradients, cotangents of wanted)`; the
            accumulators come back with this micro-batch's gradients added; with one micro-batch there are none. None
            where the forward does it.
        zeros: makes the accumulators, None with one micro-batch.
        reduce: `(accumulators) -> gradients`, once per step; None where they are the gradients.
        needs: positions among the forward's inputs that the backward reads again.
        kept: positions among the forward's outputs that the backward reads.
        grads: layout of the gradient of each of `spec.params`.
    """

    spec: StageSpec
    forward: Program
    backward: Program | None
    zeros: Program | None
    reduce: Program | None
    needs: tuple[int, ...]
    kept: tuple[int, ...]
    grads: tuple[NamedSharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Traced:
    """A stage's forward with its vjp, as data.

    Attributes:
        tape: inputs to (writes, results, residuals).
        emitted: how many of its outputs are writes and results.
        tree: of the vjp function whose leaves are the residuals.
        rebuilt: residuals that the backward makes again.
        inputs: input variables that the backward reads again.
        held: variables that the backward gets from the forward, in order.
        replicas: whose gradients are reduced once per step.
    """

    tape: Tape
    emitted: int
    tree: Any
    rebuilt: tuple[Var, ...]
    inputs: tuple[Var, ...]
    held: tuple[Var, ...]
    replicas: Replicas

    @property
    def residuals(self) -> tuple[Any, ...]:
        """Variables or literals."""
        return self.tape.outvars[self.emitted :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageForward:
    """A stage whose forward is at the compiler; `build_backward` needs the layouts that the compiler chooses."""

    spec: StageSpec
    traced: _Traced
    forward: Program
    inputs: tuple[Any, ...]
    kept: tuple[int, ...]


def build_forward(
    layout: Layout, spec: StageSpec, params: dict[int, NamedSharding], pool: Executor | None = None
) -> StageForward:
    """Traces a stage and has its forward compiled.

    Args:
        layout: graph under its plan.
        spec: of the stage.
        params: layout in which each parameter comes in.
        pool: compiles in the background.
    """
    inputs = input_shapes(layout, spec, params)
    traced = _trace(layout, spec, inputs)
    tape, emitted = traced.tape, list(traced.tape.outvars[: traced.emitted])
    returned = [v for v in traced.held if v not in variables(emitted)]
    outs = [*emitted, *returned]
    invars = [*tape.invars, *tape.consts]
    run = as_function(close(invars, outs, live_eqns(tape.eqns, outs)[0]), invars, tape.consts)
    forward = build(
        f"stage_{spec.stage}_forward",
        lambda args: run(*args),
        [inputs],
        mesh=layout.meshes[spec.stage],
        outputs=[*spec.leaves, *result_shardings(layout, spec, traced.replicas), *([None] * len(returned))],
        pool=pool,
    )
    position = {v: i for i, v in reversed(list(enumerate(outs))) if not isinstance(v, Literal)}
    kept = tuple(position[v] for v in traced.held)
    return StageForward(spec=spec, traced=traced, forward=forward, inputs=tuple(inputs), kept=kept)


def build_backward(layout: Layout, stage: StageForward, pool: Executor | None = None) -> StagePrograms:
    """Has the rest of a stage compiled.

    Args:
        layout: graph under its plan.
        stage: from `build_forward`.
        pool: compiles in the background.
    """
    spec, traced, inputs = stage.spec, stage.traced, stage.inputs
    layouts = stage.forward.output_shardings
    held = [aval_shape(v, layouts[i]) for v, i in zip(traced.held, stage.kept, strict=True)]
    needs = tuple(traced.tape.invars.index(v) for v in traced.inputs)
    grads = param_grads(layout, spec)
    zeros, totals = _build_zeros(layout, spec, traced.replicas, pool)
    backward = build(
        f"stage_{spec.stage}_backward",
        _backward(layout, spec, traced),
        [[inputs[i] for i in needs], held, _cotangent_shapes(layout, spec), totals],
        mesh=layout.meshes[spec.stage],
        outputs=_backward_layouts(layout, spec, traced.replicas),
        donate=(3,) if totals else (),
        pool=pool,
    )
    return StagePrograms(
        spec=spec,
        forward=stage.forward,
        backward=backward,
        zeros=zeros,
        reduce=_build_reduce(layout, spec, traced.replicas, totals, pool) if traced.replicas.params else None,
        needs=needs,
        kept=stage.kept,
        grads=grads,
    )


def build_whole(
    layout: Layout, spec: StageSpec, params: dict[int, NamedSharding], pool: Executor | None = None
) -> StagePrograms:
    """A stage that turns round at once, as one program.

    Args:
        layout: graph under its plan.
        spec: of a stage that no other stage reads from.
        params: layout in which each parameter comes in.
        pool: compiles in the background.
    """
    inputs, replicas = input_shapes(layout, spec, params), replicas_of(layout, spec.stage)
    run, pull = _with_vjp(layout, spec, inputs, replicas), _pullback(layout, spec, replicas)
    zeros, totals = _build_zeros(layout, spec, replicas, pool)

    def whole(inputs: list[Any], totals: list[Any]) -> Any:
        results, vjp = run(*inputs)
        return results, *pull(vjp, [], totals)

    forward = build(
        f"stage_{spec.stage}_forward_backward",
        whole,
        [inputs, totals],
        mesh=layout.meshes[spec.stage],
        outputs=(result_shardings(layout, spec, replicas), *_backward_layouts(layout, spec, replicas)),
        donate=(1,) if totals else (),
        pool=pool,
    )
    return StagePrograms(
        spec=spec,
        forward=forward,
        backward=None,
        zeros=zeros,
        reduce=_build_reduce(layout, spec, replicas, totals, pool) if replicas.params else None,
        needs=(),
        kept=(),
        grads=param_grads(layout, spec),
    )


def input_shapes(layout: Layout, spec: StageSpec, params: dict[int, NamedSharding]) -> list[Any]:
    """Of the forward program: params, operands, reads."""
    graph = layout.graph
    return [
        *(shape_of(graph.params[p], params[p]) for p in spec.params),
        *(shape_of(graph.operands[o], operand_sharding(layout, spec.stage, o)) for o in spec.operands),
        *(shape_of(graph.values[v], a) for v, a in zip(spec.reads, spec.arrives, strict=True)),
    ]


def operand_sharding(layout: Layout, stage: int, operand: int) -> NamedSharding:
    """Layout of an operand on a stage: as its first reader there has it."""
    for i in layout.plan.stage_layers(stage):
        layer = layout.graph.layers[i]
        if operand in layer.operands:
            return layout.on(stage, layout.layers[i].operands[layer.operands.index(operand)])
    return layout.on(stage)


def result_shardings(layout: Layout, spec: StageSpec, replicas: Replicas) -> list[NamedSharding]:
    """Layout of a micro-batch's results that a stage computes: as their writers have them."""
    graph, found = layout.graph, []
    for value in (graph.results[k] for k in spec.results):
        writer = graph.layers[graph.producer[value]]
        written = layout.layers[writer.index].writes[writer.writes.index(value)]
        found.append(layout.on(spec.stage, replicas.result_spec(value, written)))
    return found


def param_grads(layout: Layout, spec: StageSpec) -> tuple[NamedSharding, ...]:
    """Layout of gradients on a stage: as the first layer there that reads the parameter has them."""
    found: dict[int, NamedSharding] = {}
    for i in spec.layers:
        layer = layout.graph.layers[i]
        for p, grads in zip(layer.params, layout.layers[i].grads, strict=True):
            found.setdefault(p, layout.on(spec.stage, grads))
    return tuple(found[p] for p in spec.params)


def _with_vjp(
    layout: Layout, spec: StageSpec, inputs: Sequence[Any], replicas: Replicas
) -> Callable[..., tuple[list[Any], Any]]:
    """A stage as a function of its inputs: what it writes and its results, and their vjp."""
    first_operand, first_read = len(spec.params), len(spec.params) + len(spec.operands)
    results = [layout.graph.results[k] for k in spec.results]
    mesh, stored = layout.meshes[spec.stage], [s.sharding.spec for s in inputs[: len(spec.params)]]

    def forward(*args: Any) -> Any:
        operands = dict(zip(spec.operands, args[first_operand:first_read], strict=True))
        reads = dict(zip(spec.reads, args[first_read:], strict=True))

        def loss_part(params: list[Any], wanted: list[Any]) -> tuple[list[Any], list[Any]]:
            values = {**reads, **dict(zip(spec.wanted, wanted, strict=True))}
            ready = dict(zip(spec.params, params, strict=True))
            known = run_stage(layout, replicas, spec.layers, ready, operands, values)
            loss = layout.graph.results[0]
            ends = [replicas.result(layout.graph, loss, known[loss])] if spec.has_loss else []
            return [*(known[v] for v in spec.active), *ends], [known[v] for v in (*spec.writes, *results)]

        own = zip(spec.params, args, stored, strict=False)
        params = [replicas.view(p, array, mesh, layout_of) for p, array, layout_of in own]
        wanted = [reads[v] for v in spec.wanted]
        _, vjp, emitted = jax.vjp(loss_part, params, wanted, has_aux=True)
        return emitted, vjp

    return forward


def _trace(layout: Layout, spec: StageSpec, inputs: Sequence[Any]) -> _Traced:
    """Forward and vjp of a stage as one tape; says where the backward finds each residual."""
    replicas = replicas_of(layout, spec.stage)
    with jax.set_mesh(layout.meshes[spec.stage]):
        jaxpr, (_, vjp) = jax.make_jaxpr(_with_vjp(layout, spec, inputs, replicas), return_shape=True)(*inputs)
    tape, emitted = flatten(jaxpr), len(spec.writes) + len(spec.results)
    rebuilt = rebuildable(layout, spec, tape, emitted)
    known = {*tape.invars, *tape.consts, *rebuilt}
    residuals = list(dict.fromkeys(variables(tape.outvars[emitted:])))
    read = {*residuals, *live_eqns(tape.eqns, rebuilt)[1]}
    return _Traced(
        tape=tape,
        emitted=emitted,
        tree=jax.tree.structure(vjp),
        rebuilt=rebuilt,
        inputs=tuple(v for v in tape.invars if v in read),
        held=tuple(v for v in residuals if v not in known),
        replicas=replicas,
    )


def _backward(layout: Layout, spec: StageSpec, traced: _Traced) -> Any:
    """The backward program as a function of (inputs, held residuals, cotangents, accumulators)."""
    tape, pull = traced.tape, _pullback(layout, spec, traced.replicas)
    eqns, free = live_eqns(tape.eqns, traced.rebuilt)
    sources = [v for v in (*tape.invars, *tape.consts) if v in free]
    again = as_function(close(sources, traced.rebuilt, eqns), sources, tape.consts)

    def backward(inputs: list[Any], held: list[Any], cotangents: list[list[Any]], totals: list[Any]) -> Any:
        known = {**tape.consts, **dict(zip((*traced.inputs, *traced.held), (*inputs, *held), strict=True))}
        known.update(zip(traced.rebuilt, again(*(known[v] for v in sources if v not in tape.consts)), strict=True))
        vjp = jax.tree.unflatten(traced.tree, [_read(known, a) for a in traced.residuals])
        return pull(vjp, [sum(parts[1:], parts[0]) for parts in cotangents], totals)

    return backward


def _pullback(layout: Layout, spec: StageSpec, replicas: Replicas) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A function of (vjp, cotangents of active writes, accumulators): gradients added up, cotangents of wanted."""
    mesh, weight = layout.meshes[spec.stage], gradient_weight(layout)
    loss = layout.graph.values[layout.graph.results[0]]
    specs = [s.spec for s in _accumulated(layout, spec, replicas)]

    def pull(vjp: Any, ends: list[Any], totals: list[Any]) -> tuple[list[Any], list[Any]]:
        grads, wanted = vjp([*ends, *([jnp.asarray(weight, loss.dtype)] if spec.has_loss else [])])
        if totals:
            grads = [t + g.astype(t.dtype) for t, g in zip(totals, grads, strict=True)]
        return [constrain(g, mesh, s) for g, s in zip(grads, specs, strict=True)], wanted

    return pull


def _backward_layouts(
    layout: Layout, spec: StageSpec, replicas: Replicas
) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """Of the gradients and of the cotangents of wanted values."""
    back = [a for v, a in zip(spec.reads, spec.arrives, strict=True) if v in spec.wanted]
    return _accumulated(layout, spec, replicas), back


def _read(known: dict[Var, Any], atom: Any) -> Any:
    return jnp.asarray(atom.val, aval_shape(atom).dtype) if isinstance(atom, Literal) else known[atom]


def _cotangent_shapes(layout: Layout, spec: StageSpec) -> list[list[Any]]:
    """For each active write, one cotangent per stage that reads it with a gradient."""
    return [
        [shape_of(layout.graph.values[v], leave)] * len(spec.returns[v])
        for v, leave in zip(spec.writes, spec.leaves, strict=True)
        if v in spec.active
    ]


def _accumulated(layout: Layout, spec: StageSpec, replicas: Replicas) -> list[NamedSharding]:
    """Layout of gradients as they are accumulated: where replicas keep theirs apart, one of each."""
    own = zip(spec.params, param_grads(layout, spec), strict=True)
    return [layout.on(spec.stage, replicas.spec(p, g.spec)) for p, g in own]


def _build_zeros(
    layout: Layout, spec: StageSpec, replicas: Replicas, pool: Executor | None
) -> tuple[Program | None, list[jax.ShapeDtypeStruct]]:
    """The program that makes the accumulators, and their shapes; none with one micro-batch."""
    if layout.plan.num_microbatches == 1:
        return None, []
    own = zip(spec.params, layouts := _accumulated(layout, spec, replicas), strict=True)
    values = ((p, layout.graph.params[p], sharding) for p, sharding in own)
    shapes = [
        jax.ShapeDtypeStruct(replicas.shape(p, v.shape), accumulator_dtype(v.dtype), sharding=sharding)
        for p, v, sharding in values
    ]

    def zeros() -> list[Any]:
        return [jnp.zeros(s.shape, s.dtype) for s in shapes]

    name = f"stage_{spec.stage}_zeros"
    return build(name, zeros, [], mesh=layout.meshes[spec.stage], outputs=layouts, pool=pool), shapes


def _build_reduce(
    layout: Layout, spec: StageSpec, replicas: Replicas, totals: Sequence[Any], pool: Executor | None
) -> Program:
    """The program that adds up the replicas' gradients."""
    return build(
        f"stage_{spec.stage}_reduce",
        lambda totals: [replicas.summed(p, t) for p, t in zip(spec.params, totals, strict=True)],
        [list(totals)],
        mesh=layout.meshes[spec.stage],
        outputs=list(param_grads(layout, spec)),
        pool=pool,
    )
