"""Output of a session at the front end: from tokens that arrive anyhow to one sample, in order (section
"Session Checkpoints and Migration"; CP-4, CP-5, MG-3, MG-4, decision W31).

Tokens arrive over several streams and epochs, repeated and out of order. The assembly delivers each index
once, in order. Once a newer epoch was seen nothing of an older one passes, what was waiting behind a gap
included: the instance of the newer epoch sends it again. Where an index would be missing for good, it says
from which index on to ask for the output again. A token or an end that contradicts what was delivered ends
the stream with an error, so that a client never sees two samples spliced together.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.limits import MAX_EARLY_TOKENS
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.machines.token_log import TokenLog

__all__ = [
    "TABLE",
    "AskAgain",
    "AssemblyKind",
    "Contradicted",
    "Deliver",
    "Effect",
    "EndArrived",
    "Event",
    "Finished",
    "FrozenAssembly",
    "OutputAssembly",
    "StreamCut",
    "TokenArrived",
]


class AssemblyKind(Enum):
    """How far the sample has come."""

    OPEN = "open"
    ENDING = "ending"
    """The end is known, but tokens before it have not come yet."""
    FINISHED = "finished"
    FAILED = "failed"
    """Two values came for one index. What follows is ignored."""


# Events


@attrs.frozen
class TokenArrived:
    """A token came over some stream."""

    index: int = attrs.field(validator=attrs.validators.ge(0))
    epoch: int
    token: int = attrs.field(repr=False)


@attrs.frozen
class EndArrived:
    """The end of the sample came: it has `index` tokens."""

    reason: str
    index: int = attrs.field(validator=attrs.validators.ge(0))
    epoch: int


@attrs.frozen
class StreamCut:
    """The stream in use is over without an end, or silent for too long."""


Event: TypeAlias = TokenArrived | EndArrived | StreamCut


# Effects


@attrs.frozen
class Deliver:
    """Give the client this token: it is the next."""

    index: int
    token: int = attrs.field(repr=False)


@attrs.frozen
class Finished:
    """Give the client the end: it has got every token."""

    reason: str


@attrs.frozen
class Contradicted:
    """End the client's stream with this error."""

    detail: str


@attrs.frozen
class AskAgain:
    """Find out who serves the session and ask for its output from this index on."""

    from_index: int


Effect: TypeAlias = Deliver | Finished | Contradicted | AskAgain


# What is legal

_K = AssemblyKind

TABLE: Final = Table(
    "output assembly",
    states=tuple(AssemblyKind),
    events=get_args(Event),
    cells={
        _K.OPEN: {
            TokenArrived: to(_K.OPEN, _K.FAILED),
            EndArrived: to(_K.OPEN, _K.ENDING, _K.FINISHED, _K.FAILED),
            StreamCut: to(_K.OPEN),
        },
        _K.ENDING: {
            TokenArrived: to(_K.ENDING, _K.OPEN, _K.FINISHED, _K.FAILED),
            EndArrived: to(_K.ENDING, _K.OPEN, _K.FINISHED, _K.FAILED),
            StreamCut: to(_K.OPEN),
        },
        _K.FINISHED: stays(_K.FINISHED, *get_args(Event)),
        _K.FAILED: stays(_K.FAILED, *get_args(Event)),
    },
)


# What happens


@attrs.frozen(kw_only=True)
class FrozenAssembly:
    """All that an `OutputAssembly` holds, as a hashable value."""

    kind: AssemblyKind
    epoch: int
    delivered: tuple[int, ...] = attrs.field(repr=False)
    early: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    end: tuple[str, int] | None


class OutputAssembly:
    """The output of one session, put together for one client."""

    def __init__(self, *, max_early_tokens: int = MAX_EARLY_TOKENS) -> None:
        self.kind = AssemblyKind.OPEN
        self.epoch = 0
        """The highest epoch seen."""
        self._max_early = max_early_tokens
        self._log = TokenLog()
        self._early: dict[int, int] = {}
        self._end: tuple[str, int] | None = None

    @property
    def next_index(self) -> int:
        """The first index that was not delivered: where to ask for the output from."""
        return len(self._log)

    def next_deadline_ms(self) -> None:
        """Return None: nothing here waits for a time."""
        return

    def tokens(self) -> tuple[int, ...]:
        """Return what was delivered so far."""
        return self._log.tokens()

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen and return what is to be done, in order. Time plays no part."""
        TABLE.check(self.kind, event)
        if self.kind in (AssemblyKind.FINISHED, AssemblyKind.FAILED):
            return ()
        match event:
            case TokenArrived():
                return self._token(event) if self._is_current(event.epoch) else ()
            case EndArrived():
                return self._end_at(event) if self._is_current(event.epoch) else ()
            case StreamCut():
                return self._ask_again()
            case _:
                assert_never(event)

    def _is_current(self, epoch: int) -> bool:
        """Return whether what comes in this epoch counts; with a newer one, let go of what an older left."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._forget()
        return epoch == self.epoch

    def _forget(self) -> None:
        self._early.clear()
        self._end = None
        self.kind = AssemblyKind.OPEN

    def _ask_again(self) -> tuple[Effect, ...]:
        self._forget()
        return (AskAgain(len(self._log)),)

    def _token(self, event: TokenArrived) -> tuple[Effect, ...]:
        if self._end is not None and event.index >= self._end[1]:
            return self._contradict("a token came whose index is beyond the end of the output")
        known = self._log[event.index] if event.index < len(self._log) else self._early.get(event.index)
        if known is not None:
            return () if known == event.token else self._contradict("two values came for one output token")
        if event.index > len(self._log):
            if len(self._early) >= self._max_early:
                return self._ask_again()
            self._early[event.index] = event.token
            return ()
        effects: list[Effect] = []
        token: int | None = event.token
        while token is not None:
            effects.append(Deliver(len(self._log), token))
            self._log.append((token,))
            token = self._early.pop(len(self._log), None)
        return (*effects, *self._finish())

    def _end_at(self, event: EndArrived) -> tuple[Effect, ...]:
        end = (event.reason, event.index)
        beyond = max(self._early, default=len(self._log) - 1)
        if event.index <= beyond or self._end not in (None, end):
            return self._contradict("the output ends at an index that contradicts what has come")
        self._end, self.kind = end, AssemblyKind.ENDING
        return self._finish()

    def _finish(self) -> tuple[Effect, ...]:
        if self._end is None or len(self._log) < self._end[1]:
            return ()
        self.kind = AssemblyKind.FINISHED
        return (Finished(self._end[0]),)

    def _contradict(self, detail: str) -> tuple[Effect, ...]:
        self._forget()
        self.kind = AssemblyKind.FAILED
        return (Contradicted(detail),)

    # The whole state

    def freeze(self, now_ms: int) -> FrozenAssembly:
        """Return all that is held as a hashable value."""
        return FrozenAssembly(
            kind=self.kind,
            epoch=self.epoch,
            delivered=self._log.tokens(),
            early=tuple(sorted(self._early.items())),
            end=self._end,
        )

    @classmethod
    def thaw(
        cls, frozen: FrozenAssembly, now_ms: int, *, max_early_tokens: int = MAX_EARLY_TOKENS
    ) -> OutputAssembly:
        """Return an assembly as it was frozen."""
        assembly = cls(max_early_tokens=max_early_tokens)
        assembly.kind, assembly.epoch, assembly._end = frozen.kind, frozen.epoch, frozen.end
        assembly._log = TokenLog(frozen.delivered)
        assembly._early = dict(frozen.early)
        return assembly
