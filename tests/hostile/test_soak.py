"""A cluster at the highest rate this machine holds leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hostile.soak import soak


@pytest.mark.requirement("LE-1", "PB-2")
@pytest.mark.long
def test_a_minute_of_new_prompts(tmp_path: Path) -> None:
    section = soak(tmp_path, 1200 if os.environ.get("KVSP_PROFILE") == "long" else 60)
    print(section.markdown())
    assert section.held, section.markdown()


@pytest.mark.requirement("LE-1", "PB-2")
def test_some_seconds_of_new_prompts(tmp_path: Path) -> None:
    section = soak(tmp_path, 4)
    assert section.held, section.markdown()
