"""A child process that solves one MIP; imports nothing of this package but the solver's file beside it.

Started as a script with a JSON model on stdin; answers with one line of JSON on stdout. Solvers print to C's stdout in
places, so the descriptor itself is pointed elsewhere before one is loaded. The parent may kill this process any time,
and when the parent itself is killed it ends too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

WATCH_S = 0.5
"""Between looks at whether the parent is still there."""


def _claim_stdout() -> int:
    """A private copy of stdout for the answer; whatever else writes to descriptors 1 and 2 is dropped."""
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return answer


def _end_with(parent: int) -> None:
    """Ends this process when it has become an orphan: nobody would read the answer."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _solver(name: str) -> Any:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"uniap_solver_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(name: str, parent: int) -> None:
    """Reads a model, solves it with `cbc.py` or `highs.py`, writes the answer for `parent`, which may be gone."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answer = _claim_stdout()
    try:
        result = _solver(name).solve(json.load(sys.stdin))
    except (ImportError, OSError) as error:
        # a package is missing, or its shared library does not load on this machine
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "values": None}
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(result))
        out.flush()
    # CBC has been seen to crash while its objects are torn down; the answer is out, so leave at once
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
