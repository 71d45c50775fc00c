"""Reads the user's step: `FILE.py:build` or `pkg.mod:build`, where `build()` returns `(state, train_step, batch)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from uniap_jax.cli.output import UsageError

Build = Callable[[], tuple[Any, Callable[..., Any], Any]]
EXAMPLE = "for example --step train.py:build, where build() returns (state, train_step, batch)"


def load_build(spec: str) -> Build:
    """Finds `build` and imports what holds it.

    Raises:
        UsageError: the file, module or function is not there, or what it returns is not three things.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(f"--step {spec!r} does not name a function; {EXAMPLE}", spec=spec)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = vars(module).get(name)
    if not callable(function):
        others = _functions(module)
        there = f"it has {', '.join(others)}" if others else "it defines no function"
        raise UsageError(
            f"{place} has no function {name!r}; {there}; {EXAMPLE}", path=place, name=name, functions=others
        )
    return _checked(function, spec)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path} (looked in {Path.cwd()}); {EXAMPLE}", path=str(path))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(module_spec)
    # As Python does for a script: its neighbours can be imported, and classes it defines know their module.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    module_spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there; something it imports is not
        raise UsageError(
            f"there is no module {name!r} (looked in {Path.cwd()} and on sys.path); {EXAMPLE}", name=name
        ) from None


def _functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    )


def _checked(function: Callable[[], Any], spec: str) -> Build:
    def build() -> tuple[Any, Callable[..., Any], Any]:
        made = function()
        if not isinstance(made, tuple) or len(made) != 3:
            got = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
            raise UsageError(f"{spec} returned {got}, not (state, train_step, batch)", spec=spec)
        if not callable(made[1]):
            raise UsageError(
                f"{spec} returned (state, {type(made[1]).__name__}, batch); the second must be the train step",
                spec=spec,
            )
        return made

    return build
