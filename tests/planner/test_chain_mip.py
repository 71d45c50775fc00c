"""Chains whose columns outgrow their room: the MIP decides what is left, and says so."""

from dataclasses import replace

import pytest

from benchmarks.chains import LlamaChain
from uniap_jax.core.costs import Candidate
from uniap_jax.planner import mip_model, solve_tables
from uniap_jax.planner.chain_mip import ChainThenMip
from uniap_jax.planner.clock import Clock
from uniap_jax.planner.interval import ChainRefinement
from uniap_jax.planner.search import Search

NOISY = LlamaChain(num_blocks=6, num_devices=4, batch_size=8, memory_gib=9.0, noise=0.03, max_strategies=8)


def search(tables, *, room):
    run = Search(
        tables=lambda _: tables,
        refine=lambda t: ChainThenMip(t, _columns=ChainRefinement(t, _room=room)),
        engine="interval",
        clock=Clock(limit_s=60.0),
    )
    return run.run((tables.candidate,)), run.notes


@pytest.mark.parametrize("memory_gib", [7.0, 10.0])
def test_the_mip_finishes_what_columns_have_no_room_for(memory_gib):
    tables = replace(NOISY, memory_gib=memory_gib).tables(Candidate(num_stages=2, num_microbatches=4))
    truth = solve_tables(tables, confirm=False)
    assert truth.status == "optimal"
    found, notes = search(tables, room=1)
    assert found.complete
    assert found.best.value == pytest.approx(truth.evaluation.step_time_s, rel=1e-9)
    assert any("HiGHS's alone" in note for note in notes)


def test_without_a_solver_the_columns_get_more_room(monkeypatch):
    monkeypatch.setattr(mip_model, "child_command", lambda solver: ["/nonexistent/python"])
    tables = NOISY.tables(Candidate(num_stages=2, num_microbatches=4))
    truth = solve_tables(tables, confirm=False)
    found, notes = search(tables, room=100)
    assert found.best.value == pytest.approx(truth.evaluation.step_time_s, rel=1e-9)
    assert found.complete
    assert not any("alone" in note for note in notes)
