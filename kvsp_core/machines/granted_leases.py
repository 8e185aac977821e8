"""The leases that a holder has granted: found by name, by block and by when they end, and counted for each
client (LE-3).

What may be leased, and what follows when a lease ends, is decided in `kvsp_core.machines.lease`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import attrs

from kvsp_core.machines.alarms import Alarms
from kvsp_core.problems import LEASE_QUOTA, Problem

__all__ = ["GrantedLeases", "Lease"]


@attrs.define(eq=False, repr=False)
class Lease:
    """A lease of a client. `until_ms` is its last millisecond; `blocks` is a set that keeps its order."""

    name: str
    client: str
    blocks: dict[str, None]
    until_ms: int
    broken: bool = False


@attrs.define(eq=False, repr=False)
class _Account:
    """What a client has under lease: the octets count each block once."""

    leases: int = 0
    leased_bytes: int = 0
    blocks: dict[str, int] = attrs.field(factory=dict)  # and in how many leases each is


class GrantedLeases:
    """All leases of one holder. `size_of` gives the octets of a block that is held."""

    def __init__(self, size_of: Callable[[str], int], *, quota_bytes: int, max_leases: int) -> None:
        self._size_of = size_of
        self.quota_bytes = quota_bytes
        self._max_leases = max_leases
        self._leases: dict[str, Lease] = {}
        self._on: dict[str, dict[str, Lease]] = {}  # block -> the leases on it, by name
        self._ends: Alarms[str] = Alarms()  # when each is over
        self._accounts: dict[str, _Account] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, name: str) -> Lease | None:
        """Return the lease of this name, or None."""
        return self._leases.get(name)

    def on(self, block: str) -> Collection[Lease]:
        """Return the leases on a block, the oldest first."""
        on = self._on.get(block)
        return on.values() if on else ()

    def leased_bytes(self, client: str) -> int:
        """Return the octets a client has under lease."""
        account = self._accounts.get(client)
        return account.leased_bytes if account else 0

    def refusal(self, client: str, blocks: Collection[str]) -> Problem | None:
        """Return why a client may not have a further lease, on these blocks, or None."""
        account = self._accounts.get(client) or _Account()
        if account.leases >= self._max_leases:
            return Problem(LEASE_QUOTA, f"a client has at most {self._max_leases} leases; release some")
        leased_bytes = account.leased_bytes
        leased_bytes += sum(self._size_of(block) for block in set(blocks) if block not in account.blocks)
        if leased_bytes <= self.quota_bytes:
            return None
        return Problem(
            LEASE_QUOTA,
            f"block_keys: {leased_bytes} octets would be leased, the quota of a client is"
            f" {self.quota_bytes}; release a lease or ask for fewer blocks",
        )

    def next_end_ms(self) -> int | None:
        """Return when the next lease is over, or None."""
        return self._ends.next_ms()

    # What comes and goes

    def add(self, lease: Lease) -> None:
        """Keep a new lease."""
        self._leases[lease.name] = lease
        self._ends.set(lease.name, lease.until_ms + 1)
        account = self._accounts.setdefault(lease.client, _Account())
        account.leases += 1
        for block in lease.blocks:
            self._on.setdefault(block, {})[lease.name] = lease
            times = account.blocks.get(block, 0)
            account.blocks[block] = times + 1
            if not times:
                account.leased_bytes += self._size_of(block)

    def extend(self, lease: Lease, until_ms: int) -> None:
        """Let a lease hold until then, if it does not hold for longer."""
        lease.until_ms = max(lease.until_ms, until_ms)
        self._ends.set(lease.name, lease.until_ms + 1)

    def end(self, lease: Lease) -> tuple[str, ...]:
        """Forget a lease; return those of its blocks that no lease is on any more."""
        let_go = []
        for block in tuple(lease.blocks):
            on = self._on[block]
            del on[lease.name]
            if not on:
                del self._on[block]
                let_go.append(block)
            self._take_from(lease, block)
        return tuple(let_go)

    def end_due(self, now_ms: int) -> tuple[str, ...]:
        """Forget the leases whose time is over; return the blocks that no lease is on any more."""
        return tuple(block for name in self._ends.take_due(now_ms) for block in self.end(self._leases[name]))

    def take_out(self, block: str) -> None:
        """Take a block that is about to go out of all leases on it."""
        for lease in self._on.pop(block, {}).values():
            self._take_from(lease, block)

    def _take_from(self, lease: Lease, block: str) -> None:
        """Take one block out of a lease and out of its client's account; a lease of nothing is over."""
        del lease.blocks[block]
        account = self._accounts[lease.client]
        account.blocks[block] -= 1
        if not account.blocks[block]:
            del account.blocks[block]
            account.leased_bytes -= self._size_of(block)
        if lease.blocks:
            return
        del self._leases[lease.name]
        self._ends.set(lease.name, None)
        account.leases -= 1
        if not account.leases:
            del self._accounts[lease.client]
