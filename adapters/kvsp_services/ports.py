"""What the driver of a role needs from what is around it: a loop, connections, an engine.

The pumps for asyncio and trio provide these, and so do tests. Nothing here waits: whatever takes time is
heard of later, in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvsp_core.heads import Request, Response
from kvsp_core.roles.engine import EngineCommand

__all__ = ["EnginePort", "Incoming", "Loop", "Outgoing", "OutgoingListener", "Peers"]


class Loop(Protocol):
    """Time, timers and threads of the loop that everything runs on."""

    def now_ms(self) -> int:
        """Return the monotonic time."""
        ...

    def call_at(self, deadline_ms: int | None, call: Callable[[], None]) -> None:
        """Call when the time has come, and perhaps earlier too, in place of what was set with this `call`.

        An earlier time that was set may stand: deadlines mostly move away, and a call too early is a no-op.
        """
        ...

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread, soon; may be used from any thread."""
        ...

    def in_thread(self, order: object, work: Callable[[], None]) -> None:
        """Run in another thread. Work of the same `order` runs in the order given."""
        ...


class Incoming(Protocol):
    """A request that is being answered, as its connection shows it."""

    client: str
    request: Request
    traceparent: str | None
    """What the client says that it belongs to."""

    def accept_body(self) -> None:
        """Say that the body is wanted, to a client that waits for that."""
        ...

    def respond(self, response: Response, body: Sequence[bytes | memoryview], *, end: bool) -> None:
        """Send the response, its body in pieces that are kept, not copied, until they are sent.

        Where `end` is false, more of the body follows by `send`.
        """
        ...

    def send(self, data: bytes | memoryview, *, end: bool) -> bool:
        """Send more of the body; return whether there is room for more. Where there is not, the driver's
        `output_ready` follows when there is.
        """
        ...

    def acknowledge(self, count: int) -> None:
        """Say that octets of the request's body have been dealt with, so that more may come."""
        ...

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        """Have octets of the body put straight where `free` says that the next ones belong; the driver's
        `data_placed` then tells of them. They may come by `data_received` all the same.
        """
        ...

    def cancel(self) -> None:
        """Give the exchange up."""
        ...


class Outgoing(Protocol):
    """A call to a peer that is under way."""

    def acknowledge(self, count: int) -> None:
        """Say that octets of the answer have been dealt with."""
        ...

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        """Have octets of the answer put straight where `free` says that the next ones belong; the listener's
        `data_placed` then tells of them. They may come by `data_received` all the same.
        """
        ...

    def cancel(self) -> None:
        """Give the call up; its listener hears nothing more."""
        ...


class OutgoingListener(Protocol):
    """What hears of a call: a head and its body, then its end, or at any time its failure."""

    def response_received(self, response: Response) -> None:
        """Take note of the head of the answer."""
        ...

    def data_received(self, data: memoryview) -> None:
        """Take octets of the body, which are valid until this returns, and acknowledge them."""
        ...

    def data_placed(self, size_bytes: int) -> None:
        """Take note of octets of the body that were put where they belong, and acknowledge them."""
        ...

    def body_ended(self) -> None:
        """Take note that the answer is whole."""
        ...

    def failed(self, reason: str) -> None:
        """Take note that no whole answer will come."""
        ...


class Peers(Protocol):
    """Connections to other roles."""

    def call(
        self,
        base_uri: str,
        request: Request,
        body: Sequence[bytes | memoryview],
        listener: OutgoingListener,
        traceparent: str | None,
    ) -> Outgoing:
        """Send a request to the role at a base URI, over a connection that is there or is made.

        `traceparent` is what the request belongs to. The pieces of the body are kept, not copied, until they
        are sent. The listener may hear of a failure before this returns.
        """
        ...


class EnginePort(Protocol):
    """The engine of an instance: commands go in; events and job results come back by the driver."""

    def submit(
        self, command: EngineCommand, layers: Sequence[tuple[bytes | memoryview, bytes | memoryview]] = ()
    ) -> None:
        """Queue a command, with the layers of the block it imports."""
        ...
