import pytest

from uniap_jax.core.cluster import load_cluster
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.profile import (
    Key,
    LayerCost,
    LinkFit,
    Links,
    Profile,
    Rates,
    described_link,
    overlapped,
    ring_factor,
)

COST = {"forward_s": 1.0, "backward_s": 2.0, "sync_s": 0.5, "kept_bytes": 10.0, "transient_bytes": 5.0}


def profile(**fields):
    given = {"source": "measured", "graph_fingerprint": "f", "device_kind": "NVIDIA H100 80GB HBM3"}
    return Profile(**(given | {"num_devices": 8, "batch_size": 32} | fields))


@pytest.mark.parametrize("field", COST)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_numbers_name_their_field(field, value):
    with pytest.raises(ProfileError) as error:
        LayerCost(**(COST | {field: value}))
    assert error.value.field == field


def test_unknown_origin_source_collective_and_version():
    for make, field in (
        (lambda: LayerCost(**COST, origin="guessed"), "origin"),
        (lambda: profile(source="guessed"), "source"),
        (lambda: profile(version=2), "version"),
        (lambda: LinkFit(kind="gossip", size=2, stride=1, alpha_s=0.0, beta_s_per_byte=0.0), "kind"),
    ):
        with pytest.raises(ProfileError) as error:
            make()
        assert error.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"device_kind": "TPU v4"}, "device_kind"),
        ({"num_devices": 4}, "num_devices"),
        ({"batch_size": 16}, "batch_size"),
        ({"graph_fingerprint": "other"}, "graph_fingerprint"),
    ],
)
def test_a_profile_of_something_else_is_refused(change, field):
    cluster = load_cluster("h100:8")
    profile().check_belongs(graph_fingerprint="f", cluster=cluster, batch_size=32)
    with pytest.raises(ProfileError) as error:
        profile(**change).check_belongs(graph_fingerprint="f", cluster=cluster, batch_size=32)
    assert error.value.field == field


def test_counts_tell_where_numbers_come_from():
    keys = [Key(signature="a", strategy="data=8", samples=n) for n in (1, 2, 4)]
    costs = [LayerCost(**COST, origin=o) for o in ("measured", "scaled", "scaled")]
    found = profile(entries=tuple(zip(keys, costs, strict=True)))
    assert found.counts() == {"measured": 1, "scaled": 2}
    assert found.table()[keys[0]].time_s == 3.0


def test_ring_bytes():
    assert ring_factor("all_reduce", 4) == 1.5
    assert ring_factor("all_gather", 4) == 0.75
    assert ring_factor("all_gather", 1) == 0.0


def test_described_collective_is_ring_bytes_over_the_link():
    cluster = load_cluster("h100:8")
    fit = described_link(cluster, "all_reduce", 8, 1)
    assert fit.beta_s_per_byte == pytest.approx(2 * 7 / 8 / (450e9 * 0.8))
    assert fit.alpha_s == pytest.approx(3e-6 + 2 * 3 * 5e-6)


def test_measured_links_replace_described_ones_and_scale_their_neighbours():
    cluster = load_cluster("h100:8")
    told = described_link(cluster, "all_reduce", 8, 1)
    slow = LinkFit(
        kind="all_reduce", size=8, stride=1, alpha_s=2 * told.alpha_s, beta_s_per_byte=3 * told.beta_s_per_byte
    )
    links = Links(cluster, (slow,))
    assert links.time_s("all_reduce", 1e6, 8, 1) == pytest.approx(2 * told.alpha_s + 3e6 * told.beta_s_per_byte)
    smaller = described_link(cluster, "all_reduce", 4, 1)
    assert links.fit("all_reduce", 4, 1).beta_s_per_byte == pytest.approx(3 * smaller.beta_s_per_byte)
    assert links.fit("all_gather", 8, 1) == described_link(cluster, "all_gather", 8, 1)
    assert links.time_s("all_reduce", 1e6, 1, 1) == 0.0
    assert links.time_s("all_reduce", 0.0, 8, 1) == 0.0


def test_kernels_and_collectives_that_run_together():
    assert overlapped(3.0, 1.0, 1.0) == 3.0  # hidden
    assert overlapped(3.0, 1.0, 2.0) == 4.0  # one after the other
    assert overlapped(1.0, 3.0, 1.3) == pytest.approx(3.3)


@pytest.mark.parametrize("field", ["update_bytes_per_s", "dispatch_s", "overlap_slowdown"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_rates_name_their_field(field, value):
    with pytest.raises(ProfileError) as error:
        Rates(**{field: value})
    assert error.value.field == field
    with pytest.raises(ProfileError) as error:
        Rates(contention=((2, value),))
    assert "contention" in error.value.field
