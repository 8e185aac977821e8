"""What the safety properties are told: facts that can be seen from outside a role.

Names, blocks and histories are opaque and only compared. Times are milliseconds of the clock of who is told
of.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import attrs

__all__ = [
    "BlockEvicted",
    "BlockNotFound",
    "CheckpointAcknowledged",
    "DecisionSent",
    "DecisionTaken",
    "Disclosed",
    "Fact",
    "HolderRestarted",
    "IndexRestarted",
    "LayersUsed",
    "LeaseGranted",
    "LeaseReleased",
    "LeaseRenewed",
    "LineSeen",
    "MemberRestarted",
    "OutputEnded",
    "PlanAccepted",
    "PlanSent",
    "RangeDropped",
    "RangeLoaded",
    "Ranges",
    "RecordReturned",
    "RecordTaken",
    "RecordWithdrawn",
    "SessionClosed",
    "SessionGivenUp",
    "SessionOwned",
    "SessionResumed",
    "SessionTold",
    "SessionUnknown",
    "StatusAcknowledged",
    "StepServed",
    "StreamOpened",
    "TokenDelivered",
    "TokenDrawn",
    "WithdrawalSent",
]


# Facts: leases and blocks of a holder. Times are of the holder's clock.


@attrs.frozen(kw_only=True)
class LeaseGranted:
    """A holder granted a lease over blocks (each with its octets), valid while now <= `until_ms`."""

    holder: str
    lease: str
    client: str
    blocks: tuple[tuple[Hashable, int], ...]
    now_ms: int
    until_ms: int


@attrs.frozen(kw_only=True)
class LeaseRenewed:
    """A holder granted a lease again, until `until_ms`."""

    holder: str
    lease: str
    now_ms: int
    until_ms: int


@attrs.frozen(kw_only=True)
class LeaseReleased:
    """A holder was told that a lease is not needed any more."""

    holder: str
    lease: str


@attrs.frozen(kw_only=True)
class BlockEvicted:
    """A holder gave up its last copy of a block. `fault`: the copy was bad, or its tier broken.

    `unheard`: a publication of it has no answer yet, which a withdrawal must not overtake.
    """

    holder: str
    block: Hashable
    now_ms: int
    fault: bool = False
    unheard: bool = False


@attrs.frozen(kw_only=True)
class WithdrawalSent:
    """A holder asked the index to withdraw its record of a block."""

    holder: str
    block: Hashable


@attrs.frozen(kw_only=True)
class HolderRestarted:
    """A holder started anew with these blocks restored; its clock moved by `shift_ms` against the old one."""

    holder: str
    shift_ms: int = 0
    restored: frozenset[Hashable] = frozenset()


# Facts: the index. Times are of its clock.


@attrs.frozen(kw_only=True)
class RecordTaken:
    """An index, or a part of one, accepted a record, valid while now <= `until_ms`."""

    index: str = ""
    holder: str
    block: Hashable
    until_ms: int


@attrs.frozen(kw_only=True)
class RecordWithdrawn:
    """The index acknowledged a withdrawal."""

    index: str = ""
    holder: str
    block: Hashable


@attrs.frozen(kw_only=True)
class RecordReturned:
    """The index gave a record out."""

    index: str = ""
    holder: str
    block: Hashable
    now_ms: int


@attrs.frozen(kw_only=True)
class BlockNotFound:
    """A lookup ended at this block: the index knows no record of it."""

    index: str = ""
    block: Hashable
    now_ms: int


@attrs.frozen(kw_only=True)
class IndexRestarted:
    """The index lost its records."""

    index: str = ""


# Facts: sessions and output


@attrs.frozen(kw_only=True)
class StreamOpened:
    """A user asked for output after this history; `expected` tokens come, if that is known."""

    stream: Hashable
    history: bytes
    expected: int | None = None


@attrs.frozen(kw_only=True)
class TokenDrawn:
    """An engine drew a token after this history."""

    history: bytes
    token: int


@attrs.frozen(kw_only=True)
class LineSeen:
    """A front end received a token for a stream from an instance."""

    stream: Hashable
    epoch: int
    index: int
    token: int


@attrs.frozen(kw_only=True)
class TokenDelivered:
    """A user received a token."""

    stream: Hashable
    index: int
    token: int


@attrs.frozen(kw_only=True)
class OutputEnded:
    """A user was told that the output is complete, with `count` tokens where that was said."""

    stream: Hashable
    count: int | None = None


@attrs.frozen(kw_only=True)
class SessionOwned:
    """The controller gave a session to an instance for an epoch."""

    session: str
    epoch: int
    instance: str


@attrs.frozen(kw_only=True)
class CheckpointAcknowledged:
    """The controller acknowledged a checkpoint: it has recorded these output tokens."""

    session: str
    epoch: int
    instance: str
    generated: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SessionResumed:
    """The controller asked an instance to resume a session from these output tokens."""

    session: str
    epoch: int
    generated: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SessionClosed:
    """A session ended, failed or was deleted."""

    session: str


@attrs.frozen(kw_only=True)
class SessionTold:
    """The controller said how many output tokens of a session it has recorded."""

    session: str
    offset: int


@attrs.frozen(kw_only=True)
class SessionGivenUp:
    """A front end asked the controller to end a session: it may be forgotten from now on."""

    session: str


@attrs.frozen(kw_only=True)
class SessionUnknown:
    """The controller answered that it knows nothing of a session."""

    session: str


@attrs.frozen(kw_only=True)
class StatusAcknowledged:
    """The controller took a status of an instance in this epoch."""

    instance: str
    epoch: int


# Facts: shard maps


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of token positions."""


@attrs.frozen(kw_only=True)
class PlanSent:
    """The controller sent a member its part of a move to a new version of a map."""

    map_id: str
    version: int
    member: str
    retain: Ranges = ()
    fetch: Ranges = ()
    release: Ranges = ()
    assign: Ranges = ()


@attrs.frozen(kw_only=True)
class PlanAccepted:
    """A member acknowledged a plan with 200."""

    map_id: str
    version: int
    member: str


@attrs.frozen(kw_only=True)
class DecisionSent:
    """The controller told a member to commit a version, or to abort it."""

    map_id: str
    version: int
    commit: bool


@attrs.frozen(kw_only=True)
class DecisionTaken:
    """A member acknowledged a commit or an abort."""

    map_id: str
    version: int
    member: str
    commit: bool


@attrs.frozen(kw_only=True)
class RangeLoaded:
    """A member fetched the KV of a range of positions from another one."""

    map_id: str
    member: str
    tokens: tuple[int, int]


@attrs.frozen(kw_only=True)
class RangeDropped:
    """A member freed the KV of a range of positions."""

    map_id: str
    member: str
    tokens: tuple[int, int]


@attrs.frozen(kw_only=True)
class StepServed:
    """A member computed a step over ranges of a version of the map."""

    map_id: str
    version: int
    member: str
    ranges: Ranges


@attrs.frozen(kw_only=True)
class MemberRestarted:
    """A member lost its memory."""

    member: str


# Facts: scopes and blocks


@attrs.frozen(kw_only=True)
class Disclosed:
    """A client was given, or allowed to put, something of a scope. `allowed`: by the policy that the role was
    told."""

    client: str
    scope: str
    allowed: bool = True


@attrs.frozen(kw_only=True)
class LayersUsed:
    """An engine computed with the layers of a block. Each names the replica digest its octets belong to, or
    is None where they are not the KV of these tokens at all.
    """

    instance: str
    layers: tuple[Hashable | None, ...]


Fact: TypeAlias = (
    LeaseGranted
    | LeaseRenewed
    | LeaseReleased
    | BlockEvicted
    | WithdrawalSent
    | HolderRestarted
    | RecordTaken
    | RecordWithdrawn
    | RecordReturned
    | BlockNotFound
    | IndexRestarted
    | StreamOpened
    | TokenDrawn
    | LineSeen
    | TokenDelivered
    | OutputEnded
    | SessionOwned
    | CheckpointAcknowledged
    | SessionResumed
    | SessionClosed
    | SessionTold
    | SessionGivenUp
    | SessionUnknown
    | StatusAcknowledged
    | PlanSent
    | PlanAccepted
    | DecisionSent
    | DecisionTaken
    | RangeLoaded
    | RangeDropped
    | StepServed
    | MemberRestarted
    | Disclosed
    | LayersUsed
)
