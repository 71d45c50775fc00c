"""Mixed-integer programs as plain data, and a child process that solves them and may be killed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 3.0
"""Seconds that the child gets beyond its own limit (start-up, a pass of CBC that does not look at the clock)."""


SOLVERS = {"cbc": "CBC", "highs": "HiGHS"}
"""Solvers by name, with what people call them; each is a file of this folder."""


def other_solver(solver: str) -> str:
    """The one that checks what a solver says."""
    return "highs" if solver == "cbc" else "cbc"


@dataclass(slots=True, eq=False)
class MipModel:
    """Minimise cost · x subject to rows; milliseconds and GiB, which CBC's tolerances suit."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[list[int], list[float], str, float]] = field(default_factory=list)

    def add(self, *, cost: float = 0.0, upper: float = 1.0, whole: bool = False) -> int:
        """A variable from 0 to `upper`; returns its number."""
        self.lower.append(0.0)
        self.upper.append(upper)
        self.cost.append(cost)
        self.whole.append(whole)
        return len(self.cost) - 1

    def add_row(self, columns: Sequence[int], values: Sequence[float], sense: str, right: float) -> None:
        """A row; sense is "<", ">" or "="."""
        self.rows.append((list(columns), [float(v) for v in values], sense, float(right)))

    def limit_cost(self, most: float) -> None:
        """A row that cuts off dearer points; a solver's own cutoff has been seen to give wrong answers."""
        costs = [(j, c) for j, c in enumerate(self.cost) if c]
        self.add_row([j for j, _ in costs], [c for _, c in costs], "<", most)

    def cost_of(self, values: Sequence[float]) -> float:
        """Objective of a point."""
        return math.fsum(c * v for c, v in zip(self.cost, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MipAnswer:
    """What came back, unchecked.

    Attributes:
        status: "optimal", "feasible", "infeasible", "no_solution" (nothing within the limit) or "failed".
        values: of the variables, or None.
        bound: the solver's lower bound, -inf without one.
        reason: of a failure.
    """

    status: str
    values: tuple[float, ...] | None = None
    bound: float = -math.inf
    reason: str = ""


def child_command(solver: str) -> list[str]:
    """How a solver's child is started: by path, so that neither this package nor the user's main module is imported."""
    return [sys.executable, "-P", str(Path(__file__).with_name("child.py")), solver, str(os.getpid())]


def solve_mip(
    model: MipModel, *, time_limit_s: float, solver: str = "cbc", start: Sequence[tuple[int, float]] = ()
) -> MipAnswer:
    """Solves a model in a child process; a crash, a hang or nonsense comes back as "failed" with the reason.

    Args:
        model: to minimise.
        time_limit_s: for the solver; the child is killed a little later.
        solver: one of SOLVERS.
        start: values of some variables of a known solution; HiGHS does without.
    """
    spec = {
        "lower": model.lower,
        "upper": model.upper,
        "cost": model.cost,
        "whole": model.whole,
        "rows": model.rows,
        "start": [list(pair) for pair in start],
        "time_limit_s": max(time_limit_s, 0.1),
    }
    try:
        done = subprocess.run(
            child_command(solver),
            input=json.dumps(spec).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=max(time_limit_s, 0.1) + GRACE_S,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return MipAnswer(status="failed", reason=f"the solver hung and was killed after {time_limit_s + GRACE_S:.1f} s")
    except OSError as error:
        return MipAnswer(status="failed", reason=f"the solver did not start: {error}")
    if done.returncode != 0:
        return MipAnswer(status="failed", reason=f"the solver died with exit status {done.returncode}")
    return _read_answer(done.stdout, len(model.cost))


def _read_answer(text: bytes, num_variables: int) -> MipAnswer:
    try:
        data: dict[str, Any] = json.loads(text)
        values = data.get("values")
        answer = MipAnswer(
            status=str(data["status"]),
            values=None if values is None else tuple(float(v) for v in values),
            bound=-math.inf if data.get("bound") is None else float(data["bound"]),
            reason=str(data.get("reason", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return MipAnswer(status="failed", reason=f"the solver answered {len(text)} bytes that are not an answer")
    if answer.values is not None and len(answer.values) != num_variables:
        return MipAnswer(status="failed", reason="the solver answered with another number of variables")
    return answer
