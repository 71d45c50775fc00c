"""What a layer holds on a device beside its state: gradients, accumulators and what the forward keeps."""

from __future__ import annotations

from dataclasses import dataclass

from uniap_jax.core.costs import Candidate
from uniap_jax.core.profile import LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one layer on one device.

    Attributes:
        state: parameters and optimizer state, and the batch with the first layer.
        grads: gradients as they are accumulated.
        full_grads: gradients before they are scattered over the fsdp ways.
    """

    state: float
    grads: float
    full_grads: float


def beside_state(
    cost: LayerCost, held: Held, candidate: Candidate, platform: str, *, turned: bool = False
) -> tuple[float, float]:
    """(held all the time, held by each micro-batch in flight).

    In one program the compiler's own slope counts where it was asked for; it holds gradients, accumulators and kept
    values as far as they are alive at once. Otherwise gradients and kept values add up on CPUs and GPUs, where the
    weights' gradients are computed late, and the larger of the two counts on TPUs, where each takes the other's place.
    A pipeline stage holds what it has summed, and in the backward that adds to it one micro-batch's whole gradients;
    where the compiler was asked its slope holds both, and what one more layer computes again.

    Args:
        cost: of one micro-batch.
        held: state and gradients.
        candidate: stages and micro-batches.
        platform: of the devices.
        turned: whether the cost is that of one program for both directions, though there are several stages.
    """
    summed = held.grads if candidate.num_microbatches > 1 else 0.0
    if candidate.num_stages > 1 and not turned:
        if cost.marginal_bytes > 0:
            return cost.marginal_bytes, cost.kept_bytes
        return (held.grads + held.full_grads if summed else held.grads), cost.kept_bytes
    if cost.marginal_bytes > 0:
        return 0.0, cost.marginal_bytes
    alive = max(cost.kept_bytes, held.full_grads) if platform == "tpu" else cost.kept_bytes + held.full_grads
    return summed, alive


def by_itself(cost: LayerCost, grads: float) -> tuple[float, float]:
    """(kept values, working memory) of a layer that is charged by itself, not as one more of its stage.

    Args:
        cost: of one program for both directions.
        grads: gradients in that program.
    """
    if not cost.marginal_bytes:
        return cost.kept_bytes, cost.transient_bytes
    rest = max(0.0, cost.marginal_bytes + cost.transient_bytes - grads)
    kept = min(cost.kept_bytes, rest)
    return kept, rest - kept
