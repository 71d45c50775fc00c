"""From numbers to tables: what every choice costs. One door: `estimate`."""

from __future__ import annotations

from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.machine import Cluster
from uniap_jax.core.profile import Profile
from uniap_jax.cost_model.assemble import TableModel
from uniap_jax.cost_model.parts import with_memory_parts
from uniap_jax.cost_model.rows import RowModel
from uniap_jax.cost_model.unmeasured import unmeasured

__all__ = ["TableModel", "estimate", "unmeasured", "with_memory_parts"]


def estimate(
    graph: LayerGraph,
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    keeps: tuple[str, ...] = ("all", "inputs"),
) -> TableModel:
    """Cost tables of every candidate, built when asked for.

    Args:
        graph: from the frontend.
        cluster: the devices.
        profile: of this graph on this kind of device; None prices everything from the cluster's rates.
        keeps: what strategies may keep for the backward pass.

    Returns:
        A `CostModel`.

    Raises:
        ProfileError: the profile belongs to another model, batch or kind of device.
    """
    if profile is not None:
        profile.check_belongs(graph_fingerprint=graph.fingerprint, cluster=cluster, batch_size=graph.batch_size)
    make = TableModel if graph.step.by_rows is None else RowModel
    return make(graph, cluster, profile, keeps=keeps)
