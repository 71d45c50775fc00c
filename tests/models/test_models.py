"""Models written elsewhere, as their users train them, under the kinds of plan there are, against one device.

`scripts/` holds one model a file: `build()` returns (state, train_step, batch), small, with random weights. Those that
need flax's `examples` folder look for it in `FLAX_EXAMPLES`, those of other packages run where these are installed.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import uniap_jax as uniap
from dims_support import collectives
from uniap_jax.check import check_plan
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.reference import with_gradients
from uniap_jax.core.strategy import enumerate_strategies, parse_strategy

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGES = {"pypi_mamba2": "mamba2_jax", "pypi_nano_moe": "nano_moe"}
MODELS = tuple(sorted(p.stem for p in SCRIPTS.glob("*.py")))
WHOLE_BATCH = ("flaxex_nnx_scan", "flaxex_resnet_bn", "hf_resnet", "pypi_nano_moe")
"""A statistic of the whole batch enters the loss: micro-batches would compute something else, and are refused."""

PLANS = (
    (1, 1, "data=8"),
    (1, 1, "fsdp=8"),
    (1, 1, "fsdp=8,zero=2"),
    (1, 1, "fsdp=8,zero=1"),
    (1, 1, "tensor=2"),
    (1, 1, "data=8,keep=inputs"),
    (2, 1, "data=4"),
    (2, 2, "data=4"),
)
"""Stages, micro-batches, strategy."""

DEFAULT = {
    ("hf_gpt2", 1, 1, "fsdp=8,zero=2"),
    ("hf_gpt2", 2, 2, "data=4"),
    ("hf_t5", 1, 1, "tensor=2"),
    ("hf_resnet", 1, 1, "fsdp=8,zero=1"),
    ("hf_bert_remat", 1, 1, "data=8,keep=inputs"),
    ("hf_llama", 1, 1, "tensor=2"),
    ("hf_vit", 2, 1, "data=4"),
    ("flaxex_gemma_nnx", 1, 1, "fsdp=8"),
    ("flaxex_nnx_scan", 1, 1, "data=8"),
    ("pypi_mamba2", 1, 1, "tensor=2"),
    ("pypi_nano_moe", 2, 1, "data=4"),
}
"""Every kind of plan and of model once; the other pairs are slow."""


def _pairs() -> list[Any]:
    every = [
        (m, *p)
        for m in MODELS
        for p in PLANS
        if not (p[1] > 1 and m in WHOLE_BATCH) and not (p[0] > 1 and m == "flaxex_nnx_scan")  # one loop, one layer
    ]
    return [pytest.param(*c, marks=() if c in DEFAULT else pytest.mark.slow, id="-".join(map(str, c))) for c in every]


def load(name: str) -> Any:
    """A script as a module; skips where what it is made of is not here."""
    if name.startswith("flaxex") and "FLAX_EXAMPLES" not in os.environ:
        pytest.skip("FLAX_EXAMPLES names no folder of flax's examples")
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the model's authors
        spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=4)
def traced(name: str) -> tuple[LayerGraph, Any, Any]:
    """A model's graph, state and batch."""
    module = load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, train_step, batch = module.build()
        return uniap.trace(train_step, state, batch), state, batch


def planned(graph: LayerGraph, strategy: str, *, stages: int = 1, microbatches: int = 1) -> Any:
    """The plan that a pinned strategy gives, from published rates."""
    return uniap.solve(
        uniap.estimate(graph),
        baselines=False,
        num_stages=stages,
        num_microbatches=microbatches,
        strategy=parse_strategy(strategy),
    )


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=() if m in {d[0] for d in DEFAULT} else pytest.mark.slow) for m in MODELS]
)
def test_every_parameter_is_in_a_layer(name: str) -> None:
    graph, _, _ = traced(name)
    used = {p for layer in graph.layers for p in layer.params}
    assert used == set(range(len(graph.params)))
    assert len(graph.layers) >= (1 if name == "flaxex_nnx_scan" else 2)
    assert all(a < b for a, b, _ in graph.edges)


@pytest.mark.parametrize(("name", "stages", "microbatches", "strategy"), _pairs())
def test_plan_equals_one_device(
    name: str, stages: int, microbatches: int, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    graph, state, batch = traced(name)
    plan = planned(graph, strategy, stages=stages, microbatches=microbatches)
    report = check_plan(graph, plan, (state, batch), steps=2)
    assert report.ok, (report.loss_rel_diff, report.grad_rel_diff, report.grad_leaf)
    captured = capfd.readouterr()
    assert "nvoluntary full rematerialization" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loop_is_planned_turn_by_turn(stages: int) -> None:
    """Flax's own `nnx.scan` over layers, with statistics and keys that change inside."""
    module = load("flaxex_nnx_scan")
    state, train_step, batch = module.build()
    graph = uniap.trace(train_step, state, batch, unfold_scans=True)
    assert len(graph.layers) == 5  # and the loss
    report = check_plan(graph, planned(graph, f"data={4 // stages}", stages=stages), (state, batch), steps=2)
    assert report.ok, (report.loss_rel_diff, report.grad_rel_diff, report.grad_leaf)


def test_micro_batches_of_normalised_batches_are_refused() -> None:
    graph, _, _ = traced("hf_resnet")
    with pytest.raises(ValueError, match=r"num_microbatches=2") as caught:
        planned(graph, "data=4", stages=2, microbatches=2)
    assert getattr(caught.value, "possible", None) == (1,)
    assert graph.split_reason


def test_search_stays_small_and_pins_every_zero_stage() -> None:
    graph, _, _ = traced("hf_gpt2")
    costs = uniap.estimate(graph)
    assert len(costs.strategies(1)) <= 40  # type: ignore[attr-defined]
    assert len(set(enumerate_strategies(8, keeps=("all", "inputs"), zeros=(1, 2, 3)))) == 2 * (4 + 3 * 6)
    for zero in (1, 2, 3):
        plan = planned(graph, f"fsdp=8,zero={zero}")
        assert {(c.strategy.fsdp, c.strategy.zero) for c in plan.layers} == {(8, zero)}


@pytest.mark.parametrize(
    ("name", "fused"),
    [("hf_llama", ()), ("hf_gpt2", ((3, 32), (3, 1, 16, 16), (3, 16, 1, 16))), ("flaxex_lm1b", ())],
)
def test_tensor_parallelism_moves_what_megatron_moves(name: str, fused: tuple[tuple[int, ...], ...]) -> None:
    """Shoeybi et al., 2019, section 3: 2 all-reduces of one activation forward and 2 backward in each block.

    The split vocabulary adds one forward, where the table is looked up, and one backward, below the head. What else
    moves are parts of fused projections, stored in rows, on their way to the heads and back, and their biases'
    gradients, and never an activation.
    """
    graph, _, _ = traced(name)
    step = uniap.compile_plan(graph, planned(graph, "data=4,tensor=2"))
    (program,) = step.programs
    moved = [c for c in collectives(program.compiled.as_text()) if "tensor" in c.axes]
    activation = (8 // 4, 16, 32)
    assert Counter(c.op for c in moved if c.shape == activation) == {"all-reduce": 2 * (2 + 2) + 2}
    others = [c for c in moved if c.shape != activation]
    assert {c.shape for c in others if c.op != "all-reduce"} == set(fused)
    assert all(c.nbytes <= 2 * 16 * 4 for c in others if c.op == "all-reduce")
    assert all(c.axes == "tensor" for c in moved)


MIXED = {
    0: ("data=8", lambda p: 16 * p),
    1: ("fsdp=8,zero=1", lambda p: 4 * p + 12 * p / 8),
    2: ("fsdp=8,zero=2", lambda p: 2 * p + 14 * p / 8),
    3: ("fsdp=8,zero=3", lambda p: 16 * p / 8),
}
"""ZeRO (Rajbhandari et al., 2020, section 3.1): bytes of a device for p parameters on 8 devices: 2 for the parameter,
2 for its gradient, 12 for the 32-bit copy and two moments."""


def master_adam(learning_rate: float) -> optax.GradientTransformation:
    """Adam of 16-bit parameters with 32-bit copies, as mixed-precision training has it."""
    adam = optax.adam(learning_rate)

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return wide(params), adam.init(wide(params))

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        master, inner = state
        changes, inner = adam.update(wide(grads), inner, master)
        master = optax.apply_updates(master, changes)
        return jax.tree.map(lambda m, p: m.astype(p.dtype) - p, master, params), (master, inner)

    return optax.GradientTransformation(init, update)


@lru_cache(maxsize=1)
def mixed_llama() -> tuple[LayerGraph, Any, Any]:
    """Llama in bf16 whose every parameter divides by eight."""
    module = load("hf_llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, params = module.make_model(jnp.bfloat16)
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        batch, tx = module.make_batch(), master_adam(1e-3)

        def train_step(state: Any, batch: Any) -> Any:
            params, opt = state
            key = jax.random.key(0)
            loss, grads = jax.value_and_grad(lambda p: module.loss_fn(model, p, batch, key))(params)
            changes, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, changes), opt), {"loss": loss}

        state = (params, tx.init(params))
        return uniap.trace(train_step, state, batch), state, batch


@pytest.mark.parametrize("zero", MIXED)
def test_bytes_of_a_device_under_zero(zero: int) -> None:
    graph, state, batch = mixed_llama()
    count = sum(p.size for p in graph.params)
    strategy, expected = MIXED[zero]
    step = uniap.compile_plan(with_gradients(graph), planned(graph, strategy), donate=False)
    leaves, batch_leaves = graph.step.flatten(state, batch)
    placed = step.place(list(leaves), list(batch_leaves))
    outputs = step(placed, batch_leaves)
    grads = outputs[-len(graph.params) :]
    first = jax.devices()[0]

    def held(arrays: Any) -> int:
        shards = [s for a in arrays if a.ndim for s in a.addressable_shards if s.device == first]
        return sum(s.data.nbytes for s in shards)

    assert held(jax.tree.leaves(placed)) + held(grads) == expected(count)
    replaced = [outputs[i] for i, leaf in enumerate(graph.step.output_leaf) if leaf is not None]
    assert held(replaced) + held(grads) == expected(count)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)
