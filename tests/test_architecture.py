"""The shape of the house: who may import what, how long a file may be, which words may not appear."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "uniap_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = ("frontend", "profiler", "cost_model", "planner", "runtime", "report")


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, at any depth; relative ones do not occur here."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_after(code: str) -> set[str]:
    """Names in `sys.modules` of a fresh Python after it ran some code."""
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(json.loads(out.stdout))


def test_there_are_files_to_look_at() -> None:
    assert {f"uniap_jax/{room}/__init__.py" for room in (*ROOMS, "core")} <= {str(f.relative_to(ROOT)) for f in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_jax_and_no_file_over_400_lines(path: Path) -> None:
    private = [m for m in imports(path) if re.match(r"(jax|flax|optax|mip|rich)\b.*\._|jaxlib\b", m)]
    assert not private
    text = path.read_text()
    assert not re.search(r"\bjax\._src|\bflax\._src|\bjaxlib\._", text)
    assert text.count("\n") <= 400


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_the_hall_and_nothing_else_of_ours(room: str) -> None:
    own = {m for f in (PACKAGE / room).rglob("*.py") for m in imports(f) if m.split(".")[0] == "uniap_jax"}
    assert own <= {m for m in own if m.startswith(("uniap_jax.core", f"uniap_jax.{room}"))}


def test_the_hall_imports_no_room() -> None:
    own = {m for f in (PACKAGE / "core").rglob("*.py") for m in imports(f) if m.split(".")[0] == "uniap_jax"}
    assert own <= {m for m in own if m.startswith("uniap_jax.core")}


def test_only_cbc_imports_mip() -> None:
    users = {str(f.relative_to(PACKAGE)) for f in FILES if any(m.split(".")[0] == "mip" for m in imports(f))}
    assert users == {"planner/cbc.py"}


def test_no_import_cycle() -> None:
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES}
    graph = {name: {m for m in runtime_imports(path) if m in names and m != name} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def runtime_imports(path: Path) -> set[str]:
    """What a file imports when it runs: all but what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {m for m in members if is_module(m)}
            found |= modules if modules == members else {node.module or "", *modules}
    return found


def is_module(name: str) -> bool:
    """Whether a name is one of our files, or something in one."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_planner_imports_no_jax() -> None:
    loaded = modules_after("import uniap_jax.planner, uniap_jax.planner.cbc")
    assert "uniap_jax.planner" in loaded
    assert not loaded & {"jax", "jaxlib", "flax", "optax"}


def test_importing_the_package_loads_neither_flax_nor_solver_nor_tables() -> None:
    loaded = modules_after("import uniap_jax\nuniap_jax.parallelize")
    assert "uniap_jax.api" in loaded
    assert not loaded & {"flax", "optax", "chex", "mip", "rich"}


def test_the_command_line_starts_without_jax() -> None:
    loaded = modules_after("import uniap_jax.cli")
    assert not loaded & {"jax", "numpy", "rich", "mip"}


def test_no_words_of_a_machine_or_a_workplace_in_the_tree() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = re.compile(r"(?<![\w.])/(?:work|root|opt/v)/|\.librar[y]|\bhelper session", re.IGNORECASE)
    found = []
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yaml", ".json", ".txt", ""}:
            found += [f"{name}: {line.strip()[:80]}" for line in path.read_text().splitlines() if words.search(line)]
    assert not [f for f in found if not f.startswith("tests/test_architecture.py")]
