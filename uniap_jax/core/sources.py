"""Where in the user's code an equation comes from."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

LIBRARIES = frozenset({"jax", "jaxlib", "flax", "optax", "chex"})
STANDARD = frozenset({"contextlib.py", "functools.py", "threading.py", "runpy.py"})


def source_line(eqn: Any) -> str:
    """`file.py:line` of the innermost frame outside JAX and the libraries on it; "" where the trace kept none."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = PurePath(frame.file_name)
        if path.suffix == ".py" and path.name not in STANDARD and LIBRARIES.isdisjoint(path.parts[:-1]):
            return f"{path.name}:{frame.line_num}"
    return ""
