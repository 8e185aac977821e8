"""The changelog is that of the version, and every fragment is of a kind that it gathers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_changelog_begins_with_the_version() -> None:
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    head, marker, entries = page.partition(PROJECT["tool"]["towncrier"]["start_string"])
    assert "## " not in head
    assert marker
    versions = re.findall(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", entries, re.MULTILINE)
    assert versions[0] == PROJECT["project"]["version"]
    assert len(set(versions)) == len(versions)


def test_every_fragment_is_of_a_kind() -> None:
    kinds = "|".join(kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"])
    names = [path.name for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    assert [name for name in names if not re.fullmatch(rf"[\w-]+\.({kinds})\.md", name)] == []
