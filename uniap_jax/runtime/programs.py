"""Compiled programs: fixed shapes, fixed shardings, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from uniap_jax.core.graph import Value
from uniap_jax.core.jax_compat import ClosedJaxpr, Var
from uniap_jax.core.jaxprs import open_jaxpr
from uniap_jax.runtime.presence import is_here


class Program:
    """A compiled function of flat lists of arrays, called with the lists; never compiles again.

    Args:
        name: for people and traces.
        lowered: before compilation.
        pool: compiles it in the background; here and now where None.
    """

    __slots__ = ("_compiled", "_pending", "lowered", "name")

    def __init__(self, name: str, lowered: Any, pool: Executor | None = None) -> None:
        self.name, self.lowered = name, lowered
        self._pending = pool.submit(lowered.compile) if pool is not None else None
        self._compiled = lowered.compile() if pool is None else None

    @property
    def compiled(self) -> Any:
        """The executable; waits for the compiler where it has not finished."""
        if self._pending is not None:
            self._compiled, self._pending = self._pending.result(), None
        return self._compiled

    @property
    def is_here(self) -> bool:
        """Whether this process has devices of it."""
        return True

    def __call__(self, *lists: Any) -> Any:
        """Runs it; queued on the devices, nothing waits."""
        return (self._compiled or self.compiled)(*lists)

    @property
    def output_shardings(self) -> Any:
        """As compiled."""
        return self.compiled.output_shardings


class Elsewhere(Program):
    """A program on devices of other processes: nothing runs here, and every output is None.

    Args:
        name: for people and traces.
        outputs: tree of the outputs.
    """

    __slots__ = ("_outputs",)

    def __init__(self, name: str, outputs: Any) -> None:
        self.name = name
        self._outputs = jax.tree.map(lambda _: None, outputs)

    @property
    def is_here(self) -> bool:
        """Whether this process has devices of it."""
        return False

    def __call__(self, *lists: Any) -> Any:
        """None for every output, in lists of its own."""
        return jax.tree.map(lambda _: None, self._outputs, is_leaf=lambda x: x is None)

    @property
    def output_shardings(self) -> Any:
        """Those that matter here: none."""
        return self()


def build(
    name: str,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    mesh: Mesh,
    outputs: Any = None,
    donate: tuple[int, ...] = (),
    pool: Executor | None = None,
) -> Program:
    """Traces, lowers and compiles on a mesh of our own, whatever mesh the caller has set.

    On a mesh of which no device is this process's it is only traced.

    Args:
        name: of the program.
        function: of as many arguments as `inputs`.
        inputs: per argument a list of `jax.ShapeDtypeStruct`s with shardings.
        mesh: the devices.
        outputs: shardings of the outputs; None leaves one to the compiler.
        donate: arguments whose buffers the outputs may take.
        pool: compiles in the background. Tracing stays in the caller's thread, under the caller's settings.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = named.__qualname__ = name
    with jax.set_mesh(mesh):
        if not is_here(mesh.devices.flat):
            return Elsewhere(name, jax.eval_shape(named, *inputs))
        lowered = jax.jit(named, out_shardings=outputs, donate_argnums=donate).lower(*inputs)
        return Program(name, lowered, pool)


def shape_of(value: Value, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """A value as a traced argument."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def aval_shape(atom: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """A jaxpr's variable as a traced argument."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=sharding)


def known_mesh(sharding: NamedSharding) -> Mesh:
    """The devices of a layout."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def is_differentiable(dtype: Any) -> bool:
    """Whether values of a dtype have cotangents."""
    return not is_key(dtype) and bool(jnp.issubdtype(dtype, np.inexact))


def constrain(array: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Pins the layout of an intermediate; scalars, keys and single devices have only one."""
    if mesh.size == 1 or not array.shape or is_key(array.dtype):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def as_function(jaxpr: ClosedJaxpr, inputs: Sequence[Var], consts: dict[Var, Any]) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of those inputs that are not constants of the trace."""
    fixed = {v: _constant(consts[v]) for v in inputs if v in consts}

    def function(*args: Any) -> list[Any]:
        rest = iter(args)
        return list(
            jax.core.eval_jaxpr(open_jaxpr(jaxpr), (), *(fixed[v] if v in fixed else next(rest) for v in inputs))
        )

    return function


def _constant(array: Any) -> Any:
    """A constant free of the device that it happened to be made on."""
    return array if is_key(array.dtype) else np.asarray(array)
