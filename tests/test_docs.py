"""The documentation holds what there is: public names, options, errors, the schema."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import uniap_jax
from plan_support import plan
from uniap_jax.cli.options import make_parser
from uniap_jax.core import errors
from uniap_jax.core.plan import Plan
from uniap_jax.core.serialize import plan_schema, plan_to_json

__all__ = ["plan"]  # a fixture

DOCS = Path(__file__).resolve().parent.parent / "docs"


def conf() -> Any:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    check = conf()
    assert check.undocumented() == []
    monkeypatch.setattr(uniap_jax, "__all__", [*uniap_jax.__all__, "forgotten"])
    assert check.undocumented() == ["forgotten"]


def test_everything_in_the_reference_exists_and_says_what_it_is() -> None:
    page = (DOCS / "api.md").read_text()
    for kind, path in re.findall(r"auto(function|class):: (uniap_jax[\w.]*)", page):
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert inspect.getdoc(found), path
        assert inspect.isclass(found) is (kind == "class"), path
    assert ".. automodule:: uniap_jax.core.errors" in page


def test_every_option_is_on_the_command_lines_page() -> None:
    page = (DOCS / "cli.md").read_text()
    (verbs,) = (a.choices for a in make_parser()._actions if a.dest == "verb" or isinstance(a.choices, dict))
    assert verbs is not None
    for name, verb in verbs.items():
        assert f"`{name}`" in page, name
        for action in verb._actions:
            longest = max(action.option_strings, key=len, default="--help")
            assert longest in page, f"{name} {longest}"


def test_every_error_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text() + (DOCS / "errors.md").read_text()
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.UniapError) and kind is not errors.UniapError:
            assert f"`{name}`" in page, name


def test_schema_takes_plans_and_refuses_what_is_none(plan: Plan) -> None:
    published = plan_schema()
    assert set(published["properties"]) == {"format", *(f.name for f in dataclasses.fields(Plan))}
    jsonschema = pytest.importorskip("jsonschema")
    data = json.loads(json.dumps(plan_to_json(plan)))
    jsonschema.validate(data, published)
    for wrong in (
        {**data, "extra": 1},
        {**data, "num_stages": "two"},
        {k: v for k, v in data.items() if k != "layers"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, published)


def test_attributes_of_a_plan_are_described() -> None:
    told = inspect.getdoc(Plan) or ""
    for field in dataclasses.fields(Plan):
        assert f"{field.name}: " in told
