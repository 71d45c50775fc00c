"""Peaks of stages from the sizes of their programs, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniap_jax.cli.verify import program_bytes, resident_bytes, stage_peak
from uniap_jax.core.graph import Value
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.strategy import Strategy


def sizes(argument: float, output: float, temp: float, alias: float = 0.0) -> dict[str, float]:
    return {"argument_bytes": argument, "output_bytes": output, "temp_bytes": temp, "alias_bytes": alias}


def make_plan(schedule: str) -> Plan:
    return Plan(
        num_stages=2,
        num_microbatches=4,
        schedule=schedule,
        batch_size=8,
        stage_devices=((0,), (1,)),
        layers=tuple(LayerPlan(name=str(i), stage=i, strategy=Strategy()) for i in range(2)),
        prediction=Prediction(step_time_s=1.0),
        certificate=Certificate(status="pinned"),
    )


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 4), ("one_f_one_b", 2)])
def test_a_backward_holds_state_gradients_and_what_is_in_flight(schedule: str, in_flight: int) -> None:
    programs = {
        "stage_0_forward": sizes(200, 30, 5),
        "stage_0_backward": sizes(300, 110, 7, alias=100),
        "stage_0_zeros": sizes(0, 100, 0),
        "update_0_stage_0": sizes(500, 300, 4, alias=300),
    }
    peak = stage_peak(make_plan(schedule), 0, programs, 300.0)
    assert peak == 300 + 100 + in_flight * 30 + 7 + (110 - 100)


def test_an_update_may_be_the_peak() -> None:
    programs = {
        "stage_1_forward": sizes(1, 1, 1),
        "stage_1_backward": sizes(1, 100, 1),
        "update_1_stage_1": sizes(500, 300, 50, alias=200),
    }
    assert stage_peak(make_plan("gpipe"), 1, programs, 300.0) == 300 + 100 + 50 + (300 - 200)


def test_resident_state_counts_shards_on_the_stage_only() -> None:
    devices = jax.devices()
    mesh = Mesh(np.asarray(devices[:4], dtype=object), ("x0",))
    split, whole = NamedSharding(mesh, PartitionSpec("x0")), NamedSharding(mesh, PartitionSpec())
    state = (Value(shape=(8, 4), dtype=np.dtype("float32")), Value(shape=(3,), dtype=np.dtype("float32")))
    assert resident_bytes(state, (split, whole), frozenset(devices[:4])) == 8 * 4 * 4 / 4 + 12
    assert resident_bytes(state, (split, whole), frozenset(devices[4:])) == 0


def test_program_peak_counts_donated_buffers_once() -> None:
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(1024, jnp.float32)).compile()
    found = program_bytes(compiled.memory_analysis())
    assert found["argument_bytes"] == found["output_bytes"] == 4096
    assert found["alias_bytes"] in (0, 4096)
    assert found["peak_bytes"] == 8192 + found["temp_bytes"] - found["alias_bytes"]
