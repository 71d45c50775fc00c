"""The plan: decisions and what was predicted and proved about them. Plain data, no options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from uniap_jax.core.exports import AxisRules, JaxppStages, jaxpp_stages, logical_axis_rules, maxtext_settings
from uniap_jax.core.observed import NOTHING, Observed
from uniap_jax.core.page.document import notebook_frame, plan_page
from uniap_jax.core.plan_text import format_plan
from uniap_jax.core.strategy import Strategy

SCHEDULES = ("gpipe", "one_f_one_b")
"""Those that are searched."""
INTERLEAVED = "interleaved"
"""Stages take turns on fewer sets of devices: stage s runs on set s modulo their number; see `core.interleave`."""
EXECUTORS = ("stages", "program")
STATUSES = ("optimal", "feasible", "infeasible", "no_plan_in_time", "pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Where one layer runs and how it is split.

    Attributes:
        name: of the layer, for people.
        stage: pipeline stage, 0 first.
        strategy: intra-layer split on the stage's sub-mesh.
    """

    name: str
    stage: int
    strategy: Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What the predicted peak of a stage's device is made of, in bytes; the sum is the peak.

    Attributes:
        parameters: as stored between steps.
        optimizer: the rest of the training state.
        gradients: and where they are accumulated.
        activations: kept for the backward by the micro-batches in flight.
        transients: working memory of the layer that runs, the batch, and what else the tables count.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    transients: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model expects of the plan.

    Attributes:
        step_time_s: seconds per step (the paper's TPI).
        stage_time_s: per stage, forward + backward of one micro-batch.
        link_time_s: per boundary between neighbouring stages, seconds per micro-batch.
        iteration_time_s: per stage, once-per-step seconds (gradient synchronisation, update).
        peak_bytes: per stage, peak memory per device.
        capacity_bytes: per stage, memory allowed per device.
        source: "measured", "compiled" or "described": where the numbers come from.
        memory: per stage, what `peak_bytes` is made of; () where it was not taken apart.
    """

    step_time_s: float
    stage_time_s: tuple[float, ...] = ()
    link_time_s: tuple[float, ...] = ()
    iteration_time_s: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    capacity_bytes: tuple[float, ...] = ()
    source: str = "described"
    memory: tuple[MemoryParts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan for the same step, and what it would cost; `Plan.with_alternative` makes it a plan.

    Attributes:
        what: sets it apart, for people: "4 stages, 8 micro-batches" or "without data=8".
        num_stages: pipeline stages.
        num_microbatches: micro-batches per step.
        schedule: "gpipe" or "one_f_one_b".
        stage_devices: per stage, as in `Plan`.
        layers: per layer in trace order.
        prediction: what the cost model expects.
        bound_s: no plan of this description is faster.
    """

    what: str
    num_stages: int
    num_microbatches: int
    schedule: str
    stage_devices: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]
    prediction: Prediction
    bound_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One thing that keeps the step from being shorter.

    Attributes:
        kind: "memory" (of a stage: with more of it another plan would be faster), "stage" or "link" (the slowest one,
            which sets the pace of the pipeline), "fill" (stages that wait while the pipeline fills and drains), "once"
            (the slowest stage's once-per-step part).
        index: of the stage, or of the boundary after stage `index`; 0 for "fill".
        seconds: of the step time that it is behind; for memory, what unlimited memory would save.
        share: of the step time; for memory, how full the stage is.
    """

    kind: str
    index: int
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best plan of a problem that differs in one thing.

    Attributes:
        what: "10 % more memory" or "unlimited memory".
        step_time_s: of its best plan found; never above the plan's own.
        bound_s: no plan of that problem is faster.
        num_stages: of that plan.
        num_microbatches: of that plan.
    """

    what: str
    step_time_s: float
    bound_s: float
    num_stages: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What the search knows of one candidate.

    Attributes:
        num_stages: P.
        num_microbatches: c.
        schedule: one of SCHEDULES.
        bound_s: no plan of this candidate is faster; None where it has no plan at all.
        outcome: "chosen", "pruned" (its bound is no better than the plan), "no plan" or "open" (time was up first).
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    bound_s: float | None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was proved, by whom, how long it took.

    Attributes:
        status: one of STATUSES; "optimal" means the whole search over all candidates, not one MIP.
        bound_s: no plan is faster than this under the same tables.
        gap: (step_time - bound) / step_time, 0 when proved.
        engine: what solved it, for example "interval+cbc".
        seconds: wall time of the search.
        candidates: (stages, micro-batches) pairs looked at.
        baselines: (engine, step time in seconds or None where it found no plan) over the same tables.
        notes: one sentence each.
        binding: what keeps the step from being shorter, what matters most first.
        what_ifs: best plans of the same problem with one thing changed.
        alternatives: other plans, fastest first; where they were asked for.
        searched: per candidate, in order of their bounds; () where nothing was searched.
    """

    status: str
    bound_s: float = 0.0
    gap: float = 0.0
    engine: str = ""
    seconds: float = 0.0
    candidates: int = 0
    baselines: tuple[tuple[str, float | None], ...] = ()
    notes: tuple[str, ...] = field(default=())
    binding: tuple[Binding, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    searched: tuple[Searched, ...] = ()

    def of_another(self, step_time_s: float, note: str) -> Certificate:
        """What the same search proved of a plan that is not its best: feasible, with the gap to the bound of all."""
        return Certificate(
            status="feasible",
            bound_s=self.bound_s,
            gap=max(0.0, (step_time_s - self.bound_s) / step_time_s) if step_time_s > 0 else 0.0,
            engine=self.engine,
            seconds=self.seconds,
            candidates=self.candidates,
            baselines=self.baselines,
            notes=(*self.notes, note),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete parallel plan for one train step on one set of devices.

    Attributes:
        num_stages: pipeline stages P.
        num_microbatches: micro-batches per step c.
        schedule: "gpipe", "one_f_one_b" or "interleaved"; of no effect with one stage.
        batch_size: global batch the plan was made for.
        stage_devices: per stage, indices of its devices in the cluster, in mesh order; stages have devices of their
            own, or under "interleaved" take turns on the same sets of them.
        layers: per layer in trace order.
        prediction: what the cost model expects.
        certificate: what was proved.
        executor: what runs several stages: "stages", a program for each of them, or "program", one for all, whose
            stages hold equal shares of one run of equal layers. Layers before the run stand on the first stage and
            layers after it on the last, but run on all devices; a loop over layers is one layer that all stages share.
        graph_fingerprint: of the LayerGraph.
        device_kind: of the cluster, for example "cpu" or "TPU v5 lite".
        version: of this schema.
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    batch_size: int
    stage_devices: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]
    prediction: Prediction
    certificate: Certificate
    executor: str = "stages"
    graph_fingerprint: str = ""
    device_kind: str = ""
    version: int = 1

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        return sum(len(d) for d in self.device_sets)

    @property
    def device_sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of devices: one per stage, fewer where stages are interleaved."""
        return tuple(dict.fromkeys(self.stage_devices))

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        """Indices of the layers of one stage, in trace order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.stage == stage)

    @property
    def num_parts(self) -> int:
        """Sets of devices that programs are compiled for: one where one program holds all stages."""
        return 1 if self.executor == "program" else self.num_stages

    def with_alternative(self, number: int) -> Plan:
        """The plan of `certificate.alternatives[number]`: feasible, with the gap to the bound of all plans.

        Raises:
            IndexError: there are not so many.
        """
        other, proof = self.certificate.alternatives[number], self.certificate
        return replace(
            self,
            num_stages=other.num_stages,
            num_microbatches=other.num_microbatches,
            schedule=other.schedule,
            stage_devices=other.stage_devices,
            layers=other.layers,
            executor="stages",
            prediction=other.prediction,
            certificate=proof.of_another(
                other.prediction.step_time_s, f"an alternative to the best plan: {other.what}"
            ),
        )

    def __str__(self) -> str:
        return format_plan(self)

    def to_html(self, observed: Observed = NOTHING) -> str:
        """One self-contained page: no network, light and dark; write it to a file and open it.

        Args:
            observed: what the compiler and the clock said, to be put beside what was predicted.
        """
        return plan_page(self, observed)

    def _repr_html_(self) -> str:
        """The page, for a notebook's cell."""
        return notebook_frame(self.to_html())

    def to_logical_axis_rules(self, *, layer: int | None = None) -> AxisRules:
        """Rules for `flax.linen.logical_axis_rules`; see `core.exports.logical_axis_rules`."""
        return logical_axis_rules(self, layer)

    def to_maxtext(self, *, num_slices: int = 1, layer: int | None = None) -> dict[str, Any]:
        """Settings for MaxText; see `core.exports.maxtext_settings`."""
        return maxtext_settings(self, num_slices=num_slices, layer=layer)

    def to_jaxpp_stages(self, *, layer: int | None = None) -> JaxppStages:
        """Stages for JaxPP; see `core.exports.jaxpp_stages`."""
        return jaxpp_stages(self, layer)
