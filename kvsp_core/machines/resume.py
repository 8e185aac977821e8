"""A session at an instance: which epoch of it is served here, and how a resumed one comes to run (section
"Session Checkpoints and Migration"; MG-2, MG-3, decisions W20, W31).

A resume is accepted once, answered alike when it is repeated, and refused when it is older than what the
instance knows. The blocks of the checkpoint are loaded; what they do not cover is computed again from the
tokens of the checkpoint. A checkpoint names the prompt's blocks by their keys only, so where one of them is
gone the front end is asked for the prompt. Then engine and output gate start; the gate's first checkpoint
confirms the resume.

A newer epoch ends whatever an older one still does here, before anything of the newer one begins.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.bodies import encode
from kvsp_core.limits import PROMPT_WAIT_MS
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.problems import CONFLICT, STALE_EPOCH, Problem
from kvsp_core.records import SessionCheckpoint

__all__ = [
    "TABLE",
    "AbortEpoch",
    "Absent",
    "Accepted",
    "AskPrompt",
    "BeginReceived",
    "BlocksLoaded",
    "Effect",
    "Ended",
    "Event",
    "GiveUp",
    "LoadBlocks",
    "Loading",
    "NeedsPrompt",
    "PrefixLost",
    "PromptReceived",
    "Refused",
    "ResumeReceived",
    "Serving",
    "SessionEnded",
    "Start",
    "State",
    "TimerFired",
    "freeze",
    "next_deadline_ms",
    "thaw",
    "transition",
]


# States


@attrs.frozen
class Absent:
    """The instance has nothing to do with the session."""


@attrs.frozen(kw_only=True)
class Loading:
    """A resume was accepted; the blocks of its checkpoint are being loaded."""

    epoch: int
    content: str = attrs.field(repr=False)
    """Tells a repeated resume from another one."""
    checkpoint: SessionCheckpoint = attrs.field(repr=False)
    has_prompt: bool = False


@attrs.frozen(kw_only=True)
class NeedsPrompt:
    """Blocks of the prompt are gone: the front end has to bring the prompt again."""

    epoch: int
    content: str = attrs.field(repr=False)
    checkpoint: SessionCheckpoint = attrs.field(repr=False)
    blocks: int
    deadline_ms: int


@attrs.frozen(kw_only=True)
class Serving:
    """The session is served here in this epoch."""

    epoch: int
    content: str = attrs.field(default="", repr=False)


@attrs.frozen(kw_only=True)
class Ended:
    """The session was served here, last in this epoch; it is over here."""

    epoch: int
    content: str = attrs.field(default="", repr=False)


State: TypeAlias = Absent | Loading | NeedsPrompt | Serving | Ended


# Events


@attrs.frozen(kw_only=True)
class BeginReceived:
    """A front end begins a session that was placed here. `refusal` is why no session may begin now."""

    epoch: int
    refusal: Problem | None = None


@attrs.frozen(kw_only=True)
class ResumeReceived:
    """The controller asks to resume. `refusal` is why the instance could not: its state, the Compatibility
    ID, the scope.
    """

    epoch: int
    checkpoint: SessionCheckpoint = attrs.field(repr=False)
    refusal: Problem | None = None


@attrs.frozen
class BlocksLoaded:
    """The loads of this epoch have ended: so many leading blocks of the sequence are there."""

    epoch: int
    blocks: int


@attrs.frozen(kw_only=True)
class PrefixLost:
    """Blocks that were loaded, of a prompt that is not known here, got lost on their way into the engine,
    before anything was computed: so many leading ones are left. `checkpoint` is what it is resumed from.
    """

    epoch: int
    checkpoint: SessionCheckpoint = attrs.field(repr=False)
    blocks: int


@attrs.frozen
class PromptReceived:
    """A front end brought the prompt. `matches` says whether its block keys and tail are the
    checkpoint's.
    """

    epoch: int
    matches: bool


@attrs.frozen
class SessionEnded:
    """What was done for the session in this epoch is over: ended, lost to another instance, or failed."""

    epoch: int


Event: TypeAlias = (
    BeginReceived | ResumeReceived | BlocksLoaded | PrefixLost | PromptReceived | SessionEnded | TimerFired
)


# Effects


@attrs.frozen
class Accepted:
    """Answer that it is so: 202 to the controller, a stream to the front end."""


@attrs.frozen
class Refused:
    """Answer with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen
class AbortEpoch:
    """Stop everything done for the session in this epoch: loads, engine, gate, streams."""

    epoch: int


@attrs.frozen
class LoadBlocks:
    """Load the blocks of the checkpoint, prompt and generated, then say `BlocksLoaded`."""

    epoch: int


@attrs.frozen
class AskPrompt:
    """Answer front ends that want the output with 428, so that they bring the prompt."""

    epoch: int


@attrs.frozen(kw_only=True)
class Start:
    """Start engine and gate: the first `cached_blocks` blocks of the sequence are loaded, the rest is to be
    computed. `checkpoint` is None for a session that begins.
    """

    epoch: int
    checkpoint: SessionCheckpoint | None = attrs.field(default=None, repr=False)
    cached_blocks: int = 0


@attrs.frozen
class GiveUp:
    """The session cannot be resumed here; the controller goes on to the next instance by itself."""

    epoch: int
    reason: str


Effect: TypeAlias = Accepted | Refused | AbortEpoch | LoadBlocks | AskPrompt | Start | GiveUp


TABLE: Final = Table(
    "session at an instance",
    states=(Absent, Loading, NeedsPrompt, Serving, Ended),
    events=get_args(Event),
    cells={
        Absent: {
            BeginReceived: to(Serving, Absent),
            ResumeReceived: to(Loading, Absent),
            **stays(Absent, BlocksLoaded, SessionEnded, TimerFired),
        },
        Loading: {
            BeginReceived: to(Loading, Serving),
            ResumeReceived: to(Loading),
            BlocksLoaded: to(Loading, NeedsPrompt, Serving),
            PromptReceived: to(Loading),
            SessionEnded: to(Loading, Ended),
            TimerFired: to(Loading),
        },
        NeedsPrompt: {
            BeginReceived: to(NeedsPrompt, Serving),
            ResumeReceived: to(NeedsPrompt, Loading),
            BlocksLoaded: to(NeedsPrompt),
            PromptReceived: to(NeedsPrompt, Serving),
            SessionEnded: to(NeedsPrompt, Ended),
            TimerFired: to(NeedsPrompt, Ended),
        },
        Serving: {
            BeginReceived: to(Serving),
            ResumeReceived: to(Serving, Loading),
            BlocksLoaded: to(Serving),
            PrefixLost: to(Serving, NeedsPrompt),
            PromptReceived: to(Serving),
            SessionEnded: to(Serving, Ended),
            TimerFired: to(Serving),
        },
        Ended: {
            BeginReceived: to(Ended, Serving),
            ResumeReceived: to(Ended, Loading),
            **stays(Ended, BlocksLoaded, PromptReceived, SessionEnded, TimerFired),
        },
    },
)

_Result: TypeAlias = tuple[State, tuple[Effect, ...]]

_OLDER: Final = Problem(STALE_EPOCH, "epoch: the session is known here in a later one")
_OTHER: Final = Problem(STALE_EPOCH, "epoch: another resume of the same epoch was accepted before")
_OTHER_PROMPT: Final = Problem(CONFLICT, "prompt: is not the prompt of this session")


def transition(
    state: State, event: Event, now_ms: int, *, block_tokens: int, prompt_wait_ms: int = PROMPT_WAIT_MS
) -> _Result:
    """Take an event in and return the state that follows and what is to be done, in this order.

    What comes late, of an epoch that is over here, changes nothing.
    """
    TABLE.check(type(state), event)
    match event:
        case BeginReceived():
            return _begin(state, event)
        case ResumeReceived():
            return _resume(state, event)
        case BlocksLoaded(epoch, blocks):
            if isinstance(state, Loading) and epoch == state.epoch:
                return _start(state, blocks, block_tokens, now_ms + prompt_wait_ms)
        case PrefixLost():
            if isinstance(state, Serving) and event.epoch == state.epoch:
                return _ask(state, event.checkpoint, event.blocks, now_ms + prompt_wait_ms)
        case PromptReceived(epoch, matches):
            return _prompt(state, epoch, matches)
        case SessionEnded(epoch):
            if isinstance(state, Loading | NeedsPrompt | Serving) and epoch == state.epoch:
                return Ended(epoch=epoch, content=state.content), ()
        case TimerFired():
            if isinstance(state, NeedsPrompt) and now_ms >= state.deadline_ms:
                reason = "blocks of the prompt are gone, and nobody brought the prompt"
                return Ended(epoch=state.epoch, content=state.content), (GiveUp(state.epoch, reason),)
        case _:
            assert_never(event)
    return state, ()


def _begin(state: State, event: BeginReceived) -> _Result:
    if not isinstance(state, Absent):
        if event.epoch < state.epoch:
            return state, (Refused(_OLDER),)
        if event.epoch == state.epoch:
            return state, (Accepted(),)
    if event.refusal is not None:
        return state, (Refused(event.refusal),)
    started = Start(epoch=event.epoch)
    return Serving(epoch=event.epoch), (*_abort(state), Accepted(), started)


def _resume(state: State, event: ResumeReceived) -> _Result:
    content = hashlib.sha256(encode(event.checkpoint)).hexdigest()
    if not isinstance(state, Absent):
        if event.epoch < state.epoch:
            return state, (Refused(_OLDER),)
        if event.epoch == state.epoch:
            return state, (Accepted() if content == state.content else Refused(_OTHER),)
    if event.refusal is not None:
        return state, (Refused(event.refusal),)
    loading = Loading(epoch=event.epoch, content=content, checkpoint=event.checkpoint)
    return loading, (*_abort(state), Accepted(), LoadBlocks(event.epoch))


def _abort(state: State) -> tuple[Effect, ...]:
    """End what an older epoch still does, before a newer one begins (MG-3). Of one that is over, a stream
    or the last blocks may still be on their way."""
    return () if isinstance(state, Absent) else (AbortEpoch(state.epoch),)


def _start(state: Loading, blocks: int, block_tokens: int, deadline_ms: int) -> _Result:
    checkpoint = state.checkpoint
    prompt_blocks = len(checkpoint.prompt_blocks)
    known = len(checkpoint.prompt_tail) + len(checkpoint.generated)
    # The last token is computed in any case: the next one is drawn from what it gives.
    cached = min(blocks, (prompt_blocks * block_tokens + known - 1) // block_tokens)
    if cached < prompt_blocks and not state.has_prompt:
        return _ask(state, checkpoint, cached, deadline_ms)
    return _serve(state, cached)


def _ask(state: Loading | Serving, checkpoint: SessionCheckpoint, blocks: int, deadline_ms: int) -> _Result:
    waiting = NeedsPrompt(
        epoch=state.epoch,
        content=state.content,
        checkpoint=checkpoint,
        blocks=blocks,
        deadline_ms=deadline_ms,
    )
    return waiting, (AskPrompt(state.epoch),)


def _serve(state: Loading | NeedsPrompt, cached: int) -> _Result:
    start = Start(epoch=state.epoch, checkpoint=state.checkpoint, cached_blocks=cached)
    return Serving(epoch=state.epoch, content=state.content), (start,)


def _prompt(state: State, epoch: int, matches: bool) -> _Result:
    if not isinstance(state, Loading | NeedsPrompt) or epoch != state.epoch:
        return state, ()
    if not matches:
        return state, (Refused(_OTHER_PROMPT),)
    if isinstance(state, Loading):
        return attrs.evolve(state, has_prompt=True), ()
    return _serve(state, state.blocks)


# Deadlines


def next_deadline_ms(state: State) -> int | None:
    """Return when `TimerFired` is next due, or None."""
    return state.deadline_ms if isinstance(state, NeedsPrompt) else None


def freeze(state: State, now_ms: int) -> State:
    """Return the state with its deadline as the time that remains."""
    if isinstance(state, NeedsPrompt):
        return attrs.evolve(state, deadline_ms=state.deadline_ms - now_ms)
    return state


def thaw(frozen: State, now_ms: int) -> State:
    """Return the state that `freeze` made this of, as it stands at another time."""
    return freeze(frozen, -now_ms)
