"""What people write themselves: one jit with shardings chosen by rules on names and shapes."""

from __future__ import annotations

import functools
import importlib
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.runtime.trial import row_seconds

COLUMN = re.compile(
    r"(qkv|query|key|value|/q/|/k/|/v/|/wi(_\d)?/|up|c_attn|c_fc|fc1|/w1|/w3|gate_proj|up_proj|intermediate/dense).*kernel"
)
"""Weights [in, out] whose outputs are independent of each other: heads, columns of the first layer of an MLP."""
ROW = re.compile(r"(/out/|attention/output|/o/|/wo/|down|c_proj|fc2|/w2|down_proj|\d/output/dense).*kernel")
"""Weights [in, out] that read what COLUMN wrote."""
EMBEDDING = re.compile(r"(embedding|/embed)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByHand:
    """A jitted step with its state and batch in place.

    Attributes:
        step: called with state and batch.
        state: laid out.
        batch: laid out.
    """

    step: Callable[..., Any]
    state: Any
    batch: Any


def data_parallel(train_step: Callable[..., Any], state: Any, batch: Any, devices: Sequence[jax.Device]) -> ByHand:
    """Batch over all devices, state on every one."""
    return _jit(train_step, state, batch, _mesh(devices, len(devices), 1), lambda path, shape: PartitionSpec())


def fsdp(train_step: Callable[..., Any], state: Any, batch: Any, devices: Sequence[jax.Device]) -> ByHand:
    """Batch over all devices, every large leaf of the state over its longest dimension that divides."""
    count = len(devices)

    def rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        fitting = [d for d, size in enumerate(shape) if size % count == 0]
        if not fitting or np.prod(shape) < 1024:
            return PartitionSpec()
        longest = max(fitting, key=lambda d: shape[d])
        return PartitionSpec(*("data" if d == longest else None for d in range(len(shape))))

    return _jit(train_step, state, batch, _mesh(devices, count, 1), rule)


def tensor(
    train_step: Callable[..., Any], state: Any, batch: Any, devices: Sequence[jax.Device], *, ways: int
) -> ByHand:
    """Megatron's split of attention, MLP and embedding over `ways` devices, batch over the others.

    Raises:
        ValueError: no leaf has a name that the rules know.
    """
    found: list[str] = []

    def rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        if len(shape) != 2:
            return PartitionSpec()
        dim = 1 if COLUMN.search(path) else 0 if ROW.search(path) or EMBEDDING.search(path) else None
        if dim is None or shape[dim] % ways:
            return PartitionSpec()
        found.append(path)
        return PartitionSpec(*("tensor" if d == dim else None for d in range(2)))

    made = _jit(train_step, state, batch, _mesh(devices, len(devices) // ways, ways), rule)
    if not found:
        raise ValueError("no weight has a name that Megatron's rules know")
    return made


def parallax(
    train_step: Callable[..., Any], state: Any, batch: Any, devices: Sequence[jax.Device], *, model: Any, inputs: Any
) -> ByHand:
    """google-parallax's automatic layout of a linen model's parameters over two ways, batch over the others.

    Raises:
        ModuleNotFoundError: it is not installed.
        AssertionError: it does not know one of the model's operations.
    """
    library = importlib.import_module("parallax")
    mesh = _mesh(devices, len(devices) // 2, 2)
    with jax.set_mesh(mesh):
        made = library.create_sharded_model(
            model, inputs, library.ShardingStrategy.AUTO, data_axis_name="data", model_axis_name="tensor"
        )
    leaves = jax.tree_util.tree_leaves_with_path(made["params"])
    specs = {"/" + jax.tree_util.keystr(p, simple=True, separator="/"): leaf.sharding.spec for p, leaf in leaves}

    def rule(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return next((spec for name, spec in specs.items() if path.endswith(name)), PartitionSpec())

    return _jit(train_step, state, batch, mesh, rule)


def peak_bytes(made: ByHand) -> int:
    """Memory of the compiled step on one device."""
    analysis = made.step.lower(made.state, made.batch).compile().memory_analysis()
    return program_bytes(analysis)


def program_bytes(analysis: Any) -> int:
    """What one device holds while a program runs: arguments, results that are not arguments, temporaries."""
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def time_in_turns(runs: dict[str, ByHand], rounds: int) -> dict[str, float]:
    """Median seconds per step. A turn times a row of steps that follow others of the same contender, as in training.

    The first round warms up.
    """
    states = {name: run.state for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)

    def once(name: str) -> None:
        states[name], metrics = runs[name].step(states[name], runs[name].batch)
        jax.block_until_ready((states[name], metrics))

    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(row_seconds(functools.partial(once, name)))
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def _mesh(devices: Sequence[jax.Device], data: int, tensor_ways: int) -> Mesh:
    return Mesh(np.asarray(devices, dtype=object).reshape(data, tensor_ways), ("data", "tensor"))


def _jit(
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    mesh: Mesh,
    rule: Callable[[str, tuple[int, ...]], PartitionSpec],
) -> ByHand:
    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, rule(name, jax.numpy.shape(leaf)))

    layout = jax.tree_util.tree_map_with_path(sharding, state)
    split = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(train_step, out_shardings=(layout, None), donate_argnums=0)
    copied = jax.tree.map(jax.numpy.copy, state)  # the step consumes what it is given
    return ByHand(step=step, state=jax.device_put(copied, layout), batch=jax.device_put(batch, split))
