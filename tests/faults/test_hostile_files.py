"""Truncated, mutated and hostile JSON: only our errors, in bounded time and memory, and nothing is executed."""

import copy
import json
import math
import random
import resource
import time
from pathlib import Path

import pytest

from uniap_jax.core.errors import PlanMismatchError, ProfileError, UniapError
from uniap_jax.core.plan import Certificate, LayerPlan, Plan, Prediction
from uniap_jax.core.profile import Key, LayerCost, LinkFit, Profile, Rates
from uniap_jax.core.serialize import load, plan_to_json, profile_to_json
from uniap_jax.core.strategy import Strategy
from uniap_jax.planner.files import load_tables, tables_from_dict

TABLES = Path(__file__).resolve().parent.parent / "data" / "planning" / "small_5.json"
MUTATIONS = 3400  # of each of the three kinds: over 10,000 in all
NUMBERS = (True, -1, 0, 10**30, -(10**18), 1e308, math.nan, math.inf, -math.inf)
TEXTS = ("", "$", "__class__", "\u0000", "9" * 400, "../../etc/passwd", "__import__('os').system('false')")
HOSTILE = (*NUMBERS, *TEXTS, None, [], {}, [[]], [None] * 3, {"__reduce__": ["os.system", "false"]})


def plan():
    layers = tuple(LayerPlan(name=f"layer {i}", stage=i // 2, strategy=Strategy(data=2, tensor=2)) for i in range(4))
    return plan_to_json(
        Plan(
            num_stages=2,
            num_microbatches=2,
            schedule="one_f_one_b",
            batch_size=8,
            stage_devices=((0, 1, 2, 3), (4, 5, 6, 7)),
            layers=layers,
            prediction=Prediction(step_time_s=0.5, stage_time_s=(0.1, 0.2), link_time_s=(0.01,), peak_bytes=(1.0, 2.0)),
            certificate=Certificate(status="optimal", bound_s=0.5, baselines=(("fsdp", 0.7), ("tensor", None))),
        )
    )


def profile():
    key = Key(signature="s", strategy="data=2", samples=4)
    cost = LayerCost(forward_s=1.0, backward_s=2.0, sync_s=0.1, kept_bytes=3.0, transient_bytes=4.0, origin="measured")
    link = LinkFit(kind="all_reduce", size=2, stride=1, alpha_s=1e-5, beta_s_per_byte=1e-9)
    return profile_to_json(
        Profile(
            source="measured",
            graph_fingerprint="abc",
            device_kind="cpu",
            num_devices=2,
            batch_size=8,
            entries=((key, cost), (key, cost)),
            links=(link,),
            rates=Rates(update_bytes_per_s=1e9, dispatch_s=1e-4, contention=((2, 1.8),)),
        )
    )


def tables():
    return json.loads(TABLES.read_text())


VALID = {"plan": plan, "profile": profile, "tables": tables}


def reader(kind):
    return load_tables if kind == "tables" else load


def places(value, at=()):
    """Every path into a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def mutated(value, rng):
    """One to three edits: a value replaced, a key dropped, doubled or renamed, a list grown."""
    found = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([p for p in places(found) if p] or [()])
        if not path:
            return rng.choice(HOSTILE)
        at = found
        for key in path[:-1]:
            at = at[key]
        edit = rng.randrange(4)
        if edit == 0:
            at[path[-1]] = copy.deepcopy(rng.choice(HOSTILE))
        elif edit == 1:
            del at[path[-1]]
        elif edit == 2 and isinstance(at, dict):
            at[str(rng.choice(HOSTILE))] = at.pop(path[-1])
        elif isinstance(at, list):
            at.extend(copy.deepcopy(at[path[-1]]) for _ in range(rng.randint(1, 40)))
    return found


@pytest.mark.parametrize("kind", VALID)
def test_the_valid_file_is_read(kind, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(VALID[kind]()))
    reader(kind)(path)


@pytest.mark.parametrize("kind", VALID)
def test_mutated_files_give_only_our_errors(kind, tmp_path):
    rng = random.Random(kind)
    valid, path = VALID[kind](), tmp_path / "file.json"
    errors = []
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS):
        text = json.dumps(mutated(valid, rng))
        if rng.random() < 0.2:
            text = text[: rng.randrange(len(text) + 1)]
        path.write_bytes(text.encode(errors="surrogatepass"))
        try:
            reader(kind)(path)
        except (PlanMismatchError, ProfileError) as error:
            errors.append(str(error))
    assert len(errors) > MUTATIONS / 2
    assert max(map(len, errors)) < 2000
    assert time.process_time() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.parametrize("seed", range(20))
def test_random_bytes(kind, seed, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(random.Random(seed).randbytes(seed * 50))
    with pytest.raises(UniapError):
        reader(kind)(path)


@pytest.mark.parametrize("kind", VALID)
def test_deep_nesting(kind, tmp_path):
    path = tmp_path / "file.json"
    for text in (
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"format":"uniap-plan","layers":' + "[" * 50_000 + "]" * 50_000 + "}",
    ):
        path.write_text(text)
        with pytest.raises(UniapError):
            reader(kind)(path)


@pytest.mark.parametrize("field", ["num_stages", "num_microbatches"])
def test_a_huge_count_in_a_plan_costs_nothing(field, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(plan() | {field: 10**15}))
    started = time.process_time()
    with pytest.raises(PlanMismatchError, match=field):
        load(path)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("field", ["layers", "stages", "strategies", "micro_batches"])
def test_a_huge_count_in_tables_costs_nothing(field):
    started = time.process_time()
    if field == "micro_batches":  # is no size of an array
        assert tables_from_dict(tables() | {field: 10**15}).candidate.num_microbatches == 10**15
    else:
        with pytest.raises(ProfileError):
            tables_from_dict(tables() | {field: 10**15})
    assert time.process_time() - started < 1


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    path = tmp_path / "file.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    for read in (load, load_tables):
        with pytest.raises(UniapError, match="bytes"):
            read(path)
