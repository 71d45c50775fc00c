"""A child process that solves one MIP with CBC. The only file that imports mip; imports nothing of this package.

Started as a script with a JSON model on stdin; answers with one line of JSON on stdout. CBC prints to C's stdout in
places, so the descriptor itself is pointed elsewhere before mip is loaded. The parent may kill this process any time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def _claim_stdout() -> int:
    """A private copy of stdout for the answer; whatever else writes to descriptors 1 and 2 is dropped."""
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return answer


def _solve(spec: dict[str, Any]) -> dict[str, Any]:
    import mip

    # named, because python-mip prefers Gurobi where it can be imported, licence or not
    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.max_mip_gap = 1e-7
    model.max_mip_gap_abs = 1e-9
    variables = [
        model.add_var(lb=lb, ub=ub, obj=cost, var_type=mip.INTEGER if whole else mip.CONTINUOUS)
        for lb, ub, cost, whole in zip(spec["lower"], spec["upper"], spec["cost"], spec["whole"], strict=True)
    ]
    for columns, values, sense, right in spec["rows"]:
        model.add_constr(mip.LinExpr([variables[j] for j in columns], values, -right, sense))
    if spec["start"]:
        model.start = [(variables[j], value) for j, value in spec["start"]]
    status = model.optimize(max_seconds=spec["time_limit_s"])
    found = model.num_solutions > 0
    names = {
        mip.OptimizationStatus.OPTIMAL: "optimal",
        mip.OptimizationStatus.FEASIBLE: "feasible",
        mip.OptimizationStatus.INFEASIBLE: "infeasible",
        mip.OptimizationStatus.INT_INFEASIBLE: "infeasible",
        mip.OptimizationStatus.NO_SOLUTION_FOUND: "no_solution",
    }
    bound = model.objective_bound
    return {
        "status": names.get(status, "failed"),
        "reason": "" if status in names else f"CBC answered {status.name}",
        "values": [float(v.x) for v in variables] if found else None,
        "objective": float(model.objective_value) if found else None,
        "bound": float(bound) if bound is not None else None,
    }


def main() -> None:
    """Reads a model, solves it, writes the answer."""
    answer = _claim_stdout()
    try:
        result = _solve(json.load(sys.stdin))
    except (ImportError, OSError) as error:
        # python-mip missing, or its shared library does not load on this machine
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(result))
        out.flush()
    # CBC has been seen to crash while its objects are torn down; the answer is out, so leave at once
    os._exit(0)


if __name__ == "__main__":
    main()
