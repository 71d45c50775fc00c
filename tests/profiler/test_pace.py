"""What was measured at a slow moment is told as if it had not been."""

import jax
import pytest

import cost_support
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Rates
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.measure import Measurer
from uniap_jax.profiler.order import entries
from uniap_jax.profiler.pace import Pace


def test_the_program_of_fixed_work_runs_on_all_devices():
    assert 0 < Pace(jax.devices())() < 10


@pytest.mark.parametrize(("pace_s", "factor"), [(1e-3, 0.5), (0.0, 1.0)])
def test_times_of_a_slow_moment_are_told_at_the_machines_pace(pace_s, factor, tmp_path):
    describer = Describer(cost_support.graph(), local_cluster())
    entry = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[0]
    measurer = Measurer(
        describer=describer,
        devices=jax.devices(),
        rates=Rates(pace_s=pace_s),
        cache=Cache(tmp_path),
        pace=lambda: 2e-3,  # twice as slow as the machine was
    )
    told = measurer.measure(entry)
    numbers = measurer.cache.get(measurer.facts(entry))
    assert told.time_s + told.sync_s == pytest.approx(factor * sum(numbers["seconds"]))
    assert measurer.known(entry) == told
