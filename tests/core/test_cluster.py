import json

import jax
import pytest

from uniap_jax.core.cluster import load_cluster, local_cluster, parse_limit, shipped_names
from uniap_jax.core.errors import ProfileError
from uniap_jax.core.machine import Cluster, Link

GB = 10**9


def two_nodes():
    return Cluster(
        name="two nodes of four",
        num_devices=8,
        kind="test",
        platform="gpu",
        memory_bytes=16 * GB,
        peak_flops=(("float32", 1e12), ("bfloat16", 4e12)),
        memory_bandwidth_bytes_per_s=1e12,
        links=(
            Link(name="near", size=4, bandwidth_bytes_per_s=100e9, uplink_bytes_per_s=100e9, latency_s=1e-6),
            Link(name="far", size=8, bandwidth_bytes_per_s=40e9, uplink_bytes_per_s=40e9, latency_s=1e-5),
        ),
        link_efficiency=1.0,
    )


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [("90%", 900), ("100 %", 1000), (512, 512), ("1KB", 1000), ("0.5kB", 500), ("1e2", 100)],
)
def test_limits(limit, wanted):
    assert parse_limit(limit, 1000) == wanted


@pytest.mark.parametrize("limit", ["ninety", "0%", "101%", -1, 0, 1001, "1GiB", "", "5 XB"])
def test_impossible_limits(limit):
    with pytest.raises(ProfileError) as error:
        parse_limit(limit, 1000)
    assert error.value.field == "memory_limit"


def test_a_ring_gets_the_slowest_link_it_crosses_and_shares_it():
    cluster = two_nodes()
    assert cluster.route(4).bandwidth_bytes_per_s == 100e9
    assert cluster.route(8).bandwidth_bytes_per_s == 40e9  # one ring through both nodes
    assert cluster.route(2, 4).bandwidth_bytes_per_s == 10e9  # four rings share what leaves a node
    assert cluster.route(2, 4).level == "far"
    assert cluster.route(8).latency_s == 1e-5


def test_stages_meet_at_the_slowest_boundary():
    cluster = two_nodes()
    assert cluster.boundary(2).bandwidth_bytes_per_s == 10e9
    assert cluster.boundary(8).bandwidth_bytes_per_s == 40e9  # one device sends across
    assert cluster.boundary(4).level == "far"


def test_rates_by_dtype():
    assert two_nodes().flops_per_s("bfloat16") == 4e12
    assert two_nodes().flops_per_s("float64") == 1e12  # not listed: that of float32


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_machines_load_with_source_and_date(name):
    cluster = load_cluster(name)
    assert cluster.capacity_bytes == int(cluster.memory_bytes * 0.9)
    assert cluster.source.endswith(")")
    assert 20 in {int(part[:2]) for part in cluster.source.split("(") if part[:2].isdigit()}
    assert cluster.num_devices >= 8


@pytest.mark.parametrize(
    ("name", "devices"), [("a100-80g:2x8", 16), ("h100:8", 8), ("h200:64x8", 512), ("v5p:8x8x8", 512), ("v5e:4x4", 16)]
)
def test_shapes(name, devices):
    assert load_cluster(name).num_devices == devices


def test_published_figures():
    cluster = load_cluster("a100-80g:2x8", memory_limit="100%")
    assert cluster.memory_bytes == 80 * 2**30
    assert dict(cluster.peak_flops)["bfloat16"] == 312e12
    assert load_cluster("v5e:4x4").flops_per_s("bfloat16") == 197e12


def test_one_network_card_per_device_or_per_node():
    assert load_cluster("a100-80g:2x4").links[-1].uplink_bytes_per_s == 100e9
    assert load_cluster("titan-xp:4x2").links[-1].uplink_bytes_per_s == 1.25e9


@pytest.mark.parametrize(
    ("name", "field"),
    [("a100-80g:2x16", "shape"), ("v5e:2x2x2", "shape"), ("h100:0x8", "shape"), ("h100:1x2x3", "shape")],
)
def test_impossible_shapes(name, field):
    with pytest.raises(ProfileError) as error:
        load_cluster(name)
    assert error.value.field == "shape"


def test_unknown_machine_names_those_that_exist():
    with pytest.raises(ProfileError, match="h100") as error:
        load_cluster("h1000:8")
    assert "h100" in error.value.known


def test_own_file(tmp_path):
    from importlib import resources

    text = resources.files("uniap_jax").joinpath("profiles").joinpath("h100.json").read_text()
    data = json.loads(text) | {"name": "mine"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load_cluster(f"{path}:2x8").num_devices == 16
    path.write_text(json.dumps(data | {"memory_bytes": "many"}))
    with pytest.raises(ProfileError, match="memory_bytes"):
        load_cluster(path)
    path.write_text(json.dumps(data | {"speed": 1}))
    with pytest.raises(ProfileError, match="speed"):
        load_cluster(path)
    path.write_text(json.dumps(data | {"version": 2}))
    with pytest.raises(ProfileError, match="version 2"):
        load_cluster(path)


@pytest.mark.parametrize("rate", [float("nan"), -1.0, 0.0, float("inf")])
def test_impossible_rates(rate):
    with pytest.raises(ProfileError) as error:
        Link(name="x", size=2, bandwidth_bytes_per_s=rate, uplink_bytes_per_s=1.0, latency_s=0.0)
    assert "bandwidth" in error.value.field


def test_local_devices_share_the_host():
    cluster = local_cluster(memory_limit="50%")
    assert (cluster.num_devices, cluster.kind) == (8, jax.devices()[0].device_kind)
    assert cluster.capacity_bytes == int(cluster.memory_bytes * 0.5)
    four = local_cluster(jax.devices()[:4])
    assert (four.num_devices, four.memory_bytes) == (4, cluster.memory_bytes)


def torus(name):
    cluster = load_cluster(name)
    return cluster, cluster.link_efficiency


def test_a_group_over_whole_axes_of_a_torus_uses_them_all():
    cluster, share = torus("v5p:4x4x4")
    ring = 2 * 100e9 * share  # an axis of four closes, and sends both ways
    assert cluster.route(4).bandwidth_bytes_per_s == pytest.approx(ring)
    assert cluster.route(16).bandwidth_bytes_per_s == pytest.approx(2 * ring)
    assert cluster.route(64).bandwidth_bytes_per_s == pytest.approx(3 * ring)
    assert cluster.route(4, 16).bandwidth_bytes_per_s == pytest.approx(ring)  # the outer axis alone
    assert cluster.route(16, 4).bandwidth_bytes_per_s == pytest.approx(2 * ring)


def test_part_of_an_axis_is_a_line_and_groups_that_interleave_share_it():
    cluster, share = torus("v5p:4x4x4")
    assert cluster.route(2).bandwidth_bytes_per_s == pytest.approx(100e9 * share)
    assert cluster.route(2, 2).bandwidth_bytes_per_s == pytest.approx(50e9 * share)
    assert cluster.route(8).bandwidth_bytes_per_s == pytest.approx(2 * 100e9 * share)  # a ring and a line, at the line
    assert cluster.route(1).bandwidth_bytes_per_s == float("inf")


def test_short_axes_of_v5e_do_not_close():
    cluster, share = torus("v5e:4x4")
    assert cluster.route(16).bandwidth_bytes_per_s == pytest.approx(2 * 50e9 * share)
    assert cluster.boundary(4).bandwidth_bytes_per_s == pytest.approx(50e9 * share)  # to the row beside
    assert cluster.boundary(8).bandwidth_bytes_per_s == pytest.approx(25e9 * share)  # two devices on along a row


def test_two_devices_of_a_chip_share_its_links():
    cluster, share = torus("tpu7x:2x2x2")
    assert cluster.num_devices == 16
    assert cluster.links[0].name == "chip"
    assert cluster.route(2, 2).bandwidth_bytes_per_s == pytest.approx(50e9 * share)
    assert cluster.route(2).bandwidth_bytes_per_s == pytest.approx(600e9 * share)


@pytest.mark.parametrize("slowdown", [0.5, 2.5, float("nan")])
def test_impossible_overlap(slowdown):
    from dataclasses import replace

    with pytest.raises(ProfileError) as error:
        replace(two_nodes(), overlap_slowdown=slowdown)
    assert error.value.field == "overlap_slowdown"
