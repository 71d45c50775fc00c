import itertools
from dataclasses import dataclass, fields, replace

import pytest

from benchmarks.chains import LlamaChain, t5, u_net
from uniap_jax.core.costs import Assignment, Candidate, evaluate
from uniap_jax.core.errors import InfeasibleError, NoPlanInTimeError, OptionError
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner import solve
from uniap_jax.planner.engines import BASELINES

SMALL = LlamaChain(num_blocks=8, num_devices=8, batch_size=32, memory_gib=20.0)
TIGHT = replace(SMALL, memory_gib=9.0, slow=6e9, node_size=2)


def price_of(costs: LlamaChain, plan) -> float:
    """The plan's step time by the referee, from the tables of its candidate."""
    candidate = next(
        c for c in costs.candidates() if (c.num_stages, c.num_microbatches) == (plan.num_stages, plan.num_microbatches)
    )
    tables = costs.tables(candidate)
    strategy = tuple(tables.strategies.index(layer.strategy) for layer in plan.layers)
    price = evaluate(tables, Assignment(stage=tuple(layer.stage for layer in plan.layers), strategy=strategy))
    assert price.feasible
    return price.step_time_s


@pytest.mark.parametrize("costs", [SMALL, TIGHT], ids=["one stage", "several stages"])
def test_a_plan_with_its_proof(costs):
    plan = solve(costs)
    proof = plan.certificate
    assert (proof.status, proof.gap, proof.bound_s) == ("optimal", 0.0, plan.prediction.step_time_s)
    assert plan.prediction.step_time_s == pytest.approx(price_of(costs, plan), rel=1e-12)
    assert proof.candidates == 24
    assert plan.num_devices == 8
    assert plan.batch_size == 32
    assert [layer.name for layer in plan.layers] == list(costs.layer_names)
    assert {name for name, _ in proof.baselines} == {
        "data_parallel",
        "fsdp",
        "tensor",
        "pipeline_only",
        "intra_only",
        "inter_then_intra",
        "layerwise_dp",
    }
    assert all(t is None or t >= plan.prediction.step_time_s * (1 - 1e-9) for _, t in proof.baselines)
    assert all(
        m <= c * (1 + 1e-9) for m, c in zip(plan.prediction.peak_bytes, plan.prediction.capacity_bytes, strict=True)
    )


@pytest.mark.parametrize(("engine", "stages"), [("intra_only", 1), ("pipeline_only", 8)])
def test_an_engine_over_part_of_the_candidates_stays_there(engine, stages):
    """Also where a plan of another kind is faster, as on the tight chain."""
    joint, part = solve(TIGHT), solve(replace(TIGHT, memory_gib=200.0), engine=engine)
    assert joint.num_stages not in (1, 8)
    assert part.num_stages == stages
    assert part.certificate.baselines == ()


@dataclass(frozen=True, kw_only=True)
class Refusing(LlamaChain):
    """A chain that finds out late that one number of micro-batches is impossible."""

    impossible: int

    def refusal(self, candidate: Candidate) -> str:
        return "cannot be cut so" if candidate.num_microbatches == self.impossible else ""


@pytest.mark.parametrize("costs", [SMALL, TIGHT], ids=["one stage", "several stages"])
def test_the_search_goes_on_where_the_best_candidate_is_refused(costs):
    best, given = solve(costs), {f.name: getattr(costs, f.name) for f in fields(costs)}
    second = solve(Refusing(**given, impossible=best.num_microbatches))
    possible = [c for c in sorted({c.num_microbatches for c in costs.candidates()}) if c != best.num_microbatches]
    assert second.prediction.step_time_s == pytest.approx(
        min(solve(costs, num_microbatches=c).prediction.step_time_s for c in possible), rel=1e-9
    )
    assert second.certificate.status == "optimal"
    assert all(w.num_microbatches != best.num_microbatches for w in second.certificate.what_ifs)
    with pytest.raises(OptionError, match="cannot be cut so"):
        solve(Refusing(**given, impossible=4), num_microbatches=4)


def test_several_stages_are_confirmed_by_cbc():
    plan = solve(TIGHT)
    assert plan.num_stages > 1
    assert plan.schedule == "one_f_one_b"
    assert plan.certificate.engine == "interval+cbc"


@pytest.mark.parametrize("engine", ["hybrid", "miqp"])
def test_other_engines_agree(engine):
    costs = replace(TIGHT, num_blocks=2, batch_size=4, max_strategies=4)
    options = {"num_stages": 2, "num_microbatches": 2, "baselines": False}
    plan = solve(costs, engine=engine, **options)
    assert plan.certificate.status == "optimal"
    assert plan.prediction.step_time_s == pytest.approx(solve(costs, **options).prediction.step_time_s, rel=1e-6)


@pytest.mark.parametrize("engine", sorted(BASELINES))
def test_baselines_are_engines_and_never_better(engine):
    plan = solve(SMALL, engine=engine)
    assert plan.prediction.step_time_s >= solve(SMALL).prediction.step_time_s * (1 - 1e-9)
    assert plan.prediction.step_time_s == pytest.approx(price_of(SMALL, plan), rel=1e-12)


def test_fixed_values_are_kept():
    plan = solve(SMALL, num_stages=2, num_microbatches=4, schedule="one_f_one_b")
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (2, 4, "one_f_one_b")
    assert plan.certificate.candidates == 1


@pytest.mark.parametrize(
    ("options", "field", "possible"),
    [
        ({"num_stages": 3}, "num_stages", (1, 2, 4, 8)),
        ({"num_microbatches": 64}, "num_microbatches", (1, 2, 4, 8, 16, 32)),
        ({"schedule": "zigzag"}, "schedule", ("auto", "gpipe", "one_f_one_b")),
        ({"engine": "simplex"}, "engine", None),
    ],
)
def test_values_that_do_not_exist(options, field, possible):
    with pytest.raises(OptionError) as caught:
        solve(SMALL, **options)
    assert getattr(caught.value, field) == options[field]
    if possible:
        assert caught.value.possible == possible


def test_pinned_strategy():
    plan = solve(SMALL, strategy="data=2,tensor=2", num_stages=2, num_microbatches=4)
    assert {layer.strategy for layer in plan.layers} == {Strategy(data=2, tensor=2)}
    assert plan.certificate.status == "optimal"
    assert any("pinned to data=2,tensor=2" in note for note in plan.certificate.notes)


def test_pinned_strategy_where_the_batch_is_too_small_for_it():
    plan = solve(replace(SMALL, memory_gib=60.0), strategy=Strategy(data=8), num_microbatches=16)
    assert {layer.strategy.batch_ways for layer in plan.layers} == {2}
    assert any("may not take it" in note for note in plan.certificate.notes)


def test_pinned_degrees_are_filled_up_with_data_parallelism():
    plan = solve(replace(SMALL, memory_gib=60.0), strategy=Strategy(tensor=2), num_stages=1, num_microbatches=2)
    assert {layer.strategy for layer in plan.layers} == {Strategy(data=4, tensor=2)}


def test_infeasible_says_what_fits():
    costs = replace(SMALL, memory_gib=1.0)
    with pytest.raises(InfeasibleError) as caught:
        solve(costs)
    error = caught.value
    assert error.limit_bytes == 1024.0**3
    assert error.needed_bytes > error.limit_bytes
    assert error.layer in error.layers
    assert isinstance(error.strategy, Strategy)
    for word in (
        "1.00 GiB per device",
        "8 devices",
        "global batch 32",
        f"{error.num_stages} stage",
        "Give each device",
    ):
        assert word in str(error)
    there = {"num_stages": error.num_stages, "num_microbatches": error.num_microbatches}
    enough = solve(replace(costs, memory_gib=error.needed_bytes / 1024**3 * (1 + 1e-9)), **there)
    assert max(enough.prediction.peak_bytes) == pytest.approx(error.needed_bytes, rel=1e-9)
    with pytest.raises(InfeasibleError):
        solve(replace(costs, memory_gib=error.needed_bytes / 1024**3 * (1 - 1e-6)))


def test_no_time_is_not_infeasible():
    with pytest.raises(NoPlanInTimeError) as caught:
        solve(TIGHT, time_limit_s=0.0, baselines=False)
    assert caught.value.limit_s == 0.0
    assert caught.value.seconds >= 0


def test_progress_goes_one_way():
    seen = []
    solve(TIGHT, progress=seen.append, baselines=False)
    assert len(seen) > 3
    assert all(b.step_time_s <= a.step_time_s for a, b in itertools.pairwise(seen))
    assert all(b.bound_s >= a.bound_s * (1 - 1e-12) for a, b in itertools.pairwise(seen))
    assert seen[-1].gap <= 1e-7


def test_interrupted_search_returns_its_incumbent():
    def interrupt(progress):
        if progress.step_time_s < float("inf"):
            raise KeyboardInterrupt

    plan = solve(TIGHT, progress=interrupt, baselines=False)
    assert plan.certificate.status == "feasible"
    assert 0 < plan.certificate.gap < 1
    assert any("interrupted" in note for note in plan.certificate.notes)


def test_same_input_same_plan():
    first, second = solve(TIGHT), solve(TIGHT)
    assert first.layers == second.layers
    assert first.prediction == second.prediction


def test_ties_go_to_fewer_stages_and_micro_batches():
    """Costs that do not depend on the candidate at all: the simplest must win."""
    flat = _Flat(num_blocks=2, num_devices=4, batch_size=4)
    plan = solve(flat)
    assert (plan.num_stages, plan.num_microbatches) == (1, 1)


class _Flat(LlamaChain):
    def _build(self, candidate):
        tables = super()._build(candidate)
        work = 1.0 / (candidate.num_stages + candidate.num_microbatches - 1) / self.num_layers * candidate.num_stages
        return replace(
            tables,
            time_s=tables.time_s * 0 + work,
            iteration_time_s=tables.iteration_time_s * 0,
            reshard_s=tables.reshard_s * 0,
            cross_stage_s=tables.cross_stage_s * 0,
            relay_s=tables.relay_s * 0,
        )


@pytest.mark.parametrize(("skips", "blocks"), [(t5, 8), (u_net, 8)], ids=["t5", "u_net"])
def test_edges_that_skip_layers_are_planned(skips, blocks):
    costs = replace(TIGHT, skips=skips(blocks), max_strategies=6, batch_size=8)
    plan = solve(costs, num_stages=4, baselines=False, time_limit_s=60.0)
    assert plan.certificate.gap <= 1e-4
    assert plan.prediction.step_time_s == pytest.approx(price_of(costs, plan), rel=1e-12)
