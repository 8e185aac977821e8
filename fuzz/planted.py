"""Show that simulator and explorer can see: plant a fault of the logic in a copy, and let them look.

    python fuzz/planted.py                 every planted fault
    python fuzz/planted.py commit-early    that one

Each ``fuzz/mutations/planted/<NAME>.patch`` is a small unified diff of the shipped code. Above it stands
what finds it, and which properties it may break, either by the simulator, within 50 seeds of 2,000 steps on
each of three ranges of seeds:

    # found by: simulate --faults processes
    # breaks: acknowledged_is_kept

or by the explorer:

    # found by: explore reshard --crashes 1
    # breaks: one_owner

Where there are several such lines, each has to find it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Look", "Planted", "found_after", "look_for", "main", "read_planted"]

ROOT = Path(__file__).resolve().parent.parent
PLANTED = ROOT / "fuzz" / "mutations" / "planted"
COPIED = ("kvsp_core", "adapters/kvsp_h2", "adapters/kvsp_sim")
RANGES: Final = ("0-49", "10000-10049", "20000-20049")
TIMEOUT_S: Final = 900


class Planted(NamedTuple):
    """A planted fault: what finds it, and which properties it may break."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    breaks: tuple[str, ...]
    path: Path


class Look(NamedTuple):
    """What came of looking for a planted fault: what went wrong (None where it was found each time), after
    how many states each exploration found it, and after how many seeds of each range the simulator did.
    """

    wrong: str | None
    states: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


def read_planted() -> list[Planted]:
    """Return all planted faults, by name."""
    found = []
    for path in sorted(PLANTED.glob("*.patch")):
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^# found by: (.+)$", text, re.MULTILINE)
        breaks = re.search(r"^# breaks: (.+)$", text, re.MULTILINE)
        if not lines or breaks is None:
            raise SystemExit(f"{path.name}: add the lines '# found by: COMMAND' and '# breaks: PROPERTY'")
        commands: list[tuple[str, ...]] = []
        for line in lines:
            words = tuple(shlex.split(line))
            ranges = RANGES if words[0] == "simulate" else ()
            commands += [(*words, "--seeds", seeds, "--stop") for seeds in ranges] or [words]
        found.append(Planted(path.stem, tuple(commands), tuple(breaks[1].split()), path))
    return found


def look_for(planted: Planted, *, ranges: int = len(RANGES)) -> Look:
    """Plant a fault in a copy and look for it. `ranges` is how many of the ranges of seeds are looked
    through.
    """
    with tempfile.TemporaryDirectory(prefix="kvsp-planted-") as directory:
        tree = Path(directory)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        patch = ["patch", "-p1", "--batch", "--silent", "--forward", "-i", str(planted.path)]
        done = subprocess.run(patch, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return Look(f"the patch does not apply any more, record it anew: {done.stdout.strip()[:200]}")
        explorations = [command for command in planted.commands if command[0] == "explore"]
        simulations = [command for command in planted.commands if command[0] == "simulate"]
        states: tuple[int, ...] = ()
        seeds: tuple[int, ...] = ()
        for command in (*explorations, *simulations[:ranges]):
            look = _look(tree, command, planted.breaks)
            if look.wrong is not None:
                return Look(f"{' '.join(command)}: {look.wrong}", states, seeds)
            states += look.states
            seeds += look.seeds
    return Look(None, states, seeds)


def _look(tree: Path, command: Sequence[str], breaks: Sequence[str]) -> Look:
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "adapters"))),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvsp_sim", *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return Look("it was not found")
    if not any(f"{name}{mark}" in done.stdout for name in breaks for mark in (":", " at ")):
        said = (done.stdout + done.stderr).strip().splitlines()
        return Look(f"something else was found: {said[-1] if said else 'nothing was said'}")
    return found_after(done.stdout)


def found_after(said: str) -> Look:
    """Return after how many states or seeds a command says that it found a fault."""
    states = re.search(r": ([\d,]+) states, ", said)
    seeds = re.search(r"^(\d+) seeds, ", said, re.MULTILINE)
    return Look(None, (int(states[1].replace(",", "")),) if states else (), (int(seeds[1]),) if seeds else ())


def main(arguments: list[str]) -> int:
    """Look for the chosen faults; print after how many states or seeds each was found; return 0 where each
    was.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of planted faults (default: all)")
    parser.add_argument("--ranges", type=int, default=len(RANGES), help="ranges of seeds (default 3)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    options = parser.parse_args(arguments)
    known = {planted.name: planted for planted in read_planted()}
    strangers = set(options.names) - set(known)
    if strangers:
        raise SystemExit(f"no such planted fault: {', '.join(sorted(strangers))}")
    chosen = [known[name] for name in options.names or known]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda planted: look_for(planted, ranges=options.ranges), chosen)
        missed = 0
        for planted, look in zip(chosen, results, strict=True):
            verdict = "found" if look.wrong is None else "MISSED"
            said = [look.wrong] if look.wrong else []
            if look.states:
                said.append("after so many states: " + ", ".join(f"{count:,}" for count in look.states))
            if look.seeds:
                said.append("after so many seeds of each range: " + ", ".join(map(str, look.seeds)))
            print(": ".join((f"{verdict:<7} {planted.name}", *said)), flush=True)
            missed += look.wrong is not None
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
