"""An instance's epoch grows with every start, whatever became of the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_services.epochs import next_epoch


@pytest.mark.requirement("ST-3")
def test_an_epoch_is_the_time_of_the_start_and_never_less_than_the_last(tmp_path: Path) -> None:
    path = tmp_path / "data" / "instance.epoch"
    assert next_epoch(path, 1000) == 1000
    assert next_epoch(path, 5000) == 5000
    assert next_epoch(path, 2000) == 5001, "the clock was set back"
    assert next_epoch(path, 2001) == 5002
    assert next_epoch(path, 9000) == 9000


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"12x", b"9" * 100])
def test_a_file_that_holds_no_epoch_is_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "instance.epoch"
    path.write_bytes(content)
    assert next_epoch(path, 1000) == 1000


def test_where_nothing_can_be_kept_the_clock_decides(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert next_epoch(tmp_path / "file" / "instance.epoch", 1000) == 1000
