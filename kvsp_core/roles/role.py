"""What goes into a role and what comes out of it (a role is machines composed into what answers requests).

A role is driven by a loop that somebody else owns::

    for effect in role.handle(item, now_ms):
        execute(effect)
    wake_up_at(role.next_deadline_ms())

Everything it may learn is an `Input`, everything it wants done an `Effect`. Rules that hold for every role:

- **Order.** Effects are executed in the order given. What follows a `Persist` effect, in this or a later
  call, is held back until that `Persist` is durable. If persisting fails, the role is discarded and rebuilt
  from its store.
- **Names.** The loop numbers incoming requests; the role numbers its own calls, jobs and buffers, each in a
  counter of its own. A completion names what it completes; one of something given up is a no-op.
- **One end each.** Every request that the role was told of ends with exactly one `RequestEnded`; every `Call`
  with exactly one of `AnswerReceived`, `BlockReceived`, `StreamEnded`, `CallFailed`, unless it was cancelled;
  every job with exactly one `JobDone` or `JobFailed`.
- **Bulk octets** stay outside: they live in buffers that the loop owns and the role names. The container
  decoder of the core runs over them, so the role sees only layer digests and headers.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol, TypeAlias

import attrs

from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request, Response
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.problems import Problem
from kvsp_core.roles.engine import EngineCommand, EngineEvent

__all__ = [
    "NO_EFFECTS",
    "AnswerForm",
    "AnswerReceived",
    "Append",
    "BlockArrived",
    "BlockBody",
    "BlockName",
    "BlockReceived",
    "BodyArrived",
    "BodyFailed",
    "Call",
    "CallFailed",
    "CancelCall",
    "Delete",
    "Drop",
    "Effect",
    "FreeBuffer",
    "Input",
    "JobDone",
    "JobFailed",
    "JobFault",
    "LayerArrived",
    "LineReceived",
    "Load",
    "Observe",
    "OutputReady",
    "Persist",
    "Put",
    "ReadBlock",
    "ReceiveBlock",
    "ReceiveBody",
    "RequestEnded",
    "RequestReceived",
    "Respond",
    "Role",
    "Send",
    "Store",
    "Stored",
    "StoredBlock",
    "StreamEnded",
    "StreamStarted",
    "TimerFired",
    "Write",
]


# Values


@attrs.frozen
class BlockName:
    """A block at a holder: the three parts of its resource path."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_key: str = attrs.field(repr=False)


@attrs.frozen
class StoredBlock:
    """What a tier knows of a block it holds: enough to publish it again after a restart."""

    name: BlockName
    header: ContainerHeader
    layer_digests: tuple[str, ...] = attrs.field(repr=False)
    repr_digest: str = attrs.field(repr=False)
    """SHA-256 of the whole container, hex32."""


@attrs.frozen
class BlockBody:
    """The body of an answer or a call that is a container in a buffer: these layers of it, inclusive."""

    buffer: int
    layers: tuple[int, int] | None = None


class AnswerForm(Enum):
    """How the answer to a call is taken in."""

    DOCUMENT = "document"
    """Collected whole, up to the resource's limit: one `AnswerReceived`."""
    BLOCK = "block"
    """A container, decoded into a buffer: `LayerArrived` as layers complete, then `BlockReceived`. An answer
    other than 2xx is collected as a document: `AnswerReceived`."""
    LINES = "lines"
    """Newline-delimited documents: `StreamStarted`, `LineReceived` for each, then `StreamEnded`. An answer
    other than 2xx is collected as a document: `AnswerReceived`.
    """


class JobFault(Enum):
    """Why a job failed."""

    MISSING = "missing"
    """No such block in that tier."""
    CORRUPT = "corrupt"
    """What was read is not what was stored; it has been dropped."""
    FULL = "full"
    """No room in that tier; nothing was kept."""
    BROKEN = "broken"
    """The tier does not work."""
    BUSY = "busy"
    """Not now: files or memory are short. Nothing has changed, and the same job may succeed later."""


# Inputs: requests that reach the role


@attrs.frozen
class RequestReceived:
    """The head of a request has come. The role answers at once, or asks for the body, or answers later."""

    request_id: int
    client: str
    """The client's principal: the URI name of its certificate."""
    request: Request = attrs.field(repr=False)
    traceparent: str | None = None
    """What the request belongs to; calls that are made for it carry that on. No role acts on it."""


@attrs.frozen
class BodyArrived:
    """The whole body that `ReceiveBody` asked for."""

    request_id: int
    body: bytes = attrs.field(repr=False)


@attrs.frozen
class LayerArrived:
    """A layer of a block is complete in its buffer: of a request (`ReceiveBlock`) or of a call
    (`AnswerForm.BLOCK`).
    """

    buffer: int
    layer: int
    digest: str = attrs.field(repr=False)


@attrs.frozen
class BlockArrived:
    """The container that `ReceiveBlock` asked for is whole in its buffer, well formed, and matches the
    digest fields its request carried.
    """

    request_id: int
    buffer: int
    header: ContainerHeader
    layer_digests: tuple[str, ...] = attrs.field(repr=False)
    repr_digest: str = attrs.field(repr=False)
    """SHA-256 of the container, hex32."""


@attrs.frozen
class BodyFailed:
    """The body is not acceptable: too large, cut off, malformed or not what its digest says. The role
    responds.
    """

    request_id: int
    problem: Problem


@attrs.frozen
class OutputReady:
    """A response that is being streamed has room for more: comes after each `Send` that does not end it, at
    once or when what was sent has gone out.
    """

    request_id: int


@attrs.frozen
class RequestEnded:
    """An exchange is over. `complete` tells whether the response went out whole; `sent_bytes` counts body
    octets.
    """

    request_id: int
    complete: bool
    sent_bytes: int


# Inputs: what became of the role's own calls and jobs


@attrs.frozen
class AnswerReceived:
    """The answer to a call, whole."""

    call_id: int
    response: Response = attrs.field(repr=False)
    body: bytes = attrs.field(repr=False)


@attrs.frozen
class BlockReceived:
    """The answer to a call for a block is whole in its buffer and well formed. The loop has compared
    Repr-Digest with the octets: `repr_digest_valid` is False also where the field was missing. Everything
    else the role verifies.
    """

    call_id: int
    response: Response = attrs.field(repr=False)
    header: ContainerHeader
    layer_digests: tuple[str, ...] = attrs.field(repr=False)
    repr_digest_valid: bool


@attrs.frozen
class StreamStarted:
    """A call for lines was accepted: its 2xx head has come."""

    call_id: int
    response: Response = attrs.field(repr=False)


@attrs.frozen
class LineReceived:
    """One line of a streamed answer, without its newline."""

    call_id: int
    line: bytes = attrs.field(repr=False)


@attrs.frozen
class StreamEnded:
    """A streamed answer ended in order."""

    call_id: int


@attrs.frozen
class CallFailed:
    """A call got no whole answer: no connection, wrong identity, cut off, timed out, or malformed."""

    call_id: int
    reason: str
    """One plain word or two, for people: ``timed out``."""


@attrs.frozen
class JobDone:
    """A tier or engine job is complete.

    `header` and digests are set where a container was written to a buffer (`ReadBlock`, `ExportBlock`),
    `data` is what `Attend` computed, and `catalogue` what `Load` found.
    """

    job_id: int
    header: ContainerHeader | None = None
    layer_digests: tuple[str, ...] = attrs.field(default=(), repr=False)
    repr_digest: str = attrs.field(default="", repr=False)
    data: bytes = attrs.field(default=b"", repr=False)
    catalogue: tuple[StoredBlock, ...] = attrs.field(default=(), repr=False)


@attrs.frozen
class JobFailed:
    """A tier or engine job failed."""

    job_id: int
    fault: JobFault

    @property
    def takes_nothing(self) -> bool:
        """Whether what the job was about is as it was, and is not to be taken for lost."""
        return self.fault is JobFault.BUSY


Input: TypeAlias = (
    RequestReceived
    | BodyArrived
    | LayerArrived
    | BlockArrived
    | BodyFailed
    | OutputReady
    | RequestEnded
    | AnswerReceived
    | BlockReceived
    | StreamStarted
    | LineReceived
    | StreamEnded
    | CallFailed
    | JobDone
    | JobFailed
    | EngineEvent
    | TimerFired
)


# Effects: answering requests


@attrs.frozen
class ReceiveBody:
    """Take in the body of a request, at most `limit_bytes`; more is a `BodyFailed` of 413."""

    request_id: int
    limit_bytes: int


@attrs.frozen
class ReceiveBlock:
    """Take in the body of a request as a container, into a buffer of at most `limit_bytes`, checking it as
    it arrives.
    """

    request_id: int
    buffer: int
    limit_bytes: int


@attrs.frozen
class Respond:
    """Answer a request. A body that the client is still sending is not waited for.

    Where `streaming` is true the body follows by `Send`; else `body` is all of it.
    """

    request_id: int
    response: Response = attrs.field(repr=False)
    body: bytes | BlockBody = attrs.field(default=b"", repr=False)
    streaming: bool = False


@attrs.frozen
class Send:
    """Send a piece of a streamed response; `end` ends it."""

    request_id: int
    data: bytes = attrs.field(repr=False)
    end: bool = False


# Effects: calling peers


@attrs.frozen(kw_only=True)
class Call:
    """Send a request to the role at a base URI, and bring back the answer within `timeout_ms`.

    For `AnswerForm.BLOCK` the container goes into `buffer`, at most `limit_bytes`. For `AnswerForm.LINES`
    the timeout is for the head and then for the silence between two lines. `traceparent` is that of the
    request for which the call is made, where it is made for one.
    """

    call_id: int
    base_uri: str
    request: Request = attrs.field(repr=False)
    body: bytes | BlockBody = attrs.field(default=b"", repr=False)
    timeout_ms: int
    form: AnswerForm = AnswerForm.DOCUMENT
    buffer: int | None = None
    limit_bytes: int | None = None
    traceparent: str | None = None


@attrs.frozen
class CancelCall:
    """Give a call up; nothing more of it will be heard."""

    call_id: int


# Effects: durable state


@attrs.frozen
class Put:
    """Set a value under a key of a table."""

    table: str
    key: str = attrs.field(repr=False)
    value: bytes = attrs.field(repr=False)


@attrs.frozen
class Append:
    """Append to the log under a key of a table: these octets at this offset. What stood from there on is
    replaced.
    """

    table: str
    key: str = attrs.field(repr=False)
    offset: int
    value: bytes = attrs.field(repr=False)


@attrs.frozen
class Delete:
    """Delete what stands under a key of a table, value or log."""

    table: str
    key: str = attrs.field(repr=False)


Write: TypeAlias = Put | Append | Delete


@attrs.frozen
class Persist:
    """Make these writes durable, all or none, before any effect that follows."""

    writes: tuple[Write, ...]


# Effects: blocks in tiers and buffers


@attrs.frozen
class Store:
    """Put the block in a buffer into a tier (a job). The buffer stays the role's."""

    job_id: int
    buffer: int
    name: BlockName
    tier: str


@attrs.frozen
class ReadBlock:
    """Read these layers of a block (all, where None) from a tier into a buffer, as a container (a job)."""

    job_id: int
    buffer: int
    name: BlockName
    tier: str
    layers: tuple[int, int] | None = None


@attrs.frozen
class Drop:
    """Remove a block from a tier. It cannot fail in a way that matters: there is no completion."""

    name: BlockName
    tier: str


@attrs.frozen
class FreeBuffer:
    """Give a buffer back. A response still being sent from it keeps it until it is done."""

    buffer: int


@attrs.frozen
class Load:
    """List what a tier holds, for a role that starts (a job); the answer is `JobDone.catalogue`."""

    job_id: int
    tier: str


# Effects: seeing what goes on


@attrs.frozen
class Observe:
    """Count something (OP-1). Names and labels never carry a tenant's data."""

    name: str
    value: int = 1
    labels: tuple[tuple[str, str], ...] = ()


Effect: TypeAlias = (
    ReceiveBody
    | ReceiveBlock
    | Respond
    | Send
    | Call
    | CancelCall
    | Persist
    | Store
    | ReadBlock
    | Drop
    | FreeBuffer
    | Load
    | EngineCommand
    | Observe
)

Stored: TypeAlias = "dict[str, dict[str, bytes]]"
"""What a store holds: table, then key, then value or log. A role is rebuilt from it at start."""

NO_EFFECTS: Final[tuple[Effect, ...]] = ()


class Role(Protocol):
    """What every role is to the loop that drives it."""

    base_uri: str

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin: called once, before anything else."""
        ...

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in at a time of a monotonic clock, in milliseconds; return what is to be done."""
        ...

    def next_deadline_ms(self) -> int | None:
        """Return when the role next wants `TimerFired`, or None."""
        ...
