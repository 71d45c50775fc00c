"""Starting is quick: importing costs little beside JAX, and help needs no JAX at all."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

ROUNDS, PAIRS = 3, 5
IMPORT_RATIO = 1.2
HELP_CPU_S = 0.5


def cpu_seconds(*argv: str) -> float:
    """Processor time of a Python that runs something; a busy host does not lengthen it as it does a clock's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *argv], check=True, capture_output=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_importing_costs_little_more_than_jax() -> None:
    pairs = [(cpu_seconds("-c", "import jax"), cpu_seconds("-c", "import jax, uniap_jax")) for _ in range(PAIRS)]
    assert statistics.median(ours_s / jax_s for jax_s, ours_s in pairs) <= IMPORT_RATIO


def test_help_is_there_at_once() -> None:
    assert min(cpu_seconds("-m", "uniap_jax", "--help") for _ in range(ROUNDS)) <= HELP_CPU_S


def test_a_plan_is_read_and_drawn_without_jax() -> None:
    code = "import sys; from uniap_jax.core.serialize import load; assert 'jax' not in sys.modules"
    assert cpu_seconds("-c", code) < 2 * HELP_CPU_S
