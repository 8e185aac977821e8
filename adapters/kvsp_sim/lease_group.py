"""A holder with room for one block, clients that lease it, and one that wants the room: for the explorer."""

from __future__ import annotations

from typing import Final

from kvsp_core.container import ContainerHeader
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.messages import LeaseRenewal, LeaseRequest
from kvsp_core.resources import (
    CreateLease,
    GetBlock,
    Operation,
    ReleaseLease,
    RenewLease,
    RoleName,
    StoreBlock,
    request_for,
)
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.role import AnswerReceived, Call, CallFailed, Effect, Input, TimerFired
from kvsp_sim.deployment import DESCRIPTOR
from kvsp_sim.engine import block_octets
from kvsp_sim.host import Start

__all__ = ["TIER", "LeaseClient", "RoomSeeker", "lease_holder", "lease_policy"]

TIER: Final = "local-storage"
HOLDER: Final = "https://holder/"
_SCOPE: Final = "5" * 32
_LEASED, _OTHER = "a" * 64, "b" * 64
_TTL_MS: Final = 40
MAX_TTL_MS: Final = 50
_AGAIN_MS: Final = 40
_CALL_MS: Final = 1_000
_CALL: Final = 1  # one at a time


def lease_policy(clients: tuple[str, ...]) -> Policy:
    """Return a policy by which every client may use the holder."""
    everyone = [HOLDER, *clients]
    return Policy(
        dict.fromkeys(everyone, (RoleName.HOLDER,)),
        {_SCOPE: ScopeRules(read=everyone, write=everyone)},  # type: ignore[arg-type]
    )


def lease_holder(policy: Policy, start: Start) -> Holder:
    """Return a holder with room for one block."""
    size = ContainerHeader.for_layers(DESCRIPTOR).size_bytes
    return Holder(
        base_uri=HOLDER,
        policy=policy,
        tiers={TIER: TierLimits(capacity_bytes=size)},
        random_bytes=start.random_bytes,
        now_ms=start.now_ms,
        lease_table=LeaseTable(random_bytes=start.random_bytes, now_ms=start.now_ms, max_ttl_ms=MAX_TTL_MS),
    )


class _Client:
    """Makes one call after the other."""

    def __init__(self, base_uri: str) -> None:
        self.base_uri = base_uri
        self._due_ms: int | None = None

    def next_deadline_ms(self) -> int | None:
        """Return when it tries again."""
        return self._due_ms

    def _call(self, operation: Operation, body: object = None) -> tuple[Effect, ...]:
        request, octets = request_for(operation, body)
        return (Call(call_id=_CALL, base_uri=HOLDER, request=request, body=octets, timeout_ms=_CALL_MS),)

    def _put(self, key: str) -> tuple[Effect, ...]:
        octets = block_octets(DESCRIPTOR, key.encode(), 0)
        return self._call(StoreBlock(DESCRIPTOR.compat_id, _SCOPE, key), octets)


class LeaseClient(_Client):
    """Stores the block, leases it and renews the lease once; any other client than the first leases, renews,
    reads and releases.

    Leases of one client last a millisecond longer than those of the one before, so that a timer goes off in
    the last millisecond of a lease.
    """

    def __init__(self, base_uri: str, *, number: int) -> None:
        super().__init__(base_uri)
        stores = number == 0
        self._ttl_ms = _TTL_MS + number
        self._stores = stores
        self._lease = ""
        self._step = "store" if stores else "lease"

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin."""
        return self._put(_LEASED) if self._stores else self._ask()

    def _ask(self) -> tuple[Effect, ...]:
        return self._call(CreateLease(), LeaseRequest(block_keys=(_LEASED,), ttl_ms=self._ttl_ms))

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Go on with what comes next."""
        match item:
            case AnswerReceived(response=response, body=body):
                return self._answered(response.status, body, now_ms)
            case CallFailed():
                self._due_ms = now_ms + _AGAIN_MS
            case TimerFired():
                self._due_ms = None
                return self._ask()
        return ()

    def _answered(self, status: int, body: bytes, now_ms: int) -> tuple[Effect, ...]:
        if self._step == "store":
            self._step = "lease"
            return self._ask()
        if self._step == "lease" and status == 201:
            self._step = "renew"
            self._lease = body.split(b'"')[3].decode()
            return self._call(RenewLease(self._lease), LeaseRenewal(ttl_ms=_TTL_MS // 4))
        if self._step == "renew" and not self._stores:
            self._step = "read"
            return self._call(GetBlock(DESCRIPTOR.compat_id, _SCOPE, _LEASED))
        if self._step == "read":
            self._step = "release"
            return self._call(ReleaseLease(self._lease))
        return ()


class RoomSeeker(_Client):
    """Wants to store another block, and tries again while there is no room."""

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin."""
        return self._put(_OTHER)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Try again where there was no room."""
        match item:
            case AnswerReceived(response=response) if response.status == 201:
                return ()
            case AnswerReceived() | CallFailed():
                self._due_ms = now_ms + _AGAIN_MS
            case TimerFired():
                self._due_ms = None
                return self._put(_OTHER)
        return ()
