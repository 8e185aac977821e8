"""Ask the advisory database of PyPI about every installed package, and say in plain lines what came of it.

    python docs/tools/audit.py

Fails where a weakness is known, and where the database cannot be asked: what was not looked up is not fine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["verdict"]


def verdict(dependencies: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return what to say of packages as pip-audit reports them, and whether all of them are fine."""
    skipped = [found["name"] for found in dependencies if "skip_reason" in found]
    asked = len(dependencies) - len(skipped)
    lines = [
        f"{found['name']} {found['version']}: {weakness['id']}, fixed in {_versions(weakness)}"
        for found in dependencies
        for weakness in found.get("vulns", ())
    ]
    if not asked:
        return ["nothing was audited: the advisory database of PyPI cannot be asked from here"], False
    lines += [f"not audited, the advisory database does not know it: {name}" for name in skipped]
    if not lines:
        return [f"no weakness is known of any of the {asked} installed packages"], True
    return lines, False


def _versions(weakness: dict[str, Any]) -> str:
    return ", ".join(weakness.get("fix_versions") or ()) or "no version yet"


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off"]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines()
        lines, fine = [f"nothing was audited: {said[-1] if said else 'pip-audit says nothing'}"], False
    else:
        dependencies = [found for found in dependencies if found["name"] != "kvsp"]
        lines, fine = verdict(dependencies)
    print(*(f"audit: {line}" for line in lines), sep="\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
