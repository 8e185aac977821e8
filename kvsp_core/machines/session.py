"""A session at the controller: who owns it in which epoch, and from where it could go on (section "Session
Checkpoints and Migration"; CP-2, MG-1, MG-3, decisions W7, W19, W20, W31).

The ledger of one session, from its placement to its end. Only its owner in the current epoch may write
checkpoints, and they never contradict what is recorded. When the owner is lost the epoch rises at once, so
that nothing the old owner still sends takes effect; then instances are asked in turn to resume, until one
confirms by its first checkpoint, or the session fails.

Effects come in the order in which they are to be done: what is to be persisted stands before the answer or
the call that promises it. Of a checkpoint only what is new is kept and written, so that memory and disk grow
with the output and not with its square.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.limits import (
    MAX_PLACED_MS,
    MAX_RESUME_ATTEMPTS,
    MAX_SESSION_IDLE_MS,
    RESUME_DEADLINE_MS,
    RESUME_WAIT_MS,
    SESSION_KEPT_MS,
)
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.table import Table, refuse, stays, to
from kvsp_core.machines.token_log import TokenLog
from kvsp_core.problems import CONFLICT, FORBIDDEN, NOT_FOUND, STALE_EPOCH, Problem
from kvsp_core.records import Sampler, SessionCheckpoint

__all__ = [
    "DEFAULT_TIMES",
    "TABLE",
    "Acknowledge",
    "AppendOutput",
    "CheckpointReceived",
    "Close",
    "Effect",
    "Event",
    "Failed",
    "Forget",
    "FrozenSession",
    "NeedTarget",
    "Open",
    "Owner",
    "OwnerLost",
    "PersistPrompt",
    "PersistSession",
    "Prompt",
    "Refused",
    "ResumeFailed",
    "Resumed",
    "SendResume",
    "SessionKind",
    "SessionLedger",
    "SessionRecord",
    "SessionTimes",
    "TargetChosen",
    "TimerFired",
]


class SessionKind(Enum):
    """How a session stands. The value is what it is called on disk and for operators."""

    NEW = "new"
    PLACED = "placed"
    """It has an owner, but no checkpoint yet, and so no token was released."""
    RUNNING = "running"
    ORPHANED = "orphaned"
    """Its owner is lost; an instance is being looked for."""
    RESUMING = "resuming"
    """An instance has been asked to resume it and has not confirmed yet."""
    CLOSED = "finished"
    """The front end has ended it."""
    FAILED = "failed"


@attrs.frozen
class Owner:
    """An instance between two restarts: the only one that may extend a session."""

    instance: str
    incarnation: int
    """The epoch of the instance, not of the session."""


@attrs.frozen
class Prompt:
    """What a checkpoint says of the prompt; it never changes."""

    blocks: tuple[str, ...] = attrs.field(repr=False)
    tail: tuple[int, ...] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class SessionRecord:
    """What of a session survives a crash, next to its prompt and the log of its output."""

    session: str = attrs.field(repr=False)
    kind: SessionKind
    epoch: int
    owner: Owner | None = None
    client: str
    """Who opened it: the principal of the front end."""
    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    deterministic: bool
    """Whether it goes on only where the same tokens would come (CP-6): as it was placed, and once there is a
    checkpoint, as that says."""
    attempts: int = 0
    tried: tuple[str, ...] = ()
    """The instances that have failed it since it last ran; others are asked first."""
    sampler: Sampler | None = attrs.field(default=None, repr=False)
    output_offset: int = 0
    output_digest: str = attrs.field(default="", repr=False)
    reason: str = ""
    """Why it failed, for the client."""
    results: str | None = None
    """The class within which its results are repeated bit by bit, as far as is known of its owner (CP-6)."""


@attrs.frozen(kw_only=True)
class SessionTimes:
    """How long a session may be in a state."""

    placed_ms: int = MAX_PLACED_MS
    idle_ms: int = MAX_SESSION_IDLE_MS
    wait_ms: int = RESUME_WAIT_MS
    resume_ms: int = RESUME_DEADLINE_MS
    kept_ms: int = SESSION_KEPT_MS
    attempts: int = MAX_RESUME_ATTEMPTS


DEFAULT_TIMES: Final = SessionTimes()


# Events


@attrs.frozen
class Open:
    """A request was placed: the session begins in epoch 1. `results` is the class of the owner's results."""

    owner: Owner
    results: str | None = None


@attrs.frozen
class CheckpointReceived:
    """A checkpoint came, from this principal."""

    client: str
    checkpoint: SessionCheckpoint = attrs.field(repr=False)


@attrs.frozen
class OwnerLost:
    """This incarnation of an instance has failed, or is over."""

    owner: Owner


@attrs.frozen
class TargetChosen:
    """This instance is to go on with the session. `results` is the class of its results."""

    owner: Owner
    results: str | None = None


@attrs.frozen
class ResumeFailed:
    """The call to resume in this epoch was refused or got no answer."""

    epoch: int


@attrs.frozen
class Close:
    """The front end has delivered the end, or gives the session up."""


Event: TypeAlias = Open | CheckpointReceived | OwnerLost | TargetChosen | ResumeFailed | Close | TimerFired


# Effects


@attrs.frozen
class PersistSession:
    """Make this record durable before any effect that follows."""

    record: SessionRecord


@attrs.frozen
class PersistPrompt:
    """Make the prompt durable, together with the record."""

    prompt: Prompt


@attrs.frozen
class AppendOutput:
    """Append these output tokens to the session's log, the first at index `offset`, with the record."""

    offset: int
    tokens: tuple[int, ...] = attrs.field(repr=False)


@attrs.frozen
class Acknowledge:
    """Answer the checkpoint: so much is recorded."""

    epoch: int
    output_offset: int


@attrs.frozen
class Refused:
    """Answer the checkpoint with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen
class NeedTarget:
    """Choose an instance for the session, as in placement, and say `TargetChosen`."""

    epoch: int


@attrs.frozen
class SendResume:
    """Ask this instance to resume in this epoch, from `SessionLedger.checkpoint`."""

    instance: str
    epoch: int


@attrs.frozen
class Resumed:
    """The new owner has confirmed."""

    epoch: int


@attrs.frozen
class Failed:
    """The session has failed, as it was `moving` to another instance or not; its client is to see why."""

    reason: str
    moving: bool = False


@attrs.frozen
class Forget:
    """Drop the session and all that is stored of it."""


Effect: TypeAlias = (
    PersistSession
    | PersistPrompt
    | AppendOutput
    | Acknowledge
    | Refused
    | NeedTarget
    | SendResume
    | Resumed
    | Failed
    | Forget
)


# What is legal

_K = SessionKind

TABLE: Final = Table(
    "session ledger",
    states=tuple(SessionKind),
    events=get_args(Event),
    cells={
        _K.NEW: {Open: to(_K.PLACED)},
        _K.PLACED: {
            CheckpointReceived: to(_K.PLACED, _K.RUNNING),
            OwnerLost: to(_K.PLACED, _K.ORPHANED),
            ResumeFailed: to(_K.PLACED),
            Close: to(_K.CLOSED),
            TimerFired: to(_K.PLACED, _K.FAILED),
        },
        _K.RUNNING: {
            CheckpointReceived: to(_K.RUNNING),
            OwnerLost: to(_K.RUNNING, _K.ORPHANED),
            ResumeFailed: to(_K.RUNNING),
            Close: to(_K.CLOSED),
            TimerFired: to(_K.RUNNING, _K.FAILED),
        },
        _K.ORPHANED: {
            CheckpointReceived: to(_K.ORPHANED),
            OwnerLost: to(_K.ORPHANED),
            TargetChosen: to(_K.RESUMING, _K.PLACED),
            ResumeFailed: to(_K.ORPHANED),
            Close: to(_K.CLOSED),
            TimerFired: to(_K.ORPHANED, _K.FAILED),
        },
        _K.RESUMING: {
            CheckpointReceived: to(_K.RESUMING, _K.RUNNING),
            OwnerLost: to(_K.RESUMING, _K.ORPHANED, _K.FAILED),
            ResumeFailed: to(_K.RESUMING, _K.ORPHANED, _K.FAILED),
            Close: to(_K.CLOSED),
            TimerFired: to(_K.RESUMING, _K.ORPHANED, _K.FAILED),
        },
        _K.CLOSED: {
            CheckpointReceived: refuse(NOT_FOUND),
            **stays(_K.CLOSED, OwnerLost, ResumeFailed, Close, TimerFired),
        },
        _K.FAILED: {
            CheckpointReceived: refuse(NOT_FOUND),
            **stays(_K.FAILED, OwnerLost, ResumeFailed, TimerFired),
            Close: to(_K.CLOSED),
        },
    },
)

_NO_SESSION: Final = Problem(NOT_FOUND, "no such session; it has ended or was never opened")
_OLDER: Final = Problem(STALE_EPOCH, "epoch: another instance owns the session now; stop serving it")
_NEWER: Final = Problem(CONFLICT, "epoch: is higher than the session's; only the controller raises it")
_NOT_OWNER: Final = Problem(FORBIDDEN, "only the instance that owns the session in this epoch may write")


# What happens


@attrs.frozen(kw_only=True)
class FrozenSession:
    """All that a `SessionLedger` holds, as a hashable value; `left_ms` is what remains of its time."""

    record: SessionRecord
    prompt: Prompt | None
    tokens: tuple[int, ...] = attrs.field(repr=False)
    left_ms: int | None


class SessionLedger:
    """One session at the controller.

    `cause` is the ``traceparent`` of the request that it answers, where that is known; it is not stored.
    """

    __slots__ = ("_deadline_ms", "_log", "_prompt", "_record", "_times", "cause")

    def __init__(
        self,
        *,
        session: str,
        client: str,
        compat_id: str,
        scope_id: str,
        deterministic: bool,
        times: SessionTimes = DEFAULT_TIMES,
    ) -> None:
        self._times = times
        self._record = SessionRecord(
            session=session,
            kind=SessionKind.NEW,
            epoch=0,
            owner=None,
            client=client,
            compat_id=compat_id,
            scope_id=scope_id,
            deterministic=deterministic,
        )
        self._prompt: Prompt | None = None
        self._log = TokenLog()
        self._deadline_ms: int | None = None
        self.cause: str | None = None

    # Questions

    @property
    def kind(self) -> SessionKind:
        """How the session stands."""
        return self._record.kind

    @property
    def record(self) -> SessionRecord:
        """What is durable of it once every effect so far is done."""
        return self._record

    @property
    def owner(self) -> Owner | None:
        """Who may extend it, or None."""
        return self._record.owner

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.kind in (SessionKind.CLOSED, SessionKind.FAILED)

    @property
    def prompt_blocks(self) -> tuple[str, ...]:
        """The keys of the prompt's complete blocks, as far as a checkpoint has named them."""
        return self._prompt.blocks if self._prompt else ()

    @property
    def tokens_to_place(self) -> int:
        """Output tokens and those of the prompt's tail: what a resume computes at most, beyond blocks."""
        return len(self._log) + (len(self._prompt.tail) if self._prompt else 0)

    def checkpoint(self) -> SessionCheckpoint | None:
        """Return the latest checkpoint, in the current epoch, or None where there is none."""
        record = self._record
        if self._prompt is None or record.sampler is None:
            return None
        return SessionCheckpoint(
            session=record.session,
            epoch=record.epoch,
            compat_id=record.compat_id,
            scope_id=record.scope_id,
            prompt_blocks=self._prompt.blocks,
            prompt_tail=self._prompt.tail,
            generated=self._log.tokens(),
            output_offset=len(self._log),
            sampler=record.sampler,
        )

    def next_deadline_ms(self) -> int | None:
        """Return when `TimerFired` is next due, or None."""
        return self._deadline_ms

    # Events

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen and return what is to be done about it, in order."""
        if TABLE.check(self.kind, event):
            return (Refused(_NO_SESSION),)
        match event:
            case Open(owner, results):
                record = attrs.evolve(
                    self._record, kind=SessionKind.PLACED, epoch=1, owner=owner, results=results
                )
                return self._enter(record, now_ms)
            case CheckpointReceived():
                return self._take(event, now_ms)
            case OwnerLost(owner):
                return self._orphan(now_ms) if owner == self._record.owner and not self.is_over else ()
            case TargetChosen(owner, results):
                return self._ask(owner, results, now_ms)
            case ResumeFailed(epoch):
                current = self.kind is SessionKind.RESUMING and epoch == self._record.epoch
                return self._orphan(now_ms) if current else ()
            case Close():
                return self._close(now_ms)
            case TimerFired():
                due = self._deadline_ms is not None and now_ms >= self._deadline_ms
                return self._time_out(now_ms) if due else ()
            case _:
                assert_never(event)

    def _enter(self, record: SessionRecord, now_ms: int) -> tuple[Effect, ...]:
        """Go over to what the record says; give it its time, and make it durable."""
        self._record = record
        self._deadline_ms = now_ms + self._time_of(record.kind)
        return (PersistSession(record),)

    def _time_of(self, kind: SessionKind) -> int:
        match kind:
            case SessionKind.PLACED | SessionKind.NEW:
                return self._times.placed_ms
            case SessionKind.RUNNING:
                return self._times.idle_ms
            case SessionKind.ORPHANED:
                return self._times.wait_ms
            case SessionKind.RESUMING:
                return self._times.resume_ms
            case SessionKind.CLOSED | SessionKind.FAILED:
                return self._times.kept_ms
            case _:
                assert_never(kind)

    # Checkpoints

    def _take(self, event: CheckpointReceived, now_ms: int) -> tuple[Effect, ...]:
        checkpoint, record = event.checkpoint, self._record
        if problem := self._fault(event.client, checkpoint):
            return (Refused(problem),)
        resumed = record.kind is SessionKind.RESUMING
        effects: list[Effect] = []
        if self._prompt is None:
            self._prompt = Prompt(checkpoint.prompt_blocks, checkpoint.prompt_tail)
            effects.append(PersistPrompt(self._prompt))
        offset = len(self._log)
        if checkpoint.output_offset > offset:
            tokens = checkpoint.generated[offset:]
            self._log.append(tokens)
            effects.append(AppendOutput(offset, tokens))
        sampler = record.sampler
        if sampler is None or checkpoint.output_offset >= offset:
            sampler = checkpoint.sampler
        if effects or resumed or sampler != record.sampler:
            record = attrs.evolve(
                record,
                kind=SessionKind.RUNNING,
                sampler=sampler,
                deterministic=sampler.deterministic,
                output_offset=len(self._log),
                output_digest=self._log.digest,
                attempts=0,
                tried=(),
            )
            effects += self._enter(record, now_ms)
        else:
            self._deadline_ms = now_ms + self._times.idle_ms
        if resumed:
            effects.append(Resumed(record.epoch))
        return (*effects, Acknowledge(record.epoch, len(self._log)))

    def _fault(self, client: str, checkpoint: SessionCheckpoint) -> Problem | None:
        """Return why a checkpoint is refused, or None: who sends it first, what it says second."""
        record = self._record
        if checkpoint.epoch < record.epoch:
            return _OLDER
        if checkpoint.epoch > record.epoch:
            return _NEWER
        if record.owner is None or client != record.owner.instance:
            return _NOT_OWNER
        for member in ("compat_id", "scope_id"):
            if getattr(checkpoint, member) != getattr(record, member):
                return Problem(CONFLICT, f"{member}: is not that of the session")
        if self._prompt not in (None, Prompt(checkpoint.prompt_blocks, checkpoint.prompt_tail)):
            return Problem(CONFLICT, "prompt_blocks, prompt_tail: contradict what is recorded of the prompt")
        if not self._log.agrees(checkpoint.generated):
            return Problem(CONFLICT, "generated: contradicts what is recorded; the record stays as it is")
        before = record.sampler
        if before is not None and attrs.evolve(checkpoint.sampler, step=before.step) != before:
            return Problem(CONFLICT, "sampler: only its step may change within a session")
        return None

    # Failover

    def _orphan(self, now_ms: int) -> tuple[Effect, ...]:
        """Raise the epoch, so that the owner's messages are void, and look for another owner."""
        record = self._record
        assert record.owner is not None
        if record.kind is not SessionKind.RUNNING and record.attempts >= self._times.attempts:
            reason = f"no instance has taken the session over in {record.attempts} attempts"
            return self._fail(reason, now_ms)
        tried = (*(name for name in record.tried if name != record.owner.instance), record.owner.instance)
        epoch = record.epoch + 1
        record = attrs.evolve(record, kind=SessionKind.ORPHANED, epoch=epoch, owner=None, tried=tried)
        return (*self._enter(record, now_ms), NeedTarget(epoch))

    def _ask(self, owner: Owner, results: str | None, now_ms: int) -> tuple[Effect, ...]:
        """Ask an instance to resume; where nothing was released yet the front end brings the prompt again."""
        kind = SessionKind.PLACED if self._prompt is None else SessionKind.RESUMING
        attempts = self._record.attempts + 1
        record = attrs.evolve(self._record, kind=kind, owner=owner, attempts=attempts, results=results)
        entered = self._enter(record, now_ms)
        return entered if kind is SessionKind.PLACED else (*entered, SendResume(owner.instance, record.epoch))

    # Ends

    def _time_out(self, now_ms: int) -> tuple[Effect, ...]:
        match self.kind:
            case SessionKind.PLACED | SessionKind.NEW:
                return self._fail("the session was placed and never begun", now_ms)
            case SessionKind.RUNNING:
                return self._fail("the session has sent no checkpoint for too long", now_ms)
            case SessionKind.ORPHANED:
                return self._fail("no instance could take the session over in time", now_ms)
            case SessionKind.RESUMING:
                return self._orphan(now_ms)
            case SessionKind.CLOSED | SessionKind.FAILED:
                self._deadline_ms = None
                return (Forget(),)
            case _:
                assert_never(self.kind)

    def _fail(self, reason: str, now_ms: int) -> tuple[Effect, ...]:
        moving = self.kind in (SessionKind.ORPHANED, SessionKind.RESUMING)
        record = attrs.evolve(
            self._record, kind=SessionKind.FAILED, epoch=self._record.epoch + 1, owner=None, reason=reason
        )
        return (*self._enter(record, now_ms), Failed(reason, moving))

    def _close(self, now_ms: int) -> tuple[Effect, ...]:
        if self.kind is SessionKind.CLOSED:
            return ()
        return self._enter(attrs.evolve(self._record, kind=SessionKind.CLOSED, owner=None), now_ms)

    # The whole state

    @classmethod
    def restore(
        cls,
        record: SessionRecord,
        prompt: Prompt | None,
        tokens: tuple[int, ...],
        now_ms: int,
        *,
        times: SessionTimes = DEFAULT_TIMES,
    ) -> tuple[SessionLedger, tuple[Effect, ...]]:
        """Go on from what was durable when the controller stopped, and say what to do at once.

        Every time starts anew. A call to resume is made again, since nobody knows whether it was heard; the
        instance answers the same call as before. A log that is not what the record says fails the session.
        """
        frozen = FrozenSession(record=record, prompt=prompt, tokens=tokens, left_ms=None)
        ledger = cls.thaw(frozen, now_ms, times=times)
        ledger._deadline_ms = now_ms + ledger._time_of(record.kind)
        if record.output_offset and ledger._log.digest != record.output_digest:
            ledger._log = TokenLog()
            return ledger, ledger._fail("what was stored of the output is damaged", now_ms)
        match record.kind:
            case SessionKind.ORPHANED:
                return ledger, (NeedTarget(record.epoch),)
            case SessionKind.RESUMING:
                assert record.owner is not None
                return ledger, (SendResume(record.owner.instance, record.epoch),)
            case _:
                return ledger, ()

    def freeze(self, now_ms: int) -> FrozenSession:
        """Return all that is held as a hashable value."""
        left_ms = None if self._deadline_ms is None else self._deadline_ms - now_ms
        return FrozenSession(
            record=self._record, prompt=self._prompt, tokens=self._log.tokens(), left_ms=left_ms
        )

    @classmethod
    def thaw(
        cls, frozen: FrozenSession, now_ms: int, *, times: SessionTimes = DEFAULT_TIMES
    ) -> SessionLedger:
        """Return a ledger as it was frozen."""
        record = frozen.record
        ledger = cls(
            session=record.session,
            client=record.client,
            compat_id=record.compat_id,
            scope_id=record.scope_id,
            deterministic=record.deterministic,
            times=times,
        )
        ledger._record = record
        ledger._prompt = frozen.prompt
        ledger._log = TokenLog(frozen.tokens[: record.output_offset])
        ledger._deadline_ms = None if frozen.left_ms is None else now_ms + frozen.left_ms
        return ledger
