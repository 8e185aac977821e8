"""A cluster at the highest rate it holds, for a while: does memory stay flat, and is anything left behind?

Caches are small and prompts and blocks are new all the time, so that everything is evicted again and again.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import attrs
import openai

from kvsp_core.errors import KVSPError
from kvsp_services.demo.client import Client
from tests.hostile.kills import counted
from tests.hostile.report import Section
from tests.hostile.witnesses import Blocks, Ledger, Load, Tally
from tests.hostile.world import ROLES, WORDS, World, make_world

__all__ = ["soak"]

CACHE_BYTES = 2 << 20
SAMPLE_S = 2.0
SETTLE_S = 20.0
"""Time after which leases and what was under way are over."""


class SmallCaches(World):
    """A world whose cache and instances hold two mebibytes each."""

    def section(self, name: str) -> str:
        """Return a member's section of its configuration."""
        import re

        return re.sub(r"capacity_bytes = \d+", f"capacity_bytes = {CACHE_BYTES}", super().section(name))


@attrs.frozen
class Sample:
    """What a process has at a moment."""

    at_s: float
    memory_mib: float
    descriptors: int
    threads: int


def sample(world: World, name: str, at_s: float) -> Sample:
    """Look at a process from outside."""
    process = world.members[name].process
    assert process is not None
    folder = Path(f"/proc/{process.pid}")
    said = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    memory = int(said["VmRSS"].split()[0]) / 1024
    return Sample(at_s, memory, len(os.listdir(folder / "fd")), int(said["Threads"]))


def slope(samples: list[Sample]) -> float:
    """Return how memory grows over the second half, in MiB a minute."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    fit = statistics.linear_regression([one.at_s for one in half], [one.memory_mib for one in half])
    return fit.slope * 60


class NewPrompts:
    """Asks questions that nobody asked before."""

    def __init__(self, world: World, tally: Tally) -> None:
        self._client = Client(world.api_url, world.model_dir.name, timeout_s=120)
        self._tally = tally

    def step(self, drawn: random.Random) -> None:
        """Ask once."""
        prompt = " ".join([f"{drawn.getrandbits(40):x}", *drawn.choices(WORDS, k=30)])
        try:
            reply = self._client.ask(prompt, max_tokens=drawn.randint(4, 40))
        except openai.OpenAIError as error:
            why = f"{type(error).__name__}: {error}"
            self._tally.breach(f"a question failed, though nothing was hurt ({why})")
            return
        self._tally.add("answers")
        self._tally.add("tokens", reply.output_tokens + reply.prompt_tokens)


def soak(directory: Path, seconds: float = 60.0) -> Section:
    """Run for so long, and tell of every process."""
    header = ("process", "memory: begin, end", "growth in the second half", "descriptors", "threads")
    section = Section("soak", header)
    tally = Tally()
    with make_world(directory, SmallCaches) as world:
        prompts, blocks, ledger = NewPrompts(world, tally), Blocks(world, tally), Ledger(world, tally)
        blocks.forgets = True
        seen: dict[str, list[Sample]] = {name: [] for name in ROLES}
        most_records = 0
        began = time.monotonic()
        with Load(tally, [prompts.step, prompts.step, blocks.step, blocks.step, ledger.step]):
            while (at_s := time.monotonic() - began) < seconds:
                for name in ROLES:
                    seen[name].append(sample(world, name, at_s))
                most_records = max(most_records, world.index().records)
                time.sleep(SAMPLE_S)
        time.sleep(SETTLE_S)
        _look_for_leaks(world, section, tally)
        for name, samples in seen.items():
            end = sample(world, name, 0)
            first, last = samples[min(len(samples) - 1, 3)], samples[-1]
            memory = f"{first.memory_mib:.0f}, {last.memory_mib:.0f} MiB"
            grown = f"{slope(samples):+.2f} MiB a minute"
            row = (
                name,
                memory,
                grown,
                f"{max(s.descriptors for s in samples)}, {end.descriptors} at the end",
            )
            section.rows.append((*row, f"{max(s.threads for s in samples)}, {end.threads} at the end"))
        held = 4 * CACHE_BYTES // len(world.new_block(random.Random(1)).octets)
        if most_records > 2 * held:
            section.broken.append(
                f"{most_records} records at the index, though at most {held} blocks are held"
            )
    rate = {what: count / seconds for what, count in tally.counts.items()}
    section.notes.append(
        f"{seconds:.0f} s: {counted(tally.counts)}. That is {rate.get('tokens', 0):.0f} tokens,"
        f" {rate.get('blocks stored', 0) + rate.get('blocks fetched', 0):.0f} blocks and"
        f" {rate.get('checkpoints acknowledged', 0):.0f} checkpoints a second. The index had {most_records:,}"
        f" records at most, with room for {held:,} blocks in all caches."
    )
    section.broken += tally.broken
    return section


def _look_for_leaks(world: World, section: Section, tally: Tally) -> None:
    for name in ("cache", "alpha", "beta", "gamma"):
        try:
            left = world.leases(name).leases
        except KVSPError as error:
            section.broken.append(f"{name} does not answer in the end: {error}")
            continue
        if left:
            section.broken.append(f"{name}: {len(left)} leases are left")
    running = [one for one in world.sessions().sessions if one.state in ("placed", "resuming")]
    tally.add("sessions placed and left to run out", len(running))
    files = [path for path in (world.directory / "blocks").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if size > 2 * CACHE_BYTES:
        section.broken.append(f"{size:,} octets on disk, {CACHE_BYTES:,} are allowed")
    for name, member in world.members.items():
        if not member.alive():
            section.broken.append(f"{name} has ended")
        elif "Traceback" in member.log.read_text():
            section.broken.append(f"{name} has logged a traceback")
