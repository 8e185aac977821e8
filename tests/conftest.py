"""What all tests share: the requirement marks, the effort of property tests, and what is left to longer runs.

The environment variable ``KVSP_PROFILE`` says how hard to try:

- ``test`` (the default): a few examples of each property, for every change
- ``verify``: 1,000 examples of 50 steps, and the tests marked ``verify``
- ``long``: for nights; also the tests marked ``long``
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
PROFILE = os.environ.get("KVSP_PROFILE", "test")
# A machine that is busy with something else is slow, and that is no fault of the example.
_SUPPRESSED = (HealthCheck.too_slow,)

settings.register_profile(
    "test",
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=_SUPPRESSED,
)
settings.register_profile(
    "verify",
    max_examples=1000,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SUPPRESSED,
)
settings.register_profile(
    "long",
    max_examples=20_000,
    stateful_step_count=80,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SUPPRESSED,
)
settings.load_profile(PROFILE)

# The profiles in which a test with this mark runs.
_RUNS_IN = {"verify": ("verify", "long"), "long": ("long",)}


def requirement_ids(item: pytest.Item) -> Iterator[str]:
    """Go through the requirements a test is marked with."""
    for mark in item.iter_markers("requirement"):
        yield from mark.args


def _known_requirements() -> frozenset[str]:
    lines = (ROOT / "docs" / "requirements.tsv").read_text(encoding="utf-8").splitlines()
    return frozenset(line.split("\t", 1)[0] for line in lines[1:])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse marks of requirements that do not exist, and leave out what belongs to a longer profile."""
    known = _known_requirements()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        unknown = sorted(set(requirement_ids(item)) - known)
        if unknown:
            raise pytest.UsageError(
                f"{item.nodeid}: requirement {unknown[0]!r} is not in docs/requirements.tsv; correct the mark"
            )
        if "property" in Path(item.path).relative_to(ROOT).parts:
            item.add_marker("model")
        runs = all(PROFILE in _RUNS_IN[m] for m in _RUNS_IN if item.get_closest_marker(m))
        (kept if runs or config.option.collectonly else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
