"""Markdown tables on standard output, and the line that says where they were made."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version


def say(text: str) -> None:
    """A line of text."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def row(*cells: object) -> None:
    """One line of a table."""
    sys.stdout.write("| " + " | ".join(str(c) for c in cells) + " |\n")
    sys.stdout.flush()


def head(*names: str) -> None:
    """The first two lines of a table."""
    sys.stdout.write("\n")
    row(*names)
    row(*("---" for _ in names))


def made_on(packages: Sequence[str] = ("numpy", "scipy", "mip")) -> str:
    """Machine, versions and load of this moment, one sentence."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; "
        f"Python {platform.python_version()}, {versions}."
    )


def cpu_seconds() -> float:
    """CPU time of this process and of children that have ended."""
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + child.ru_utime + child.ru_stime


def peak_mib() -> int:
    """Most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
