"""Every guard against a fault is taken out in turn, and its tests have to fail: prints one row a guard.

    python tests/faults/without_fixes.py             all, a few minutes
    python tests/faults/without_fixes.py solver      those whose fault has this word

Works on a copy of the package and its tests in a temporary folder. A guard whose text is no longer there, and tests
that cannot run, count as failures of this script as much as tests that pass without the guard.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS_FAILED = 1
"""What pytest ends with where tests ran and some failed; other statuses say that it could not run them."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What keeps a fault from doing harm, and what tells that it does.

    Attributes:
        fault: in words.
        file: of the package.
        text: the guard's code, there exactly once.
        without: what stands there without it.
        tests: one of them has to fail then.
    """

    fault: str
    file: str
    text: str
    without: str
    tests: tuple[str, ...]


INTERRUPTIONS, HOSTILE = "tests/faults/test_interruptions.py", "tests/faults/test_hostile_files.py"
SOLVER, LINES = "tests/planner/test_faults.py", "tests/processes/test_process_lines.py"
MONITOR, PROCESSES = "tests/runtime/test_monitor.py", "tests/processes/test_process_training.py"

GUARDS = (
    Guard(
        "killed while a plan is written: files are replaced by rename",
        "core/serialize.py",
        "        os.replace(name, path)\n",
        "        shutil = __import__('shutil')\n        shutil.copyfile(name, path)\n        os.unlink(name)\n",
        (f"{INTERRUPTIONS}::test_a_killed_writer_leaves_a_whole_file",),
    ),
    Guard(
        "full disk while a plan is written: what was begun is removed",
        "core/serialize.py",
        "    except BaseException:\n        os.unlink(name)\n        raise\n",
        "    except BaseException:\n        raise\n",
        (f"{INTERRUPTIONS}::test_a_full_disk_keeps_the_old_file",),
    ),
    Guard(
        "full disk while a plan is written: the old file stays until the new one is whole",
        "core/serialize.py",
        '    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")\n',
        "    name = str(path)\n    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)\n",
        (f"{INTERRUPTIONS}::test_a_full_disk_keeps_the_old_file",),
    ),
    Guard(
        "killed while layers are profiled: every number is kept as soon as it is known",
        "profiler/probe.py",
        "        self.cache.put(self.facts(entry), numbers)\n",
        "",
        (f"{INTERRUPTIONS}::test_a_killed_profiling_run_is_taken_up_where_it_stood",),
    ),
    Guard(
        "two planners share a cache: each writes a file of its own and renames it",
        "core/serialize.py",
        '    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")\n',
        '    name = f"{path}.part"\n    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)\n',
        (f"{INTERRUPTIONS}::test_two_writers_of_one_file_never_mix",),
    ),
    Guard(
        "a solver outlives the planner that was killed: it watches its parent",
        "planner/child.py",
        "    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()\n",
        "",
        (f"{SOLVER}::test_the_solver_ends_with_the_process_that_asked",),
    ),
    Guard(
        "read-only cache: a number that cannot be kept is a warning",
        "profiler/cache.py",
        '        except OSError as error:\n            log.warning("measurement cannot be kept',
        '        except ZeroDivisionError as error:\n            log.warning("measurement cannot be kept',
        ("tests/profiler/test_cache.py::test_a_folder_that_cannot_be_written_is_no_error",),
    ),
    Guard(
        "damaged cache entry: checksums",
        "profiler/cache.py",
        'entry.get("checksum") != _checksum(facts, numbers) or ',
        "",
        ("tests/profiler/test_cache.py::test_a_damaged_entry_is_measured_again",),
    ),
    Guard(
        "profile with impossible numbers: negative, infinite or no number",
        "core/serialize.py",
        '    _refuse_infinite(body, "$", error)\n',
        "",
        ("tests/core/test_serialize.py",),
    ),
    Guard(
        "profile faster than the peak rate: set apart and said",
        "cost_model/credible.py",
        "if cost.time_s + cost.sync_s < SLACK * least_s:",
        "if cost.time_s < 0:",
        ("tests/cost_model/test_estimate.py::test_numbers_faster_than_the_peak_are_set_apart",),
    ),
    Guard(
        "profile of another device or model: refused by field",
        "core/profile.py",
        "            if own != other:\n",
        "            if own is None:\n",
        ("tests/core/test_profile.py::test_a_profile_of_something_else_is_refused",),
    ),
    Guard(
        "hostile file: too large to be read",
        "core/serialize.py",
        "    if size > MAX_BYTES:\n",
        "    if size < 0:\n",
        (f"{HOSTILE}::test_a_file_larger_than_the_limit_is_not_read",),
    ),
    Guard(
        "hostile file: nested too deep",
        "core/serialize.py",
        "(msgspec.DecodeError, UnicodeDecodeError, RecursionError)",
        "(msgspec.DecodeError, UnicodeDecodeError)",
        (f"{HOSTILE}::test_deep_nesting",),
    ),
    Guard(
        "hostile file: values of another type, unknown keys, huge counts",
        "core/serialize.py",
        "    except msgspec.ValidationError as wrong:  # says",
        "    except ZeroDivisionError as wrong:  # says",
        (f"{HOSTILE}::test_mutated_files_give_only_our_errors",),
    ),
    Guard(
        "hostile plan: counts that nothing can be made of",
        "core/serialize.py",
        "    if stages < 1 or len(sizes) != stages:\n",
        "    if len(list(range(stages))) < 1:\n",
        (f"{HOSTILE}::test_a_huge_count_in_a_plan_costs_nothing",),
    ),
    Guard(
        "hostile tables: sizes beyond what a file holds",
        "planner/files.py",
        "    if array.shape not in shapes:\n",
        "    if array.size < 0:\n",
        (
            f"{HOSTILE}::test_a_huge_count_in_tables_costs_nothing",
            f"{HOSTILE}::test_mutated_files_give_only_our_errors",
        ),
    ),
    Guard(
        "solver lies about its optimum: its price is computed again",
        "planner/joint.py",
        "    if not honest:\n",
        "    if claimed < 0:\n",
        (f"{SOLVER}::test_a_true_plan_with_a_false_price_is_not_believed",),
    ),
    Guard(
        "solver calls a model infeasible that has a plan",
        "planner/joint.py",
        "        if known:\n",
        "        if known is None:\n",
        (f"{SOLVER}::test_graph_with_skips_keeps_a_plan_and_claims_no_proof",),
    ),
    Guard(
        "solver hangs: killed a little after its limit",
        "planner/mip_model.py",
        "            timeout=max(time_limit_s, 0.1) + GRACE_S,\n",
        "            timeout=30.0,\n",
        (f"{SOLVER}::test_hang_is_killed",),
    ),
    Guard(
        "solver crashes: its exit status is looked at",
        "planner/mip_model.py",
        "    except (ValueError, KeyError, TypeError, AttributeError):\n",
        "    except ZeroDivisionError:\n",
        (f"{SOLVER}::test_chain_survives",),
    ),
    Guard(
        "solver prints to standard output",
        "planner/child.py",
        "    os.dup2(null, 1)\n",
        "",
        (f"{SOLVER}::test_what_a_solver_prints_is_no_part_of_its_answer",),
    ),
    Guard(
        "rank that disagrees: texts are compared before anything runs",
        "runtime/processes.py",
        '    if odd:\n        raise PlanMismatchError(\n            f"{what} differs',
        '    if odd == 0:\n        raise PlanMismatchError(\n            f"{what} differs',
        (f"{LINES}::test_process_that_differs_is_named_everywhere",),
    ),
    Guard(
        "rank that dies: its line breaks, and the others end",
        "runtime/process_server.py",
        "            if member.rank is not None and not member.left:\n                self._fail(",
        "            if member.rank is not None and not member.left:\n                str(",
        (f"{PROCESSES}::test_process_that_falls_out_ends_the_job[die-rank 1 ended in step 2: its process is gone]",),
    ),
    Guard(
        "rank that stays behind: steps are watched",
        "runtime/process_server.py",
        "        self._watch_steps(now)\n",
        "",
        (f"{LINES}::test_process_that_stays_behind_ends_the_job",),
    ),
    Guard(
        "rank that is blamed for the death of another",
        "runtime/process_server.py",
        "now - self._told[0] > ECHO_S",
        "now - self._told[0] > 0",
        (f"{LINES}::test_process_that_dies_is_blamed_and_not_the_one_that_fails_for_it",),
    ),
    Guard(
        "rank that fails for the death of another: it hears whose",
        "runtime/processes.py",
        "            blamed = self._blamed()\n",
        "            blamed = None\n",
        (f"{LINES}::test_process_that_fails_for_the_death_of_another_says_whose",),
    ),
    Guard(
        "rank that never speaks: waited for so long and no longer",
        "runtime/process_server.py",
        "            if now - since > self._timeout_s:\n",
        "            if now - since > 60.0:\n",
        (f"{LINES}::test_process_that_never_speaks_is_named_in_time",),
    ),
    Guard(
        "out of memory while a layer is profiled: does not fit, and on",
        "profiler/probe.py",
        "            if OUT_OF_MEMORY not in str(error):\n",
        "            if True:\n",
        ("tests/profiler/test_profile.py::test_out_of_memory_is_a_fact_other_failures_are_notes",),
    ),
    Guard(
        "a layer that needs more memory than a device has: compiled, and not run",
        "profiler/programs.py",
        "if arrays is None or program.needed_bytes > arrays.device_bytes:",
        "if arrays is None:",
        ("tests/profiler/test_profile.py::test_what_needs_more_memory_than_a_device_has_is_not_run",),
    ),
    Guard(
        "out of memory in a step: says what the plan expected",
        "runtime/executable.py",
        "            if OUT_OF_MEMORY not in str(error):\n",
        "            if True:\n",
        ("tests/faults/test_out_of_memory.py::test_a_step_that_finds_no_memory_says_what_was_expected",),
    ),
    Guard(
        "clock that jumps: limits are by a clock that nobody sets",
        "planner/clock.py",
        "time.monotonic()",
        "time.time()",
        (f"{INTERRUPTIONS}::test_no_time_is_taken_from_a_clock_that_people_set",),
    ),
    Guard(
        "stage that becomes slow: found",
        "runtime/monitor.py",
        "drift.factor > self._threshold",
        "drift.factor > 1e9",
        (f"{MONITOR}::test_a_stage_that_becomes_twice_as_slow_is_found",),
    ),
    Guard(
        "noise of ten percent: no drift, for medians are compared",
        "runtime/monitor.py",
        "elif drift.stage in self._drifting and drift.factor < min(SETTLED, self._threshold):",
        "elif drift.stage in self._drifting and drift.factor < self._threshold:",
        (f"{MONITOR}::test_noise_is_no_drift_and_a_slow_stage_is_said_once",),
    ),
    Guard(
        "plan that gains next to nothing: not proposed",
        "runtime/monitor.py",
        "found is None or found.gain_s < LEAST_GAIN * found.now_s",
        "found is None",
        (f"{MONITOR}::test_small_gains_are_not_proposed",),
    ),
    Guard(
        "switch that costs more than it saves: not made",
        "runtime/monitor.py",
        "proposal is None or proposal.gain_s * remaining_steps <= cost",
        "proposal is None",
        (f"{MONITOR}::test_state_after_a_switch_is_that_of_no_switch",),
    ),
    Guard(
        "the loop that trains waits for the stopwatch",
        "runtime/stopwatch.py",
        "        self._queues[stage].put((task, array))\n",
        "        self._queues[stage].put((task, array.block_until_ready()))\n",
        (f"{MONITOR}::test_the_loop_waits_for_nothing",),
    ),
    Guard(
        "privacy: a redacted file names no device",
        "core/serialize.py",
        'dataclasses.replace(value, device_kind="", certificate=',
        "dataclasses.replace(value, certificate=",
        ("tests/test_privacy.py::test_redacted_files_say_nothing_of_the_devices",),
    ),
)


@contextmanager
def without(guard: Guard) -> Iterator[Path]:
    """A copy of the tree that lacks one guard."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        leave = shutil.ignore_patterns("__pycache__", ".*_cache")
        for name in ("uniap_jax", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=leave)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "uniap_jax" / guard.file
        text = path.read_text()
        if text.count(guard.text) != 1:
            raise ValueError(f"{guard.file} has {text.count(guard.text)} times {guard.text!r}, expected once")
        path.write_text(text.replace(guard.text, guard.without))
        yield copy


def outcome(guard: Guard) -> str:
    """What the tests say without the guard: "fails" is what is wanted."""
    try:
        with without(guard) as copy:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *guard.tests],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
    except ValueError as wrong:
        return f"NOT TRIED: {wrong}"
    if done.returncode == 0:
        return "PASSES"
    if done.returncode == TESTS_FAILED:
        return "fails"
    return f"NOT RUN: {done.stdout.splitlines()[-1]}"


def main(words: list[str]) -> int:
    """Prints the table; status 1 where a test does not fail."""
    print("| fault and guard | where | test | without the guard | s |\n| --- | --- | --- | --- | --- |")
    wrong = 0
    for guard in (g for g in GUARDS if all(word in g.fault for word in words)):
        began = time.monotonic()
        found = outcome(guard)
        wrong += found != "fails"
        tests = ", ".join(f"`{t.removeprefix('tests/')}`" for t in guard.tests)
        print(f"| {guard.fault} | `{guard.file}` | {tests} | {found} | {time.monotonic() - began:.0f} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
