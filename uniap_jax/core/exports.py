"""A plan in the words of other tools: MaxText's settings, Flax's logical axis rules, JaxPP's stages. Imports no JAX.

These tools split all layers alike. A plan whose layers differ is refused until the caller says which layer's split is
to stand for all of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uniap_jax.core.errors import PlanMismatchError
from uniap_jax.core.strategy import DEGREES, Strategy

if TYPE_CHECKING:  # a plan exports itself with this module
    from uniap_jax.core.plan import Plan

AxisRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]

MESH_AXES = ("stage", *DEGREES)
"""Axes of the mesh that the exports speak of, slowest network first."""

FLAX_RULES: AxisRules = (
    ("batch", ("data", "fsdp", "expert")),
    ("vocab", "tensor"),
    ("mlp", "tensor"),
    ("heads", "tensor"),
    ("joined_kv", "tensor"),
    ("embed", "fsdp"),
    ("layers", "stage"),
    ("expert", "expert"),
    ("length", "context"),
    ("kv", None),
    ("norm", None),
)
"""Logical names as T5X and Flax's examples use them, and the mesh axes they are split over."""

_TENSOR = ("tensor", "tensor_sequence")
_BATCH = ("data", "fsdp", "expert")

MAXTEXT_RULES: AxisRules = (
    *((f"activation_batch{part}", _BATCH) for part in ("", "_attn", "_moe")),
    ("activation_embed_and_logits_batch", ("data", "stage", "fsdp", "expert")),
    *((f"activation_{name}", "context") for name in ("length", "length_attn", "length_moe", "q_length")),
    *((f"activation_norm_length{part}", ("tensor_sequence", "context")) for part in ("", "_moe")),
    *((f"activation_{name}", _TENSOR) for name in ("heads", "kv_heads", "mlp", "mlp_moe", "vocab")),
    ("activation_exp", "expert"),
    ("activation_stage", "stage"),
    *((name, _TENSOR) for name in ("mlp", "mlp_moe", "vocab", "heads", "q_heads", "kv_heads")),
    *((name, "fsdp") for name in ("embed", "embed_vocab", "embed_moe")),
    ("exp", "expert"),
    ("layers", "stage"),
)
"""Names of MaxText's `configs/base.yml`; rules of a config replace those of the same name there."""

MAXTEXT_AXES = {
    "stage": "pipeline",
    "data": "data",
    "fsdp": "fsdp",
    "expert": "expert",
    "context": "context",
    "tensor": "tensor",
    "tensor_sequence": "tensor_sequence",
}
"""Our axes, and what stands between `ici_` or `dcn_` and `_parallelism` in MaxText's settings."""

MAXTEXT_REMAT = {"all": "minimal_with_context", "dots": "minimal", "inputs": "full"}
"""MaxText's `remat_policy` for what a strategy keeps; it always computes something again, its fastest policy least."""

JAXPP_SCHEDULES = {"gpipe": "GPipe", "one_f_one_b": "Std1F1B"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxppStages:
    """What JaxPP needs to cut a model as the plan does.

    JaxPP's versions from August 2025 on want one more `pipeline_enter_stage` at the end of the last stage, on what the
    loss is taken of.

    Attributes:
        num_stages: of `jaxpp.MpmdMesh`'s dimension `mpmd`.
        enter_before: per stage but the first, its first layer: call `jaxpp.pipeline_enter_stage` on what it reads.
        layer_names: of those layers.
        schedule: class in `jaxpp.schedules`, made with `num_stages`.
        num_microbatches: leading dimension of the batch that `jaxpp.treduce` loops over; it adds up, so that a mean
            loss has to be divided by this number.
        mesh_axes: names and sizes of the mesh, the MPMD dimension first.
    """

    num_stages: int
    enter_before: tuple[int, ...]
    layer_names: tuple[str, ...]
    schedule: str
    num_microbatches: int
    mesh_axes: tuple[tuple[str, int], ...]


def common_strategy(plan: Plan, layer: int | None = None) -> Strategy:
    """The one split of all layers, or that of the layer which is to stand for all.

    Raises:
        PlanMismatchError: layers differ and none is named; or there is no such layer.
    """
    if layer is not None:
        if not 0 <= layer < len(plan.layers):
            raise PlanMismatchError(f"layer {layer} is not one of the {len(plan.layers)} layers", layer=layer)
        return plan.layers[layer].strategy
    groups: dict[Strategy, list[int]] = {}
    for index, one in enumerate(plan.layers):
        groups.setdefault(one.strategy, []).append(index)
    if len(groups) > 1:
        told = "; ".join(f"{s} for {len(ids)} layers, the first is {ids[0]}" for s, ids in groups.items())
        most = max(groups.values(), key=len)[0]
        raise PlanMismatchError(
            f"this plan splits its layers in {len(groups)} ways ({told}), and this export has one for all: name the "
            f"layer whose split is to stand for all, for example layer={most}, or pin one strategy when planning",
            strategies=tuple(map(str, groups)),
        )
    return next(iter(groups))


def mesh_shape(plan: Plan, layer: int | None = None) -> dict[str, int]:
    """Sizes of `MESH_AXES` under the common split; all of them, also those of size 1.

    Raises:
        PlanMismatchError: layers differ and none is named.
    """
    strategy = common_strategy(plan, layer)
    return {"stage": plan.num_stages, **{name: getattr(strategy, name) for name in DEGREES}}


def _only(rules: AxisRules, shape: dict[str, int]) -> AxisRules:
    """The rules without the axes of size 1."""
    found = []
    for name, axes in rules:
        wanted = (axes,) if isinstance(axes, str) else axes or ()
        kept = tuple(a for a in wanted if shape[a] > 1)
        found.append((name, None if not kept else kept[0] if len(kept) == 1 else kept))
    return tuple(found)


def logical_axis_rules(plan: Plan, layer: int | None = None) -> AxisRules:
    """Rules for `flax.linen.logical_axis_rules`, on a mesh of `mesh_shape`.

    Args:
        plan: the plan.
        layer: whose split stands for all, where they differ.

    Raises:
        PlanMismatchError: layers differ and none is named; or the optimizer's state alone is split (ZeRO 1 and 2),
            which rules for parameters cannot say; or activations change their layout inside a layer (sequence
            parallelism), which one rule per name cannot say.
    """
    strategy = common_strategy(plan, layer)
    if strategy.fsdp > 1 and strategy.zero != 3:
        raise PlanMismatchError(
            f"{strategy} splits the state of the optimizer and keeps parameters whole; logical axis rules name "
            "parameters and activations only. Plan with zero=3, or use step.shardings(), which has every leaf",
            strategy=str(strategy),
        )
    if strategy.sequence:
        raise PlanMismatchError(
            f"{strategy} splits activations along the sequence between tensor regions only; a rule holds everywhere. "
            f"Take tensor={strategy.tensor} without sequence",
            strategy=str(strategy),
        )
    return _only(FLAX_RULES, mesh_shape(plan, layer))


def maxtext_settings(plan: Plan, *, num_slices: int = 1, layer: int | None = None) -> dict[str, Any]:
    """Settings for MaxText: `key=value` of its command line, or a YAML file with `base_config: base.yml`.

    Axes go over the data-centre network (`dcn_`) from the outside: stages first, then data, then fsdp.

    Args:
        plan: the plan.
        num_slices: groups of devices that only the data-centre network joins.
        layer: whose split stands for all, where they differ.

    Raises:
        PlanMismatchError: layers differ and none is named; MaxText cannot say ZeRO 2; stages hold unlike numbers of
            the repeated layers; or the slices do not fit the axes.
    """
    strategy, shape = common_strategy(plan, layer), mesh_shape(plan, layer)
    if strategy.fsdp > 1 and strategy.zero != 3:
        if strategy.zero == 2:
            raise PlanMismatchError(
                f"{strategy}: MaxText has ZeRO 1 (shard_optimizer_over_data) and 3 (fsdp), not 2; plan with zero=1 or "
                "zero=3",
                strategy=str(strategy),
            )
        shape |= {"data": strategy.data * strategy.fsdp, "fsdp": 1}
    shape["tensor_sequence"] = 1
    if strategy.sequence:
        shape |= {"tensor": 1, "tensor_sequence": strategy.tensor}
    dcn = _over_slices(shape, num_slices)
    settings: dict[str, Any] = {f"ici_{MAXTEXT_AXES[a]}_parallelism": n // dcn[a] for a, n in shape.items()}
    settings |= {f"dcn_{MAXTEXT_AXES[a]}_parallelism": n for a, n in dcn.items()}
    settings["per_device_batch_size"] = plan.batch_size / plan.num_devices
    settings["remat_policy"] = MAXTEXT_REMAT[strategy.keep]
    if strategy.fsdp > 1 and strategy.zero == 1:
        settings["shard_optimizer_over_data"] = True
    if plan.num_stages > 1:
        settings["num_layers_per_pipeline_stage"] = _layers_per_stage(plan)
        settings["num_pipeline_microbatches"] = plan.num_microbatches
    elif plan.num_microbatches > 1:
        settings["gradient_accumulation_steps"] = plan.num_microbatches
        settings["per_device_batch_size"] /= plan.num_microbatches
    rules = _only(MAXTEXT_RULES, shape)
    settings["logical_axis_rules"] = [[n, [a] if isinstance(a, str) else list(a or ())] for n, a in rules]
    return settings


def _over_slices(shape: dict[str, int], num_slices: int) -> dict[str, int]:
    left, found = num_slices, dict.fromkeys(shape, 1)
    for axis in ("stage", "data", "fsdp"):
        found[axis] = math.gcd(left, shape[axis])
        left //= found[axis]
    if num_slices < 1 or left != 1:
        told = ", ".join(f"{a}={shape[a]}" for a in MESH_AXES)
        raise PlanMismatchError(
            f"{num_slices} slices cannot be laid over the outer axes of {told}: the others stay inside a slice; use a "
            "number of slices that divides stage × data × fsdp",
            num_slices=num_slices,
        )
    return found


def _layers_per_stage(plan: Plan) -> int:
    sizes = [len(_decoder_layers(plan).intersection(plan.stage_layers(i))) for i in range(plan.num_stages)]
    if len(set(sizes)) > 1 or plan.num_microbatches % plan.num_stages:
        raise PlanMismatchError(
            f"stages of {sizes} repeated layers and {plan.num_microbatches} micro-batches: MaxText wants equal stages "
            f"and a multiple of {plan.num_stages} micro-batches; plan with num_microbatches={plan.num_stages}, or with "
            "num_stages=1",
            stages=tuple(sizes),
            num_microbatches=plan.num_microbatches,
        )
    return sizes[0]


def _decoder_layers(plan: Plan) -> set[int]:
    """Layers whose names differ by numbers alone, the largest such group: MaxText counts neither embedding nor head."""
    groups: dict[str, list[int]] = {}
    for index, layer in enumerate(plan.layers):
        groups.setdefault(re.sub(r"\d+", "", layer.name), []).append(index)
    return set(sorted(groups.values(), key=len, reverse=True)[0])


def jaxpp_stages(plan: Plan, layer: int | None = None) -> JaxppStages:
    """The stages for JaxPP's `pipeline_enter_stage`, `MpmdMesh` and `treduce`.

    Args:
        plan: the plan.
        layer: whose split stands for all, where they differ; JaxPP's stages share one mesh.

    Raises:
        PlanMismatchError: layers differ and none is named; or stages share one layer, or take turns.
    """
    shape = mesh_shape(plan, layer)
    stages = [plan.stage_layers(stage) for stage in range(plan.num_stages)]
    if not all(stages):
        raise PlanMismatchError(
            f"stage {stages.index(())} holds no layer of its own: a loop over layers is one layer that stages share, "
            "and JaxPP marks stages between layers. Write the loop out, or plan with executor='stages'",
            stage=stages.index(()),
        )
    if plan.schedule not in JAXPP_SCHEDULES:
        raise PlanMismatchError(
            f"stages of this plan take turns on {len(plan.device_sets)} sets of devices, which these marks do not "
            "say; export the plan that it was interleaved from",
            schedule=plan.schedule,
        )
    first = tuple(layers[0] for layers in stages[1:])
    return JaxppStages(
        num_stages=plan.num_stages,
        enter_before=first,
        layer_names=tuple(plan.layers[i].name for i in first),
        schedule=JAXPP_SCHEDULES[plan.schedule],
        num_microbatches=plan.num_microbatches,
        mesh_axes=(("mpmd", plan.num_stages), *((a, shape[a]) for a in MESH_AXES[1:])),
    )
