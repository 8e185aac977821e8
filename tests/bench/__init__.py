"""Benchmarks: side by side in one run, interleaved, medians, ratios.

A benchmark is a module ``tests/bench/bench_<subject>.py`` with a function ``rows()`` that yields what `row`
and `left_out` make:

    from tests.bench import Row, interleaved, row

    def rows() -> Iterator[Row]:
        times = interleaved({"ours": decode_ours, "sha256": hash_only})
        ratio = times["ours"] / times["sha256"]
        yield row("container.decode_2mib.vs_sha256", ratio, "ratio", at_most=1.15)

``python -m tests.bench`` runs all of them, ``python -m tests.bench keys index`` those two. The table is
printed, and ``build/bench.json`` holds a list of ``{"name", "value", "unit", "target", "met"}``. The exit
status is 1 where a target was missed, so a speed is asserted here and nowhere else.

Compare with something measured in the same run: a machine's figures do not carry over to another, ratios do.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Final

import attrs

__all__ = ["Row", "interleaved", "left_out", "peak_bytes", "row", "tool"]

ROUNDS: Final = 7
"""How often each candidate is timed; the median counts."""


@attrs.frozen
class Row:
    """One figure: its value, what it must reach (None: only reported), and whether it does."""

    name: str
    value: float | None
    unit: str
    target: str | None
    met: bool | None
    note: str = attrs.field(default="", kw_only=True)


def row(
    name: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str = "",
) -> Row:
    """Return a figure with its target; without one it is reported and cannot fail.

    `name` reads from the subject to the detail: ``keys.array_131072_tokens.vs_pickle``. `unit` is ``ratio``
    where the value is one.
    """
    if at_most is not None and at_least is not None:
        raise ValueError(f"{name}: give at_most or at_least, not both")
    if at_most is not None:
        return Row(name, value, unit, f"<= {at_most:g}", value <= at_most, note=note)
    if at_least is not None:
        return Row(name, value, unit, f">= {at_least:g}", value >= at_least, note=note)
    return Row(name, value, unit, None, None, note=note)


def left_out(name: str, reason: str) -> Row:
    """Return the row of a figure that cannot be measured here, with the reason in a few words."""
    return Row(name, None, "", None, None, note=reason)


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Time each candidate in turn, `rounds` times over, and return the median seconds of each.

    The clock is CPU time of this process by default, which other load disturbs least; give
    `time.perf_counter` where another process does part of the work. Each candidate runs once before it
    counts. The garbage collector is off while a candidate runs.
    """
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            gc.collect()
            gc.disable()
            try:
                before = clock()
                run()
                taken[name].append(clock() - before)
            finally:
                gc.enable()
    return {name: statistics.median(times) for name, times in taken.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most memory Python held on account of `run`, in octets, beyond what it held before."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - before


def tool(name: str) -> str | None:
    """Return the path of a program to compare with, or None where it is not installed."""
    return shutil.which(name)
