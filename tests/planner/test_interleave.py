"""The cut of a model into stages that take turns."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uniap_jax.planner.interleave import cut_evenly


@given(seconds=st.lists(st.floats(0.1, 9), min_size=4, max_size=8), count=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_cut_is_the_best_one(seconds: list[float], count: int) -> None:
    def slowest(ends: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *ends, len(seconds))))

    best = min(slowest(ends) for ends in itertools.combinations(range(1, len(seconds)), count - 1))
    stage = cut_evenly(seconds, count)
    assert sorted(set(stage)) == list(range(count))
    assert list(stage) == sorted(stage)
    found = max(sum(t for t, s in zip(seconds, stage, strict=True) if s == k) for k in range(count))
    assert found == pytest.approx(best)
