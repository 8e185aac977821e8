"""Output of a session at the instance that serves it: what may be released, and when a checkpoint is due
(section "Session Checkpoints and Migration"; CP-1, CP-3, MG-4, decisions W19, W31).

The gate stands between the engine and the stream to the front end. Tokens of a sampler that is not
deterministic stay behind it until the controller has acknowledged a checkpoint that covers them, so that no
resumed instance can ever contradict what a client has seen. Tokens of a deterministic sampler pass at once,
but not before the first checkpoint, so that there always is one to resume from.

It asks for a checkpoint at the offset the epoch began with, at each completed block, and never more than 64
tokens apart; one at a time. Where too many tokens are not covered it pauses the engine. Every stream that
attaches gets the tokens from the index it asks for, labelled with this epoch; a resumed instance first sends
those of the checkpoint again, since they may have been lost on their way (erratum, decision W31).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.limits import (
    CHECKPOINT_RETRY_MS,
    MAX_HOLD_MS,
    MAX_TOKENS_PER_CHECKPOINT,
    MAX_UNCOVERED_TOKENS,
    OUTPUT_WINDOW_TOKENS,
)
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.machines.token_log import TokenLog
from kvsp_core.problems import STALE_EPOCH, Problem

__all__ = [
    "TABLE",
    "Abandon",
    "Attached",
    "Begin",
    "CheckpointAcknowledged",
    "CheckpointFailed",
    "CheckpointRefused",
    "Decoded",
    "Deliver",
    "DeliverEnd",
    "Detached",
    "Effect",
    "EngineEnded",
    "Event",
    "FrozenGate",
    "GateKind",
    "OutputGate",
    "PauseDecoding",
    "ProceedDecoding",
    "SendCheckpoint",
    "StreamReady",
    "TimerFired",
]


class GateKind(Enum):
    """How far the output of a session has come at this instance."""

    NEW = "new"
    OPENING = "opening"
    """The first checkpoint of the epoch is not acknowledged: nothing is released."""
    OPEN = "open"
    ENDING = "ending"
    """The engine has ended, and a checkpoint has yet to cover its last tokens."""
    ENDED = "ended"
    """Everything may be released; streams that attach get it, and the end."""
    LOST = "lost"
    """The controller has refused a checkpoint: the session is served elsewhere, or not at all."""


# Events


@attrs.frozen
class Begin:
    """The epoch begins; the first checkpoint is due."""


@attrs.frozen
class Decoded:
    """The engine has drawn tokens: the next ones, from `first_index` on."""

    first_index: int
    tokens: tuple[int, ...] = attrs.field(repr=False)


@attrs.frozen
class EngineEnded:
    """The engine has drawn its last token."""

    reason: str


@attrs.frozen
class CheckpointAcknowledged:
    """The controller has recorded `offset` tokens in this epoch."""

    epoch: int
    offset: int


@attrs.frozen
class CheckpointRefused:
    """The controller has refused the checkpoint for good: stale epoch, unknown session, contradiction."""

    problem: Problem


@attrs.frozen
class CheckpointFailed:
    """The checkpoint got no answer, or one that says to try again."""


@attrs.frozen
class Attached:
    """A front end wants the output from this index on; a stream it had before is given up."""

    from_index: int = attrs.field(validator=attrs.validators.ge(0))


@attrs.frozen
class StreamReady:
    """The stream has taken all that was delivered to it."""


@attrs.frozen
class Detached:
    """The stream is gone."""


Event: TypeAlias = (
    Begin
    | Decoded
    | EngineEnded
    | CheckpointAcknowledged
    | CheckpointRefused
    | CheckpointFailed
    | Attached
    | StreamReady
    | Detached
    | TimerFired
)


# Effects


@attrs.frozen
class SendCheckpoint:
    """Send a checkpoint that covers the first `offset` output tokens (`OutputGate.tokens(0, offset)`)."""

    offset: int


@attrs.frozen
class Deliver:
    """Give these tokens to the stream, the first at index `first_index`, in the epoch of the gate."""

    first_index: int
    tokens: tuple[int, ...] = attrs.field(repr=False)


@attrs.frozen
class DeliverEnd:
    """End the stream in order: `index` tokens were all."""

    reason: str
    index: int


@attrs.frozen
class PauseDecoding:
    """Too many tokens are not covered: draw no more. Tokens already drawn may still be reported."""


@attrs.frozen
class ProceedDecoding:
    """Draw tokens again."""


@attrs.frozen
class Abandon:
    """Abort the sequence, and cut the stream without an end, so that the front end asks who serves it."""

    problem: Problem


Effect: TypeAlias = SendCheckpoint | Deliver | DeliverEnd | PauseDecoding | ProceedDecoding | Abandon


# What is legal

_K = GateKind
_ANSWERS: Final = (CheckpointAcknowledged, CheckpointRefused, CheckpointFailed)
_ANY_TIME: Final = (Attached, StreamReady, Detached, TimerFired)

TABLE: Final = Table(
    "output gate",
    states=tuple(GateKind),
    events=get_args(Event),
    cells={
        _K.NEW: {
            Begin: to(_K.OPENING),
            **stays(_K.NEW, *_ANY_TIME),
        },
        _K.OPENING: {
            Decoded: to(_K.OPENING),
            EngineEnded: to(_K.OPENING),
            CheckpointAcknowledged: to(_K.OPEN, _K.ENDING, _K.ENDED, _K.LOST, _K.OPENING),
            CheckpointRefused: to(_K.LOST),
            **stays(_K.OPENING, CheckpointFailed, *_ANY_TIME),
        },
        _K.OPEN: {
            Decoded: to(_K.OPEN),
            EngineEnded: to(_K.ENDING, _K.ENDED),
            CheckpointAcknowledged: to(_K.OPEN, _K.LOST),
            CheckpointRefused: to(_K.LOST),
            **stays(_K.OPEN, CheckpointFailed, *_ANY_TIME),
        },
        _K.ENDING: {
            CheckpointAcknowledged: to(_K.ENDING, _K.ENDED, _K.LOST),
            CheckpointRefused: to(_K.LOST),
            **stays(_K.ENDING, CheckpointFailed, *_ANY_TIME),
        },
        _K.ENDED: {
            **stays(_K.ENDED, *_ANSWERS, *_ANY_TIME),
        },
        _K.LOST: {
            **stays(_K.LOST, Decoded, EngineEnded, *_ANSWERS, *_ANY_TIME),
        },
    },
)


# What happens


@attrs.frozen(kw_only=True)
class FrozenGate:
    """All that an `OutputGate` holds, as a hashable value; times are what remains."""

    kind: GateKind
    epoch: int
    tokens: tuple[int, ...] = attrs.field(repr=False)
    base: int
    covered: int
    asked: int | None
    retry_ms: int | None
    hold_ms: int | None
    paused: bool
    reason: str
    next_index: int | None
    unready: int
    end_sent: bool
    resent: bool


class OutputGate:
    """The output of one session in one epoch at the instance that serves it.

    `generated` are the tokens of the checkpoint it was resumed from, none for a new session. `prompt_tokens`
    and `block_tokens` tell where blocks end.
    """

    def __init__(
        self,
        *,
        epoch: int,
        deterministic: bool,
        prompt_tokens: int,
        block_tokens: int,
        generated: Sequence[int] = (),
        max_tokens_per_checkpoint: int = MAX_TOKENS_PER_CHECKPOINT,
        max_uncovered_tokens: int = MAX_UNCOVERED_TOKENS,
        max_hold_ms: int = MAX_HOLD_MS,
        retry_ms: int = CHECKPOINT_RETRY_MS,
        window_tokens: int = OUTPUT_WINDOW_TOKENS,
    ) -> None:
        self.kind = GateKind.NEW
        self.epoch = epoch
        self._deterministic = deterministic
        self._prompt_tokens = prompt_tokens
        self._block_tokens = block_tokens
        self._max_step = max_tokens_per_checkpoint
        self._max_uncovered = max_uncovered_tokens
        self._max_hold_ms = max_hold_ms
        self._retry_ms = retry_ms
        self._window = window_tokens
        self._log = TokenLog(generated)
        self._base = len(self._log)
        self._covered = self._base
        self._asked: int | None = None
        self._retry_at_ms: int | None = None
        self._hold_until_ms: int | None = None
        self._paused = False
        self._reason = ""
        # The stream: the next index it gets, None where there is none; what it has been given and not taken.
        self._next_index: int | None = None
        self._unready = 0
        self._end_sent = False
        self._resent = not self._base

    # Questions

    @property
    def decoded(self) -> int:
        """How many output tokens there are, over all epochs."""
        return len(self._log)

    @property
    def engine_ended(self) -> bool:
        """Whether the engine has drawn its last token, or has failed."""
        return bool(self._reason)

    @property
    def covered(self) -> int:
        """How many of them an acknowledged checkpoint covers."""
        return self._covered

    @property
    def released(self) -> int:
        """How many of them a front end may have."""
        if self.kind in (GateKind.NEW, GateKind.OPENING, GateKind.LOST):
            return 0
        return len(self._log) if self._deterministic else self._covered

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the output tokens from index `start` to before `end`."""
        return self._log.tokens(start, end)

    def next_deadline_ms(self) -> int | None:
        """Return when `TimerFired` is next due, or None."""
        if self.kind in (GateKind.NEW, GateKind.ENDED, GateKind.LOST) or self._asked is not None:
            return None
        return self._retry_at_ms if self._retry_at_ms is not None else self._hold_until_ms

    # Events

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen and return what is to be done, in order.

        Raises `LocalProtocolError`, with nothing changed, for tokens that are not the next ones and for
        whatever the engine does after its end.
        """
        TABLE.check(self.kind, event)
        if self.kind is GateKind.LOST:
            return ()
        match event:
            case Begin():
                self.kind = GateKind.OPENING
            case Decoded():
                self._decode(event, now_ms)
            case EngineEnded(reason):
                if self._reason:
                    raise LocalProtocolError("the engine has ended this sequence already")
                self._reason = reason or "end"
            case CheckpointAcknowledged(epoch, offset):
                if epoch != self.epoch and self.kind is not GateKind.ENDED:
                    return self._lose(Problem(STALE_EPOCH, "the session has gone on in another epoch"))
                self._acknowledge(offset, now_ms)
            case CheckpointRefused(problem):
                return self._lose(problem) if self.kind is not GateKind.ENDED else ()
            case CheckpointFailed():
                if self._asked is not None:
                    self._asked = None
                    self._retry_later(now_ms)
            case Attached(from_index):
                self._attach(from_index)
            case StreamReady():
                self._unready = 0
            case Detached():
                self._next_index = None
            case TimerFired():
                if self._retry_at_ms is not None and now_ms >= self._retry_at_ms:
                    self._retry_at_ms = None
            case _:
                assert_never(event)
        self._settle()
        return (*self._regulate(), *self._checkpoint(now_ms), *self._deliver())

    def _decode(self, event: Decoded, now_ms: int) -> None:
        if self._reason:
            raise LocalProtocolError("tokens were reported after the end of the sequence")
        if event.first_index != len(self._log):
            detail = f"tokens from index {event.first_index} on were reported, the next is {len(self._log)}"
            raise LocalProtocolError(detail)
        self._log.append(event.tokens)
        if self._hold_until_ms is None and event.tokens and not self._deterministic:
            self._hold_until_ms = now_ms + self._max_hold_ms

    def _acknowledge(self, offset: int, now_ms: int) -> None:
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        # What the controller has recorded beyond what was sent was not compared with what is here.
        covered = min(offset, asked)
        if covered < asked:
            self._retry_later(now_ms)
        self._covered = max(self._covered, covered)
        if self.kind is GateKind.OPENING and covered == asked:
            self.kind = GateKind.OPEN

    def _retry_later(self, now_ms: int) -> None:
        """Ask again after a while, also for tokens that would be held by themselves."""
        self._retry_at_ms = now_ms + self._retry_ms
        if not self._deterministic and len(self._log) > self._covered:
            self._hold_until_ms = self._retry_at_ms

    def _settle(self) -> None:
        """Go on to the end where the engine has ended and everything may be released."""
        if self._reason and self.kind in (GateKind.OPEN, GateKind.ENDING):
            whole = self.released == len(self._log)
            self.kind = GateKind.ENDED if whole else GateKind.ENDING

    def _lose(self, problem: Problem) -> tuple[Effect, ...]:
        self.kind = GateKind.LOST
        self._next_index = None
        return (Abandon(problem),)

    # Decoding

    def _regulate(self) -> tuple[Effect, ...]:
        uncovered = len(self._log) - self._covered
        if not self._paused and uncovered >= self._max_uncovered and not self._reason:
            self._paused = True
            return (PauseDecoding(),)
        if self._paused and uncovered <= self._max_uncovered // 2 and not self._reason:
            self._paused = False
            return (ProceedDecoding(),)
        return ()

    # Checkpoints

    def _checkpoint(self, now_ms: int) -> tuple[Effect, ...]:
        """Ask for a checkpoint where one is due and none is under way."""
        if self._asked is not None or self._retry_at_ms is not None or not self._is_due(now_ms):
            return ()
        opening = self.kind is GateKind.OPENING
        self._asked = self._base if opening else min(len(self._log), self._covered + self._max_step)
        held = not self._deterministic and len(self._log) > self._asked
        self._hold_until_ms = now_ms + self._max_hold_ms if held else None
        return (SendCheckpoint(self._asked),)

    def _is_due(self, now_ms: int) -> bool:
        if self.kind is GateKind.OPENING:
            return True
        if self.kind not in (GateKind.OPEN, GateKind.ENDING) or len(self._log) == self._covered:
            return False
        held = self._hold_until_ms is not None and now_ms >= self._hold_until_ms
        completed = self._blocks(len(self._log)) > self._blocks(self._covered)
        far = len(self._log) - self._covered >= self._max_step
        return completed or far or held or self.kind is GateKind.ENDING

    def _blocks(self, output_tokens: int) -> int:
        return (self._prompt_tokens + output_tokens) // self._block_tokens

    # The stream

    def _attach(self, from_index: int) -> None:
        """Start a stream; the first one of a resumed session begins at the checkpoint at the latest."""
        if not self._resent:
            from_index = min(from_index, self._base)
        self._next_index = from_index
        self._unready, self._end_sent = 0, False

    def _deliver(self) -> tuple[Effect, ...]:
        if self._next_index is None:
            return ()
        effects: list[Effect] = []
        end = min(self.released, self._next_index + self._window - self._unready)
        if end > self._next_index:
            effects.append(Deliver(self._next_index, self._log.tokens(self._next_index, end)))
            self._unready += end - self._next_index
            self._next_index = end
            self._resent = True
        if self.kind is GateKind.ENDED and self._next_index >= len(self._log) and not self._end_sent:
            effects.append(DeliverEnd(self._reason, len(self._log)))
            self._end_sent = self._resent = True
        return tuple(effects)

    # The whole state

    def freeze(self, now_ms: int) -> FrozenGate:
        """Return all that is held as a hashable value, with what remains of each time."""
        return FrozenGate(
            kind=self.kind,
            epoch=self.epoch,
            tokens=self._log.tokens(),
            base=self._base,
            covered=self._covered,
            asked=self._asked,
            retry_ms=None if self._retry_at_ms is None else self._retry_at_ms - now_ms,
            hold_ms=None if self._hold_until_ms is None else self._hold_until_ms - now_ms,
            paused=self._paused,
            reason=self._reason,
            next_index=self._next_index,
            unready=self._unready,
            end_sent=self._end_sent,
            resent=self._resent,
        )

    def thaw(self, frozen: FrozenGate, now_ms: int) -> None:
        """Take over the state of another gate. This one must be new."""
        if self.kind is not GateKind.NEW or self.epoch != frozen.epoch:
            raise LocalProtocolError("only a new gate of the same epoch can take over another's state")
        self.kind = frozen.kind
        self._log = TokenLog(frozen.tokens)
        self._base, self._covered, self._asked = frozen.base, frozen.covered, frozen.asked
        self._retry_at_ms = None if frozen.retry_ms is None else now_ms + frozen.retry_ms
        self._hold_until_ms = None if frozen.hold_ms is None else now_ms + frozen.hold_ms
        self._paused, self._reason = frozen.paused, frozen.reason
        self._next_index, self._unready = frozen.next_index, frozen.unready
        self._end_sent, self._resent = frozen.end_sent, frozen.resent
