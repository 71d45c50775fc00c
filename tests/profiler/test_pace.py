"""What was measured at a slow moment is told as if it had not been."""

import jax
import pytest

import cost_support
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.profile import Rates
from uniap_jax.profiler import pace
from uniap_jax.profiler.cache import Cache
from uniap_jax.profiler.measure import UNSURE, Measurer
from uniap_jax.profiler.order import entries
from uniap_jax.profiler.pace import Pace
from uniap_jax.profiler.probe import COMPILE_S


def test_the_program_of_fixed_work_runs_on_all_devices():
    assert 0 < Pace(jax.devices())() < 10


@pytest.fixture
def paced(monkeypatch):
    """A machine whose paces are told; the list of them is eaten up, and the last one stays."""

    def of(paces):
        left = list(paces)
        monkeypatch.setattr(Pace, "__call__", lambda self: left.pop(0) if len(left) > 1 else left[0])
        monkeypatch.setattr(pace.time, "sleep", lambda s: None)
        return Pace(jax.devices(), own_s=1.0)

    return of


def test_a_measurement_of_a_slow_moment_is_made_again(paced):
    moments = iter([50, 35])
    assert paced([1.4, 1.4, 1.0, 1.05]).steadily(lambda: next(moments)) == (35, 1.0)


def test_a_machine_that_stays_slow_is_measured_as_it_is_and_not_waited_for_for_ever(paced):
    measured, machine = [], paced([1.5])
    for _ in range(9):
        assert machine.steadily(lambda: measured.append(1)) == (None, 1.5)
    assert 9 < len(measured) < 9 + pace.TRIES


@pytest.mark.parametrize(("pace_s", "factor"), [(1e-3, 0.5), (0.0, 1.0)])
def test_times_of_a_slow_machine_are_told_at_its_own_pace(pace_s, factor, tmp_path, paced):
    describer = Describer(cost_support.graph(), local_cluster())
    entry = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[0]
    measurer = Measurer(
        describer=describer,
        devices=jax.devices(),
        rates=Rates(pace_s=pace_s),
        cache=Cache(tmp_path),
        pace=paced([2.0]),  # twice as slow as the machine was
    )
    told = measurer.measure(entry)
    numbers = measurer.cache.get(measurer.facts(entry))
    assert told.time_s + told.sync_s == pytest.approx(factor * sum(numbers["seconds"]))
    assert measurer.known(entry) == told


def test_what_is_known_says_how_long_the_rest_will_take(tmp_path):
    """A description of this machine may be far off, and one entry may take minutes."""
    describer = Describer(cost_support.graph(), local_cluster())
    one, other = entries(describer, num_stages=1, num_microbatches=1, keeps=("all",))[:2]
    measurer = Measurer(describer=describer, devices=jax.devices(), rates=Rates(), cache=Cache(tmp_path))
    thought = (measurer.expected_s(other) - COMPILE_S) / UNSURE
    told = describer.cost(
        describer.graph.layers[one.layer], one.strategy, samples=one.key.samples, fused=one.num_stages == 1
    )
    slow = 50 * (told.time_s + told.sync_s)
    measurer.cost(one, {"pace": 1.0, "seconds": [slow], "spread": [0.0], "runs": [1]}, told)
    assert measurer.expected_s(other) - COMPILE_S == pytest.approx(50 * thought)
