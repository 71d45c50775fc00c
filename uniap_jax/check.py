"""A planned step beside the one-device step: losses, gradients and state, from the same start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from uniap_jax.api import compile_plan, estimate, local_cluster, solve, trace
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.plan import Plan
from uniap_jax.core.profile import Profile
from uniap_jax.core.reference import reference_gradients, with_gradients
from uniap_jax.core.serialize import plan_to_json
from uniap_jax.core.wide import is_narrow, wide_array, widened

TOLERANCE = {"loss": 1e-5, "grad": 1e-4}
"""Relative, for steps whose parameters are all 32-bit or wider."""
WHOLE_BATCH = {"loss": 1e-5, "grad": 1e-3}
"""Relative, where a statistic of the whole batch enters the loss: ahead of a normalisation the gradients of the
examples cancel, and what is left of a bias's is the rounding of their sum."""
LOW_PRECISION = {"loss": 2e-2, "grad": 2e-2}
"""Relative, where a parameter or an activation is narrower: another order of a bf16 sum differs by 2^-8."""
NOISE_FACTOR = 2.0
"""How many times as far as one device is from itself, rounded elsewhere or not at all, narrow gradients may be from it:
two programs that are as far from the truth may lie on either side of it."""
FLOOR = 1e-2
"""A leaf's gradient is compared against its own size, but never less than this share of the largest gradient: a
gradient that is zero in exact arithmetic (a bias ahead of a softmax) is all rounding. Times the tolerance it is 1e-6,
eight units in the last place of the largest gradient in 32 bits; a tenth of that is less than one."""


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
        grad_rel_diff: worst over the steps; where `narrow_grad_rel_diff` is set, of the step computed in 32 bits.
        grad_leaf: parameter where the gradient differs most.
        state_abs_diff: largest absolute difference of any floating leaf of the outputs after the last step.
        state_leaf: that leaf.
        per_step: one entry a step.
        ok: whether losses and gradients are within `tolerance`.
        tolerance: ("loss", "grad") relative tolerances that applied.
        plan: the plan that ran.
        notes: one sentence each.
        narrow_grad_rel_diff: worst over the steps of the step as written, where 16-bit rounding alone is above the
            tolerance: one device compiled with and without excess precision then differs from itself as much, and
            the plan is judged by the same step in 32 bits (`uniap_jax.core.wide`). None where it was not needed.
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
    narrow_grad_rel_diff: float | None = None

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
    unfold_scans: bool = False,
    **pins: Any,
) -> CheckReport:
    """Checks a step under a plan, or under the best plan that satisfies the pins.

    Args:
        build: returns (state, train_step, batch).
        devices: `jax.devices()` by default.
        plan: the plan to run; where None it is solved for from `profile` (published rates where that is None too).
        profile: a profile made before.
        steps: optimizer steps to compare.
        unfold_scans: as of `trace`.
        **pins: `num_stages`, `num_microbatches`, `schedule`, `strategy` of `solve`.

    Raises:
        InfeasibleError: no plan satisfies the pins for this model; says why.
        PlanMismatchError: the plan is for another model or number of devices.
    """
    state, train_step, batch = build()
    devices = list(jax.devices() if devices is None else devices)
    graph = trace(train_step, state, batch, unfold_scans=unfold_scans)
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


def _largest(array: Any) -> float:
    return float(np.abs(np.asarray(array, np.float64)).max(initial=0.0))


def leaf_differences(grads: Sequence[Any], others: Sequence[Any]) -> list[float]:
    """Per leaf |difference| / max(|leaf|, FLOOR × |largest leaf|), maximum norms."""
    floor = max(FLOOR * max(map(_largest, grads), default=0.0), 1e-30)
    return [_difference(a, b) / max(_largest(a), floor) for a, b in zip(grads, others, strict=True)]


def _compare(
    graph: LayerGraph, loss: Any, planned: Any, grads: Sequence[Any], planned_grads: Sequence[Any]
) -> StepDifference:
    apart = leaf_differences(grads, planned_grads)
    worst = max(range(len(apart)), key=lambda i: (apart[i], i), default=None)
    loss, planned = float(loss), float(planned)
    return StepDifference(
        loss=loss,
        planned_loss=planned,
        loss_rel_diff=_difference(loss, planned) / max(abs(loss), 1e-30),
        grad_rel_diff=0.0 if worst is None else apart[worst],
        grad_leaf="" if worst is None else graph.params[worst].name,
    )


def is_low_precision(graph: LayerGraph) -> bool:
    """Whether a parameter or an activation is a float of less than 32 bits."""
    return any(is_narrow(v.dtype) for v in (*graph.params, *graph.values))


def tolerance_of(graph: LayerGraph) -> dict[str, float]:
    """The tolerances that fit the narrowest floating type of parameters and activations, and how examples meet."""
    return LOW_PRECISION if is_low_precision(graph) else _wide_tolerance(graph)


def _wide_tolerance(graph: LayerGraph) -> dict[str, float]:
    return WHOLE_BATCH if graph.split_cause == "statistic" else TOLERANCE


class OneDevice:
    """The user's own step on one device, compiled once for all the plans that are compared with it.

    Args:
        graph: the captured step.
        device: where it runs; the default device where None.
    """

    def __init__(self, graph: LayerGraph, device: Any = None) -> None:
        self.graph, self.device = graph, device
        with jax.default_device(device):
            self.step = jax.jit(graph.step.flat)
            self.gradients = jax.jit(reference_gradients(graph))

    @functools.cached_property
    def rounded(self) -> Callable[..., tuple[Any, list[Any]]]:
        """The gradients compiled to round every 16-bit value: a program as right as `gradients`, rounded elsewhere."""
        options = {"xla_allow_excess_precision": False}
        with jax.default_device(self.device):
            return jax.jit(reference_gradients(self.graph), compiler_options=options)

    @functools.cached_property
    def widened(self) -> OneDevice:
        """The same step in 32 bits."""
        return OneDevice(widened(self.graph), self.device)


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

    Where 16-bit gradients differ by more than the tolerance, one device is compared with itself compiled otherwise and
    in 32 bits, and the plan is run once more with the same step in 32 bits: that tells rounding from a fault.

    Args:
        graph: the captured step.
        plan: the plan to run.
        args: arguments of the first call; the batch is used at every step.
        devices: devices of the plan; `jax.devices()` by default.
        steps: optimizer steps.
        one_device: of the same graph, where several plans are compared with it.
    """
    devices = list(jax.devices() if devices is None else devices)
    reference, limits = one_device or OneDevice(graph, devices[0]), tolerance_of(graph)
    leaves = graph.step.flatten(*args)
    found = _run_both(reference, plan, leaves, devices, steps)
    report = _report(graph, plan, found, limits)
    if report.ok or limits is not LOW_PRECISION or report.loss_rel_diff > limits["loss"]:
        return report
    noise = _noise(reference, found, leaves[1])
    floats = [list(map(wide_array, group)) for group in leaves]
    wide = _report(graph, plan, _run_both(reference.widened, plan, floats, devices, steps), _wide_tolerance(graph))
    note = (
        f"in 16 bits gradients differ by {report.grad_rel_diff:.1e} at {report.grad_leaf}; those of one device "
        f"from itself compiled otherwise, or in 32 bits, by {noise:.1e}; "
        f"in 32 bits the same plan differs by {wide.grad_rel_diff:.1e}"
    )
    if report.grad_rel_diff > NOISE_FACTOR * noise or not wide.ok:
        return replace(report, notes=(*report.notes, note))
    return replace(
        report,
        ok=True,
        grad_rel_diff=wide.grad_rel_diff,
        grad_leaf=wide.grad_leaf,
        narrow_grad_rel_diff=report.grad_rel_diff,
        tolerance=(limits["loss"], wide.tolerance[1]),
        notes=(*report.notes, note),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """What running a plan beside one device gave.

    Attributes:
        differences: per step.
        states: the planned state at which each step compared gradients.
        outs: of the last step.
        expected: of the last step on one device.
    """

    differences: list[StepDifference]
    states: list[list[Any]]
    outs: Sequence[Any]
    expected: Sequence[Any]


def _run_both(
    reference: OneDevice, plan: Plan, leaves: Sequence[Sequence[Any]], devices: Sequence[Any], steps: int
) -> _Found:
    graph, (state, batch) = reference.graph, leaves
    planned = compile_plan(with_gradients(graph), plan, devices=devices, donate=False)
    ours, theirs, extra = list(state), list(state), 1 + len(graph.params)
    differences, states, outs, expected = [], [], list[Any](), list[Any]()
    for _ in range(steps):
        loss, _ = reference.gradients(*theirs, *batch)
        states.append(planned.gather(ours))
        _, grads = reference.gradients(*states[-1], *batch)
        expected = reference.step(*theirs, *batch)
        outs = planned(ours, batch)
        outs, (planned_loss, *planned_grads) = outs[:-extra], outs[-extra:]
        differences.append(_compare(graph, loss, planned_loss, grads, planned_grads))
        ours, theirs = _next_state(graph, ours, outs), _next_state(graph, theirs, expected)
    return _Found(differences=differences, states=states, outs=outs, expected=expected)


def _noise(reference: OneDevice, found: _Found, batch: Sequence[Any]) -> float:
    """How far gradients of one device are from itself compiled otherwise or in 32 bits; worst over steps and leaves."""
    wide = reference.widened.gradients

    def apart(state: Sequence[Any]) -> float:
        own, rounded = reference.gradients(*state, *batch)[1], reference.rounded(*state, *batch)[1]
        _, true = wide(*map(wide_array, state), *map(wide_array, batch))
        return max((*leaf_differences(own, rounded), *leaf_differences(true, own)), default=0.0)

    return max(map(apart, found.states))


def _report(graph: LayerGraph, plan: Plan, found: _Found, limits: dict[str, float]) -> CheckReport:
    worst_state, state_leaf = 0.0, ""
    for value, a, b in zip(graph.step.outputs, found.expected, found.outs, strict=True):
        if _floating(a) and _difference(a, b) >= worst_state:
            worst_state, state_leaf = _difference(a, b), value.name
    worst = max(found.differences, key=lambda d: d.grad_rel_diff)
    loss_rel = max(d.loss_rel_diff for d in found.differences)
    return CheckReport(
        loss_rel_diff=loss_rel,
        grad_rel_diff=worst.grad_rel_diff,
        grad_leaf=worst.grad_leaf,
        state_abs_diff=worst_state,
        state_leaf=state_leaf,
        per_step=tuple(found.differences),
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
