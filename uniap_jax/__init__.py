"""Parallel plans for JAX train steps, found by one joint optimisation and run as planned.

>>> import uniap_jax as uniap
>>> step = uniap.parallelize(train_step)  # doctest: +SKIP
>>> state = step.place(state, batch)  # doctest: +SKIP
>>> state, metrics = step(state, batch)  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uniap_jax.api import (
        Parallelized,
        compile_plan,
        estimate,
        load,
        local_cluster,
        mark_layer,
        parallelize,
        profile,
        save,
        solve,
        trace,
        value_and_grad,
    )
    from uniap_jax.core.cluster import Cluster, load_cluster
    from uniap_jax.core.errors import (
        ExecutionError,
        InfeasibleError,
        NoPlanInTimeError,
        PlanMismatchError,
        ProfileError,
        SolverError,
        StrategyError,
        TraceError,
        UniapError,
    )
    from uniap_jax.core.graph import LayerGraph
    from uniap_jax.core.plan import Plan
    from uniap_jax.core.strategy import Strategy
    from uniap_jax.planner.interleave import interleave

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "ExecutionError",
    "InfeasibleError",
    "LayerGraph",
    "NoPlanInTimeError",
    "Parallelized",
    "Plan",
    "PlanMismatchError",
    "ProfileError",
    "SolverError",
    "Strategy",
    "StrategyError",
    "TraceError",
    "UniapError",
    "compile_plan",
    "estimate",
    "interleave",
    "load",
    "load_cluster",
    "local_cluster",
    "mark_layer",
    "parallelize",
    "profile",
    "save",
    "solve",
    "trace",
    "value_and_grad",
]

_HOMES = {
    "Cluster": "core.cluster",
    "LayerGraph": "core.graph",
    "Plan": "core.plan",
    "Strategy": "core.strategy",
    "interleave": "planner.interleave",
    "load_cluster": "core.cluster",
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "core.errors"),
}


def __getattr__(name: str) -> Any:
    """Imports a public name where it is first used: the command line and the planner start without JAX."""
    if name not in __all__:
        raise AttributeError(f"module 'uniap_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"uniap_jax.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
