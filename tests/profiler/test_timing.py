import pytest

from uniap_jax.profiler import timing
from uniap_jax.profiler.timing import summarize, time_in_a_row, time_program


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


def test_runs_in_a_row_are_two_under_way():
    started, waited, most = [], [], 0

    def start():
        nonlocal most
        started.append(len(started))
        most = max(most, len(started) - len(waited))
        return started[-1]

    found = time_in_a_row(start, waited.append, length=4, min_rows=2, max_rows=3, target_s=0.0)
    assert found.runs == 2
    assert waited == started == list(range(9))  # one to warm up, and two rows of four
    assert most == 2


def test_a_run_that_takes_long_is_not_repeated_often(monkeypatch):
    clock, count = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def wait(_):
        clock[0] += 20.0

    found = time_in_a_row(lambda: count.append(1), wait)
    assert len(count) == 1 + timing.RUNS_IF_LONG
    assert (found.runs, found.median_s) == (1, 20.0)
