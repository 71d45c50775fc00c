"""A child process that solves one MIP with HiGHS, through SciPy; imports nothing of this package.

The same door as `cbc.py`: a JSON model on stdin, one line of JSON on stdout, and it may be killed any time.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

TIME_LIMIT, INFEASIBLE = 1, 2
"""Of `scipy.optimize.milp`; 0 is optimal."""


def _claim_stdout() -> int:
    """A private copy of stdout for the answer; whatever else writes to descriptors 1 and 2 is dropped."""
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return answer


def _number(value: float | None) -> float | None:
    """None for what JSON does not know."""
    return None if value is None or not math.isfinite(value) else float(value)


def _solve(spec: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    columns, values, starts = [], [], [0]
    low, high = [], []
    for row_columns, row_values, sense, right in spec["rows"]:
        columns += row_columns
        values += row_values
        starts.append(len(columns))
        low.append(-np.inf if sense == "<" else right)
        high.append(np.inf if sense == ">" else right)
    matrix = csr_array((values, columns, starts), shape=(len(low), len(spec["cost"])))
    found = milp(
        np.array(spec["cost"]),
        integrality=np.array(spec["whole"], dtype=int),
        bounds=Bounds(np.array(spec["lower"]), np.array(spec["upper"])),
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)) if low else None,
        options={"time_limit": spec["time_limit_s"], "mip_rel_gap": 1e-7},
    )
    status = {0: "optimal", TIME_LIMIT: "no_solution" if found.x is None else "feasible", INFEASIBLE: "infeasible"}
    return {
        "status": status.get(found.status, "failed"),
        "reason": "" if found.status in status else str(found.message),
        "values": None if found.x is None else [float(x) for x in found.x],
        "objective": _number(found.fun),
        "bound": _number(found.mip_dual_bound),
    }


def main() -> None:
    """Reads a model, solves it, writes the answer."""
    answer = _claim_stdout()
    try:
        result = _solve(json.load(sys.stdin))
    except (ImportError, OSError) as error:
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
