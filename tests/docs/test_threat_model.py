"""Every test that the threat model names is there; every dependency has a licence on its page."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part.rsplit("/")[-1])
def test_a_test_that_is_named_is_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test() -> None:
    rows = re.findall(r"^\| (?!who\b|---|a stranger \||another tenant)(.+) \|$", PAGE, re.MULTILINE)
    tables = [row for row in rows if row.count("|") == 2 and "test" in row]
    assert len(tables) >= 30
    threats = PAGE.partition("## Authentication")[2]
    for line in threats.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| who could")):
            assert re.search(r"`tests/\S+::\w+` \|$", line), line


def test_every_dependency_that_is_asked_for_has_a_licence() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    licences = dict(re.findall(r"^\| (\S+) \| (.+) \|$", page, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    for name in {Requirement(one).name.lower().replace("_", "-") for one in asked} - {"kvsp"}:
        assert licences.get(name, "not stated") != "not stated", f"{name}: python docs/tools/dependencies.py"
