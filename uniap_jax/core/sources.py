"""Where in the user's code an equation comes from."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

LIBRARIES = frozenset({"jax", "jaxlib", "flax", "optax", "chex"})
STANDARD = frozenset({"contextlib.py", "functools.py", "threading.py", "runpy.py"})


def source_line(eqn: Any) -> str:
    """`file.py:line` of the innermost frame outside JAX and the libraries on it; "" where the trace kept none."""
    return _line(eqn.source_info.traceback)


def inlined(source: Any, caller: Any) -> Any:
    """Source of an equation of a nested jit, in its caller: the caller's names ahead, its line where there is none.

    The body of a function of `jax.numpy` may come from a cache, and then knows nothing of who called.
    """
    known = source.traceback if _line(source.traceback) else caller.traceback
    return source.replace(name_stack=caller.name_stack + source.name_stack, traceback=known)


def _line(traceback: Any) -> str:
    for frame in traceback.frames if traceback is not None else ():
        path = PurePath(frame.file_name)
        if path.suffix == ".py" and path.name not in STANDARD and LIBRARIES.isdisjoint(path.parts[:-1]):
            return f"{path.name}:{frame.line_num}"
    return ""
