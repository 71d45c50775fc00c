import pytest

from uniap_jax.profiler.timing import summarize, time_program


def test_median_and_spread():
    found = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median_s == 3.0
    assert found.runs == 5
    assert found.spread == pytest.approx((52.0 - 1.5) / 2 / 3.0)
    assert summarize([2.0, 2.0]).spread == 0.0


def test_runs_are_bounded_and_the_first_is_not_timed():
    count = []
    found = time_program(lambda: count.append(1), min_runs=3, max_runs=5, target_s=10.0)
    assert (found.runs, len(count)) == (5, 6)
    count.clear()
    assert time_program(lambda: count.append(1), min_runs=3, max_runs=5, target_s=0.0).runs == 3
