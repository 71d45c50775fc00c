import jax
import pytest

import cost_support
from uniap_jax.accuracy import AccuracyReport, PlanAccuracy, accuracy, diverse_plans, kendall_tau, report_lines
from uniap_jax.core.cluster import local_cluster
from uniap_jax.cost_model import estimate
from uniap_jax.frontend import trace


@pytest.fixture(scope="module")
def costs():
    return estimate(cost_support.graph(), local_cluster())


@pytest.mark.parametrize(
    ("second", "tau"), [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 2, 4, 3], 4 / 6), ([1, 1, 1, 1], 0.0)]
)
def test_kendall_tau(second, tau):
    assert kendall_tau([1, 2, 3, 4], second) == pytest.approx(tau)
    assert kendall_tau([1], [2]) == 1.0


def row(predicted, measured, **fields):
    memory = {"predicted_bytes": (90.0, 110.0), "compiled_bytes": (100.0, 100.0)}
    return PlanAccuracy(
        **({"what": "p", "chosen": False, "predicted_s": predicted, "measured_s": measured} | memory | fields)
    )


def test_the_summary_by_hand():
    report = AccuracyReport(
        plans=(
            row(1.1, 1.0, chosen=True),
            row(1.8, 2.0),
            row(0.5, 0.8),
            row(9.0, 0.0, compiled_bytes=(), problem="no"),
        ),
        source="measured",
    )
    found = report.summary()
    assert (found["plans"], found["failed"]) == (4, 1)
    assert found["memory_mean"] == pytest.approx(0.1)
    assert found["memory_worst"] == pytest.approx(0.1)
    assert found["time_mean"] == pytest.approx((0.1 + 0.1 + 0.375) / 3)
    assert found["time_worst"] == pytest.approx(0.375)
    assert found["time_chosen"] == pytest.approx(0.1)
    assert found["kendall_tau"] == 1.0
    assert found["regret"] == pytest.approx(1.0 / 0.8)
    lines = list(report_lines(report))
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert report.to_dict()["plans"][3]["problem"] == "no"


def test_plans_are_diverse_and_the_first_is_the_searchs(costs):
    plans = diverse_plans(costs, 8)
    assert len(plans) == 8
    assert len({(p.num_stages, p.num_microbatches, p.layers) for p in plans}) == 8
    assert len({p.num_stages for p in plans}) >= 3
    assert plans[0].certificate.status != "pinned"
    assert min(p.prediction.step_time_s for p in plans) == plans[0].prediction.step_time_s


def test_plans_run_in_turn(costs):
    state, step, batch = cost_support.build()
    report = accuracy(trace(step, state, batch), costs, (state, batch), num_plans=2, rounds=3)
    assert [bool(p.problem) for p in report.plans] == [False, False]
    assert all(p.measured_s > 0 and p.compiled_bytes for p in report.plans)
    assert report.summary()["regret"] >= 1.0
    assert len(jax.devices()) == 8
