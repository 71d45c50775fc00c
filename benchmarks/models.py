"""Models written elsewhere under every kind of plan, against one device: one line a cell, one table of all.

    python -m benchmarks.models hf_gpt2 hf_t5      cells of some models
    python -m benchmarks.models --json FILE ...    adds the cells to a file, one JSON object a line
    python -m benchmarks.models --table FILE ...   prints the Markdown table of such files

The scripts are those of `tests/models/scripts`; those of flax's examples need `FLAX_EXAMPLES`, the others the packages
their first lines name. Eight virtual CPU devices. A cell is the worst relative difference of the loss and of a
gradient over the steps, or the reason why the plan was refused; it misses where a difference exceeds its tolerance,
where the compiler reshards through a full copy, or where a parameter is on no layer.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)

import jax

import uniap_jax as uniap
from uniap_jax.check import OneDevice, check_plan
from uniap_jax.core.errors import UniapError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.runtime.verify import full_copies, standard_error

SCRIPTS = Path(__file__).parent.parent / "tests" / "models" / "scripts"
TESTS = SCRIPTS.parent.parent
PLANS = (
    "1 1 data=8",
    "1 1 fsdp=8",
    "1 1 fsdp=8,zero=2",
    "1 1 fsdp=8,zero=1",
    "1 1 data=4,tensor=2",
    "1 1 data=4,tensor=2,sequence",
    "1 1 data=8,keep=inputs",
    "1 2 data=4,tensor=2",
    "2 1 data=4",
    "2 2 fsdp=4",
)
"""Stages, micro-batches, strategy of each layer that allows it."""


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _kinds() -> Any:
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module("model_kinds").KINDS


def build(name: str) -> Any:
    """(state, train_step, batch) of a script, or of a kind in `tests/model_kinds.py`."""
    script = SCRIPTS / f"{name}.py"
    return _load(script).build() if script.exists() else _kinds()[name]()


def unplaced(graph: LayerGraph) -> list[str]:
    """Parameters that are on no layer."""
    placed = {p for layer in graph.layers for p in layer.params}
    return [value.name for p, value in enumerate(graph.params) if p not in placed]


def cells(name: str, plans: Sequence[str], steps: int) -> Iterable[dict[str, Any]]:
    """Every plan of one model, compared with one device."""
    state, train_step, batch = build(name)
    graph = uniap.trace(train_step, state, batch)
    costs, one_device = uniap.estimate(graph), OneDevice(graph)
    for text in plans:
        stages, microbatches, strategy = text.split()
        started = time.perf_counter()
        cell: dict[str, Any] = {"model": name, "jax": jax.__version__, "plan": text, "layers": len(graph.layers)}
        cell |= {"parameters": len(graph.params), "unplaced": unplaced(graph)}
        try:
            plan = uniap.solve(
                costs,
                baselines=False,
                num_stages=int(stages),
                num_microbatches=int(microbatches),
                strategy=parse_strategy(strategy),
            )
            with standard_error() as written:
                report = check_plan(graph, plan, (state, batch), steps=steps, one_device=one_device)
            cell |= {
                "ok": report.ok,
                "loss": report.loss_rel_diff,
                "grad": report.grad_rel_diff,
                "leaf": report.grad_leaf,
                "narrow": report.narrow_grad_rel_diff,
                "tolerance": report.tolerance,
                "full_copies": full_copies(written),
                "strategies": sorted({str(c.strategy) for c in plan.layers}),
            }
        except UniapError as error:
            cell |= {"refused": type(error).__name__, "reason": str(error)}
        yield cell | {"seconds": round(time.perf_counter() - started, 1)}


def line(cell: dict[str, Any]) -> str:
    """One cell for the terminal."""
    head = f"{cell['model']} [{cell['plan']}] jax {cell['jax']} {cell['layers']} layers {cell['seconds']} s: "
    if "refused" in cell:
        return head + f"refused, {cell['reason']}"
    verdict = "; ".join(["MISS", *misses(cell)]) if misses(cell) else "ok"
    return head + f"{verdict} loss {cell['loss']:.1e} grad {cell['grad']:.1e} {cell['leaf'][-40:]} {cell['strategies']}"


def misses(cell: dict[str, Any]) -> list[str]:
    """What is wrong with a cell, one sentence each."""
    found = [f"parameters on no layer: {', '.join(cell['unplaced'])}"] if cell["unplaced"] else []
    if "refused" in cell:
        return found
    if not cell["ok"]:
        found.append(f"{cell['leaf']} differs by {cell['grad']:.1e}, the loss by {cell['loss']:.1e}")
    return found + [f"full copy: {text.split('] ')[-1]}" for text in cell["full_copies"][:1]]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: models × plans, the worst differences of all versions or a refusal; refusals and misses numbered."""
    plans = [p for p in PLANS if any(c["plan"] == p for c in found)]
    reasons: dict[str, int] = {}

    def cell(model: str, plan: str) -> str:
        here = [c for c in found if c["model"] == model and c["plan"] == plan]
        if not here:
            return "—"
        refused = [c for c in here if "refused" in c]
        if refused:
            reason = refused[0]["reason"].splitlines()[0]
            return f"refused ({reasons.setdefault(reason, len(reasons) + 1)})"
        wrong = dict.fromkeys(f"miss on jax {c['jax']}: {text}" for c in here for text in misses(c))
        mark = "".join(f"**miss ({reasons.setdefault(text, len(reasons) + 1)})** " for text in wrong)
        return f"{mark}{max(c['loss'] for c in here):.0e} / {max(c['grad'] for c in here):.0e}"

    rows = [
        f"| {model} | " + " | ".join(cell(model, p) for p in plans) + " |"
        for model in sorted({c["model"] for c in found})
    ]
    head = ["| model | " + " | ".join(f"`{p}`" for p in plans) + " |", "| --- " * (len(plans) + 1) + "|"]
    notes = [f"{n}. {reason}" for reason, n in reasons.items()]
    versions = sorted({c["jax"] for c in found})
    notes += ["", f"jax {' and '.join(versions)}: {len(found)} cells, {sum(map(bool, map(misses, found)))} miss."]
    return "\n".join([*head, *rows, "", *notes])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs cells, or prints the table of those that ran."""
    parser = argparse.ArgumentParser(prog="benchmarks.models", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="scripts; with --table, files")
    parser.add_argument("--plans", default=";".join(PLANS), help="stages micro-batches strategy; separated by ;")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    if args.table:
        sys.stdout.write(table([json.loads(x) for f in args.models for x in Path(f).read_text().splitlines()]) + "\n")
        return
    for model in args.models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the models' authors
            for cell in cells(model, args.plans.split(";"), args.steps):
                sys.stdout.write(line(cell) + "\n")
                sys.stdout.flush()
                if args.json:
                    with args.json.open("a") as out:
                        out.write(json.dumps(cell) + "\n")


if __name__ == "__main__":
    main()
