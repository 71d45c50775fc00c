"""Environment of every test: eight virtual CPU devices, set before anything imports jax."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Unoptimised CPU code compiles several times faster and computes the same numbers to rounding.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)
os.environ["JAX_PLATFORMS"] = "cpu"
# The CPU client takes its thread count from here: eight devices that meet in a collective need eight threads and more,
# or they wait for each other for good on a machine with few cores.
os.environ["NPROC"] = "64"
# Child processes import this tree, from whatever folder they run in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))

# Hypothesis writes down source paths of this machine; they are no part of the tree.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir()) / "uniap-jax-hypothesis"))
# A busy machine is no fault of the code: an example may take as long as it takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

if "jax" in sys.modules:
    import jax

    assert len(jax.devices()) == 8, "jax started before tests/conftest.py could ask for eight devices"


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(autouse=True, scope="session")
def _cache_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps profiles of tests out of the user's cache, and the user's profiles out of tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
