from dataclasses import replace

import numpy as np
import pytest

import cost_support
from uniap_jax.core.cluster import local_cluster
from uniap_jax.core.described import Describer
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.profile import LayerCost
from uniap_jax.core.strategy import Strategy
from uniap_jax.profiler.calibrate import calibrate, described_parts, distance, fill
from uniap_jax.profiler.order import by_value, choices, entries


@pytest.fixture(scope="module")
def describer():
    return Describer(cost_support.graph(), local_cluster())


@pytest.fixture(scope="module")
def found(describer):
    return entries(describer, num_stages="auto", num_microbatches="auto", keeps=("all", "inputs"))


def test_one_common_factor_is_found():
    rng = np.random.default_rng(0)
    parts = rng.uniform(0.1, 1.0, (20, 5))
    fit = calibrate([(p, 3.0 * p.sum()) for p in parts])
    assert fit.weights == pytest.approx(np.full(5, 3.0), rel=1e-6)
    assert fit.error == pytest.approx(0.0, abs=1e-6)


def test_weights_are_never_negative():
    rng = np.random.default_rng(1)
    fit = calibrate([(p, float(p[0] + 1e-3)) for p in rng.uniform(0.1, 1.0, (20, 5))])
    assert (fit.weights >= 0).all()
    assert calibrate([]).weights.tolist() == [1.0] * 5


def test_entries_cover_every_legal_choice_once(describer, found):
    keys = [e.key for e in found]
    assert len(set(keys)) == len(keys)
    assert {e.num_stages for e in found} == {1, 2, 4}
    assert not any(e.strategy.batch_ways > e.key.samples for e in found)


def test_the_dearest_plain_entries_are_measured_first(describer, found):
    ranked = by_value(found, describer)
    assert sorted(map(id, ranked)) == sorted(map(id, found))
    first = ranked[0]
    assert (first.strategy, first.num_stages, first.num_microbatches) == (Strategy(data=8), 1, 1)
    assert first.layer in (0, 1)  # a block, not the loss


@pytest.mark.parametrize(("wanted", "got"), [("auto", (1, 2, 4)), (2, (2,)), ((1, 4), (1, 4))])
def test_choices(wanted, got):
    assert choices(wanted, (1, 2, 4), "num_stages") == got


@pytest.mark.parametrize("wanted", ["all", 3, (1, 5)])
def test_impossible_choices(wanted):
    with pytest.raises(ProfileError) as error:
        choices(wanted, (1, 2, 4), "num_stages")
    assert error.value.field == "num_stages"


def test_what_was_not_measured_is_scaled_from_what_was(describer, found):
    """Measured numbers that are exactly five times the described ones make everything five times the described."""
    plain = [e for e in found if e.strategy.keep == "all"]
    measured = {}
    for e in plain[::3]:
        parts = 5 * described_parts(describer, e)
        base = describer.cost(
            describer.graph.layers[e.layer], e.strategy, samples=e.key.samples, fused=e.num_stages == 1
        )
        measured[e.key] = LayerCost(
            forward_s=float(parts[:4].sum()) / 3,
            backward_s=float(parts[:4].sum()) * 2 / 3,
            sync_s=float(parts[4]),
            kept_bytes=base.kept_bytes,
            transient_bytes=base.transient_bytes,
            origin="measured",
        )
    filled, calibration = fill(found, measured, describer)
    assert calibration.error < 1e-6
    for e in plain:
        total = filled[e.key].time_s + filled[e.key].sync_s
        assert total == pytest.approx(5 * described_parts(describer, e).sum(), rel=1e-6)
        twin = str(replace(e.strategy, keep="inputs"))
        again = filled.get(replace(e.key, strategy=twin))
        if again is not None:
            assert again.time_s > filled[e.key].time_s  # recompute is never free
            assert again.origin == "scaled"


def test_nothing_measured_leaves_the_description(describer, found):
    filled, _ = fill(found, {}, describer)
    assert {c.origin for c in filled.values()} == {"described"}


def test_distance(found):
    assert distance(found[0], found[0]) == 0.0
    other = next(e for e in found if e.strategy == Strategy(tensor=8) and e.layer == found[0].layer)
    assert distance(found[0], other) > 0
