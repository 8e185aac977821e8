"""The safety properties of KVSP, each written once, for model tests, explorer and simulator alike.

A property sees **facts**: what was said in a message, written to durable storage, delivered to a user,
drawn or loaded by an engine. It never sees inside a role. It raises `Violation` at the first fact that
breaks it::

    leases = LeasesHold(quota_bytes=4096)
    leases.observe(
        LeaseGranted(holder="h", lease="1", client="c", blocks=(("b", 64),), now_ms=0, until_ms=10)
    )
    leases.observe(BlockEvicted(holder="h", block="b", now_ms=10))  # Violation: leases_hold: ...

`Properties` holds one of each and passes every fact to those that want it. All of them can be frozen into a
hashable value, times as what remains of them. Names, blocks and histories are opaque and only compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

import attrs

from kvsp_sim.facts import (
    BlockEvicted,
    BlockNotFound,
    DecisionSent,
    DecisionTaken,
    Disclosed,
    Fact,
    HolderRestarted,
    IndexRestarted,
    LayersUsed,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    MemberRestarted,
    PlanAccepted,
    PlanSent,
    RangeDropped,
    RangeLoaded,
    Ranges,
    RecordReturned,
    RecordTaken,
    RecordWithdrawn,
    StepServed,
    WithdrawalSent,
)
from kvsp_sim.property import Property, Violation
from kvsp_sim.session_properties import AcknowledgedIsKept, OneSample, SessionsAreFenced, extend_history

__all__ = [
    "AcknowledgedIsKept",
    "IndexIsCurrent",
    "LeasesHold",
    "OneOwner",
    "OneSample",
    "OnlyVerifiedBlocks",
    "Properties",
    "Property",
    "ScopesHold",
    "SessionsAreFenced",
    "Violation",
    "extend_history",
]


@attrs.define
class _Lease:
    client: str
    blocks: dict[Hashable, int]
    until_ms: int
    counts: bool = True  # towards the quota: a restarted holder does not know its former leases


class LeasesHold(Property):
    """A replica under a valid lease is never evicted; no client's leased octets exceed its quota (PB-4, LE-2,
    LE-3), each block counted once a client.

    A fault is no eviction where the withdrawal was sent before (LE-4). Give one for each holder, or one for
    all.
    """

    name = "leases_hold"

    def __init__(self, quota_bytes: int | None = None) -> None:
        self.quota_bytes = quota_bytes
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._covering: dict[tuple[str, Hashable], set[str]] = {}
        self._withdrawn: set[tuple[str, Hashable]] = set()
        self._published: set[tuple[str, Hashable]] = set()

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            LeaseGranted: self._granted,
            LeaseRenewed: self._renewed,
            LeaseReleased: self._released,
            BlockEvicted: self._evicted,
            WithdrawalSent: self._withdrawal,
            RecordTaken: self._record_taken,
            HolderRestarted: self._restarted,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return the valid leases, and the blocks for which a withdrawal was sent."""
        leases = frozenset(
            (key, lease.client, frozenset(lease.blocks.items()), lease.until_ms - now_ms, lease.counts)
            for key, lease in self._leases.items()
            if lease.until_ms >= now_ms
        )
        return leases, frozenset(self._withdrawn), frozenset(self._published)

    def _granted(self, fact: LeaseGranted) -> None:
        lease = _Lease(fact.client, dict(fact.blocks), fact.until_ms)
        if (fact.holder, fact.lease) in self._leases:
            self.fail(f"{fact.holder} gave the identifier of a lease to a second one")
        self._leases[fact.holder, fact.lease] = lease
        for block in lease.blocks:
            self._covering.setdefault((fact.holder, block), set()).add(fact.lease)
        self._check_quota(fact.holder, fact.client, fact.now_ms)

    def _check_quota(self, holder: str, client: str, now_ms: int) -> None:
        if self.quota_bytes is None:
            return
        held: dict[Hashable, int] = {}
        for key in [key for key in self._leases if key[0] == holder]:
            lease = self._leases[key]
            if lease.until_ms < now_ms:
                self._forget(key)
            elif lease.counts and lease.client == client:
                held.update(lease.blocks)
        if sum(held.values()) > self.quota_bytes:
            self.fail(
                f"{holder} leases {sum(held.values())} octets to {client}, whose quota is {self.quota_bytes}"
            )

    def _renewed(self, fact: LeaseRenewed) -> None:
        lease = self._leases.get((fact.holder, fact.lease))
        if lease is not None:
            lease.until_ms = max(lease.until_ms, fact.until_ms)

    def _released(self, fact: LeaseReleased) -> None:
        self._forget((fact.holder, fact.lease))

    def _forget(self, key: tuple[str, str]) -> None:
        lease = self._leases.pop(key, None)
        for block in lease.blocks if lease else ():
            covering = self._covering.get((key[0], block), set())
            covering.discard(key[1])
            if not covering:
                self._covering.pop((key[0], block), None)

    def _evicted(self, fact: BlockEvicted) -> None:
        block = (fact.holder, fact.block)
        for name in sorted(self._covering.get(block, ())):
            lease = self._leases[fact.holder, name]
            if lease.until_ms < fact.now_ms:
                self._forget((fact.holder, name))
            elif not fact.fault:
                self.fail(
                    f"{fact.holder} evicted a block at {fact.now_ms} ms that {lease.client} leased until "
                    f"{lease.until_ms} ms"
                )
            elif block in self._published and block not in self._withdrawn and not fact.unheard:
                self.fail(f"{fact.holder} dropped a leased block for a fault before withdrawing its record")
        # What a fault took is out of its leases: a copy stored later under the same key is another block.
        for name in self._covering.pop(block, ()):
            self._leases[fact.holder, name].blocks.pop(fact.block, None)
        self._withdrawn.discard(block)
        self._published.discard(block)

    def _withdrawal(self, fact: WithdrawalSent) -> None:
        self._withdrawn.add((fact.holder, fact.block))

    def _record_taken(self, fact: RecordTaken) -> None:
        self._published.add((fact.holder, fact.block))
        self._withdrawn.discard((fact.holder, fact.block))

    def _restarted(self, fact: HolderRestarted) -> None:
        for key in [key for key in self._leases if key[0] == fact.holder]:
            lease = self._leases[key]
            kept = {block: size for block, size in lease.blocks.items() if block in fact.restored}
            self._forget(key)
            if kept:
                self._leases[key] = _Lease(lease.client, kept, lease.until_ms + fact.shift_ms, counts=False)
                for block in kept:
                    self._covering.setdefault((fact.holder, block), set()).add(key[1])


class IndexIsCurrent(Property):
    """The index gives no record out after its withdrawal or expiry, and loses none before (PB-2, LK-1)."""

    name = "index_is_current"

    def __init__(self) -> None:
        # Part of the index and block -> holder -> when its record expires.
        self._until_ms: dict[tuple[str, Hashable], dict[str, int]] = {}

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            RecordTaken: self._taken,
            RecordWithdrawn: self._withdrawn,
            RecordReturned: self._returned,
            BlockNotFound: self._not_found,
            IndexRestarted: self._restarted,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return the records that may be given out."""
        return frozenset(
            (index, holder, block, until - now_ms)
            for (index, block), records in self._until_ms.items()
            for holder, until in records.items()
            if until >= now_ms
        )

    def listed(self, now_ms: int, index: str = "") -> list[tuple[str, Hashable]]:
        """Return the holder and the block of each record that a part of the index may give out."""
        return [
            (holder, block)
            for (part, block), records in self._until_ms.items()
            for holder, until in records.items()
            if part == index and until >= now_ms
        ]

    def _taken(self, fact: RecordTaken) -> None:
        self._until_ms.setdefault((fact.index, fact.block), {})[fact.holder] = fact.until_ms

    def _withdrawn(self, fact: RecordWithdrawn) -> None:
        self._until_ms.get((fact.index, fact.block), {}).pop(fact.holder, None)

    def _returned(self, fact: RecordReturned) -> None:
        until = self._until_ms.get((fact.index, fact.block), {}).get(fact.holder)
        if until is None:
            self.fail(f"the index returned a record of {fact.holder} that was withdrawn or never published")
        elif until < fact.now_ms:
            self.fail(
                f"the index returned a record of {fact.holder} {fact.now_ms - until} ms after it expired"
            )

    def _not_found(self, fact: BlockNotFound) -> None:
        for holder, until in self._until_ms.get((fact.index, fact.block), {}).items():
            if until > fact.now_ms:
                self.fail(
                    f"the index did not find a record of {holder}, which it has taken, "
                    f"{until - fact.now_ms} ms before it expires"
                )

    def _restarted(self, fact: IndexRestarted) -> None:
        self._until_ms = {place: each for place, each in self._until_ms.items() if place[0] != fact.index}


@attrs.define
class _Move:
    plans: dict[str, PlanSent] = attrs.field(factory=dict)
    accepted: set[str] = attrs.field(factory=set)
    holding: set[str] = attrs.field(factory=set)  # who accepted it and did not restart since
    decision: bool | None = None

    def owned(self, member: str) -> Ranges:
        """Return what a member owns in this version; ranges that touch are one."""
        plan = self.plans.get(member)
        owned: list[tuple[int, int]] = []
        for start, end in sorted(plan.retain + plan.fetch + plan.assign) if plan is not None else ():
            if owned and owned[-1][1] == start:
                owned[-1] = (owned[-1][0], end)
            else:
                owned.append((start, end))
        return tuple(owned)


def _overlap(ranges: Ranges, other: tuple[int, int]) -> bool:
    return any(start < other[1] and other[0] < end for start, end in ranges)


class OneOwner(Property):
    """Every token position has exactly one authoritative owner at every moment of a reshard; ranges that stay
    move no octet; versions are not used twice (RS-1 to RS-6, decision W21).
    """

    name = "one_owner"

    def __init__(self) -> None:
        self._moves: dict[str, dict[int, _Move]] = {}
        self._version: dict[str, int] = {}  # the authoritative one
        self._seen: dict[tuple[str, str], int] = {}  # (map, member) -> highest version
        self._held: dict[tuple[str, str], int] = {}  # (map, member) -> the plan it has accepted
        self._committed: dict[tuple[str, str], int] = {}

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            PlanSent: self._plan_sent,
            PlanAccepted: self._plan_accepted,
            DecisionSent: self._decision_sent,
            DecisionTaken: self._decision_taken,
            RangeLoaded: self._loaded,
            RangeDropped: self._dropped,
            StepServed: self._served,
            MemberRestarted: self._member_restarted,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return all moves and what members have seen of them."""
        moves = frozenset(
            (
                *(map_id, version, move.decision),
                *(frozenset(move.plans.items()), frozenset(move.accepted), frozenset(move.holding)),
            )
            for map_id, versions in self._moves.items()
            for version, move in versions.items()
        )
        rest = (self._version, self._seen, self._held, self._committed)
        return moves, *(frozenset(table.items()) for table in rest)

    def authoritative(self, map_id: str) -> int | None:
        """Return the version of a map that was committed last, or None."""
        return self._version.get(map_id)

    def owned(self) -> Iterator[tuple[str, int, str, Ranges]]:
        """Go through the maps in their authoritative version: map, version, member, and what it owns."""
        for map_id, version in self._version.items():
            move = self._move(map_id, version)
            for member in move.plans:
                if owned := move.owned(member):
                    yield map_id, version, member, owned

    def without_owner(self) -> Iterator[str]:
        """Go through the ranges whose owner has not taken them over, or has lost them in a restart."""
        for map_id, version, member, ranges in self.owned():
            if self._committed.get((map_id, member)) != version:
                yield (
                    f"{member} owns positions {ranges[0][0]} to {ranges[0][1]} in version {version} of a "
                    "map, and does not hold that version"
                )

    def left_behind(self, member: str) -> bool:
        """Return whether a member waits for a decision, or holds ranges of a version that is over.

        It must not decide alone (decision W21), so its coordinator has to tell it sooner or later.
        """
        if any(holder == member for _, holder in self._held):
            return True
        return any(
            version < self._version.get(map_id, 0) and bool(self._move(map_id, version).owned(holder))
            for (map_id, holder), version in self._committed.items()
            if holder == member
        )

    def _move(self, map_id: str, version: int) -> _Move:
        return self._moves.setdefault(map_id, {}).setdefault(version, _Move())

    def _plan_sent(self, fact: PlanSent) -> None:
        move = self._move(fact.map_id, fact.version)
        before = move.plans.setdefault(fact.member, fact)
        if before != fact:
            self.fail(f"version {fact.version} was planned twice for {fact.member}")
        if move.decision is not None and fact.member not in move.accepted:
            self.fail(f"version {fact.version} was planned again after its decision")

    def _plan_accepted(self, fact: PlanAccepted) -> None:
        key = (fact.map_id, fact.member)
        seen = self._seen.get(key, 0)
        if fact.version <= seen and fact.version != self._held.get(key):
            self.fail(f"{fact.member} accepted version {fact.version} after it had seen {seen}")
        self._seen[key] = max(seen, fact.version)
        self._held[key] = fact.version
        move = self._move(fact.map_id, fact.version)
        move.accepted.add(fact.member)
        move.holding.add(fact.member)

    def _decision_sent(self, fact: DecisionSent) -> None:
        move = self._move(fact.map_id, fact.version)
        if move.decision is not None:
            if move.decision != fact.commit:
                self.fail(f"version {fact.version} was both committed and aborted")
            return
        move.decision = fact.commit
        if not fact.commit:
            return
        missing = sorted(move.plans.keys() - move.accepted)
        if missing:
            self.fail(f"version {fact.version} was committed, {missing[0]} has not acknowledged its plan")
        self._check_cover(fact.map_id, fact.version, move)
        self._version[fact.map_id] = fact.version

    def _check_cover(self, map_id: str, version: int, move: _Move) -> None:
        covered = 0
        for start, end in sorted(r for member in move.plans for r in move.owned(member)):
            if start != covered:
                kind = "no owner" if start > covered else "two owners"
                self.fail(f"version {version} leaves position {min(start, covered)} with {kind}")
            covered = end
        former = self._moves[map_id].get(self._version.get(map_id, -1))
        if former is not None and covered:  # a version without owners ends the map
            end = max((r[1] for member in former.plans for r in former.owned(member)), default=0)
            if covered < end:
                self.fail(f"version {version} leaves position {covered} with no owner")

    def _decision_taken(self, fact: DecisionTaken) -> None:
        key = (fact.map_id, fact.member)
        holding = self._move(fact.map_id, fact.version).holding
        if fact.commit and fact.member not in holding and fact.version > self._committed.get(key, 0):
            self.fail(f"{fact.member} took version {fact.version} over, whose plan it has not acknowledged")
        self._seen[key] = max(self._seen.get(key, 0), fact.version)
        if self._held.get(key) == fact.version:
            del self._held[key]
        if fact.commit:
            self._committed[key] = max(self._committed.get(key, 0), fact.version)

    def _loaded(self, fact: RangeLoaded) -> None:
        for version, move in self._moves.get(fact.map_id, {}).items():
            plan = move.plans.get(fact.member)
            counts = move.decision is None or version == self._version.get(fact.map_id)
            if counts and plan is not None and _overlap(plan.retain, fact.tokens):
                self.fail(f"{fact.member} moved octets of a range that version {version} retains")

    def _dropped(self, fact: RangeDropped) -> None:
        for version, move in self._moves.get(fact.map_id, {}).items():
            authoritative = version == self._version.get(fact.map_id)
            undecided = move.decision is None
            holds = fact.member in move.holding
            if holds and (authoritative or undecided) and _overlap(move.owned(fact.member), fact.tokens):
                kind = "is authoritative" if authoritative else "may still be committed"
                self.fail(f"{fact.member} dropped positions it owns in version {version}, which {kind}")

    def _served(self, fact: StepServed) -> None:
        if fact.version < self._committed.get((fact.map_id, fact.member), 0):
            self.fail(f"{fact.member} served version {fact.version} after it had committed a newer one")
        move = self._move(fact.map_id, fact.version)
        if not move.decision:
            self.fail(f"{fact.member} served version {fact.version}, which was not committed")
        for start, end in fact.ranges:
            if not any(a <= start and end <= b for a, b in move.owned(fact.member)):
                self.fail(f"{fact.member} served positions it does not own in version {fact.version}")

    def _member_restarted(self, fact: MemberRestarted) -> None:
        for table in (self._seen, self._held, self._committed):
            for key in [key for key in table if key[1] == fact.member]:
                del table[key]
        for versions in self._moves.values():
            for move in versions.values():
                move.holding.discard(fact.member)


class ScopesHold(Property):
    """Nothing crosses scopes, and no Scope Key reaches the index (SK-4, SK-5, LK-3, BR-7).

    `allowed` gives the scopes of each client; octets sent to the index are checked by `check_octets`.
    """

    name = "scopes_hold"

    def __init__(
        self, allowed: Mapping[str, frozenset[str]] | None = None, scope_keys: tuple[bytes, ...] = ()
    ) -> None:
        self._allowed = allowed
        self._needles = tuple(
            needle for key in scope_keys for needle in (key, key.hex().encode(), key.hex().upper().encode())
        )

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {Disclosed: self._disclosed}

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return nothing: each fact stands for itself."""
        return ()

    def check_octets(self, octets: bytes) -> None:
        """Take octets on their way to the index."""
        if any(needle in octets for needle in self._needles):
            self.fail("a Scope Key was sent to the index")

    def _disclosed(self, fact: Disclosed) -> None:
        if not fact.allowed:
            self.fail(f"{fact.client} got something of a scope that it was put out of")
        if self._allowed is not None and fact.scope not in self._allowed.get(fact.client, frozenset()):
            self.fail(f"{fact.client} got something of a scope it has no part in")


class OnlyVerifiedBlocks(Property):
    """A block that fails verification is never used; layers of replicas with different digests are never
    mixed (BR-4, BR-5, decision W17).
    """

    name = "only_verified_blocks"

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {LayersUsed: self._used}

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return nothing: each fact stands for itself."""
        return ()

    def _used(self, fact: LayersUsed) -> None:
        wrong = [number for number, replica in enumerate(fact.layers) if replica is None]
        if wrong:
            self.fail(
                f"{fact.instance} computed with layer {wrong[0]} of a block that is not the KV of its tokens"
            )
        if len(set(fact.layers)) > 1:
            self.fail(f"{fact.instance} mixed layers of replicas with different digests")


class Properties:
    """One of each property, and each fact passed to those that want it.

    Without `timed` those that compare times are left out, which an exploration checks at each node.
    """

    def __init__(
        self,
        *,
        quota_bytes: int | None = None,
        allowed: Mapping[str, frozenset[str]] | None = None,
        scope_keys: tuple[bytes, ...] = (),
        timed: bool = True,
    ) -> None:
        self.scopes = ScopesHold(allowed, scope_keys)
        self.one_owner = OneOwner()
        self.index_is_current = IndexIsCurrent()
        self.all: tuple[Property, ...] = (
            *((LeasesHold(quota_bytes), self.index_is_current) if timed else ()),
            OneSample(),
            SessionsAreFenced(),
            AcknowledgedIsKept(),
            self.one_owner,
            self.scopes,
            OnlyVerifiedBlocks(),
        )
        self._wanting: dict[type, list[Callable[..., None]]] = {}
        for one in self.all:
            for kind, handler in one._handlers().items():
                self._wanting.setdefault(kind, []).append(handler)

    def observe(self, fact: Fact) -> None:
        """Take a fact; raise `Violation` where it breaks a property."""
        for handler in self._wanting.get(type(fact), ()):
            handler(fact)

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return what all properties remember."""
        return tuple(one.freeze(now_ms) for one in self.all)
