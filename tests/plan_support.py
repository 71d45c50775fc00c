"""A plan to show, as a fixture of the tests of what shows plans."""

from __future__ import annotations

import pytest

from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy


@pytest.fixture
def plan() -> Plan:
    """Two stages, three micro-batches, one name that HTML must escape."""
    names = ("embed", "block_0", "<b>&block_1", "head")
    strategies = (Strategy(data=4), Strategy(data=2, tensor=2), Strategy(data=4), Strategy(data=4))
    return Plan(
        num_stages=2,
        num_microbatches=3,
        schedule="gpipe",
        batch_size=12,
        stage_devices=((0, 1, 2, 3), (4, 5, 6, 7)),
        layers=tuple(
            LayerPlan(name=n, stage=i // 2, strategy=s) for i, (n, s) in enumerate(zip(names, strategies, strict=True))
        ),
        prediction=Prediction(
            step_time_s=0.5,
            stage_time_s=(0.03, 0.06),
            link_time_s=(0.01,),
            iteration_time_s=(0.02, 0.01),
            peak_bytes=(3 * 2.0**30, 1 * 2.0**30),
            capacity_bytes=(4 * 2.0**30, 4 * 2.0**30),
            source="measured",
        ),
        certificate=Certificate(
            status="optimal", bound_s=0.5, engine="interval", seconds=0.1, candidates=9, baselines=(("data", 0.75),)
        ),
        device_kind="cpu",
    )
