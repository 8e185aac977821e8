"""A stranger: a client with roles and a certificate, and without a part in any scope.

It has overheard names of blocks, sessions, leases and maps, and tries what can be tried with them. All of it
has to be refused, without telling it anything (SE-1, LK-3, BR-7, SK-6).
"""

from __future__ import annotations

from typing import Final

from kvsp_core.ext_messages import AttendRequest, OutputRequest, PlacementRequest, ScopedPrefix
from kvsp_core.identity import component_id
from kvsp_core.messages import LeaseRenewal, LeaseRequest, LookupRequest, Withdrawal
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.resources import (
    Attend,
    CreateLease,
    DeleteSession,
    GetBlock,
    GetSession,
    HeadBlock,
    Lookup,
    Operation,
    PlaceRequest,
    PublishReplica,
    RecordCheckpoint,
    ReleaseLease,
    RenewLease,
    StoreBlock,
    StreamOutput,
    WithdrawReplica,
)
from kvsp_core.roles.role import AnswerForm, AnswerReceived, CallFailed, Effect, Input, StreamEnded
from kvsp_core.roles.work import Work
from kvsp_sim.overheard import Overheard, Places
from kvsp_sim.randomness import Randomness

__all__ = ["Stranger"]

_CALL_MS: Final = 500


class Stranger:
    """Sends what must be refused; `mean_ms` is the mean time between two requests."""

    def __init__(
        self, base_uri: str, places: Places, overheard: Overheard, random: Randomness, *, mean_ms: int
    ) -> None:
        self.base_uri = base_uri
        self._places = places
        self._overheard = overheard
        self._random = random
        self._mean_ms = mean_ms
        self._work = Work()
        self._due_ms: int | None = None

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin, after a while."""
        self._due_ms = now_ms + self._random.between(1, 2 * self._mean_ms)
        return ()

    def leave(self) -> None:
        """Try nothing more."""
        self._due_ms = None

    def next_deadline_ms(self) -> int | None:
        """Return when the next attempt is due."""
        return self._due_ms

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return the attempts to make."""
        match item:
            case AnswerReceived(call_id) | CallFailed(call_id) | StreamEnded(call_id):
                self._work.calls.pop(call_id, None)
            case _ if self._due_ms is not None and now_ms >= self._due_ms:
                self._due_ms = now_ms + self._random.between(1, 2 * self._mean_ms)
                self._try()
            case _:
                pass
        return self._work.take()

    def _call(self, base_uri: str, operation: Operation, body: object = None) -> None:
        form = AnswerForm.LINES if isinstance(operation, StreamOutput) else AnswerForm.DOCUMENT
        length = len(body) if isinstance(operation, StoreBlock) and isinstance(body, bytes) else None
        self._work.call(
            base_uri, operation, body, purpose=None, timeout_ms=_CALL_MS, form=form, length=length
        )

    def _try(self) -> None:
        random, overheard = self._random, self._overheard
        attempts = []
        if overheard.prompts:
            attempts += [self._lookup, self._block, self._record, self._lease, self._place] * 2
        if overheard.sessions:
            attempts.append(self._session)
        if overheard.leases:
            attempts.append(self._somebodys_lease)
        if overheard.checkpoints:
            attempts.append(self._checkpoint)
        if overheard.maps:
            attempts.append(self._attend)
        if attempts:
            random.pick(attempts)()

    def _prefix(self) -> tuple[str, tuple[str, ...]]:
        scope_id, tokens = self._random.pick(self._overheard.prompts)
        return scope_id, self._places.keys(scope_id, tokens)

    def _lookup(self) -> None:
        scope_id, keys = self._prefix()
        if keys:
            compat_id = self._places.descriptor.compat_id
            body = LookupRequest(scope_id=scope_id, compat_id=compat_id, block_keys=keys)
            self._call(self._places.index.of(keys[0]), Lookup(), body)

    def _block(self) -> None:
        random, compat_id = self._random, self._places.descriptor.compat_id
        scope_id, keys = self._prefix()
        if not keys:
            return
        kind = random.pick((GetBlock, HeadBlock, StoreBlock))
        body = random.octets(64) if kind is StoreBlock else None
        self._call(random.pick(self._places.keepers), kind(compat_id, scope_id, random.pick(keys)), body)

    def _record(self) -> None:
        random, places = self._random, self._places
        scope_id, keys = self._prefix()
        if not keys:
            return
        key = random.pick(keys)
        holder = random.pick((self.base_uri, random.pick(places.keepers)))
        if random.chance(0.5):
            body = random.pick((None, Withdrawal(digest="sha-256:" + random.octets(32).hex())))
            self._call(places.index.of(key), WithdrawReplica(component_id(holder), key), body)
            return
        record = ReplicaRecord(
            block_key=key,
            compat_id=places.descriptor.compat_id,
            scope_id=scope_id,
            holder=holder,
            codec=1,
            size=128,
            digest="sha-256:" + random.octets(32).hex(),
            layer_digests=None,
            residency=(Residency(layers=(0, places.descriptor.layers - 1), tier="host"),),
            ttl_ms=1_000,
        )
        self._call(places.index.of(key), PublishReplica(component_id(holder), key), record)

    def _lease(self) -> None:
        _, keys = self._prefix()
        if keys:
            body = LeaseRequest(block_keys=keys[: self._random.between(1, len(keys))], ttl_ms=100)
            self._call(self._random.pick(self._places.keepers), CreateLease(), body)

    def _somebodys_lease(self) -> None:
        holder, lease = self._random.pick(self._overheard.leases)
        if self._random.chance(0.5):
            self._call(holder, ReleaseLease(lease))
        else:
            self._call(holder, RenewLease(lease), LeaseRenewal(ttl_ms=100))

    def _place(self) -> None:
        scope_id, keys = self._prefix()
        body = PlacementRequest(
            compat_id=self._places.descriptor.compat_id,
            prefixes=(ScopedPrefix(scope_id=scope_id, block_keys=keys),),
            token_count=4 * len(keys) + 1,
        )
        self._call(self._places.controller, PlaceRequest(), body)

    def _session(self) -> None:
        session, instance = self._random.pick(self._overheard.sessions)
        match self._random.below(3):
            case 0:
                self._call(self._places.controller, GetSession(session))
            case 1:
                self._call(self._places.controller, DeleteSession(session))
            case _:
                body = OutputRequest(from_index=0, epoch=1)
                self._call(instance, StreamOutput(session), body)

    def _checkpoint(self) -> None:
        session, body = self._random.pick(self._overheard.checkpoints)
        self._call(self._places.controller, RecordCheckpoint(session), body)

    def _attend(self) -> None:
        map_id = self._random.pick(list(self._overheard.maps))
        body = AttendRequest(version=max(1, self._overheard.maps[map_id]), layer=0, queries=bytes(16))
        self._call(self._random.pick(self._places.instances), Attend(map_id), body)
