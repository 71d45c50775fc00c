"""The options of every verb. Imports argparse and this package's plain nouns only, so that `--help` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

SCHEDULES = {"gpipe": "gpipe", "1f1b": "one_f_one_b", "one_f_one_b": "one_f_one_b", "auto": "auto"}
REDACT = "leave out of the saved file what identifies the devices: their kind, and notes"
EXIT_CODES = """\
exit codes: 0 ok; 1 a step or a solver broke; 2 wrong use, or a step that cannot be read; 3 nothing fits, or the given
plan cannot be made for this model and these devices; 4 no plan in time; 5 the check failed"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")


def _verb(name: str) -> Callable[..., int]:
    """The function of a verb, imported only when it runs: verbs import jax."""

    def run(*args: Any) -> int:
        function: Callable[..., int] = getattr(import_module("uniap_jax.cli.verbs"), name)
        return function(*args)

    return run


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _schedule(text: str) -> str:
    if text not in SCHEDULES:
        raise argparse.ArgumentTypeError(f"{text!r} is no schedule; use gpipe or 1f1b")
    return SCHEDULES[text]


def _strategy(text: str) -> str:
    from uniap_jax.core.errors import StrategyError
    from uniap_jax.core.strategy import parse_strategy

    try:
        parse_strategy(text)
    except StrategyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _pin(text: str) -> tuple[str, str]:
    pattern, _, value = text.partition("=")
    if not pattern.strip() or not value.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no pin; use PATTERN=STRATEGY or PATTERN=STAGE, as in block_*=tensor=2"
        )
    return pattern.strip(), value.strip()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("uniap-jax")
    except PackageNotFoundError:
        return "unknown (runs from a source tree, not installed)"


def _common() -> _Parser:
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    common.add_argument("--verbose", "-v", action="store_true", help="log what is done, on stderr")
    common.add_argument(
        "--devices", type=_count, metavar="N", help="use N virtual CPU devices instead of the devices jax finds"
    )
    return common


def _step() -> _Parser:
    step = _Parser(add_help=False)
    step.add_argument(
        "--step",
        required=True,
        metavar="FILE.py:build",
        help="the train step: FILE.py:build or pkg.mod:build, where build() returns (state, train_step, batch)",
    )
    step.add_argument(
        "--unfold-scans",
        action="store_true",
        help="make a layer of every turn of a loop over layers (nn.scan, nnx.scan, lax.scan); wanted again with --plan",
    )
    return step


def _profiling() -> _Parser:
    group = _Parser(add_help=False)
    group.add_argument(
        "--source",
        choices=("measured", "compiled", "described"),
        help="where numbers come from: this machine's clock, the real compiler of devices that are not here "
        "(extras tpu, cuda), or described rates and links "
        "(default: measured for devices that are here, described with --topology)",
    )
    group.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help="time to spend on measuring (default 120) or compiling (default 480)",
    )
    group.add_argument("--topology", metavar="NAME", help="plan for devices that are not here, for example v5e:2x4")
    group.add_argument("--memory-limit", default="90%", metavar="SIZE", help="per device: 90%%, 6GiB or bytes")
    group.add_argument("--cache-dir", metavar="DIR", help="where profiles are kept (default: the user's cache folder)")
    return group


def _pinning() -> _Parser:
    group = _Parser(add_help=False)
    group.add_argument("--stages", type=_count_or_auto, default="auto", metavar="P", help="number of pipeline stages")
    group.add_argument(
        "--microbatches", type=_count_or_auto, default="auto", metavar="C", help="micro-batches per step"
    )
    group.add_argument("--schedule", type=_schedule, default="auto", metavar="gpipe|1f1b", help="pipeline schedule")
    group.add_argument(
        "--executor",
        choices=("auto", "stages", "program"),
        default="auto",
        help="of several stages: a program for each, one program for all equal stages, or the faster (default)",
    )
    group.add_argument(
        "--strategy",
        type=_strategy,
        metavar="data=2,tensor=2",
        help="use this split for every layer where it is legal, the nearest legal one elsewhere",
    )
    group.add_argument(
        "--pin",
        type=_pin,
        action="append",
        metavar="PATTERN=STRATEGY",
        help="fix the split or the stage of layers by name, for example 'block_*=tensor=2' or 'embed=0'; repeatable",
    )
    return group


def _solving() -> _Parser:
    group = _Parser(add_help=False)
    group.add_argument(
        "--time-limit", type=_seconds, default=60.0, metavar="SECONDS", help="of the solver (default 60)"
    )
    group.add_argument(
        "--solver", choices=("cbc", "highs"), default="cbc", help="where a MIP solver is asked (default cbc)"
    )
    return group


def _trying() -> _Parser:
    group = _Parser(add_help=False)
    group.add_argument(
        "--finalists",
        type=_count,
        default=1,
        metavar="N",
        help="compile the best plans of N numbers of stages, run those that fit, and take the fastest (default 1: the "
        "best as predicted); with --topology they are compiled only",
    )
    return group


def _add_pages(verb: _Parser, what: str) -> None:
    verb.add_argument("--html", metavar="FILE", help=f"write {what} as a self-contained page")
    verb.add_argument("--trace", metavar="FILE", help="write the step in time for ui.perfetto.dev")


def make_parser() -> _Parser:
    """The parser of `uniap-jax`."""
    step, profiling, pinning, solving, trying = _step(), _profiling(), _pinning(), _solving(), _trying()
    parser = _Parser(
        prog="uniap-jax",
        description="Finds a parallel plan for a JAX train step by one joint optimisation, and runs it.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    def add(name: str, parents: Sequence[_Parser], text: str) -> _Parser:
        # common options anew for every verb: parsers share the actions of their parents, and with them every default
        verb = verbs.add_parser(
            name, parents=[_common(), *parents], help=text, description=f"{text}.", epilog=EXIT_CODES
        )
        verb.set_defaults(verb=_verb(name))
        return verb

    add("doctor", [], "Show devices, versions, extras, solver and caches")
    add("trace", [step], "Show the layers a train step is cut into")
    profile = add("profile", [step, profiling], "Measure layers and links")
    profile.add_argument("--out", metavar="FILE", help="save the profile")
    profile.add_argument("--redact", action="store_true", help=REDACT)
    plan = add("plan", [step, profiling, pinning, solving, trying], "Find the fastest plan that fits, with its proof")
    plan.add_argument("--out", metavar="FILE", help="save the plan")
    plan.add_argument("--redact", action="store_true", help=REDACT)
    plan.add_argument("--top-k", type=_count, default=1, metavar="K", help="find the K best plans (default 1)")
    plan.add_argument("--verify", action="store_true", help="compile the plan and compare memory with the prediction")
    explain = add("explain", [], "Show a saved plan, or how two differ")
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument("other", nargs="?", metavar="OTHER.json")
    _add_pages(explain, "the plan")
    check = add(
        "check", [step, profiling, pinning, solving], "Train under a plan and on one device, and compare the numbers"
    )
    check.add_argument("--plan", metavar="FILE", help="check this plan instead of searching one")
    check.add_argument("--steps", type=_count, default=3, metavar="N", help="training steps to compare (default 3)")
    check.add_argument(
        "--accuracy",
        action="store_true",
        help="compare what is predicted of many plans with what is measured; with --topology, memory as compiled",
    )
    check.add_argument("--plans", type=_count, default=20, metavar="N", help="plans to compare (default 20)")
    solve = add("solve", [], "Solve a planning problem given as tables")
    solve.add_argument("tables", metavar="TABLES.json")
    solve.add_argument("--engine", default="interval", help="interval (default) or another engine by name")
    solve.add_argument("--time-limit", type=_seconds, default=60.0, metavar="SECONDS", help="(default 60)")
    solve.add_argument("--solver", choices=("cbc", "highs"), default="cbc", help="(default cbc)")
    run = add("run", [step, profiling, pinning, solving, trying], "Train under a plan")
    run.add_argument("--plan", metavar="FILE", help="use this plan instead of searching one")
    run.add_argument("--steps", type=_count, default=10, metavar="N", help="training steps (default 10)")
    run.add_argument("--tensorboard", metavar="DIR", help="write metrics and step times there (extra: report)")
    _add_pages(run, "the plan, with what was compiled and measured beside it,")
    demo = add("demo", [], "Plan, train and check a small GPT on virtual devices")
    demo.add_argument("--steps", type=_count, default=20, metavar="N", help="training steps (default 20)")
    demo.set_defaults(devices=8)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; leaves with 2 where it is wrong, with 0 after `--help` and `--version`."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.version:
        print(f"uniap-jax {_version()}")
        parser.exit(0)
    if "verb" not in options:
        parser.error("name a verb: doctor, trace, profile, plan, explain, check, solve, run or demo")
    pins = ("stages", "microbatches", "schedule", "executor", "strategy", "pin")
    pinned = [f"--{name}" for name in pins if getattr(options, name, None) not in (None, "auto")]
    if pinned and getattr(options, "plan", None):
        parser.error(f"--plan and {pinned[0]} both say what the plan is; give one")
    return options
