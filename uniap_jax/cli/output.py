"""What a person or a program sees: one owner of standard output, errors as text or JSON, progress on stderr."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from uniap_jax.core import errors

OK, BROKEN, USAGE, NOTHING_FITS, NO_PLAN_IN_TIME, CHECK_FAILED = range(6)


class UsageError(errors.UniapError, ValueError):
    """The command line names something that is not there."""


# First match wins.
EXIT_CODES: tuple[tuple[type[errors.UniapError], int, str], ...] = (
    (errors.NoPlanInTimeError, NO_PLAN_IN_TIME, "no_plan_in_time"),
    (errors.InfeasibleError, NOTHING_FITS, "infeasible"),
    (errors.StrategyError, NOTHING_FITS, "infeasible"),
    (errors.OptionError, NOTHING_FITS, "infeasible"),
    (errors.PlanMismatchError, NOTHING_FITS, "plan_mismatch"),
    (UsageError, USAGE, "usage"),
    (errors.TraceError, USAGE, "not_traced"),
    (errors.ProfileError, USAGE, "not_profiled"),
    (errors.UniapError, BROKEN, "broken"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go.

    Attributes:
        stream: the process's real standard output.
        as_json: one JSON object instead of text.
    """

    stream: TextIO
    as_json: bool

    def text(self, text: str) -> None:
        """A result for people; left out under `--json`."""
        if not self.as_json:
            print(text, file=self.stream, flush=True)

    def result(self, value: Mapping[str, Any]) -> None:
        """The result for programs; left out without `--json`."""
        if self.as_json:
            print(json.dumps(plain(value)), file=self.stream, flush=True)

    def show(self, facts: Mapping[str, Any], write: Callable[[TextIO], None]) -> None:
        """A result for programs or, where they did not ask, for people."""
        self.result(facts)
        self.people(write)

    def people(self, write: Callable[[TextIO], None]) -> None:
        """A result for people that writes itself; left out under `--json`."""
        if not self.as_json:
            write(self.stream)
            self.stream.flush()

    def close(self) -> None:
        """Flushes; descriptor 1 stays redirected, so that what C libraries print at exit stays off the result."""
        self.stream.flush()


def claim_stdout(*, as_json: bool) -> Output:
    """Takes standard output for results; whatever else prints, in Python or in C, lands on stderr from here on.

    The user's step file, plugins and solvers write to descriptor 1 without asking, so the descriptor itself moves.
    """
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    return Output(stream=os.fdopen(real, "w", encoding="utf-8"), as_json=as_json)


def plain(value: Any) -> Any:
    """The value in JSON's types; not-a-number and infinities become None, which strict readers accept."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value)


def failure(error: errors.UniapError, output: Output) -> int:
    """Tells an error of ours without a traceback and returns its exit code."""
    code, status = next((code, status) for kind, code, status in EXIT_CODES if isinstance(error, kind))
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    output.result(
        {"ok": False, "status": status, "error": type(error).__name__, "message": str(error), "fields": error.fields}
    )
    return code


def start_logging(*, verbose: bool) -> None:
    """Sends this package's log to stderr: warnings, or everything with `--verbose`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("uniap_jax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def say(text: str) -> None:
    """A line for the person who waits, on stderr."""
    print(text, file=sys.stderr, flush=True)
