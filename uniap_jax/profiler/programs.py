"""The programs that are measured: forward and backward of one layer, laid out as the runtime lays it out.

With one stage both directions are one program, as in the planned step; what a pipeline stage runs is in `piece`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.core.examples import example
from uniap_jax.core.graph import Layer, LayerGraph
from uniap_jax.core.jaxprs import Tape, close, live_eqns, open_jaxpr
from uniap_jax.core.rewrite_layout import laid_out
from uniap_jax.core.sharding import LayerSharding, layer_sharding
from uniap_jax.core.strategy import Strategy
from uniap_jax.core.vjp import is_float, layer_avals, layer_function

RAW_KEYS = {(2,): "threefry2x32", (4,): "rbg"}
"""Kinds of keys that are plain numbers, by their last dimension."""
UNOPTIMISED: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA's CPU compiler."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Direction:
    """A compiled program and arguments to run it with.

    Attributes:
        compiled: the executable.
        arguments: placed arrays; empty where the devices are not here or have not the memory.
        memory: bytes per device: arguments, outputs, temporaries, aliased; empty where the backend does not say.
    """

    compiled: Any
    arguments: tuple[Any, ...]
    memory: dict[str, float]

    @property
    def needed_bytes(self) -> float:
        """Of one device, while it runs; 0 where the backend does not say."""
        return sum(self.memory.values()) - 2 * self.memory.get("aliased", 0.0)

    def __call__(self) -> Any:
        """Hands one run over; its results need not be ready."""
        return self.compiled(*self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One layer under one strategy, and where it runs.

    Attributes:
        graph: traced at the micro-batch to measure.
        layer: of that graph.
        strategy: on a stage's sub-mesh.
        mesh: the sub-mesh.
        mapped: whether it is one of replicas that the runtime maps the layer over, so that gradients meet once a step.
    """

    graph: LayerGraph
    layer: Layer
    strategy: Strategy
    mesh: Mesh
    mapped: bool = False

    def sharding(self) -> LayerSharding:
        """Layout of the layer's arrays on the sub-mesh."""
        return layer_sharding(self.graph, self.layer, self.strategy)

    def view(self, params: Sequence[Any]) -> list[Any]:
        """Parameters as the layer's function takes them."""
        return [p[None] for p in params] if self.mapped else list(params)


def compile_fused(case: Case, arrays: Arrays | None) -> tuple[Direction]:
    """Forward and backward as one program: `(params, operands, reads, cotangents) -> (writes, gradients)`.

    The writes are results, as the next layer reads them: where nothing is kept but the inputs, a forward whose result
    nobody wants would be dropped, and the one that is computed again would look like the only one.

    Args:
        case: what to compile and where.
        arrays: of the arguments to run it with; None where it is only compiled.
    """
    where, run = case.sharding(), case_function(case)

    def both(params: Any, operands: Any, reads: Any, cotangents: Any) -> Any:
        outs, pull = vjp(run, params, drawn(operands), reads)
        return [*outs, *_pinned_grads(pull(cotangents), case, where)]

    writes = _float_specs(case, where)
    shapes = (*layer_avals(case.layer), float_writes(case))
    specs = (where.stored, where.operands, where.reads, writes)
    return (compile_on(case, both, shapes, specs, [*writes, *_grad_specs(case, where)], arrays),)


def drawn(operands: Sequence[Any]) -> list[Any]:
    """Operands with keys that are hashed, as they are within a step of one stage.

    What is drawn from a key that is an argument XLA's CPU compiler draws once for the forward and for the one that is
    computed again; from a key that is hashed it draws twice, and masks of dropout cost as much as matrix products.
    """

    def hashed(keys: Any) -> Any:
        flat = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys.reshape(-1))
        return flat.reshape(keys.shape)

    def computed(o: Any) -> Any:
        if jnp.issubdtype(o.dtype, jax.dtypes.prng_key):
            return hashed(o)
        impl = RAW_KEYS.get(o.shape[-1:]) if o.dtype == jnp.uint32 else None
        return o if impl is None else jax.random.key_data(hashed(jax.random.wrap_key_data(o, impl=impl)))

    return [computed(o) for o in operands]


def vjp(run: Callable[..., list[Any]], params: Any, operands: Any, reads: Any) -> tuple[list[Any], Any]:
    """Differentiable results, and the pull-back to parameters and differentiable reads."""
    flags = [is_float(r) for r in reads]

    def of(params: Any, moving: Any) -> list[Any]:
        it = iter(moving)
        outs = run(params, operands, [next(it) if f else r for f, r in zip(flags, reads, strict=True)])
        return [o for o in outs if is_float(o)]

    return jax.vjp(of, params, [r for r, f in zip(reads, flags, strict=True) if f])


def case_function(case: Case) -> Callable[..., list[Any]]:
    """The layer with its layout pinned at its edges."""
    layer = laid_out(case.graph, case.layer, case.strategy, case.mesh)
    function, where = layer_function(layer, case.strategy.keep), case.sharding()

    def run(params: Sequence[Any], operands: Sequence[Any], reads: Sequence[Any]) -> list[Any]:
        p = [pin(a, case.mesh, s) for a, s in zip(params, where.params, strict=True)]
        r = [pin(a, case.mesh, s) for a, s in zip(reads, where.reads, strict=True)]
        return [pin(a, case.mesh, s) for a, s in zip(function(p, operands, r), where.writes, strict=True)]

    def replica(params: Sequence[Any], operands: Sequence[Any], reads: Sequence[Any]) -> list[Any]:
        given = [o if kind == "state" else o[None] for o, kind in zip(operands, kinds, strict=True)]
        axes = (0, [None if kind == "state" else 0 for kind in kinds], 0)
        return [w[0] for w in jax.vmap(run, in_axes=axes)(list(params), given, [r[None] for r in reads])]

    kinds = [case.graph.operands[o].kind for o in case.layer.operands]
    return replica if case.mapped else run


def pin(array: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Pins the layout of an intermediate; scalars, keys and single devices have only one."""
    if mesh.size == 1 or not array.shape or not jnp.issubdtype(array.dtype, np.generic):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _pinned_grads(pulled: Any, case: Case, where: LayerSharding) -> Any:
    grads, into = pulled
    return [*(pin(g, case.mesh, s) for g, s in zip(grads, where.grads, strict=True)), *into]


def _grad_specs(case: Case, where: LayerSharding) -> list[PartitionSpec]:
    return [*where.grads, *_read_specs(case, where)]


def _read_specs(case: Case, where: LayerSharding) -> list[PartitionSpec]:
    """Of the gradients of what the layer reads."""
    reads = layer_avals(case.layer)[2]
    return [s for s, a in zip(where.reads, reads, strict=True) if is_float(a)]


def float_writes(case: Case) -> list[Any]:
    """Shapes of what the layer writes and has a gradient."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.layer.jaxpr.out_avals if is_float(a)]


def _float_specs(case: Case, where: LayerSharding) -> list[PartitionSpec]:
    return [s for s, a in zip(where.writes, case.layer.jaxpr.out_avals, strict=True) if is_float(a)]


def as_function(tape: Tape, inputs: Sequence[Any], outs: Sequence[Any]) -> Callable[..., list[Any]]:
    """The part of a tape that computes `outs`, as a function of one list."""
    eqns, _ = live_eqns(tape.eqns, outs)
    jaxpr = close([*inputs, *tape.consts], list(outs), eqns)

    def run(args: Sequence[Any]) -> list[Any]:
        return list(jax.core.eval_jaxpr(open_jaxpr(jaxpr), (), *args, *tape.consts.values()))

    return run


def compile_on(
    case: Case,
    function: Callable[..., Any],
    shapes: Sequence[Sequence[Any]],
    specs: Sequence[Sequence[Any]],
    out_specs: Sequence[PartitionSpec | None],
    arrays: Arrays | None,
    *,
    donate: tuple[int, ...] = (),
) -> Direction:
    """Compiles on the sub-mesh and places arguments; None leaves an output's layout to the compiler.

    On CPUs what is not run is compiled without LLVM's optimisation: buffers are assigned before it.
    """
    mesh = case.mesh
    unread = arrays is None and mesh.devices.flat[0].platform == "cpu"

    def named(spec: Any) -> Any:
        return NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec

    shardings = tuple([named(s) for s in group] for group in specs)
    with jax.set_mesh(mesh):
        outs = [named(s) for s in out_specs]
        jitted = jax.jit(function, in_shardings=shardings, out_shardings=outs, donate_argnums=donate)
        lowered = jitted.lower(*[list(g) for g in shapes])
        compiled = lowered.compile(UNOPTIMISED) if unread else lowered.compile()
    program = Direction(compiled=compiled, arguments=(), memory=memory_of(compiled))
    if arrays is None or program.needed_bytes > arrays.device_bytes:
        return program
    return replace(program, arguments=_placed(arrays, shapes, shardings))


def _placed(arrays: Arrays, shapes: Sequence[Any], shardings: Sequence[Any]) -> tuple[list[Any], ...]:
    return tuple(
        [arrays.place(s, h) for s, h in zip(group, where, strict=True)]
        for group, where in zip(shapes, shardings, strict=True)
    )


def memory_of(compiled: Any) -> dict[str, float]:
    """Bytes per device of a compiled program; empty where the backend does not say."""
    found = compiled.memory_analysis()
    if found is None:
        return {}
    return {
        "arguments": float(found.argument_size_in_bytes),
        "outputs": float(found.output_size_in_bytes),
        "temporaries": float(found.temp_size_in_bytes),
        "aliased": float(found.alias_size_in_bytes),
    }


class Arrays:
    """Host arrays by shape, made once, placed where a program wants them.

    Args:
        device_bytes: what a device has; a program that needs more gets no arguments.
    """

    def __init__(self, device_bytes: float = math.inf) -> None:
        self.device_bytes = device_bytes
        self._made: dict[tuple[tuple[int, ...], str], Any] = {}

    def place(self, shape: Any, sharding: Any) -> Any:
        """An array of this shape and dtype, laid out."""
        key = (tuple(shape.shape), str(shape.dtype))
        if key not in self._made:
            self._made[key] = example(shape)
        return jax.device_put(self._made[key], sharding)
