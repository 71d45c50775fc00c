from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniap_jax.core.schedule import BACKWARD, FORWARD, Schedule, Task, gpipe, interleaved, make_schedule, one_f_one_b


def forward(m: int) -> Task:
    return Task(kind=FORWARD, microbatch=m)


def backward(m: int) -> Task:
    return Task(kind=BACKWARD, microbatch=m)


def test_gpipe_runs_everything_forward_first() -> None:
    schedule = gpipe(2, 3)
    assert schedule.tasks[0] == tuple(map(forward, range(3))) + tuple(map(backward, range(3)))
    assert schedule.in_flight == (3, 3)


def test_one_f_one_b_holds_fewer_on_later_stages() -> None:
    assert one_f_one_b(4, 8).in_flight == (4, 3, 2, 1)
    assert one_f_one_b(4, 2).in_flight == (2, 2, 2, 1)
    assert one_f_one_b(2, 3).tasks[1] == (
        forward(0), backward(0), forward(1), backward(1), forward(2), backward(2),
    )  # fmt: skip


@given(
    stages=st.integers(1, 6), microbatches=st.integers(1, 9), forward_s=st.floats(0.1, 3), backward_s=st.floats(0.1, 3)
)
@settings(max_examples=60, deadline=None)
def test_makespan_of_equal_stages_is_the_textbook_formula(
    stages: int, microbatches: int, forward_s: float, backward_s: float
) -> None:
    expected = (microbatches + stages - 1) * (forward_s + backward_s)
    for schedule in (gpipe(stages, microbatches), one_f_one_b(stages, microbatches)):
        assert schedule.makespan([forward_s] * stages, [backward_s] * stages) == pytest.approx(expected)


def test_links_delay_the_first_and_the_last_micro_batch() -> None:
    assert gpipe(3, 1).makespan([1.0] * 3, [2.0] * 3, [0.5, 0.25]) == pytest.approx(9 + 2 * 0.75)


@given(stages=st.integers(1, 5), microbatches=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_order_respects_what_every_task_needs(stages: int, microbatches: int) -> None:
    for schedule in (gpipe(stages, microbatches), one_f_one_b(stages, microbatches)):
        seen: set[tuple[int, Task]] = set()
        for stage, task in ((e.stage, e.task) for e in schedule.simulate()):
            assert set(schedule.needs(stage, task)) <= seen
            seen.add((stage, task))
        assert len(seen) == 2 * stages * microbatches


def test_interleaving_shortens_the_bubble() -> None:
    plain, woven = one_f_one_b(4, 8), interleaved(4, 8, 2)
    whole = plain.makespan([1.0] * 4, [2.0] * 4)
    assert whole == pytest.approx((8 + 3) * 3.0)
    assert woven.makespan([0.5] * 8, [1.0] * 8) == pytest.approx(8 * 3.0 + 3 * 3.0 / 2)
    assert interleaved(4, 8, 1).tasks == plain.tasks


def test_interleaving_needs_groups_of_microbatches() -> None:
    with pytest.raises(ValueError, match=r"groups of the 4 stages, got 6; use 4"):
        interleaved(4, 6, 2)


def test_a_deadlock_names_the_tasks_that_wait() -> None:
    with pytest.raises(ValueError, match=r"waiting for ever: stage 0: backward\(0\); stage 1: forward\(1\)"):
        Schedule(
            name="odd",
            num_microbatches=2,
            tasks=(
                (forward(0), backward(0), forward(1), backward(1)),
                (forward(1), forward(0), backward(0), backward(1)),
            ),
        )


def test_a_missing_task_is_named() -> None:
    with pytest.raises(ValueError, match=r"stage 1 .* repeated: backward\(1\)"):
        Schedule(
            name="odd",
            num_microbatches=2,
            tasks=((forward(0), forward(1), backward(0), backward(1)), (forward(0), forward(1), backward(0))),
        )


def test_unknown_name() -> None:
    assert make_schedule("gpipe", 2, 2) == gpipe(2, 2)
    with pytest.raises(ValueError, match="use one of gpipe, one_f_one_b"):
        make_schedule("zigzag", 2, 2)
