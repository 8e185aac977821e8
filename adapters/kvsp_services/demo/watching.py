"""What an operator could see of a cluster while it worked: states, sessions and leases over time."""

from __future__ import annotations

import threading
import time

import attrs

from kvsp_core.errors import KVSPError
from kvsp_services.demo.cluster import INSTANCES, Cluster

__all__ = ["Mark", "Sample", "Watcher"]

_PERIOD_S = 1.0
_HOLDERS = ("cache", *INSTANCES)


@attrs.frozen
class Sample:
    """The cluster at one moment, in seconds from the start."""

    at_s: float
    states: dict[str, str]
    """Process -> active, draining, sleeping, or down."""
    sessions: dict[str, tuple[str, str]]
    """Session, by a number of ours -> its state and the instance that owns it."""
    leases: dict[str, int]
    """Holder -> blocks under lease."""


@attrs.frozen
class Mark:
    """Something the demonstration did."""

    at_s: float
    process: str
    what: str


class Watcher:
    """Samples a cluster from a thread until it is stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []
        self._cluster = cluster
        self._began = time.monotonic()
        self._names: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvsp-demo-watcher", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after a last sample."""
        self._stopped.set()
        self._thread.join()
        self.samples.sort(key=lambda sample: sample.at_s)

    def now_s(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._began

    def mark(self, process: str, what: str) -> None:
        """Note that something was done to a process."""
        self.marks.append(Mark(self.now_s(), process, what))

    def sample(self) -> None:
        """Look now, between two of the regular times."""
        self.samples.append(self._sample())

    def leases_now(self) -> dict[str, int]:
        """Return the blocks under lease at each holder that answers."""
        found: dict[str, int] = {}
        for name in _HOLDERS:
            if self._cluster.members[name].alive():
                try:
                    found[name] = sum(lease.blocks for lease in self._cluster.leases(name).leases)
                except KVSPError:
                    continue
        return found

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stopped.wait(_PERIOD_S):
                return

    def _sample(self) -> Sample:
        cluster = self._cluster
        at_s = self.now_s()
        states = {name: "up" if member.alive() else "down" for name, member in cluster.members.items()}
        sessions: dict[str, tuple[str, str]] = {}
        if states["controller"] == "down":  # asking would wait for it, and the next sample with that
            return Sample(at_s, states, sessions, self.leases_now())
        try:
            for info in cluster.instances().instances:
                name = cluster.name_of(info.instance)
                states[name] = info.state if cluster.members[name].alive() else "down"
            for session in cluster.sessions().sessions:
                number = self._names.setdefault(session.session, str(len(self._names) + 1))
                sessions[number] = (session.state, cluster.name_of(session.instance))
        except KVSPError:
            pass  # it went down meanwhile
        return Sample(at_s, states, sessions, self.leases_now())
