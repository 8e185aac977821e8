"""Rows of figures, as tables on a terminal and in a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import attrs

__all__ = ["Section", "write_section"]


@attrs.define
class Section:
    """One table of the page. `held` is False where a promise was broken; `notes` are lines below it."""

    name: str
    header: Sequence[str]
    rows: list[Sequence[object]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    broken: list[str] = attrs.field(factory=list)

    @property
    def held(self) -> bool:
        """Whether nothing was broken."""
        return not self.broken

    def markdown(self) -> str:
        """Return it as Markdown."""
        rows = [list(map(str, self.header)), ["---"] * len(self.header)]
        rows += [list(map(str, row)) for row in self.rows]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        notes = [*self.notes, *(f"**Broken:** {line}" for line in dict.fromkeys(self.broken))]
        return table + "".join(f"\n\n{note}" for note in notes) + "\n"


def write_section(page: Path, section: Section) -> None:
    """Put a section's table between its marks in a page."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- begin {section.name} -->", f"<!-- end {section.name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"{page}: add the lines {begin} and {end} where the table is to be")
    found = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    page.write_text(found.sub(lambda _: f"{begin}\n{section.markdown()}{end}", text), encoding="utf-8")
