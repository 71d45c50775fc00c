from dataclasses import replace

import numpy as np
import pytest

from oracles.random_tables import random_tables
from uniap_jax.core.costs import Assignment, Candidate, CostTables, evaluate


def hand_tables(**changes) -> CostTables:
    """Three layers, three stages, one strategy; the edge 0 → 2 skips a stage."""
    base = {
        "candidate": Candidate(num_stages=3, num_microbatches=4),
        "time_s": np.array([1.0, 2.0, 3.0])[:, None, None] * np.ones((3, 3, 1)),
        "iteration_time_s": np.array([5.0, 0.0, 7.0])[:, None, None] * np.ones((3, 3, 1)),
        "memory_bytes": np.ones((3, 3, 1)),
        "capacity_bytes": np.full(3, 1.0),
        "allowed": np.ones((3, 1), dtype=bool),
        "edges": ((0, 1), (1, 2), (0, 2)),
        "reshard_s": np.full((3, 1, 1), 100.0),
        "cross_stage_s": np.array([10.0, 20.0, 40.0])[:, None, None],
        "relay_s": np.array([[1.0], [1.0], [30.0]]),
    }
    return CostTables(**(base | changes))


def test_price_by_hand():
    price = evaluate(hand_tables(), Assignment(stage=(0, 1, 2), strategy=(0, 0, 0)))
    assert price.stage_time_s == (1.0, 2.0, 3.0)
    assert price.link_time_s == (10.0 + 30.0, 20.0 + 40.0)
    assert price.step_time_s == 6 + 100 + 3 * 60 + 7
    assert price.feasible


def test_one_tensor_crosses_a_boundary_once():
    tables = hand_tables(edge_tensor=(0, 1, 0))
    price = evaluate(tables, Assignment(stage=(0, 1, 2), strategy=(0, 0, 0)))
    assert price.link_time_s == (max(10.0, 30.0), 20.0 + 40.0)


def test_violations_are_named():
    tables = hand_tables(allowed=np.array([[True], [False], [True]]), capacity_bytes=np.full(3, 0.5))
    price = evaluate(tables, Assignment(stage=(1, 0, 2), strategy=(0, 0, 0)))
    assert not price.feasible
    text = "; ".join(price.violations)
    assert "layer 1 may not take strategy 0" in text
    assert "layer 1 on stage 0 reads from layer 0 on the later stage 1" in text
    assert "stage 2 needs 1 bytes" in text
    assert "stage 2 is empty" in "; ".join(evaluate(tables, Assignment(stage=(0, 0, 1), strategy=(0, 0, 0))).violations)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"capacity_bytes": np.ones(2)}, "capacity_bytes"),
        ({"edges": ((0, 1), (2, 1), (0, 2))}, r"\(2, 1\)"),
        ({"edge_tensor": (0, 0, 0)}, "tensor 0"),
    ],
)
def test_malformed_tables_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        hand_tables(**change)


def test_assignment_out_of_range():
    with pytest.raises(ValueError, match="stage has 3 entries"):
        evaluate(hand_tables(), Assignment(stage=(0, 1, 3), strategy=(0, 0, 0)))


def test_broadcast_views_price_the_same():
    tables = hand_tables()
    views = replace(tables, time_s=np.broadcast_to(tables.time_s[:, :1], (3, 3, 1)))
    plan = Assignment(stage=(0, 1, 2), strategy=(0, 0, 0))
    assert evaluate(views, plan) == evaluate(tables, plan)


def test_candidates_are_ordered_and_checked():
    assert Candidate(num_stages=1, num_microbatches=8) < Candidate(num_stages=2, num_microbatches=1)
    with pytest.raises(ValueError, match="0 stages"):
        Candidate(num_stages=0, num_microbatches=1)
    with pytest.raises(ValueError, match="zigzag"):
        Candidate(num_stages=1, num_microbatches=1, schedule="zigzag")


def test_random_tables_are_reproducible():
    a, b = random_tables(3), random_tables(3)
    assert np.array_equal(a.time_s, b.time_s)
    assert a.edges == b.edges
