"""Faults that are not a kill: disks, files, descriptors, clocks and links, each on a cluster under load."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from kvsp_core.errors import KVSPError
from kvsp_services.demo.cluster import Member, wait_until
from tests.hostile.kills import Hurt, counted
from tests.hostile.report import Section
from tests.hostile.world import PATIENCE_S, World, make_world

__all__ = ["FAULTS", "Skipped", "faults"]

_TMPFS = "size=96m,mode=700"


class Skipped(Exception):
    """This cannot be tried here, and why."""


@attrs.define
class Outcome:
    """What one fault did: what was seen while it lasted, and when the cluster was whole after it ended."""

    meanwhile: str
    whole_s: float


def run(*command: str) -> str:
    """Run a program of the system; where it may not, the fault is skipped."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Skipped(f"there is no {command[0]}") from None
    if done.returncode != 0:
        raise Skipped(f"{' '.join(command[:3])}: {done.stderr.strip() or done.returncode}")
    return done.stdout


# Disks


class OnSmallDisks(World):
    """A world whose controller and cache keep what they have on small file systems of their own."""

    DISKS = ("data-controller", "blocks")

    def __enter__(self) -> OnSmallDisks:
        self._mounted: list[Path] = []
        for name in self.DISKS:
            (self.directory / name).mkdir()
            run("mount", "-t", "tmpfs", "-o", _TMPFS, "kvsp-test", str(self.directory / name))
            self._mounted.append(self.directory / name)
        try:
            super().__enter__()
        except BaseException:
            self._unmount()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self._unmount()

    def _unmount(self) -> None:
        for path in self._mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def _restart(hurt: Hurt, name: str) -> None:
    if not hurt.world.members[name].alive():
        hurt.world.launch(name)


def _refusals(hurt: Hurt, act: Callable[[], bool], seconds: float = 8) -> int:
    """Do something again and again; return how often it was refused or not answered."""
    refused, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            refused += not act()
        except KVSPError:
            refused += 1
        time.sleep(0.1)
    return refused


def _place(hurt: Hurt) -> bool:
    before = hurt.tally.counts["placements"]
    hurt.ledger.step(hurt.drawn)
    return hurt.tally.counts["placements"] > before


def _full(path: Path) -> Path:
    filler = path / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    return filler


def disk_full_controller(hurt: Hurt) -> Outcome:
    """No room for sessions: nothing more is acknowledged, nothing acknowledged is lost."""
    filler = _full(hurt.world.directory / "data-controller")
    refused = _refusals(hurt, lambda: _place(hurt))
    filler.unlink()
    began_s = time.monotonic()
    time.sleep(0.5)
    _restart(hurt, "controller")
    return Outcome(f"{refused} placements refused", hurt.world.wait_whole(hurt.canary, {}, began_s))


def disk_full_cache(hurt: Hurt) -> Outcome:
    """No room for blocks: they are refused, those that are there are served."""
    filler = _full(hurt.world.directory / "blocks")
    refused = _refusals(hurt, lambda: hurt.blocks.store(hurt.drawn) is not None, 4)
    served = hurt.blocks.check(hurt.canary)
    if not served:
        hurt.tally.breach("a full disk keeps blocks from being read")
    filler.unlink()
    return Outcome(
        f"{refused} blocks refused, others served",
        hurt.world.wait_whole(hurt.canary, {}, time.monotonic()),
    )


def _read_only(hurt: Hurt, name: str, disk: str) -> Outcome:
    """Restart a member on a disk that cannot be written, then on one that can."""
    path = str(hurt.world.directory / disk)
    hurt.world.kill(name)
    run("mount", "-o", "remount,ro", path)
    hurt.world.launch(name)
    member = hurt.world.members[name]
    until = time.monotonic() + 20
    while time.monotonic() < until and member.alive() and not member.ready():
        time.sleep(0.1)
    if not member.alive():
        said = "says so and ends"
        last = member.log.read_text().splitlines()[-1]
        if not last.startswith("kvsp: "):
            hurt.tally.breach(f"{name} on a read-only disk ended without saying why")
    else:
        said = "serves what it has"
        hurt.world.kill(name)
    run("mount", "-o", "remount,rw", path)
    began_s = time.monotonic()
    hurt.world.launch(name)
    return Outcome(said, hurt.world.wait_whole(hurt.canary, {}, began_s))


def read_only_controller(hurt: Hurt) -> Outcome:
    """The controller's disk comes back read-only."""
    return _read_only(hurt, "controller", "data-controller")


def read_only_cache(hurt: Hurt) -> Outcome:
    """The cache's disk comes back read-only."""
    return _read_only(hurt, "cache", "blocks")


# Files


def torn_blocks(hurt: Hurt) -> Outcome:
    """The cache's files are cut, changed and emptied while it is down: a block is whole or not there."""
    for _ in range(24):
        hurt.blocks.store(hurt.drawn)
    hurt.world.kill("cache")
    files = sorted(p for p in (hurt.world.directory / "blocks").rglob("*") if p.is_file())
    torn = hurt.drawn.sample(files, min(12, len(files) // 2))
    for number, path in enumerate(torn):
        octets = bytearray(path.read_bytes())
        if number % 3 == 0:
            del octets[hurt.drawn.randrange(max(1, len(octets))) :]
        elif number % 3 == 1 and octets:
            octets[hurt.drawn.randrange(len(octets))] ^= 1 << hurt.drawn.randrange(8)
        else:
            octets.clear()
        path.write_bytes(octets)
    began_s = time.monotonic()
    hurt.world.launch("cache")
    hurt.world.wait_ready("cache")
    gone = hurt.blocks.check_some(hurt.drawn, 10_000)
    if gone > len(torn):
        hurt.tally.breach(f"{gone} blocks are gone, {len(torn)} files were torn")
    if not hurt.blocks.check(hurt.canary):
        replaced = hurt.blocks.store(hurt.drawn)
        assert replaced is not None
        hurt.canary = replaced
    whole_s = hurt.world.wait_whole(hurt.canary, {}, began_s)
    return Outcome(f"{len(torn)} files torn, {gone} blocks not there, none wrong", whole_s)


def torn_log(hurt: Hurt) -> Outcome:
    """Rubbish at the end of the controller's write-ahead log, as of a write that was cut off."""
    hurt.world.kill("controller")
    (log,) = (hurt.world.directory / "data-controller").glob("*.sqlite-wal")
    with log.open("ab") as file:
        file.write(hurt.drawn.randbytes(3000))
    began_s = time.monotonic()
    hurt.world.launch("controller")
    return Outcome("3,000 octets of rubbish", hurt.world.wait_whole(hurt.canary, {}, began_s))


# Descriptors


def _no_descriptors(hurt: Hurt, name: str) -> Outcome:
    """Leave a process almost no file descriptors, and take those with connections that say nothing."""
    member = hurt.world.members[name]
    assert member.process is not None
    pid = member.process.pid
    used = len(os.listdir(f"/proc/{pid}/fd"))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 6, hard))
    idle: list[socket.socket] = []
    try:
        for _ in range(60):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection((member.host, member.port), timeout=5))
        time.sleep(3)
        if not member.alive():
            hurt.tally.breach(f"{name} ended when it had no file descriptors left")
    finally:
        for one in idle:
            one.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    began_s = time.monotonic()
    _restart(hurt, name)
    whole_s = hurt.world.wait_whole(hurt.canary, {}, began_s)
    return Outcome(f"{len(idle)} idle connections, 6 descriptors", whole_s)


def descriptors_index(hurt: Hurt) -> Outcome:
    """The index has no file descriptors left."""
    return _no_descriptors(hurt, "index")


def descriptors_controller(hurt: Hurt) -> Outcome:
    """The controller has no file descriptors left."""
    return _no_descriptors(hurt, "controller")


def descriptors_cache(hurt: Hurt) -> Outcome:
    """The cache has no file descriptors left, so it cannot open its files either."""
    return _no_descriptors(hurt, "cache")


# Clocks

_SHIM = """import os, time
_step_ns = int(os.environ.get("KVSP_TEST_CLOCK_STEP_S", "0")) * 1_000_000_000
_time, _time_ns = time.time, time.time_ns
time.time_ns = lambda: _time_ns() + _step_ns
time.time = lambda: _time() + _step_ns / 1e9
"""


def clock_steps(hurt: Hurt) -> Outcome:
    """An instance restarts with its wall clock an hour ahead, then an hour behind, then right."""
    world = hurt.world
    shim = world.directory / "shim"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(_SHIM)
    import sys

    path = os.pathsep.join(filter(None, [str(shim), *sys.path]))
    began_s = time.monotonic()
    for step_s in (3600, -3600, 0):
        newer_than = {"alpha": world.epochs()["alpha"]}
        began_s = time.monotonic()
        world.kill("alpha")
        world.launch("alpha", {"PYTHONPATH": path, "KVSP_TEST_CLOCK_STEP_S": str(step_s)})
        world.wait_whole(hurt.canary, newer_than, began_s)
    return Outcome("an hour ahead, an hour behind, right", time.monotonic() - began_s)


# Links


class Apart(World):
    """A world with one instance in a network namespace of its own, whose link can be cut."""

    FAR = "beta"

    def __init__(self, *arguments: object, **options: object) -> None:
        number = os.getpid() % 16000
        self._namespace, self._near_link, self._far_link = f"kvsp{number}", f"kvn{number}", f"kvf{number}"
        third, fourth = divmod(number * 4 % 65536, 256)
        self._near = f"10.213.{third}.{fourth + 1}"
        self._far = f"10.213.{third}.{fourth + 2}"
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def host(self, name: str) -> str:
        """Return the address that a member listens on."""
        return self._far if name == self.FAR else self._near

    def command(self, member: Member) -> list[str]:
        """Return what runs a member."""
        command = super().command(member)
        return ["ip", "netns", "exec", self._namespace, *command] if member.name == self.FAR else command

    def __enter__(self) -> Apart:
        try:
            self._make_link()
            super().__enter__()
        except BaseException:
            self._remove_link()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self._remove_link()

    def _make_link(self) -> None:
        namespace, near, far = self._namespace, self._near_link, self._far_link
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        run("ip", "link", "set", far, "netns", namespace)
        run("ip", "address", "add", f"{self._near}/30", "dev", near)
        run("ip", "-n", namespace, "address", "add", f"{self._far}/30", "dev", far)
        run("ip", "link", "set", near, "up")
        run("ip", "-n", namespace, "link", "set", far, "up")
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        self._near_mac = run("cat", f"/sys/class/net/{near}/address").strip()
        shown = run("ip", "-n", namespace, "-o", "link", "show", far).split()
        self._far_mac = shown[shown.index("link/ether") + 1]
        self.let(to_far=True, to_near=True)

    def _remove_link(self) -> None:
        subprocess.run(["ip", "netns", "delete", self._namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", self._near_link], check=False, capture_output=True)

    def let(self, *, to_far: bool, to_near: bool) -> None:
        """Let packets arrive in these directions; in the other they are lost without a word."""
        nowhere, near, far = "02:00:00:00:00:99", self._near_link, self._far_link
        way = ("neigh", "replace")
        to = (self._far, "lladdr", self._far_mac if to_far else nowhere, "dev", near, "nud", "permanent")
        run("ip", *way, *to)
        to = (self._near, "lladdr", self._near_mac if to_near else nowhere, "dev", far, "nud", "permanent")
        run("ip", "-n", self._namespace, *way, *to)


def _cut(hurt: Hurt, what: str, *, to_far: bool, to_near: bool) -> Outcome:
    world = hurt.world
    assert isinstance(world, Apart)
    world.let(to_far=to_far, to_near=to_near)
    cut_s = time.monotonic()
    with contextlib.suppress(KVSPError):
        wait_until(lambda: world.state_of(world.FAR) != "active", 20, "the controller to notice")
    noticed_s = time.monotonic() - cut_s
    time.sleep(3)
    world.let(to_far=True, to_near=True)
    began_s = time.monotonic()
    whole_s = world.wait_whole(hurt.canary, {}, began_s)
    return Outcome(f"{what}; the controller noticed after {noticed_s:.1f} s", whole_s)


def link_cut(hurt: Hurt) -> Outcome:
    """Nothing passes between an instance and the others."""
    return _cut(hurt, "both ways", to_far=False, to_near=False)


def link_cut_out(hurt: Hurt) -> Outcome:
    """The instance hears the others, and is not heard."""
    return _cut(hurt, "it hears and is not heard", to_far=True, to_near=False)


def link_cut_in(hurt: Hurt) -> Outcome:
    """The instance is heard, and hears nobody."""
    return _cut(hurt, "it is heard and hears nobody", to_far=False, to_near=True)


FAULTS: dict[str, tuple[type[World], tuple[Callable[[Hurt], Outcome], ...]]] = {
    "disks": (
        OnSmallDisks,
        (disk_full_controller, disk_full_cache, read_only_controller, read_only_cache),
    ),
    "files": (
        World,
        (
            *(torn_blocks, torn_log, clock_steps),
            *(descriptors_index, descriptors_controller, descriptors_cache),
        ),
    ),
    "links": (Apart, (link_cut, link_cut_out, link_cut_in)),
}
_NAMES = {fault: fault.__name__.replace("_", " ") for _, group in FAULTS.values() for fault in group}


def faults(directory: Path, group: str, times: int = 1) -> Section:
    """Do every fault of a group so many times."""
    header = ("fault", "meanwhile", "times", "survived", "lost", "whole again after (longest)")
    section = Section(group, header)
    kind, acts = FAULTS[group]
    try:
        section.rows += _group(make_world(directory, kind), acts, times, section)
    except Skipped as skipped:
        section.rows += [(_NAMES[act], f"skipped: {skipped}", 0, 0, 0, "") for act in acts]
    return section


def _group(
    world: World, acts: tuple[Callable[[Hurt], Outcome], ...], times: int, section: Section
) -> Iterator[tuple[object, ...]]:
    rows = []
    with world, Hurt(world) as hurt:
        for act in acts:
            lost, longest_s, meanwhile = 0, 0.0, ""
            for _ in range(times):
                time.sleep(hurt.drawn.random())
                try:
                    outcome = act(hurt)
                except KVSPError as error:
                    hurt.tally.breach(f"{_NAMES[act]}: {error}")
                    outcome = Outcome("the cluster did not come back", PATIENCE_S)
                    for name in world.members:
                        _restart(hurt, name)
                longest_s, meanwhile = max(longest_s, outcome.whole_s), outcome.meanwhile
                lost += hurt.lost()
            rows.append((_NAMES[act], meanwhile, times, times, lost, f"{longest_s:.1f} s"))
    section.broken += hurt.tally.broken
    section.notes.append(f"Meanwhile: {counted(hurt.tally.counts)}.")
    return iter(rows)
