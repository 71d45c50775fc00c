"""Strategies as text, their degrees, and the list of those a sub-mesh can lay out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uniap_jax.core.errors import StrategyError
from uniap_jax.core.sharding import assign_axes
from uniap_jax.core.strategy import DEGREES, enumerate_strategies, parse_strategy

EVERY = enumerate_strategies(8, keeps=("all", "dots"), zeros=(1, 2, 3), degrees=DEGREES, sequence=(False, True))


@given(st.sampled_from(EVERY))
def test_text_reads_back_as_the_strategy(strategy):
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "batch", "sequence", "devices"),
    [
        ("data=2,tensor=2", 2, 1, 4),
        ("data=2,tensor=2,sequence", 2, 2, 4),
        ("data=2,fsdp=2,expert=2", 8, 1, 8),
        ("data=2,context=2,tensor=2,sequence", 2, 4, 8),
    ],
)
def test_ways_multiply(text, batch, sequence, devices):
    strategy = parse_strategy(text)
    assert (strategy.batch_ways, strategy.sequence_ways, strategy.num_devices) == (batch, sequence, devices)
    assert str(strategy) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensor=2,sequence=2", "context=2"),
        ("data=2,sequence", "tensor is 1; use tensor=2,sequence or context=2"),
        ("expert=0", "expert=0 is not a positive whole number"),
        ("experts=2", "known are context, data, expert, fsdp"),
    ],
)
def test_what_cannot_be_read_says_what_can(text, says):
    with pytest.raises(StrategyError, match=says):
        parse_strategy(text)


def test_batch_axes_are_a_prefix_and_the_sequence_a_suffix():
    for strategy in EVERY:
        axes = assign_axes(strategy, 8)
        names = (*axes.batch, *axes.context, *axes.tensor)
        assert names == ("x0", "x1", "x2")


def test_every_way_to_cut_the_axes_is_listed_once():
    assert len(set(EVERY)) == len(EVERY)
    plain = enumerate_strategies(8)
    assert len(plain) == 10
    assert {s.num_devices for s in EVERY} == {8}
    assert not any(s.sequence or s.expert > 1 or s.context > 1 for s in plain)
