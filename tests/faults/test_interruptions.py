"""Killed at any moment, on a full disk, or two at once: files are whole, and the next run goes on from them."""

import ast
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from uniap_jax.core.serialize import load

HERE = Path(__file__).resolve().parent
WORKER = [sys.executable, str(HERE / "worker.py")]
CHAIN = HERE.parent / "data" / "planning" / "chain14_p2.json"


def start(*arguments, **options):
    return subprocess.Popen([*WORKER, *map(str, arguments)], **options)


def entries(cache):
    return {p.name: json.loads(p.read_text()) for p in cache.glob("*.json")}


def timed(cache):
    return [e for e in entries(cache).values() if e["facts"]["what"] == "layer"]


def finish(process):
    assert process.wait(timeout=240) == 0


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_profiling_run_is_taken_up_where_it_stood(tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "profile.json"
    killed = start("profile", cache, out)
    wait_for(lambda: len(timed(cache)) >= 3, killed)
    killed.kill()
    killed.wait()
    assert not out.exists()
    before = entries(cache)  # every file is whole
    both = [start("profile", cache, tmp_path / f"{i}.json") for i in range(2)]  # and two share the cache
    for process in both:
        finish(process)
    after = entries(cache)
    assert before.items() <= after.items()
    assert len(after) > len(before)
    first, second = (load(tmp_path / f"{i}.json") for i in range(2))
    assert [key for key, _ in first.entries] == [key for key, _ in second.entries]
    assert sum(cost.origin == "measured" for _, cost in first.entries) >= 3


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    path = tmp_path / "plan.json"
    rng = random.Random(0)
    for _ in range(5):
        writer = start("save", path, stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        wait_for(path.exists, writer)
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert load(path).prediction.step_time_s in (1.0, 2.0)


def test_two_writers_of_one_file_never_mix(tmp_path):
    path = tmp_path / "plan.json"
    writers = [start("save", path, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    wait_for(path.exists, writers[0])
    for _ in range(30):
        assert load(path).prediction.step_time_s in (1.0, 2.0)
    for writer in writers:
        assert writer.poll() is None, "one cannot write because of the other"
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_a_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    writer = start("save-once", path, 1000)
    assert writer.wait(timeout=60) == 7
    assert load(path).prediction.step_time_s == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_killed_solver_run_gives_the_same_answer_again(tmp_path):
    command = [sys.executable, "-m", "uniap_jax", "solve", str(CHAIN), "--json"]
    first = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path)
    time.sleep(0.5)
    killed.kill()
    killed.communicate()
    again = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    same = [{k: v for k, v in json.loads(run.stdout).items() if "seconds" not in k} for run in (first, again)]
    assert same[0] == same[1]
    assert list(tmp_path.iterdir()) == []


def test_no_time_is_taken_from_a_clock_that_people_set(root):
    wall = {("time", "time"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    for path in (root / "uniap_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in wall, f"{path.name}:{node.lineno}: use time.monotonic"
