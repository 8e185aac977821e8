"""Write docs/dependencies.md: what is used, under which licence, as the packages themselves say; and, with
``--pin``, constraints.txt: the versions of all of it that are installed here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "dependencies.md"
PINS = ROOT / "constraints.txt"
RUNNING, TESTING = ("all",), ("test",)
HEAD = """# Dependencies

What the project uses, directly and indirectly, and the licence that each package states. Written by
`python docs/tools/dependencies.py`; a test fails where something is used that is not here.

`constraints.txt` names one version of each, with which all is tested here; `make constraints` renews it.
Whoever installs the package is not bound to them.

`make audit` asks the advisory database of PyPI about every installed version; it needs the network, and a
package index that has advisories, which mirrors often have not. Where it cannot ask, it says in one line that
nothing was audited and fails, rather than pass. Where the versions in `constraints.txt` were tested there is
no such index, so they have not been audited yet.
"""
# Packages whose metadata says nothing, by the licence file they come with.
_BY_FILE = {"atheris": "Apache-2.0"}
_SAID = re.compile(r"License :: (?:OSI Approved :: )?(.+)")


def closure(extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return the packages that `kvsp` with these extras needs here, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [("kvsp", extra) for extra in (*extras, "")]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            known = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name != "kvsp":
            found[name] = known
        for requirement in map(Requirement, known.requires or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            for wanted in ("", *requirement.extras):
                entry = (requirement.name.lower().replace("_", "-"), wanted)
                if entry not in seen:
                    seen.add(entry)
                    waiting.append(entry)
    return found


def licence_of(known: metadata.Distribution) -> str:
    """Return the licence that a package states, in a few words."""
    fields = known.metadata
    said = fields.get("License-Expression") or ""
    if not said:
        classes = [
            match[1] for line in fields.get_all("Classifier") or () if (match := _SAID.fullmatch(line))
        ]
        said = ", ".join(classes)
    if not said:
        said = (fields.get("License") or "").strip().partition("\n")[0]
    return said[:80] or _BY_FILE.get(fields["Name"], "not stated")


def lines() -> Iterator[str]:
    """Go through the lines of the page."""
    running, testing = closure(RUNNING), closure(TESTING)
    yield HEAD
    for title, packages in (
        ("Running", running),
        ("Testing", {name: known for name, known in testing.items() if name not in running}),
    ):
        yield f"## {title}\n\n| package | licence |\n|---|---|"
        for name in sorted(packages):
            yield f"| {name} | {licence_of(packages[name])} |"
        yield ""


def pins() -> str:
    """Return the constraints: every package that running or testing needs, in the version that is here."""
    packages = closure(RUNNING) | closure(TESTING)
    head = "# The versions that everything is tested with. Written by `make constraints`.\n"
    return head + "".join(f"{name}=={packages[name].version}\n" for name in sorted(packages))


def main() -> None:
    """Write the page, and the constraints where that is asked for."""
    if "--pin" in sys.argv[1:]:
        PINS.write_text(pins(), encoding="utf-8")
    PAGE.write_text("\n".join(lines()).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
