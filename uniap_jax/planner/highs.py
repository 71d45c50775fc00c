"""One MIP solved with HiGHS through SciPy, in the process of `child.py`; imports nothing of this package."""

from __future__ import annotations

import math
from typing import Any

TIME_LIMIT, INFEASIBLE = 1, 2
"""Of `scipy.optimize.milp`; 0 is optimal."""


def _number(value: float | None) -> float | None:
    """None for what JSON does not know."""
    return None if value is None or not math.isfinite(value) else float(value)


def solve(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers a model of `MipModel` as JSON data."""
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
