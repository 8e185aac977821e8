"""What may happen next to a node of an exploration."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvsp_sim.messages import Message, Question

__all__ = [
    "Begin",
    "CallLost",
    "Crash",
    "Event",
    "MessageArrives",
    "Passed",
    "PeerCrashed",
    "Pending",
    "Persisted",
    "Timer",
    "Unheard",
]


@attrs.frozen
class MessageArrives:
    """A message that was sent arrives, for the first time or again."""

    message: Message


@attrs.frozen
class Timer:
    """The role's clock reaches its next deadline."""


@attrs.frozen
class Persisted:
    """What is being persisted is durable."""


@attrs.frozen
class Pending:
    """Number `index` of what the node's engine or storage has under way is done."""

    index: int


@attrs.frozen
class CallLost:
    """A call fails: no answer came, or none will."""

    call_id: int


@attrs.frozen
class Begin:
    """What the exploration is about begins; not an event of its own."""


@attrs.frozen
class PeerCrashed:
    """Another node has crashed: a call to it that is open has no end but its failure, or an answer that is
    under way. Not an event of its own; it comes with the crash.
    """

    peer: str


@attrs.frozen
class Unheard:
    """Who asked this does not wait any more, so that no later call takes the answer for its own. Not an event
    of its own; it comes with the end of the call.
    """

    question: Question


@attrs.frozen
class Passed:
    """So much time has passed, and nothing has happened. Not an event of its own; it comes with a timer, of
    this node or of another.
    """

    ms: int


@attrs.frozen
class Crash:
    """The node crashes and starts again; what was being persisted became durable, or did not."""

    durable: bool


Event: TypeAlias = (
    MessageArrives | Timer | Persisted | Pending | CallLost | Begin | PeerCrashed | Unheard | Passed | Crash
)
