"""Run rows of the hostile world: ``python -m tests.hostile [ROW...] [--write PAGE]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "adapters")]
    parser = argparse.ArgumentParser(description="Hurt a cluster, and say what became of it.")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--times", type=int, default=1, help="how often each other fault")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of the soak; a quarter, 15 at most, for each attack"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="the page that keeps the tables")
    parser.add_argument("--directory", type=Path, help="where the clusters live; kept afterwards")
    parser.add_argument("rows", nargs="*", help="which; all of them by default")
    options = parser.parse_args(arguments)
    try:
        from tests.hostile.faults import FAULTS, faults
        from tests.hostile.kills import kills
        from tests.hostile.load import OtherWork
        from tests.hostile.peers import attacks
        from tests.hostile.report import Section, write_section
        from tests.hostile.soak import soak
        from tests.hostile.storm import storm
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is missing; in a checkout run: pip install '.[test]'")
    known: dict[str, Callable[[Path], Section]] = {
        "kills": lambda directory: kills(directory, options.kills, seed=options.seed),
        **{group: lambda directory, group=group: faults(directory, group, options.times) for group in FAULTS},
        "peers": lambda directory: attacks(directory, min(15, options.seconds / 4)),
        "soak": lambda directory: soak(directory, options.seconds),
        "storm": lambda directory: storm(),
    }
    unknown = sorted(set(options.rows) - set(known))
    if unknown:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    held = True
    for name in options.rows or known:
        began_s, others = time.monotonic(), OtherWork()
        with tempfile.TemporaryDirectory(prefix="kvsp-hostile-") as made:
            directory = (options.directory or Path(made)) / name
            directory.mkdir(parents=True)
            section = known[name](directory)
        if name != "storm" and (note := others.note()):  # that one's time is simulated
            section.notes.append(note)
        print(f"\n{name} ({time.monotonic() - began_s:.0f} s)\n\n{section.markdown()}", flush=True)
        held &= section.held
        if options.write is not None:
            write_section(options.write, section)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
