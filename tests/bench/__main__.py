"""Run the benchmarks: ``python -m tests.bench [SUBJECT...]``."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import attrs

from tests.bench import Row, left_out

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def print_row(row: Row) -> None:
    value = "left out" if row.value is None else f"{row.value:,.4g}"
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    print(
        f"{row.name:<58} {value:>10} {row.unit:<10} {row.target or '':>10} {verdict:<7}{row.note}", flush=True
    )


def main(arguments: list[str]) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "adapters")]
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for subject in arguments or known:
        started = time.monotonic()
        module = importlib.import_module(f"tests.bench.bench_{subject}")
        try:
            for row in module.rows():
                rows.append(row)
                print_row(row)
        except ImportError as error:
            rows.append(left_out(subject, f"needs {error.name}"))
            print_row(rows[-1])
        print(f"  ({subject}: {time.monotonic() - started:.0f} s)", flush=True)
    target = ROOT / "build" / "bench.json"
    target.parent.mkdir(exist_ok=True)
    measured = [{k: v for k, v in attrs.asdict(r).items() if k != "note" or v} for r in rows]
    target.write_text(json.dumps(measured, indent=1) + "\n")
    missed = [r.name for r in rows if r.met is False]
    print(f"{sum(r.met is True for r in rows)} met, {len(missed)} missed", *missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
