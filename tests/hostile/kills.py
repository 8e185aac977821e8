"""kill -9 of roles at random moments under load, and whether anything that was promised is lost by it."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from kvsp_services.demo.report import report
from kvsp_services.demo.watching import Watcher
from tests.hostile.report import Section
from tests.hostile.witnesses import Blocks, Ledger, Load, Streams, Tally
from tests.hostile.world import ROLES, Block, World, make_world, questions

__all__ = ["Hurt", "kills"]

SEED = 1


class Hurt:
    """A cluster under load, whose members are hurt one after the other."""

    def __init__(self, world: World, *, seed: int = SEED, tokens: int = 300, streams: int = 2) -> None:
        self.world = world
        self.tally = Tally()
        self.drawn = random.Random(seed)
        self.fronts_killed = 0
        self.ledger = Ledger(world, self.tally)
        self.blocks = Blocks(world, self.tally)
        asked = questions(world, 3, tokens)
        self.streams = Streams(world, asked, self.tally, lambda: self.fronts_killed)
        steps = [self.streams.step] * streams + [self.blocks.step, self.ledger.step]
        self.load = Load(self.tally, steps, seed)
        canary = self.blocks.store(self.drawn)
        assert canary is not None, "the cache takes no block"
        self.canary: Block = canary

    def __enter__(self) -> Hurt:
        self.load.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.load.__exit__()

    def kill(self, name: str) -> float:
        """Kill a member and start it again; return how long it took until the cluster was whole."""
        newer_than = {name: self.world.epochs().get(name, 0)}
        if name == "front":
            self.fronts_killed += 1
        began_s = time.monotonic()
        self.world.kill(name)
        time.sleep(self.drawn.random() * 0.5)
        self.world.launch(name)
        took_s = self.world.wait_whole(self.canary, newer_than, began_s)
        if name == "front":
            self.fronts_killed += 1  # what began before it was whole may have been cut by this kill
        return took_s

    def write_what_is_seen(self) -> None:
        """Write beside the logs what operators and clients see: metrics, a report, refusals."""
        world, watcher = self.world, Watcher(self.world)
        for name, member in world.members.items():
            (world.directory / f"{name}.metrics").write_text(member.exposition())
        watcher.mark("alpha", "kill -9")
        watcher.start()
        watcher.stop()
        page = report("A hostile world", [], watcher.samples, watcher.marks)
        (world.directory / "report.html").write_text(page)
        (world.directory / "answers.refusals").write_bytes(b"\n".join(world.refusals))

    def lost(self) -> int:
        """Return how many promises are not kept right now: sessions and blocks."""
        lost = self.ledger.check()
        gone = self.blocks.check_some(self.drawn)
        if gone:
            self.tally.breach(f"{gone} blocks that the cache took are not there any more")
        return lost + gone


@attrs.define
class _Row:
    kills: int = 0
    lost: int = 0
    whole_s: list[float] = attrs.field(factory=list)


def kills(
    directory: Path,
    count: int,
    *,
    seed: int = SEED,
    loop: str = "trio",
    victims: Sequence[str] = (),
    then: Callable[[Hurt], None] = lambda hurt: None,
    tokens: int = 300,
) -> Section:
    """Kill so many times, spread over all roles, or these `victims`; do something `then`."""
    rows = {name: _Row() for name in ROLES}
    world = make_world(directory, loop=loop)
    with world, Hurt(world, seed=seed, tokens=tokens) as hurt:
        for name in victims or _victims(count, hurt.drawn):
            time.sleep(hurt.drawn.random())  # at any moment of what is under way
            row = rows[name]
            row.whole_s.append(hurt.kill(name))
            row.kills += 1
            row.lost += hurt.lost()
        then(hurt)
    return _section(rows, hurt.tally, seed)


def _victims(count: int, drawn: random.Random) -> list[str]:
    """Return who is killed, in what order: every role as often, give or take one."""
    found: list[str] = []
    while len(found) < count:
        found += drawn.sample(ROLES, len(ROLES))
    return found[:count]


def _section(rows: dict[str, _Row], tally: Tally, seed: int) -> Section:
    section = Section(
        "kills",
        ("killed with -9", "times", "survived", "lost", "whole again after (median, longest)"),
        broken=tally.broken,
    )
    for name, row in rows.items():
        if row.kills:
            whole = f"{statistics.median(row.whole_s):.1f} s, {max(row.whole_s):.1f} s"
            section.rows.append((name, row.kills, row.kills, row.lost, whole))
    every = [time_s for row in rows.values() for time_s in row.whole_s]
    total, lost = len(every), sum(row.lost for row in rows.values())
    whole = f"{statistics.median(every):.1f} s, {max(every):.1f} s"
    section.rows.append(("all", total, total, lost, whole))
    section.notes.append(f"Meanwhile (seed {seed}): {counted(tally.counts)}.")
    return section


def counted(counts: Counter[str]) -> str:
    """Return counts in one line."""
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
