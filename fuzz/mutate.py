"""Show that the tests can fail: plant recorded faults, one at a time, and see the named test turn red.

    python fuzz/mutate.py --all
    python fuzz/mutate.py --sample 20 --seed 7
    python fuzz/mutate.py LE-1 KC-2

Each ``fuzz/mutations/<REQUIREMENT>.patch`` (or ``<REQUIREMENT>.<word>.patch``) is a small unified diff that
breaks one requirement. Above the diff stands ``# test: tests/unit/machines/test_lease.py::test_x``, the test
that must fail under it and that is marked with that requirement. Faults go into temporary copies of the tree
only.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutation", "main", "read_mutations"]

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = ROOT / "fuzz" / "mutations"
COPIED = ("kvsp_core", "adapters", "tests", "docs", "fuzz", "pyproject.toml", "README.md", "changelog.d")
TIMEOUT_S = 300


class Mutation(NamedTuple):
    """A recorded fault: its patch, the requirement it breaks, and the test that must see it."""

    name: str
    requirement: str
    test: str
    path: Path


def read_mutations() -> list[Mutation]:
    """Return all recorded faults, by name."""
    found = []
    for path in sorted(MUTATIONS.glob("*.patch")):
        header = re.search(r"^# test: (\S+)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if header is None:
            raise SystemExit(f"{path.name}: add the line '# test: PATH::NAME' above the diff")
        found.append(Mutation(path.stem, path.name.split(".")[0], header[1], path))
    return found


def _environment(tree: Path) -> dict[str, str]:
    # Without bytecode files a source that changes twice in a second cannot be mistaken for its former self.
    paths = os.pathsep.join((str(tree), str(tree / "adapters")))
    return {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": paths,
        "KVSP_PROFILE": "test",
        "CI": "1",
    }


def _pytest(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    return subprocess.run(
        command,
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _patch(tree: Path, mutation: Mutation, *options: str) -> str | None:
    """Apply a patch to the tree; return None, or what went wrong."""
    command = [
        "patch",
        "-p1",
        "--batch",
        "--silent",
        "--no-backup-if-mismatch",
        *options,
        "-i",
        str(mutation.path),
    ]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1]


def _try(tree: Path, mutation: Mutation) -> str | None:
    """Plant one fault in the tree and take it out again; return None where the test saw it, or why not."""
    wrong = _patch(tree, mutation, "--forward", "--dry-run") or _patch(tree, mutation, "--forward")
    if wrong:
        return f"the patch does not apply any more, record it anew: {wrong}"
    try:
        done = _pytest(tree, [mutation.test, "-x"])
    except subprocess.TimeoutExpired:
        return None  # a test that hangs does not pass either
    finally:
        _patch(tree, mutation, "--reverse")
    if done.returncode == 1:
        return None
    if done.returncode == 0:
        return f"{mutation.test} passes all the same"
    return f"{mutation.test} cannot be run: {(done.stdout + done.stderr).strip().splitlines()[-1]}"


def _copy(directory: str) -> Path:
    tree = Path(directory)
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        elif source.exists():
            shutil.copy(source, tree / name)
    return tree


def _choose(options: argparse.Namespace, mutations: list[Mutation]) -> list[Mutation]:
    if options.names:
        chosen = [m for m in mutations if m.name in options.names or m.requirement in options.names]
        strangers = set(options.names) - {m.name for m in chosen} - {m.requirement for m in chosen}
        if strangers:
            raise SystemExit(f"no fault is recorded for {', '.join(sorted(strangers))} under fuzz/mutations")
        return chosen
    if options.sample is None or options.sample >= len(mutations):
        return mutations
    return sorted(random.Random(options.seed).sample(mutations, options.sample))


def main(arguments: list[str]) -> int:
    """Try the chosen faults; return 0 where each was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="requirements or names of patches")
    parser.add_argument("--all", action="store_true", help="try every fault (the default without --sample)")
    parser.add_argument("--sample", type=int, help="try this many, drawn by the seed")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="default: a new one each time"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    options = parser.parse_args(arguments)
    if shutil.which("patch") is None:
        raise SystemExit("the program 'patch' is missing; install it (Debian: apt-get install patch)")
    chosen = _choose(options, read_mutations())
    drawn = f", seed {options.seed}" if options.sample else ""
    print(f"{len(chosen)} planted faults{drawn}")
    if not chosen:
        return 0
    with tempfile.TemporaryDirectory(prefix="kvsp-mutate-") as directory:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            trees.put(_copy(f"{directory}/{number}"))
        return _run(chosen, trees, options.jobs)


def _run(chosen: list[Mutation], trees: queue.Queue[Path], jobs: int) -> int:
    def attempt(mutation: Mutation) -> str | None:
        tree = trees.get()
        try:
            return _try(tree, mutation)
        finally:
            trees.put(tree)

    tree = trees.get()
    sound = _pytest(tree, sorted({m.test for m in chosen}))
    trees.put(tree)
    if sound.returncode != 0:
        print(sound.stdout[-4000:], sound.stderr[-2000:], sep="\n", file=sys.stderr)
        print("the named tests must pass before a fault is planted", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = list(pool.map(attempt, chosen))
    for mutation, why in zip(chosen, verdicts, strict=True):
        print(f"{'seen' if why is None else 'MISSED':<8}{mutation.name:<16}{why or mutation.test}")
    missed = sum(why is not None for why in verdicts)
    print(f"{len(chosen) - missed} seen, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
