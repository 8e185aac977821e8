"""Run the coverage-guided fuzz targets.

    python fuzz/run.py                          every target for a minute
    python fuzz/run.py container --seconds 600  one target for as long as you like
    python fuzz/run.py container --input FILE   one input again, as a crash report names it

A target is a module in fuzz/targets with a function ``one_input(data)``: it feeds the octets to one thing
that reads octets and lets only what that thing documents pass; any other exception is a find. ``SEEDS`` are
its first inputs; what a run learns is kept under build/fuzz/<target>. Needs the package atheris.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ROOT / "fuzz" / "targets"
WORK = ROOT / "build" / "fuzz"
MAX_INPUT_BYTES = 16384
INPUT_TIMEOUT_S = 10
MEMORY_MB = 1024


def target_names() -> list[str]:
    """Return the names of all targets."""
    return sorted(path.stem for path in TARGETS.glob("*.py") if not path.stem.startswith("_"))


def run_target(name: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own; return whether it found nothing."""
    corpus = WORK / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    log = WORK / name / "log.txt"
    command = [
        sys.executable,
        __file__,
        name,
        "--child",
        str(corpus),
        f"-max_total_time={seconds}",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-artifact_prefix={WORK / name}/",
        "-print_final_stats=1",
    ]
    with log.open("wb") as output:
        code = subprocess.run(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False
        ).returncode
    text = log.read_text(errors="replace")
    if code == 0:
        stats = dict(
            line.removeprefix("stat::").split(":", 1)
            for line in text.splitlines()
            if line.startswith("stat::")
        )
        units = stats.get("number_of_executed_units", "?").strip()
        print(f"{name:24} passed  {units} inputs in {seconds} s")
        return True
    print(f"{name:24} FAILED  the end of {log.relative_to(ROOT)}:")
    print("\n".join("    " + line for line in text.splitlines()[-25:]))
    print(f"    again: python fuzz/run.py {name} --input FILE, with the file named above")
    return False


def child(name: str, arguments: list[str]) -> None:
    """Be the fuzzing process of one target."""
    import atheris

    with atheris.instrument_imports(include=["kvsp_core", "kvsp_h2", "kvsp_sim", "kvsp_services"]):
        target = importlib.import_module(f"targets.{name}")
    corpus = Path(arguments[0])
    for number, seed in enumerate(target.SEEDS):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments], target.one_input)
    atheris.Fuzz()


def main() -> int:
    """Run what the command line says; 0 where nothing was found."""
    for path in (ROOT, ROOT / "adapters", ROOT / "fuzz"):
        sys.path.insert(0, str(path))
    parser = argparse.ArgumentParser(description="Run the coverage-guided fuzz targets.")
    parser.add_argument("target", nargs="*", help=f"one or more of: {', '.join(target_names())}")
    parser.add_argument("--seconds", type=int, default=60, help="how long each target runs")
    parser.add_argument("--input", type=Path, help="run one target on the octets of this file and end")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.target or target_names()
    unknown = set(names) - set(target_names())
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(target_names())}")
    if options.child:
        child(names[0], options.child)
        return 0
    if options.input:
        if len(options.target) != 1 or not options.input.is_file():
            parser.error(f"--input takes one target and a file that is there: {options.input}")
        importlib.import_module(f"targets.{names[0]}").one_input(options.input.read_bytes())
        print(f"{names[0]}: this input shows nothing")
        return 0
    if importlib.util.find_spec("atheris") is None:
        parser.error(
            "atheris is not installed; run: pip install '.[test]' (Linux, x86_64, Python before 3.14)"
        )
    results = [run_target(name, options.seconds) for name in names]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
