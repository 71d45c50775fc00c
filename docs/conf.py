"""Sphinx: MyST with notebooks executed at build, warnings are errors (`sphinx-build -W -b html docs docs/_build`)."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The kernels that run the pages inherit this: eight virtual CPU devices, and code that compiles quickly.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "64"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))

project = "uniap-jax"
author = "The uniap-jax developers"
project_copyright = "The uniap-jax developers"
release = "0.1.0"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "uniap-jax"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SINGLE_BACKTICKS = re.compile(r"(?<![`:])`([^`\n]+)`(?!`)(\w?)")


def code_in_docstrings(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write `code` as Markdown does; reStructuredText wants two backticks and no letter right after."""
    for i, line in enumerate(lines):
        lines[i] = SINGLE_BACKTICKS.sub(lambda m: f"``{m[1]}``" + (rf"\ {m[2]}" if m[2] else ""), line)


def undocumented() -> list[str]:
    """Public names that the API page does not hold."""
    import uniap_jax

    page = (ROOT / "docs" / "api.md").read_text()
    own = re.findall(r"auto(?:function|class):: uniap_jax\.(\w+)$", page, flags=re.MULTILINE)
    errors = {name for name in uniap_jax.__all__ if name.endswith("Error")}  # of the module of errors, whole
    return sorted(set(uniap_jax.__all__) - set(own) - errors)


def refuse_undocumented(app: Any) -> None:
    from sphinx.errors import ConfigError

    if missing := undocumented():
        raise ConfigError(f"docs/api.md does not document {', '.join(missing)}")


def publish_schema(app: Any, exception: Exception | None) -> None:
    """Puts the schema of a plan's file beside the pages."""
    from uniap_jax.core.serialize import plan_schema

    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "plan.schema.json").write_text(json.dumps(plan_schema(), indent=1) + "\n")


def setup(app: Any) -> None:
    app.connect("build-finished", publish_schema)
    app.connect("builder-inited", refuse_undocumented)
    app.connect("autodoc-process-docstring", code_in_docstrings)
