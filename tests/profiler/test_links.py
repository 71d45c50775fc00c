import jax
import pytest

from uniap_jax.profiler.links import (
    fit_line,
    groups,
    measure_collective,
    measure_overlap,
    measure_transfer,
    overlap_slowdown,
)


def test_a_line_is_found_again():
    fit = fit_line("all_reduce", 4, 1, [(n, 1e-4 + 2e-9 * n) for n in (1e4, 1e5, 1e6)])
    assert fit.alpha_s == pytest.approx(1e-4)
    assert fit.beta_s_per_byte == pytest.approx(2e-9)
    assert fit.error == pytest.approx(0.0, abs=1e-9)


def test_nothing_is_negative():
    fit = fit_line("all_reduce", 4, 1, [(1e4, 1e-3), (1e6, 1e-4)])  # larger and faster: noise
    assert fit.alpha_s >= 0
    assert fit.beta_s_per_byte == 0.0
    assert fit.error > 0.3


def test_groups_of_strategies():
    assert set(groups(8)) == {(8, 1), (4, 2), (2, 4), (4, 1), (2, 2), (2, 1)}
    assert set(groups(6)) == {(6, 1), (3, 2), (2, 1)}
    assert list(groups(1)) == []


@pytest.mark.parametrize(("kind", "size", "stride"), [("all_reduce", 8, 1), ("all_gather", 2, 4)])
def test_collectives_on_the_devices(kind, size, stride):
    fit = measure_collective(kind, size, stride, jax.devices())
    assert (fit.kind, fit.size, fit.stride, fit.origin) == (kind, size, stride, "measured")
    assert fit.time_s(1 << 20) > 0


def test_transfers_on_the_devices():
    assert measure_transfer(2, jax.devices()).time_s(1 << 20) > 0


@pytest.mark.parametrize(
    ("kernels", "collective", "both", "slowdown"),
    [(3.0, 1.0, 3.0, 1.0), (3.0, 1.0, 4.0, 2.0), (1.0, 3.0, 3.3, 1.3), (3.0, 1.0, 9.0, 2.0), (3.0, 1.0, 2.0, 1.0)],
)
def test_slowdown_of_what_runs_together(kernels, collective, both, slowdown):
    assert overlap_slowdown(kernels, collective, both) == pytest.approx(slowdown)


def test_what_is_too_short_to_be_seen_takes_turns():
    assert overlap_slowdown(10.0, 0.1, 10.0) == 2.0


def test_overlap_on_the_devices():
    assert 1.0 <= measure_overlap(jax.devices()) <= 2.0
