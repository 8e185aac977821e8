"""What each client of a holder has under lease: how many, and their octets, a block counted once (LE-3)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvsp_core.problems import LEASE_QUOTA, Problem

__all__ = ["LeaseAccounts"]


class _Account:
    __slots__ = ("blocks", "leased_bytes", "leases")

    def __init__(self) -> None:
        self.blocks: dict[str, int] = {}  # and by how many leases
        self.leased_bytes = 0
        self.leases = 0


class LeaseAccounts:
    """The accounts of all clients that have a lease. `size_of` gives the octets of a block that is held."""

    def __init__(self, size_of: Callable[[str], int], *, quota_bytes: int, max_leases: int) -> None:
        self._size_of = size_of
        self.quota_bytes = quota_bytes
        self._max_leases = max_leases
        self._accounts: dict[str, _Account] = {}

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

    def enter(self, client: str, blocks: Collection[str]) -> None:
        """A client has a further lease, on these blocks."""
        account = self._accounts.setdefault(client, _Account())
        account.leases += 1
        for block in blocks:
            times = account.blocks.get(block, 0)
            account.blocks[block] = times + 1
            if not times:
                account.leased_bytes += self._size_of(block)

    def leave(self, client: str, block: str) -> None:
        """A block is in one lease of a client less."""
        account = self._accounts[client]
        account.blocks[block] -= 1
        if not account.blocks[block]:
            del account.blocks[block]
            account.leased_bytes -= self._size_of(block)

    def end(self, client: str) -> None:
        """A client has one lease less, whose blocks have all left."""
        account = self._accounts[client]
        account.leases -= 1
        if not account.leases:
            del self._accounts[client]
