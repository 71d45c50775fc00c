"""A planned step beside the one-device step: losses, gradients and state, from the same start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from uniap_jax.api import compile_plan, estimate, local_cluster, solve, trace
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Profile
from uniap_jax.core.reference import reference_gradients, with_gradients
from uniap_jax.core.serialize import plan_to_json

TOLERANCE = {"loss": 1e-5, "grad": 1e-4}
"""Relative, for steps whose parameters are all 32-bit or wider."""
WHOLE_BATCH = {"loss": 1e-5, "grad": 1e-3}
"""Relative, where a statistic of the whole batch enters the loss: ahead of a normalisation the gradients of the
examples cancel, and what is left of a bias's is the rounding of their sum."""
LOW_PRECISION = {"loss": 2e-2, "grad": 2e-2}
"""Relative, where a parameter or an activation is narrower: another order of a bf16 sum differs by 2^-8."""
FLOOR = 1e-3
"""A leaf's gradient is compared against its own size, but never less than this share of the largest gradient: a
gradient that is zero in exact arithmetic (a bias ahead of a softmax) is all rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Differences at one step.

    Losses are compared along two trajectories, each from its own state. Gradients are compared at the planned step's
    state, so that what an optimizer makes of rounding (Adam divides by it) does not count as an error of the gradient.

    Attributes:
        loss: of one device.
        planned_loss: of the planned step.
        loss_rel_diff: |planned - one device| / |one device|.
        grad_rel_diff: largest over leaves of |difference| / max(|leaf|, FLOOR × |largest leaf|), maximum norms.
        grad_leaf: the leaf where it is largest.
    """

    loss: float
    planned_loss: float
    loss_rel_diff: float
    grad_rel_diff: float
    grad_leaf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `check` found.

    Attributes:
        loss_rel_diff: worst over the steps.
        grad_rel_diff: worst over the steps.
        grad_leaf: parameter where the gradient differs most.
        state_abs_diff: largest absolute difference of any floating leaf of the outputs after the last step.
        state_leaf: that leaf.
        per_step: one entry a step.
        ok: whether losses and gradients are within `tolerance`.
        tolerance: ("loss", "grad") relative tolerances that applied.
        plan: the plan that ran.
        notes: one sentence each.
    """

    loss_rel_diff: float
    grad_rel_diff: float
    grad_leaf: str
    state_abs_diff: float
    state_leaf: str
    per_step: tuple[StepDifference, ...]
    ok: bool
    tolerance: tuple[float, float]
    plan: Plan
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `uniap-jax check --json` prints it."""
        return {**asdict(self), "plan": plan_to_json(self.plan)}


def check(
    build: Callable[[], tuple[Any, Callable[..., Any], Any]],
    *,
    devices: Sequence[Any] | None = None,
    plan: Plan | None = None,
    profile: Profile | None = None,
    steps: int = 3,
    **pins: Any,
) -> CheckReport:
    """Checks a step under a plan, or under the best plan that satisfies the pins.

    Args:
        build: returns (state, train_step, batch).
        devices: `jax.devices()` by default.
        plan: the plan to run; where None it is solved for from `profile` (published rates where that is None too).
        profile: a profile made before.
        steps: optimizer steps to compare.
        **pins: `num_stages`, `num_microbatches`, `schedule`, `strategy` of `solve`.

    Raises:
        InfeasibleError: no plan satisfies the pins for this model; says why.
        PlanMismatchError: the plan is for another model or number of devices.
    """
    state, train_step, batch = build()
    devices = list(jax.devices() if devices is None else devices)
    graph = trace(train_step, state, batch)
    if plan is None:
        plan = solve(estimate(graph, local_cluster(devices), profile), baselines=False, **pins)
    return check_plan(graph, plan, (state, batch), devices=devices, steps=steps)


def _floating(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(getattr(value, "dtype", np.dtype(type(value))), jax.numpy.floating))


def _difference(a: Any, b: Any) -> float:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape:
        return float("inf")
    same_nan = np.isnan(x) & np.isnan(y)
    gap = np.abs(np.where(same_nan, 0.0, x) - np.where(same_nan, 0.0, y))
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def _compare(
    graph: LayerGraph, loss: Any, planned: Any, grads: Sequence[Any], planned_grads: Sequence[Any]
) -> StepDifference:
    largest = max((float(np.abs(np.asarray(g, np.float64)).max(initial=0.0)) for g in grads), default=0.0)
    worst, leaf = 0.0, ""
    for value, a, b in zip(graph.params, grads, planned_grads, strict=True):
        size = max(float(np.abs(np.asarray(a, np.float64)).max(initial=0.0)), FLOOR * largest, 1e-30)
        relative = _difference(a, b) / size
        if relative >= worst:
            worst, leaf = relative, value.name
    loss, planned = float(loss), float(planned)
    return StepDifference(
        loss=loss,
        planned_loss=planned,
        loss_rel_diff=_difference(loss, planned) / max(abs(loss), 1e-30),
        grad_rel_diff=worst,
        grad_leaf=leaf,
    )


def tolerance_of(graph: LayerGraph) -> dict[str, float]:
    """The tolerances that fit the narrowest floating type of parameters and activations, and how examples meet."""
    floats = [v.dtype for v in (*graph.params, *graph.values) if jax.numpy.issubdtype(v.dtype, jax.numpy.floating)]
    if any(np.dtype(d).itemsize < 4 for d in floats):
        return LOW_PRECISION
    return WHOLE_BATCH if graph.split_cause == "statistic" else TOLERANCE


class OneDevice:
    """The user's own step on one device, compiled once for all the plans that are compared with it.

    Args:
        graph: the captured step.
        device: where it runs; the first of `jax.devices()` by default.
    """

    def __init__(self, graph: LayerGraph, device: Any = None) -> None:
        with jax.default_device(device):
            self.step = jax.jit(graph.step.flat)
            self.gradients = jax.jit(reference_gradients(graph))


def check_plan(
    graph: LayerGraph,
    plan: Plan,
    args: Sequence[Any],
    *,
    devices: Sequence[Any] | None = None,
    steps: int = 3,
    one_device: OneDevice | None = None,
) -> CheckReport:
    """Runs a plan and the user's own step on one device from the same start and compares them.

    Args:
        graph: the captured step.
        plan: the plan to run.
        args: arguments of the first call; the batch is used at every step.
        devices: devices of the plan; `jax.devices()` by default.
        steps: optimizer steps.
        one_device: of the same graph, where several plans are compared with it.
    """
    devices = list(jax.devices() if devices is None else devices)
    planned = compile_plan(with_gradients(graph), plan, devices=devices, donate=False)
    state, batch = graph.step.flatten(*args)
    reference = one_device or OneDevice(graph, devices[0])
    ours, theirs = list(state), list(state)
    differences, outs, expected = [], [], []
    for _ in range(steps):
        loss, _ = reference.gradients(*theirs, *batch)
        _, grads = reference.gradients(*planned.gather(ours), *batch)
        expected = reference.step(*theirs, *batch)
        outs = planned(ours, batch)
        extra = 1 + len(graph.params)
        outs, (planned_loss, *planned_grads) = outs[:-extra], outs[-extra:]
        differences.append(_compare(graph, loss, planned_loss, grads, planned_grads))
        ours, theirs = _next_state(graph, ours, outs), _next_state(graph, theirs, expected)
    worst_state, state_leaf = 0.0, ""
    for value, a, b in zip(graph.step.outputs, expected, outs, strict=True):
        if _floating(a) and _difference(a, b) >= worst_state:
            worst_state, state_leaf = _difference(a, b), value.name
    limits = tolerance_of(graph)
    worst = max(differences, key=lambda d: d.grad_rel_diff)
    loss_rel = max(d.loss_rel_diff for d in differences)
    return CheckReport(
        loss_rel_diff=loss_rel,
        grad_rel_diff=worst.grad_rel_diff,
        grad_leaf=worst.grad_leaf,
        state_abs_diff=worst_state,
        state_leaf=state_leaf,
        per_step=tuple(differences),
        ok=loss_rel <= limits["loss"] and worst.grad_rel_diff <= limits["grad"],
        tolerance=(limits["loss"], limits["grad"]),
        plan=plan,
        notes=(*graph.notes, *plan.certificate.notes),
    )


def _next_state(graph: LayerGraph, state: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    following = list(state)
    for leaf, value in zip(graph.step.output_leaf, outputs, strict=True):
        if leaf is not None:
            following[leaf] = value
    return following
