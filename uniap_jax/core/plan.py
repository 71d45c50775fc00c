"""The plan: decisions and what was predicted and proved about them. Plain data, no options."""

from __future__ import annotations

from dataclasses import dataclass, field

from uniap_jax.core.plan_text import format_plan
from uniap_jax.core.strategy import Strategy

SCHEDULES = ("gpipe", "one_f_one_b")
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
    """

    step_time_s: float
    stage_time_s: tuple[float, ...] = ()
    link_time_s: tuple[float, ...] = ()
    iteration_time_s: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    capacity_bytes: tuple[float, ...] = ()
    source: str = "described"


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
    """

    status: str
    bound_s: float = 0.0
    gap: float = 0.0
    engine: str = ""
    seconds: float = 0.0
    candidates: int = 0
    baselines: tuple[tuple[str, float | None], ...] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete parallel plan for one train step on one set of devices.

    Attributes:
        num_stages: pipeline stages P.
        num_microbatches: micro-batches per step c.
        schedule: "gpipe" or "one_f_one_b"; of no effect with one stage.
        batch_size: global batch the plan was made for.
        stage_devices: per stage, indices of its devices in the cluster, in mesh order.
        layers: per layer in trace order.
        prediction: what the cost model expects.
        certificate: what was proved.
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
    graph_fingerprint: str = ""
    device_kind: str = ""
    version: int = 1

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        return sum(len(d) for d in self.stage_devices)

    def stage_layers(self, stage: int) -> tuple[int, ...]:
        """Indices of the layers of one stage, in trace order."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.stage == stage)

    def __str__(self) -> str:
        return format_plan(self)
