"""One MIP solved with CBC, in the process of `child.py`; the only file that imports mip."""

from __future__ import annotations

from typing import Any


def solve(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers a model of `MipModel` as JSON data."""
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
