"""`ParallelStep`: a planned train step, called as the user's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from uniap_jax.core.errors import OUT_OF_MEMORY, ExecutionError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.jax_compat import no_mesh
from uniap_jax.core.plan import Certificate, Plan
from uniap_jax.core.plan_text import format_bytes
from uniap_jax.runtime.evaluate import OnAllDevices, Spreader, spread
from uniap_jax.runtime.programs import Program
from uniap_jax.runtime.state import Placer, fits, gather_leaf

log = logging.getLogger("uniap_jax")


class Executor(Protocol):
    """What runs a plan: `SingleStage`, `Pipeline` or `UniformProgram`."""

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program; compiles those that have not been used yet."""
        ...

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """Flat outputs of the step from placed leaves."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Homes:
    """Where a plan keeps the arrays of a step.

    Attributes:
        plan: the decisions.
        state_shardings: of every state leaf.
        batch_shardings: of every batch leaf.
        create: `create(create_state, args)`: leaves of a new state, each computed only where it lives.
        device: the first of the plan.
        places_batch: whether batch leaves are brought to `batch_shardings` before the executor gets them.
    """

    plan: Plan
    state_shardings: tuple[NamedSharding, ...]
    batch_shardings: tuple[NamedSharding, ...]
    create: Callable[[Callable[..., Any], Sequence[Any]], list[Any]]
    device: Any
    places_batch: bool


class ParallelStep:
    """A train step that runs as planned: same signature, same pytrees out, ordinary `jax.Array`s.

    Programs are compiled at their first use, for fixed shapes and shardings; no call ever compiles them again.

    Args:
        graph: of the whole batch.
        homes: where its arrays live.
        run: what runs it.
        donated: state leaves whose buffers are given up.
    """

    def __init__(self, graph: LayerGraph, homes: Homes, run: Executor, *, donated: Sequence[int]) -> None:
        self._graph, self._homes, self._run, self._donated = graph, homes, run, tuple(donated)
        self._place = Placer(graph.step.state, homes.state_shardings, donated)
        self._spread: Spreader | None = None

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self._homes.plan

    def with_certificate(self, certificate: Certificate) -> ParallelStep:
        """The same programs, with another account of how their plan was found."""
        homes = replace(self._homes, plan=replace(self.plan, certificate=certificate))
        return ParallelStep(self._graph, homes, self._run, donated=self._donated)

    @property
    def graph(self) -> LayerGraph:
        """The captured step."""
        return self._graph

    @property
    def executor(self) -> Executor:
        """What runs the plan."""
        return self._run

    def __call__(self, *args: Any) -> Any:
        """One training step.

        Raises:
            PlanMismatchError: the arguments have another structure or other shapes than planned for.
            ExecutionError: the state was given up to an earlier call, or the devices have too little memory.
        """
        return self._graph.step.unflatten(self.on_leaves(*self._graph.step.flatten(*args)), *args)

    def on_leaves(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """One training step on the leaves of state and batch, in flat order; returns the leaves of its outputs.

        Raises:
            PlanMismatchError: a leaf has another shape than planned for.
            ExecutionError: the state was given up to an earlier call, or the devices have too little memory.
        """
        try:
            with no_mesh():
                return self._run(self._place(state), self._placed_batch(batch))
        except jax.errors.JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            raise _out_of_memory(self.plan, str(error).splitlines()[0]) from error

    def _placed_batch(self, batch: Sequence[Any]) -> list[Any]:
        """Batch leaves as the programs want them: an array on other devices is moved, numpy goes in as it is."""
        if not self._homes.places_batch:
            return list(batch)
        return [x if fits(x, s) else jax.device_put(x, s) for x, s in zip(batch, self.batch_shardings, strict=True)]

    def place(self, *args: Any) -> Any:
        """The non-batch arguments laid out as planned, in the user's structure; a tuple where there are several."""
        state, _ = self._graph.step.flatten(*args)
        return self._graph.step.state_result(self.place_leaves(state))

    def place_leaves(self, state: Sequence[Any]) -> list[Any]:
        """The leaves of the state, in flat order, laid out as planned; those that lie so already are the same."""
        with no_mesh():
            return self._place(state, quiet=True)

    def init(self, create_state: Callable[..., Any], *args: Any) -> Any:
        """A new state that is sharded from the start: no device computes or holds more than what it keeps.

        Args:
            create_state: returns the step's non-batch argument.
            *args: its arguments.

        Raises:
            PlanMismatchError: it returns other leaves than the plan was made for.
        """
        with no_mesh():
            return self._graph.step.state_result(self._homes.create(create_state, args))

    def gather(self, state: Any, device: Any = None) -> Any:
        """A copy of a tree of arrays on one device; the first of the plan by default."""
        target = device if device is not None else self._homes.device
        return jax.tree.map(lambda leaf: gather_leaf(leaf, target), state)

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit` for functions of the state that are not the train step: evaluation, inference, averages.

        With one stage a plain `jax.jit` takes the state as well. The state of several stages lives on several
        sub-meshes, which no one program can take: here its leaves are spread over all devices of the plan first (each
        holds its share, at one copy between devices per leaf), and kept so until the next step replaces them.

        Args:
            function: of any arguments; those that are not on some of the devices only are passed as they are.
            **options: of `jax.jit`.

        Example:
            >>> evaluate = step.jit(lambda state, batch: loss(state.params, batch))  # doctest: +SKIP
            >>> evaluate(state, batch)  # doctest: +SKIP
        """
        return OnAllDevices(function, self._devices, options)

    @property
    def _devices(self) -> Mesh:
        """All devices of the plan along one axis."""
        widest_first = sorted(self.in_shardings, key=lambda s: -len(s.device_set))
        devices = dict.fromkeys(d for s in widest_first for d in s.mesh.devices.flat)
        return Mesh(np.asarray(list(devices), dtype=object), ("all",))

    def spread(self, state: Any) -> Any:
        """A state whose leaves are on all devices of the plan: for checkpoints and evaluation over several processes.

        Leaves that are on all devices already come back as they are. Others are copied, each device keeps its share;
        every process has to call this together. The step takes the result as any state, and lays it out again.

        Args:
            state: as the step returns it.
        """
        if self._spread is None:
            self._spread = Spreader(self._devices)
        with no_mesh():
            return jax.tree.map(self._spread, state)

    def abstract_state(self) -> Any:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for checkpoints.

        Over several processes all leaves are on all devices, as from `spread`: no checkpoint library reads or writes
        arrays of which a process has all and another one nothing.
        """
        mesh, several = self._devices, jax.process_count() > 1
        shapes = [
            jax.ShapeDtypeStruct(
                v.shape, v.dtype, sharding=spread(v.shape, mesh) if several and len(s.device_set) < mesh.size else s
            )
            for v, s in zip(self._graph.step.state, self.in_shardings, strict=True)
        ]
        return self._graph.step.state_result(shapes)

    def shardings(self) -> Any:
        """`NamedSharding` of every state leaf, in the user's structure: for `jax.jit`, `jax.device_put` and orbax.

        With several stages the leaves of different stages lie on different devices, which one plain `jax.jit` refuses.
        """
        return self._graph.step.state_result(list(self.in_shardings))

    @property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        """Layout of every state leaf, in flat order."""
        return self._homes.state_shardings

    @property
    def batch_shardings(self) -> tuple[NamedSharding, ...]:
        """Layout of every batch leaf, in flat order, that saves the step from moving it."""
        return self._homes.batch_shardings

    @property
    def batch_sharding(self) -> NamedSharding:
        """Layout of the first batch leaf; fits every leaf that the same layers read."""
        return self.batch_shardings[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every compiled program; compiles those that have not been used yet."""
        return self._run.programs

    def lower(self, *args: Any) -> Any:
        """The lowered program of the step, a tuple of them for several stages; arguments are only checked."""
        if args:
            self._graph.step.flatten(*args)
        lowered = tuple(p.lowered for p in self.programs)
        return lowered[0] if len(lowered) == 1 else lowered

    def memory_analysis(self) -> Any:
        """Of the compiled program, a dict by name for several stages, as `jax.stages.Compiled.memory_analysis`."""
        analyses = {p.name: p.compiled.memory_analysis() for p in self.programs}
        return analyses.get("train_step", analyses)

    def __repr__(self) -> str:
        return f"ParallelStep({self.plan.num_stages} stages, {self.plan.num_microbatches} micro-batches)"


def _out_of_memory(plan: Plan, told: str) -> ExecutionError:
    expected = plan.prediction.peak_bytes
    stage = max(range(len(expected)), key=expected.__getitem__, default=0)
    peak, limit = (format_bytes(v[stage]) if v else "nothing" for v in (expected, plan.prediction.capacity_bytes))
    return ExecutionError(
        f"the devices ran out of memory, where the plan expects {peak} of {limit} on its fullest stage "
        f"({plan.prediction.source} numbers): {told}. Compare with what the compiler needs (verify=True, or check) and "
        "plan again with a memory_limit lower by the difference; the state may have been given up to this step",
        stage=stage,
        predicted_bytes=expected,
    )
