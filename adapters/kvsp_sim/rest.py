"""What is true of a deployment at rest: all has healed, nobody asks for more, and what was left to do had its
time.

Each truth compares what one party has said, in a message or a durable write, with what another one was told,
stores or has its engine hold; none looks into a role. It may take a while to come true, so each says what is
still missing. That nothing is missing is what liveness demands of shard maps, records, sessions and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import msgspec

from kvsp_sim.host import Cluster, Host
from kvsp_sim.overheard import Places
from kvsp_sim.properties import Properties
from kvsp_sim.property import Violation, shortened

__all__ = ["TRUTHS", "Rest"]

TRUTHS: Final = (
    "ranges_are_owned",
    "ranges_are_loaded",
    "what_is_purged_is_gone",
    "what_is_listed_is_held",
    "what_is_held_is_listed",
    "requests_leave_nothing",
    "instances_are_idle",
    "epochs_agree",
    "sessions_are_over",
    "engines_are_freed",
)
"""The names of all truths; the last is one only once all shard maps have ended."""

_PATIENCE_US: Final = 90_000_000
"""How long what is missing may take: blocks of ranges are looked for once a minute at last."""
_OVER: Final = ("finished", "failed")


class _Session(msgspec.Struct):
    kind: str


_read_session = msgspec.json.Decoder(_Session).decode


class Rest:
    """Says what is missing of the rest of a deployment. An instance has room for so many blocks (`room`), and
    where the index has room for the records of all, it `lists_all`. It takes long until the records of what
    was lost have expired: not every run `sees_records_expire`. Where digests of some instances alone count,
    these are its `producers`.
    """

    def __init__(
        self,
        cluster: Cluster,
        places: Places,
        properties: Properties,
        *,
        room: int,
        lists_all: bool,
        sees_records_expire: bool,
        producers: Collection[str] = (),
    ) -> None:
        self._world = cluster.world
        self._hosts = cluster.hosts
        self._witness = cluster.witness
        self._places = places
        self._properties = properties
        self._room = room
        self._lists_all = lists_all
        self._sees_records_expire = sees_records_expire
        self._producers = producers
        self.too_old: set[tuple[str, str]] = set()
        """Who was told to delete which block, which goes, unlisted, when no shard map needs it there."""
        self.purged: str | None = None
        """The scope that was purged."""
        self._since_us: int | None = None
        looks: tuple[Callable[[], Iterator[str]], ...] = (
            self._unowned,
            self._unloaded,
            self._left_of_purged,
            self._not_held,
            self._not_listed,
            self._left_of_requests,
            self._at_work,
            self._unlike_epochs,
            self._open_sessions,
            self._in_engines,
        )
        self._looks: Mapping[str, Callable[[], Iterator[str]]] = dict(zip(TRUTHS, looks, strict=True))

    def missing(self, *, with_maps: bool) -> str:
        """Return what does not hold yet, or an empty string. `with_maps`: shard maps have not ended yet.

        Raises `Violation` where it has been missing for too long.
        """
        if self._since_us is None:
            self._since_us = self._world.now_us
        for name in TRUTHS[:-1] if with_maps else TRUTHS[-1:]:
            what = next(self._looks[name](), "")
            if what and self._world.now_us > self._since_us + _PATIENCE_US:
                raise Violation(name, f"{_PATIENCE_US // 1_000_000} s after all faults: {what}")
            if what:
                return what
        return ""

    # Shard maps

    def _unowned(self) -> Iterator[str]:
        """Every range of an authoritative map is with a member that is up and has taken it over (RS-6)."""
        return self._properties.one_owner.without_owner()

    def _unloaded(self) -> Iterator[str]:
        """An owner has in its engine what of its ranges the index lists, where it has room to keep it all."""
        size = self._places.descriptor.block_tokens
        producers = self._producers
        listed = {key for holder, key in self._listed() if not producers or holder in producers}
        owned: dict[str, list[tuple[str, str, tuple[int, int]]]] = {}
        for map_id, version, member, ranges in self._properties.one_owner.owned():
            for number, key in enumerate(self._witness.contexts.get((map_id, version), ())):
                first, end = number * size, (number + 1) * size
                if any(start <= first and end <= last for start, last in ranges):
                    owned.setdefault(member, []).append((map_id, key, (first, end)))
        for member, blocks in owned.items():
            host = self._hosts[member]
            if len({key for _, key, _ in blocks}) > self._room:
                continue
            for map_id, key, (first, end) in blocks:
                if key in listed and (map_id, (first, end)) not in host.in_engine:
                    yield f"{member} owns positions {first} to {end} of a map and has not loaded them"

    def _in_engines(self) -> Iterator[str]:
        """Once a shard map has ended, no engine holds a range of it."""
        for host in self._hosts.values():
            if host.in_engine:
                yield f"the engine of {host.name} holds ranges of shard maps that have ended"

    # Records

    def _listed(self) -> list[tuple[str, str]]:
        """Return holder and block of each record that the index has granted."""
        index = self._properties.index_is_current
        return [
            (holder, str(key))
            for part in self._places.index.uris
            for holder, key in index.listed(self._hosts[part].now_ms, part)
        ]

    @staticmethod
    def _held(host: Host) -> set[str]:
        return {name.block_key for tier in host.tiers.values() for name in tier.blocks}

    def _not_held(self) -> Iterator[str]:
        """Who has a record has the block, but for what a tier lost and nobody has noticed."""
        for holder, key in self._listed() if self._sees_records_expire else ():
            host = self._hosts[holder]
            unnoticed = any(name.block_key == key for tier in host.tiers.values() for name in tier.forgotten)
            if key not in self._held(host) and not unnoticed:
                yield f"the index lists block {shortened(key)} at {holder}, which does not hold it"

    def _not_listed(self) -> Iterator[str]:
        """Who has a block has a record of it, where the index has room for all."""
        listed = set(self._listed())
        for keeper in self._places.keepers if self._lists_all else ():
            for key in sorted(self._held(self._hosts[keeper])):
                if (keeper, key) not in listed | self.too_old:
                    yield f"{keeper} holds block {shortened(key)}, which the index does not list there"

    # Requests and sessions

    def _left_of_requests(self) -> Iterator[str]:
        """No buffer is in use, and no engine has a sequence or blocks for one."""
        for host in self._hosts.values():
            if host.buffers:
                yield f"{host.name} has {len(host.buffers)} buffers in use"
            if host.engine is not None and not host.engine.idle:
                yield f"the engine of {host.name} has a sequence that nobody waits for"

    def _at_work(self) -> Iterator[str]:
        """What an instance has said of itself last is that nothing runs and nothing waits."""
        for (_, instance), status in self._witness.statuses.items():
            if status.running or status.queued:
                yield f"{instance} reports {status.running} sessions that run and {status.queued} that wait"

    def _unlike_epochs(self) -> Iterator[str]:
        """What the controller has made durable of an instance is the epoch it has answered last."""
        controller = self._places.controller
        durable = self._hosts[controller].store.load().get("epochs", {})
        for (told, instance), status in self._witness.statuses.items():
            if told == controller and (kept := int(durable.get(instance, b"0"))) != status.epoch:
                yield f"{instance} is in epoch {status.epoch}, and the controller has kept {kept}"

    def _open_sessions(self) -> Iterator[str]:
        """No session that the controller has made durable goes on, and no part of one is left by itself."""
        tables = self._hosts[self._places.controller].store.load()
        sessions = tables.get("sessions", {})
        for session, value in sessions.items():
            if (kind := _read_session(value).kind) not in _OVER:
                yield f"session {shortened(session)} is still {kind}"
        for table in ("prompts", "outputs"):
            for session in tables.get(table, {}):
                if session not in sessions:
                    yield f"{table} of session {shortened(session)} are kept, and the session is not"

    def _left_of_purged(self) -> Iterator[str]:
        """Of a scope that was purged nobody has a block, and the controller neither session nor shard map."""
        if self.purged is None:
            return
        for host in self._hosts.values():
            if any(name.scope_id == self.purged for tier in host.tiers.values() for name in tier.blocks):
                yield f"{host.name} has blocks of a scope that was purged"
        tables = self._hosts[self._places.controller].store.load()
        for table in ("sessions", "maps"):
            if any(self.purged.encode() in value for value in tables.get(table, {}).values()):
                yield f"the controller has {table} of a scope that was purged"
