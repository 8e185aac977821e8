"""What the page says of its figures is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import load
from tests.hostile.report import Section, write_section


@pytest.mark.parametrize(
    ("ticks", "ours_s", "said"),
    [
        ([100, 0, 0, 800, 100, 0, 0, 0], 1.0, ""),
        ([100, 0, 0, 850, 50, 0, 0, 0], 0.5, ""),
        ([300, 0, 0, 600, 0, 0, 0, 100], 1.5, "25%"),
        ([500, 0, 200, 300, 0, 0, 0, 0], 0.0, "70%"),
    ],
)
def test_other_work_is_spoken_of_where_there_was_some(
    monkeypatch: pytest.MonkeyPatch, ticks: list[int], ours_s: float, said: str
) -> None:
    monkeypatch.setattr(load, "_ticks", lambda: [7] * 8)
    monkeypatch.setattr(load, "_ours", lambda: 3.0)
    monkeypatch.setattr(load.os, "sysconf", lambda name: 100)
    others = load.OtherWork()
    monkeypatch.setattr(load, "_ticks", lambda: [7 + spent for spent in ticks])
    monkeypatch.setattr(load, "_ours", lambda: 3.0 + ours_s)
    assert (said in others.note()) if said else (others.note() == "")


def test_a_section_is_written_between_its_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n")
    write_section(page, Section("a", ("one", "two"), [(1, 2)], ["A note."]))
    table = "| one | two |\n| --- | --- |\n| 1 | 2 |\n\nA note.\n"
    assert page.read_text() == f"before\n<!-- begin a -->\n{table}<!-- end a -->\nafter\n"
