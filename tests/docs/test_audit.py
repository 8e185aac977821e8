"""The audit says what came of it, and is never fine where nothing could be asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {"name": "a", "version": "1", "vulns": []}
WEAK = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "docs" / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("found", "said", "fine"),
    [
        ([KNOWN], "no weakness is known of any of the 1 installed packages", True),
        ([KNOWN, WEAK], "b 2: PYSEC-1, fixed in 3", False),
        ([SKIPPED], "nothing was audited: the advisory database of PyPI cannot be asked from here", False),
        ([], "nothing was audited: the advisory database of PyPI cannot be asked from here", False),
        ([KNOWN, SKIPPED], "not audited, the advisory database does not know it: c", False),
    ],
)
def test_what_the_audit_says(found: list[dict[str, Any]], said: str, fine: bool) -> None:
    assert audit().verdict(found) == ([said], fine)
