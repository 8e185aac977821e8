"""Draw each machine's table into its page: docs/machines/<name>.md.

    python docs/tools/machine_pages.py           writes the generated parts
    python docs/tools/machine_pages.py --check   exit 1 where a page is missing or not current

A page is written by hand but for the part between the two markers, which holds a state diagram and the table
of what is legal, made from the ``TABLE`` of the module (one, or several where a file holds several machines).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from kvsp_core.machines.table import Illegal, Kind, Legal, Refused, Table, name_of  # noqa: E402

PAGES = ROOT / "docs" / "machines"
BEGIN = "<!-- generated from the table by make docs: begin -->"
END = "<!-- generated: end -->"


def tables_of(name: str) -> list[Table]:
    """Return the tables a machine's module declares, in the order of the file."""
    module = importlib.import_module(f"kvsp_core.machines.{name}")
    return [value for value in vars(module).values() if isinstance(value, Table)]


def machine_names() -> Iterator[str]:
    """Go through the modules of kvsp_core.machines that declare a table."""
    for path in sorted((ROOT / "kvsp_core" / "machines").glob("*.py")):
        if path.stem not in ("__init__", "table") and tables_of(path.stem):
            yield path.stem


def diagram(table: Table) -> str:
    """Return the table as a state diagram: one arrow for each pair of states, labelled with its events."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for kind, event, cell in table:
        if isinstance(cell, Legal):
            for then in cell.then or (kind,):
                arrows.setdefault((name_of(kind), name_of(then)), []).append(event.__name__)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join([*lines, "```"])


def _cell(kind: Kind, cell: object) -> str:
    match cell:
        case Legal(then):
            others = [name_of(k) for k in then if k != kind]
            stays = kind in then or not then
            return (
                "stays"
                if not others
                else " or ".join((["stays"] if stays else []) + [f"**{o}**" for o in others])
            )
        case Refused(problem):
            return f"`{problem.suffix or problem.status}`"
        case Illegal():
            return "illegal"
    raise TypeError(cell)


def grid(table: Table) -> str:
    """Return what is legal: events down, states across, so that machines of many events stay readable."""
    lines = [
        "| event | " + " | ".join(f"in {name_of(kind)}" for kind in table.states) + " |",
        "|---" * (len(table.states) + 1) + "|",
    ]
    for event in table.events:
        cells = " | ".join(_cell(kind, table.cell(kind, event)) for kind in table.states)
        lines.append(f"| `{event.__name__}` | {cells} |")
    return "\n".join(lines)


def generated(name: str) -> str:
    """Return the generated part of a machine's page, markers included."""
    parts = [BEGIN, ""]
    tables = tables_of(name)
    for table in tables:
        if len(tables) > 1:
            parts += [f"### {table.machine}", ""]
        parts += [diagram(table), "", grid(table), ""]
    parts += [
        "A bold name is the state that follows. A problem type is the answer to a peer that may not send",
        "this here; *illegal* is a mistake of the calling program, `LocalProtocolError`. Both leave the",
        "state as it is.",
        "",
        END,
    ]
    return "\n".join(parts)


def page_with(page: str | None, name: str) -> str:
    """Return a page with its generated part renewed, or a first page where there is none."""
    if page is None:
        return f"# {name.replace('_', ' ').capitalize()}\n\n{generated(name)}\n"
    if BEGIN not in page or END not in page:
        return f"{page.rstrip()}\n\n## What is legal\n\n{generated(name)}\n"
    head, rest = page.split(BEGIN, 1)
    return head + generated(name) + rest.split(END, 1)[1]


def main(arguments: list[str]) -> int:
    """Write or check the pages; return the exit status."""
    PAGES.mkdir(exist_ok=True)
    stale = []
    for name in machine_names():
        path = PAGES / f"{name}.md"
        page = path.read_text(encoding="utf-8") if path.exists() else None
        wanted = page_with(page, name)
        if page != wanted:
            stale.append(path.name)
            if "--check" not in arguments:
                path.write_text(wanted, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"docs/machines: {', '.join(stale)} not current; run make docs and commit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
