import importlib.util
import os
import subprocess
import sys
from importlib import resources

import pytest

from uniap_jax.core import absent
from uniap_jax.core.absent import absent_devices, part_of, stage_devices
from uniap_jax.core.cluster import load_cluster, local_cluster
from uniap_jax.core.errors import ProfileError

HERE = importlib.util.find_spec("libtpu") is not None
cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the compiler of NVIDIA cards comes with jax[cuda13]"
)


@pytest.mark.parametrize(
    ("name", "stages", "part"),
    [
        ("v5e:4x4", 1, ("v5e", (4, 4))),
        ("v5e:4x4", 2, ("v5e", (2, 4))),
        ("v5e:4x4", 8, ("v5e", (1, 2))),
        ("v5p:4x4x8", 4, ("v5p", (1, 4, 8))),
        ("h100:2x8", 2, ("h100", (1, 8))),
        ("tpu7x:2x2x1", 4, ("tpu7x", (1, 1, 1))),
    ],
)
def test_a_stage_is_a_topology_of_its_own(name, stages, part):
    assert part_of(load_cluster(name), stages) == part


@pytest.mark.parametrize(("name", "stages"), [("v5e:4x4", 3), ("v5p:2x3x4", 12 // 4 * 4), ("tpu7x:2x2x1", 8)])
def test_no_box(name, stages):
    cluster = load_cluster(name)
    if cluster.num_devices % stages == 0 and name == "v5p:2x3x4":
        assert part_of(cluster, stages) == ("v5p", (1, 1, 2))
        return
    with pytest.raises(ProfileError) as error:
        part_of(cluster, stages)
    assert error.value.field == "num_stages"


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(absent, "find_spec", lambda name: None)
    for name, extra in (("v5e:4x4", "tpu"), ("h100:2x8", "cuda")):
        with pytest.raises(ProfileError, match=rf"uniap-jax\[{extra}\]") as error:
            stage_devices(load_cluster(name), 1)
        assert error.value.extra == extra


def test_absent_cpus_have_no_compiler():
    with pytest.raises(ProfileError) as error:
        stage_devices(local_cluster(), 1)
    assert error.value.field == "platform"


@pytest.mark.skipif(not HERE, reason="the TPU compiler comes with jax[tpu]")
def test_chips_come_in_the_order_of_the_torus():
    before = dict(os.environ)
    devices = absent_devices(load_cluster("v5e:2x4"))
    assert [tuple(d.coords)[:2] for d in devices] == [(x, y) for x in range(2) for y in range(4)]
    assert devices[0].device_kind == load_cluster("v5e:2x4").kind
    assert dict(os.environ) == before
    assert len(absent_devices(load_cluster("v5e:2x4"), 4)) == 8


@pytest.mark.skipif(not HERE, reason="the TPU compiler comes with jax[tpu]")
def test_topologies_that_the_compiler_does_not_know():
    with pytest.raises(ProfileError) as error:
        stage_devices(load_cluster("v5e:3x5"), 1)
    assert error.value.name == "v5e:3x5"
    with pytest.raises(ProfileError) as error:  # the compiler sees cores, the description chips
        stage_devices(load_cluster("v4:2x2x2"), 1)
    assert (error.value.field, error.value.wanted, error.value.found) == ("num_devices", 8, 16)


@cuda
@pytest.mark.parametrize("card", ["a100-40g", "a100-80g", "h100", "h200"])
def test_every_described_card_can_be_compiled_for(card):
    before, cluster = dict(os.environ), load_cluster(f"{card}:2x8")
    devices = absent_devices(cluster)
    assert [d.id for d in devices] == list(range(16))
    assert {d.device_kind for d in devices} == {cluster.kind}
    assert len(absent_devices(cluster, 4)) == 16
    assert dict(os.environ) == before


@cuda
def test_a_plugin_that_has_withdrawn_says_how_to_start():
    """It looks for a driver unless jax was told to use CPUs; an old cupti or none is enough to make it withdraw."""
    code = (
        "from uniap_jax.core.absent import stage_devices\nfrom uniap_jax.core.cluster import load_cluster\n"
        "from uniap_jax.core.errors import ProfileError\n"
        "try:\n    print(len(stage_devices(load_cluster('h100:8'), 1)))\n"
        "except ProfileError as error:\n    print(error.field, error)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert out.stdout.startswith(("8", "JAX_PLATFORMS")), out.stderr


def test_a_card_without_a_compiler_description_names_those_that_have_one(monkeypatch, tmp_path):
    monkeypatch.setattr(absent, "find_spec", lambda name: True)
    text = (
        resources.files("uniap_jax")
        .joinpath("profiles/h100.json")
        .read_text()
        .replace('"name": "h100"', '"name": "own"')
    )
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ProfileError, match="source described") as error:
        stage_devices(load_cluster(f"{tmp_path / 'own.json'}:8"), 1)
    assert "h100" in error.value.known


def test_a_plugin_that_withdrew_is_no_unknown_topology(monkeypatch):
    def withdrawn(**_):
        raise NotImplementedError("platform cuda is not registered")

    monkeypatch.setattr("uniap_jax.core.absent._check_installed", lambda cluster: None)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", withdrawn)
    with pytest.raises(ProfileError, match="start Python with JAX_PLATFORMS=cpu") as error:
        absent_devices(load_cluster("h100:1x8"))
    assert error.value.field == "JAX_PLATFORMS"
