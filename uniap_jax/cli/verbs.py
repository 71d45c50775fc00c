"""What each verb does: reads the step, walks through the rooms, shows the result. Imports jax."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import uniap_jax as uniap
from uniap_jax.cli.output import CHECK_FAILED, NO_PLAN_IN_TIME, NOTHING_FITS, OK, Output, UsageError, say
from uniap_jax.cli.progress import profiling_bar, search_bar
from uniap_jax.cli.steps import load_build
from uniap_jax.cli.watching import follow, live_bytes, observe
from uniap_jax.core.absent import absent_devices
from uniap_jax.core.cluster import Cluster, local_cluster
from uniap_jax.core.errors import OptionError
from uniap_jax.core.graph import LayerGraph
from uniap_jax.core.observed import NOTHING, Observed
from uniap_jax.core.plan import Plan
from uniap_jax.core.plan_text import format_seconds
from uniap_jax.core.profile import Key, Profile
from uniap_jax.core.serialize import load, plan_to_json, profile_to_json, redacted, save
from uniap_jax.core.strategy import parse_strategy
from uniap_jax.core.topology import load_cluster
from uniap_jax.cost_model import TableModel, estimate
from uniap_jax.planning import best_of, finalists, informed, possible_executor
from uniap_jax.profiler import MEMORY_SHARE
from uniap_jax.report import table
from uniap_jax.report.facts import print_check, print_facts, print_profile, print_verify
from uniap_jax.report.scalars import step_scalars, write_scalars
from uniap_jax.report.trace import write_trace
from uniap_jax.runtime import ParallelStep
from uniap_jax.runtime.verify import verify

BUDGETS_S = {"measured": 120.0, "compiled": 480.0, "described": 120.0}


def doctor(options: Namespace, output: Output) -> int:
    """Devices, versions, extras, solver, caches, and what is amiss."""
    from uniap_jax import doctor as room

    facts = room.examine()
    output.show(facts, lambda stream: print_facts(facts, stream))
    return OK


def trace(options: Namespace, output: Output) -> int:
    """The layers of a step."""
    graph = _trace(options)
    output.show(graph_facts(graph), lambda stream: table.print_graph(graph, stream))
    return OK


def graph_facts(graph: LayerGraph) -> dict[str, Any]:
    """What `trace --json` prints."""
    return {
        "ok": True,
        "batch_size": graph.batch_size,
        "fingerprint": graph.fingerprint,
        "split_reason": graph.split_reason,
        "notes": graph.notes,
        "layers": [
            {
                "index": layer.index,
                "name": layer.name,
                "source": layer.source,
                "signature": layer.signature,
                "flops": layer.flops,
                "param_bytes": table.layer_param_bytes(graph, layer),
                "activation_bytes": table.layer_output_bytes(graph, layer),
            }
            for layer in graph.layers
        ],
        "edges": [
            {"writer": u, "reader": v, "bytes": sum(graph.values[i].nbytes for i in values)}
            for u, v, values in graph.edges
        ],
    }


def profile(options: Namespace, output: Output) -> int:
    """Measures layers and links."""
    found = _profile(options, _trace(options), _cluster(options), _budget_s(options))
    if options.out:
        save(redacted(found) if options.redact else found, options.out)
        say(f"saved {options.out}")
    facts = {"ok": True, **profile_to_json(found)}
    output.show(facts, lambda stream: print_profile(found, stream))
    return OK


def plan(options: Namespace, output: Output) -> int:
    """The fastest plan that fits, with its proof."""
    state, train_step, batch = load_build(options.step)()
    graph, cluster = uniap.trace(train_step, state, batch, unfold_scans=options.unfold_scans), _cluster(options)
    if (options.verify or options.finalists > 1) and options.topology:
        absent_devices(cluster)  # says what is missing before anything is searched
    plans, step = _plans(options, graph, cluster, top_k=options.top_k), None

    def compiled(plan: Plan) -> ParallelStep:
        devices = absent_devices(cluster, plan.num_parts) if options.topology else None
        return uniap.compile_plan(graph, plan, cluster, devices=devices)

    if options.verify or len(plans) > 1:
        step = best_of(plans, compiled, None if options.topology else graph.step.flatten(state, batch))
    found = step.plan if step else plans[0]
    if options.out:
        save(redacted(found) if options.redact else found, options.out)
        say(f"saved {options.out}")
    facts = plan_facts(found)
    output.people(lambda stream: table.print_plan(found, stream))
    if options.verify and step:
        facts["verify"] = verify(step).to_dict()
        output.people(lambda stream: print_verify(facts["verify"], stream))
    output.result(facts)
    return OK


def plan_facts(found: Plan) -> dict[str, Any]:
    """The plan file's object, and what people ask first at its top."""
    proof = found.certificate
    return {
        **plan_to_json(found),
        "ok": True,
        "status": proof.status,
        "step_time_s": found.prediction.step_time_s,
        "bound_s": proof.bound_s,
        "gap": proof.gap,
        "seconds": proof.seconds,
    }


def explain(options: Namespace, output: Output) -> int:
    """A saved plan, or how two differ."""
    from uniap_jax.report.difference import plan_difference

    first = _load(options.plan)
    _write(options, first, NOTHING)
    if not options.other:
        output.show(plan_facts(first), lambda stream: table.print_plan(first, stream))
        return OK
    second = _load(options.other)
    rows = [{"what": d.what, "first": d.first, "second": d.second} for d in plan_difference(first, second)]
    output.show({"ok": True, "differences": rows}, lambda stream: table.print_difference(first, second, stream))
    return OK


def check(options: Namespace, output: Output) -> int:
    """Trains under a plan and on one device from the same start, and compares the numbers."""
    from uniap_jax.check import check as compare

    if options.accuracy:
        return _accuracy(options, output)
    build, profile = load_build(options.step), None
    if options.source == "measured" and not options.plan:
        profile = _profile(options, _trace(options), _cluster(options), _budget_s(options))
    report = compare(
        build,
        devices=jax.devices(),
        plan=_load(options.plan) if options.plan else None,
        profile=profile,
        steps=options.steps,
        unfold_scans=options.unfold_scans,
        **({} if options.plan else {**_pins(options), "time_limit_s": options.time_limit}),
    )
    facts = report.to_dict()
    output.people(lambda stream: table.print_plan(report.plan, stream))
    output.show(facts, lambda stream: print_check(facts, stream))
    return OK if report.ok else CHECK_FAILED


def _accuracy(options: Namespace, output: Output) -> int:
    """Many plans: what was predicted beside what is measured, or compiled for devices that are not here."""
    from uniap_jax.accuracy import absent_accuracy, accuracy, diverse_plans, report_lines

    if options.plan:
        raise UsageError("--accuracy compares many plans; leave --plan out")
    state, train_step, batch = load_build(options.step)()
    graph = uniap.trace(train_step, state, batch, unfold_scans=options.unfold_scans)
    cluster = _cluster(options)

    share = 1.0 if options.topology else MEMORY_SHARE  # nothing runs on devices that are not here: memory is all

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        return estimate(graph, cluster, _profile(options, graph, cluster, seconds, only, memory_share=share))

    costs, _ = informed(price, lambda model: diverse_plans(model, options.plans), _budget_s(options))
    if options.topology:
        report = absent_accuracy(graph, costs, cluster, num_plans=options.plans)
    else:
        report = accuracy(graph, costs, (state, batch), num_plans=options.plans)
    output.text("\n".join(report_lines(report)))
    output.result({"ok": True, **report.to_dict()})
    return OK


def solve(options: Namespace, output: Output) -> int:
    """Solves a planning problem given as tables."""
    from uniap_jax.planner import solve_file

    path = Path(options.tables)
    if not path.is_file():
        raise UsageError(f"there is no file {path}", path=str(path))
    try:
        found = solve_file(path, engine=options.engine, solver=options.solver, time_limit_s=options.time_limit)
    except OptionError as error:
        raise UsageError(str(error), **error.fields) from None
    code = {"infeasible": NOTHING_FITS, "no_plan_in_time": NO_PLAN_IN_TIME}.get(found["status"], OK)
    output.show({"ok": code == OK, **found}, lambda stream: print_facts(found, stream))
    return code


def run(options: Namespace, output: Output) -> int:
    """Trains under a plan."""
    state, train_step, batch = load_build(options.step)()
    cluster = _cluster(options)
    graph = uniap.trace(train_step, state, batch, unfold_scans=options.unfold_scans)
    plans = [_load(options.plan)] if options.plan else _plans(options, graph, cluster)
    leaves = graph.step.flatten(state, batch)
    step = best_of(plans, lambda plan: uniap.compile_plan(graph, plan, cluster), leaves)
    chosen, state = step.plan, step.place(state, batch)
    if len(plans) > 1:
        output.text(chosen.certificate.notes[-1])
    monitor = follow(step) if options.html or options.trace else None
    seconds, history, live = [], [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
        history.append(_scalars(metrics))
        live.append(live_bytes(jax.devices()))
        told = "  ".join(f"{name} {value:.5g}" for name, value in history[-1].items())
        output.text(f"step {len(history):4d}  {format_seconds(seconds[-1])}  {told}")
    median = statistics.median(seconds[1:] or seconds)
    predicted = chosen.prediction.step_time_s
    if options.tensorboard:
        known = [b for b in live if b is not None]
        points = step_scalars(history, seconds=seconds, predicted_step_time_s=predicted, live_bytes=known)
        write_scalars(options.tensorboard, points)
        say(f"wrote {options.tensorboard}")
    if options.html or options.trace:
        _write(options, chosen, observe(step, seconds, monitor))
    output.text(f"median step {format_seconds(median)}, predicted {format_seconds(predicted)}")
    output.result(
        {
            "ok": True,
            "metrics": history,
            "seconds": seconds,
            "step_time_s": median,
            "predicted_step_time_s": predicted,
            "plan": plan_to_json(chosen),
        }
    )
    return OK


def _write(options: Namespace, plan: Plan, observed: Observed) -> None:
    """The page and the trace that were asked for."""
    if options.html:
        Path(options.html).write_text(plan.to_html(observed), encoding="utf-8")
        say(f"wrote {options.html}")
    if options.trace:
        write_trace(plan, options.trace, observed)
        say(f"wrote {options.trace}")


def demo(options: Namespace, output: Output) -> int:
    """Plans, trains and checks a small GPT."""
    from uniap_jax.demo import run_demo
    from uniap_jax.profiler.cache import default_dir

    # Compiled programs are kept beside the profiles, so that a second demo does not compile them again.
    jax.config.update("jax_compilation_cache_dir", str(default_dir().parent / "xla"))
    with profiling_bar() as progress:
        facts = run_demo(
            steps=options.steps,
            tell=output.text,
            show_plan=lambda found: output.people(lambda stream: table.print_plan(found, stream)),
            progress=progress,
        )
    output.result(facts)
    return OK if facts["ok"] else CHECK_FAILED


def _trace(options: Namespace) -> LayerGraph:
    state, train_step, batch = load_build(options.step)()
    return uniap.trace(train_step, state, batch, unfold_scans=options.unfold_scans)


def _cluster(options: Namespace) -> Cluster:
    if options.topology:
        return load_cluster(options.topology, memory_limit=options.memory_limit)
    return local_cluster(memory_limit=options.memory_limit)


def _source(options: Namespace) -> str:
    found: str = options.source or ("described" if options.topology else "measured")
    return found


def _budget_s(options: Namespace) -> float:
    return float(options.budget or BUDGETS_S[_source(options)])


def _profile(
    options: Namespace,
    graph: LayerGraph,
    cluster: Cluster,
    budget_s: float,
    only: Sequence[Key] | None = None,
    **given: Any,
) -> Profile:
    source = _source(options)
    if source == "measured" and options.topology:
        raise UsageError(
            "--topology names devices that are not here, so nothing can be measured; use --source compiled or described"
        )
    if source == "compiled" and not options.topology:
        raise UsageError(
            "--source compiled is for devices that are not here; name them, for example --topology v5e:4x4, or use "
            "--source measured"
        )
    with profiling_bar() as progress:
        return uniap.profile(
            graph,
            cluster,
            source=source,
            budget_s=budget_s,
            only=only,
            cache_dir=options.cache_dir,
            progress=progress,
            **given,
        )


def _pins(options: Namespace) -> dict[str, Any]:
    return {
        "num_stages": options.stages,
        "num_microbatches": options.microbatches,
        "schedule": options.schedule,
        "executor": options.executor,
        "strategy": parse_strategy(options.strategy) if options.strategy else None,
        "pin": _layer_pins(options.pin or ()),
        "solver": options.solver,
    }


def _layer_pins(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Patterns with what they are pinned to; what is said of one pattern in several places adds up."""
    pins: dict[str, str] = {}
    for pattern, value in pairs:
        pins[pattern] = f"{pins[pattern]},{value}" if pattern in pins else value
    return pins


def _plans(options: Namespace, graph: LayerGraph, cluster: Cluster, *, top_k: int = 1) -> Sequence[Plan]:
    """The best plan, then the other finalists that were asked for."""
    pins = {**_pins(options), "executor": possible_executor(options.executor, cluster), "top_k": top_k}

    def price(only: Sequence[Key] | None, seconds: float) -> TableModel:
        # described numbers are made as the search asks for them
        found = None if _source(options) == "described" else _profile(options, graph, cluster, seconds, only)
        return estimate(graph, cluster, found)

    def plans_of(costs: TableModel) -> list[Plan]:
        def solve_for(**fixed: Any) -> Plan:
            with search_bar() as progress:
                return uniap.solve(costs, time_limit_s=options.time_limit, progress=progress, **{**pins, **fixed})

        return finalists(solve_for, costs, options.finalists, fixed=pins)

    return informed(price, plans_of, _budget_s(options))[1]


def _load(path: str) -> Plan:
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}", path=path)
    found = load(path)
    if not isinstance(found, Plan):
        raise UsageError(f"{path} holds a profile, not a plan", path=path)
    return found


def _scalars(metrics: Any) -> dict[str, float]:
    """The scalars of what a step returned beside its state, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(metrics)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): float(x) for path, x in leaves if jax.numpy.ndim(x) == 0
    }
