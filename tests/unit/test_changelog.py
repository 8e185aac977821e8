"""Changelog fragments have a name and a kind that the changelog knows, and say something."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_fragment_has_a_known_kind_and_a_text() -> None:
    types = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    kinds = {entry["directory"] for entry in types}
    fragments = [f for f in (ROOT / "changelog.d").iterdir() if f.name not in ("README.md", ".gitignore")]
    for fragment in fragments:
        parts = fragment.name.split(".")
        assert len(parts) == 3, f"{fragment.name}: name it NAME.KIND.md"
        assert parts[1] in kinds, f"{fragment.name}: KIND is one of {', '.join(sorted(kinds))}"
        assert parts[2] == "md", f"{fragment.name}: fragments are Markdown"
        assert fragment.read_text().strip(), f"{fragment.name} is empty"


def test_the_changelog_tells_of_the_version_that_is_installed() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version} (" in (ROOT / "CHANGELOG.md").read_text()
