"""What an observer on the wire sees, as facts for the safety properties.

The witness reads requests, answers and bodies with readers of its own, so that it shares no mistake with the
roles; members it does not need it does not read. It looks into no role. Of storage it sees drops, of engines
what they load, draw and free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING

import msgspec

from kvsp_core.heads import Response
from kvsp_core.identity import component_id
from kvsp_core.roles.authorization import Permission
from kvsp_core.roles.engine import DropShard, EngineCommand, LoadShard
from kvsp_core.roles.instance import Instance
from kvsp_core.roles.role import BlockName, Call, Delete, Put, Respond, Write
from kvsp_sim.facts import (
    BlockEvicted,
    BlockNotFound,
    CheckpointAcknowledged,
    DecisionSent,
    DecisionTaken,
    Disclosed,
    Fact,
    HolderRestarted,
    IndexRestarted,
    LeaseGranted,
    LeaseReleased,
    LeaseRenewed,
    LineSeen,
    MemberRestarted,
    PlanAccepted,
    PlanSent,
    RangeDropped,
    RangeLoaded,
    RecordReturned,
    RecordTaken,
    RecordWithdrawn,
    SessionClosed,
    SessionGivenUp,
    SessionOwned,
    SessionResumed,
    SessionTold,
    SessionUnknown,
    StatusAcknowledged,
    StepServed,
    WithdrawalSent,
)
from kvsp_sim.overheard import Overheard
from kvsp_sim.properties import Properties

if TYPE_CHECKING:
    from kvsp_sim.carried import CarriedRequest
    from kvsp_sim.host import Host

__all__ = ["Witness"]

Range = tuple[int, int]


class _Record(msgspec.Struct):
    block_key: str
    scope_id: str
    holder: str


class _Granted(msgspec.Struct):
    ttl_ms: int
    lease: str = ""


class _LeaseRequest(msgspec.Struct):
    block_keys: list[str] = []
    ttl_ms: int = 0


class _Block(msgspec.Struct):
    block_key: str
    replicas: list[_Record]


class _Prefix(msgspec.Struct):
    scope_id: str


class _PlacementRequest(msgspec.Struct):
    prefixes: list[_Prefix]


class _Scoped(msgspec.Struct):
    scope_id: str | None = None


class _Directive(msgspec.Struct):
    directive: str
    scope_id: str


class _LookupRequest(msgspec.Struct):
    block_keys: list[str]


class _LookupAnswer(msgspec.Struct):
    blocks: list[_Block]


class _Status(msgspec.Struct):
    epoch: int
    running: int = 0
    queued: int = 0


class _Checkpoint(msgspec.Struct):
    epoch: int
    generated: list[int]
    scope_id: str


class _Resume(msgspec.Struct):
    epoch: int
    checkpoint: _Checkpoint


class _Placed(msgspec.Struct):
    session: str
    epoch: int
    instance: str


class _Fetch(msgspec.Struct):
    tokens: Range


class _Reshard(msgspec.Struct):
    map: str
    commit: int | None = None
    abort: int | None = None
    to: int | None = None
    retain: list[Range] = []
    fetch: list[_Fetch] = []
    release: list[Range] = []
    assign: list[Range] = []
    scope_id: str | None = None
    block_keys: tuple[str, ...] = ()

    def decision(self) -> tuple[int, bool]:
        """Return which version is decided, and whether it is a commit."""
        return (self.commit, True) if self.commit is not None else (self.abort or 0, False)


class _Attend(msgspec.Struct):
    version: int
    ranges: list[Range] = []


class _Output(msgspec.Struct):
    prompt: list[int] | None = None
    scope_id: str | None = None


class _Line(msgspec.Struct):
    epoch: int
    index: int
    token: int


class _Stored(msgspec.Struct):
    kind: str = ""


class _Session(msgspec.Struct):
    state: str
    session: str = ""
    epoch: int = 0
    instance: str | None = None
    output_offset: int = 0


class _Sessions(msgspec.Struct):
    sessions: list[_Session]


_read_record = msgspec.json.Decoder(_Record).decode
_read_granted = msgspec.json.Decoder(_Granted).decode
_read_lease = msgspec.json.Decoder(_LeaseRequest).decode
_read_lookup_request = msgspec.json.Decoder(_LookupRequest).decode
_read_lookup = msgspec.json.Decoder(_LookupAnswer).decode
_read_status = msgspec.json.Decoder(_Status).decode
_read_checkpoint = msgspec.json.Decoder(_Checkpoint).decode
_read_resume = msgspec.json.Decoder(_Resume).decode
_read_placed = msgspec.json.Decoder(_Placed).decode
_read_reshard = msgspec.json.Decoder(_Reshard).decode
_read_attend = msgspec.json.Decoder(_Attend).decode
_read_output = msgspec.json.Decoder(_Output).decode
_read_line = msgspec.json.Decoder(_Line).decode
_read_placement = msgspec.json.Decoder(_PlacementRequest).decode
_read_scoped = msgspec.json.Decoder(_Scoped).decode
_read_directive = msgspec.json.Decoder(_Directive).decode
_read_sessions = msgspec.json.Decoder(_Sessions).decode
_read_stored = msgspec.json.Decoder(_Stored).decode
_read_session = msgspec.json.Decoder(_Session).decode

_GONE = ("ended", "failed", "cancelled", "finished")


class Witness:
    """Turns what is seen into facts and passes them on; `indexes` are the base URIs of the parts of the
    index.
    """

    def __init__(
        self, properties: Properties, *, indexes: Collection[str] = (), block_bytes: int = 0
    ) -> None:
        self.properties = properties
        self.indexes = indexes
        self.block_bytes = block_bytes
        self.purged: str | None = None
        """A scope whose sessions end without a word."""
        self.put_out: set[tuple[str, str]] = set()
        """Who has been out of which scope, for a while or still."""
        self.strangers: frozenset[str] = frozenset()
        """Who has no part in any scope."""
        self.overheard = Overheard()
        self.statuses: dict[tuple[str, str], _Status] = {}
        """What each instance has said of itself last, by whom it told and who it is."""
        self.contexts: dict[tuple[str, int], tuple[str, ...]] = {}
        """The keys of the blocks that a version of a shard map splits."""
        self.observe: Callable[[Fact], None] = properties.observe
        self._holders: dict[str, str] = {}
        self._streams_by_prompt: dict[tuple[int, ...], Hashable] = {}
        self._streams: dict[str, Hashable] = {}
        self._scopes: dict[str, str] = {}  # of sessions, blocks and shard maps, by their names
        self._faulty: set[tuple[str, str]] = set()
        self._replaced: tuple[Host, ...] = ()
        self._answers: dict[tuple[str, str], Callable[[CarriedRequest, Respond, bytes], None]] = {
            ("PUT", "replicas"): self._record_taken,
            ("DELETE", "replicas"): self._record_withdrawn,
            ("POST", "lookup"): self._looked_up,
            ("POST", "leases"): self._lease_granted,
            ("PUT", "leases"): self._lease_renewed,
            ("DELETE", "leases"): self._lease_released,
            ("GET", "blocks"): self._block_disclosed,
            ("PUT", "blocks"): self._block_disclosed,
            ("PUT", "instances"): self._status,
            ("PUT", "sessions"): self._checkpoint,
            ("POST", "placements"): self._placed,
            ("POST", "prefetch"): self._prefetched,
            ("POST", "sessions"): self._output_begun,
            ("GET", "sessions"): self._session_told,
            ("DELETE", "sessions"): self._session_closed,
            ("POST", "reshard"): self._reshard_answered,
            ("POST", "shards"): self._attended,
        }

    # What the hosts tell

    def called(self, host: Host, call: Call, body: bytes) -> None:
        """A role sends a request."""
        request = call.request
        path = request.path
        if call.base_uri in self.indexes:
            self.properties.scopes.check_octets(body)
            self.properties.scopes.check_octets(path.encode())
        if request.method == "POST":
            if path == "reshard":
                plan = _read_reshard(body)
                self._disclosed(call.base_uri, plan.scope_id)
                self._plan_sent(call.base_uri, plan)
            elif path == "prefetch":
                self._disclosed(call.base_uri, _read_scoped(body).scope_id)
            elif path.startswith("ext/sessions/"):
                output = _read_output(body)
                if output.prompt is not None:
                    self._disclosed(call.base_uri, output.scope_id)
                    self._streams.setdefault(path, self._streams_by_prompt.get(tuple(output.prompt)))
            elif path.startswith("sessions/") and path.endswith("/resume"):
                resume = _read_resume(body)
                session = path.split("/")[1]
                generated = tuple(resume.checkpoint.generated)
                self._disclosed(call.base_uri, resume.checkpoint.scope_id)
                self.observe(SessionOwned(session=session, epoch=resume.epoch, instance=call.base_uri))
                self.observe(SessionResumed(session=session, epoch=resume.epoch, generated=generated))
        elif request.method == "PUT" and path.startswith("sessions/"):
            self.overheard.checkpoints.append((path.split("/")[1], body))
        elif request.method == "DELETE" and path.startswith("ext/sessions/"):
            if host.base_uri not in self.strangers:
                self.observe(SessionGivenUp(session=path.split("/")[2]))
        elif request.method == "DELETE" and path.startswith("leases/"):
            if host.base_uri not in self.strangers:  # who does not rely on it any more
                self.observe(LeaseReleased(holder=call.base_uri, lease=path.split("/")[1]))
        elif request.method == "DELETE" and path.startswith("replicas/"):
            holder, key = path.split("/")[1:]
            self.observe(WithdrawalSent(holder=self._holder(holder), block=key))

    def responded(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        """A role answers a request, whether its client still hears it or not."""
        if leg.server in self._replaced:
            return
        request = leg.request
        kind = request.path.removeprefix("ext/").split("/", 1)[0]
        handler = self._answers.get((request.method, kind))
        if handler is not None:
            handler(leg, effect, body)

    def sent(self, leg: CarriedRequest, data: bytes) -> None:
        """A role sends a piece of a streamed answer."""
        scope, role = self._scopes.get(leg.request.path.split("/")[2]), leg.server.role
        if data and scope is not None and isinstance(role, Instance):
            allowed = role.policy.may(leg.client, Permission.READ, scope)
            self.observe(Disclosed(client=leg.client, scope=scope, allowed=allowed))

    def unheard(self, request: CarriedRequest, effect: Respond, body: bytes) -> None:
        """Nothing of an answer has left: nobody holds the lease that it grants."""
        if request.request.path == "leases" and effect.response.status == 201:
            lease = _read_granted(body).lease
            self.observe(LeaseReleased(holder=request.server.base_uri, lease=lease))

    def started(self, host: Host) -> None:
        """A role starts, for the first time or after a crash."""
        self._holders[component_id(host.base_uri)] = host.base_uri
        restored = frozenset(name.block_key for tier in host.tiers.values() for name in tier.blocks)
        shift_ms = host.clock_shift_ms
        self.observe(HolderRestarted(holder=host.base_uri, shift_ms=shift_ms, restored=restored))
        if host.base_uri in self.indexes and host.life > 1:
            self.observe(IndexRestarted(index=host.base_uri))

    def replaced(self, host: Host) -> None:
        """Another process has the base URI of a role from now on: what the role does is not seen any more,
        but for its requests, and the tokens of its engine."""
        self.crashed(host)
        self._replaced = (*self._replaced, host)

    def crashed(self, host: Host) -> None:
        """A role lost its memory."""
        if host in self._replaced:
            return
        host.in_engine.clear()
        self.observe(MemberRestarted(member=host.base_uri))

    def written(self, host: Host, writes: Iterable[Write]) -> None:
        """Writes of a role are durable: a session that has failed, as it was not able to say in time, or
        that was purged.
        """
        for write in writes:
            if type(write) is Delete and write.table == "sessions" and self._is_purged(write.key):
                self.observe(SessionClosed(session=write.key))
            if (
                type(write) is Put
                and write.table == "sessions"
                and _read_stored(write.value).kind == "failed"
            ):
                self.observe(SessionClosed(session=write.key))

    def _is_purged(self, session: str) -> bool:
        return self.purged is not None and self._scopes.get(session) == self.purged

    def tier_fault(self, host: Host, name: BlockName) -> None:
        """A tier gave a block out wrong, or not at all."""
        if host in self._replaced:
            return
        self._faulty.add((host.base_uri, name.block_key))

    def dropped(self, host: Host, name: BlockName) -> None:
        """A role gave up a copy of a block."""
        if host in self._replaced or any(
            name in tier.blocks or name in tier.forgotten for tier in host.tiers.values()
        ):
            return  # as far as the role can know
        fault = (host.base_uri, name.block_key) in self._faulty
        self._faulty.discard((host.base_uri, name.block_key))
        path = f"replicas/{component_id(host.base_uri)}/{name.block_key}"
        calls = (each.call.request for each in host.calls.values())
        unheard = any(request.method == "PUT" and request.path == path for request in calls)
        self.observe(
            BlockEvicted(
                holder=host.base_uri, block=name.block_key, now_ms=host.now_ms, fault=fault, unheard=unheard
            )
        )

    def commanded(self, host: Host, command: EngineCommand) -> None:
        """A role commands its engine. What it loads for the first time has not moved before."""
        if host in self._replaced:
            return
        if type(command) is LoadShard:
            loaded = (command.map_id, command.tokens)
            if loaded in host.in_engine:
                self.observe(RangeLoaded(map_id=command.map_id, member=host.base_uri, tokens=command.tokens))
            host.in_engine.add(loaded)
        elif type(command) is DropShard:
            host.in_engine.discard((command.map_id, command.tokens))
            self.observe(RangeDropped(map_id=command.map_id, member=host.base_uri, tokens=command.tokens))

    def answered(self, host: Host, call: Call, response: Response, body: bytes) -> None:
        """A role gets the answer to a call.

        A record that the index refuses for its digest is of a block that others have found bad.
        """
        if response.status == 409 and call.request.path.startswith("replicas/"):
            self._faulty.add((host.base_uri, call.request.path.split("/")[2]))

    def stream_opened(self, stream: Hashable, prompt: tuple[int, ...]) -> None:
        """A user asks for output; no two ask with the same prompt."""
        self._streams_by_prompt[prompt] = stream

    def line_received(self, host: Host, call: Call, line: bytes) -> None:
        """A role gets a line of a streamed answer."""
        stream = self._streams.get(call.request.path)
        if stream is not None and b'"token"' in line:
            said = _read_line(line)
            self.observe(LineSeen(stream=stream, epoch=said.epoch, index=said.index, token=said.token))

    # What it means

    def _holder(self, holder_id: str) -> str:
        return self._holders.get(holder_id, holder_id)

    def _disclosed(self, client: str, scope: str | None) -> None:
        """Something of a scope goes to a client."""
        if scope is not None:
            self.observe(Disclosed(client=client, scope=scope))

    def _disclosed_of(self, client: str, name: str) -> None:
        self._disclosed(client, self._scopes.get(name))

    def _record_taken(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        if effect.response.is_success:
            record = _read_record(leg.body)
            self._scopes[record.block_key] = record.scope_id
            self.overheard.blocks.append((record.holder, record.block_key))
            granted = _read_granted(body)
            until_ms = leg.server.now_ms + granted.ttl_ms
            self._disclosed(leg.client, record.scope_id)
            self.observe(
                RecordTaken(
                    index=leg.server.base_uri,
                    holder=record.holder,
                    block=record.block_key,
                    until_ms=until_ms,
                )
            )

    def _record_withdrawn(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.status == 204:
            holder, key = leg.request.path.split("/")[1:]
            self._disclosed_of(leg.client, key)
            self.observe(RecordWithdrawn(index=leg.server.base_uri, holder=self._holder(holder), block=key))

    def _looked_up(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        if not effect.response.is_success:
            return
        now_ms, index = leg.server.now_ms, leg.server.base_uri
        scopes = set()
        asked, found = _read_lookup_request(leg.body).block_keys, _read_lookup(body).blocks
        if len(found) < len(asked):
            self.observe(BlockNotFound(index=index, block=asked[len(found)], now_ms=now_ms))
        for block in found:
            for record in block.replicas:
                scopes.add(record.scope_id)
                self.observe(
                    RecordReturned(index=index, holder=record.holder, block=block.block_key, now_ms=now_ms)
                )
        for scope in sorted(scopes):
            self._disclosed(leg.client, scope)

    def _lease_granted(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        if effect.response.status != 201 or not leg.heard:
            return  # nobody holds a lease that nobody was told of
        granted = _read_granted(body)
        keys = _read_lease(leg.body).block_keys
        for key in keys:
            self._disclosed_of(leg.client, key)
        self.overheard.leases.append((leg.server.base_uri, granted.lease))
        now_ms = leg.server.now_ms
        self.observe(
            LeaseGranted(
                holder=leg.server.base_uri,
                lease=granted.lease,
                client=leg.client,
                blocks=tuple((key, self.block_bytes) for key in keys),
                now_ms=now_ms,
                until_ms=now_ms + granted.ttl_ms + 1,  # decision W16
            )
        )

    def _lease_renewed(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        if effect.response.status == 200:
            now_ms = leg.server.now_ms
            self.observe(
                LeaseRenewed(
                    holder=leg.server.base_uri,
                    lease=leg.request.path.split("/")[1],
                    now_ms=now_ms,
                    until_ms=now_ms + _read_granted(body).ttl_ms + 1,
                )
            )

    def _lease_released(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.status == 204:
            lease = leg.request.path.split("/")[1]
            self.observe(LeaseReleased(holder=leg.server.base_uri, lease=lease))

    def _block_disclosed(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.is_success:
            self._disclosed(leg.client, leg.request.path.split("/")[2])

    def _status(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.status == 200 and leg.request.path.startswith("instances/"):
            status = _read_status(leg.body)
            self.statuses[leg.server.base_uri, leg.client] = status
            # An index may hear of a later epoch last, and acts on none.
            if leg.server.base_uri not in self.indexes:
                self.observe(StatusAcknowledged(instance=leg.client, epoch=status.epoch))

    def _checkpoint(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        session = leg.request.path.split("/")[1]
        if effect.response.status == 200:
            checkpoint = _read_checkpoint(leg.body)
            self.observe(
                CheckpointAcknowledged(
                    session=session,
                    epoch=checkpoint.epoch,
                    instance=leg.client,
                    generated=tuple(checkpoint.generated),
                )
            )
        elif effect.response.status == 404 and leg.client not in self.strangers:
            self.observe(SessionUnknown(session=session))

    def _placed(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        if effect.response.is_success:
            placed = _read_placed(body)
            scope = _read_placement(leg.body).prefixes[0].scope_id
            self._scopes[placed.session] = scope
            self._disclosed(leg.client, scope)
            self.overheard.sessions.append((placed.session, placed.instance))
            self.observe(SessionOwned(session=placed.session, epoch=placed.epoch, instance=placed.instance))

    def _prefetched(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.is_success:
            name = _read_directive(leg.body).directive
            self.overheard.directives.append((leg.server.base_uri, name))

    def _output_begun(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        path = leg.request.path
        if effect.response.is_success and path.startswith("ext/"):
            self._disclosed_of(leg.client, path.split("/")[2])

    def _session_told(self, leg: CarriedRequest, effect: Respond, body: bytes) -> None:
        parts = leg.request.path.split("/")
        if len(parts) != 3:
            if effect.response.is_success:
                for one in _read_sessions(body).sessions:
                    self.observe(SessionTold(session=one.session, offset=one.output_offset))
            return
        if effect.response.status == 404:
            out = (leg.client, self._scopes.get(parts[2], "")) in self.put_out
            if leg.client not in self.strangers and not out:
                self.observe(SessionUnknown(session=parts[2]))
        elif effect.response.is_success:
            self._disclosed_of(leg.client, parts[2])
            told = _read_session(body)
            self.observe(SessionTold(session=parts[2], offset=told.output_offset))
            if told.state in _GONE:
                self.observe(SessionClosed(session=parts[2]))
            elif told.instance is not None:
                self.observe(SessionOwned(session=parts[2], epoch=told.epoch, instance=told.instance))

    def _session_closed(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.is_success:
            self._disclosed_of(leg.client, leg.request.path.split("/")[2])
            self.observe(SessionClosed(session=leg.request.path.split("/")[2]))

    def _plan_sent(self, member: str, plan: _Reshard) -> None:
        if plan.to is None:
            version, commit = plan.decision()
            known = self.overheard.maps.get(plan.map, 0)
            self.overheard.maps[plan.map] = max(version, known)
            self.observe(DecisionSent(map_id=plan.map, version=version, commit=commit))
            return
        if plan.scope_id is not None:
            self._scopes[plan.map] = plan.scope_id
        self.contexts[plan.map, plan.to] = plan.block_keys
        self.observe(
            PlanSent(
                map_id=plan.map,
                version=plan.to,
                member=member,
                retain=tuple(plan.retain),
                fetch=tuple(fetch.tokens for fetch in plan.fetch),
                release=tuple(plan.release),
                assign=tuple(plan.assign),
            )
        )

    def _reshard_answered(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.status != 200:
            return
        plan = _read_reshard(leg.body)
        member = leg.server.base_uri
        if plan.to is not None:
            self.observe(PlanAccepted(map_id=plan.map, version=plan.to, member=member))
            return
        version, commit = plan.decision()
        if commit:
            self.overheard.members.append((plan.map, member))
        self.observe(DecisionTaken(map_id=plan.map, version=version, member=member, commit=commit))

    def _attended(self, leg: CarriedRequest, effect: Respond, _: bytes) -> None:
        if effect.response.status == 200:
            step = _read_attend(leg.body)
            self._disclosed_of(leg.client, leg.request.path.split("/")[2])
            self.observe(
                StepServed(
                    map_id=leg.request.path.split("/")[2],
                    version=step.version,
                    member=leg.server.base_uri,
                    ranges=tuple(step.ranges),
                )
            )
