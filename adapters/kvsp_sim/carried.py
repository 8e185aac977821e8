"""A call of a role and a request to one, whatever carries them: what hosts and the witness see of both.

`kvsp_sim.exchange` carries them as messages, `kvsp_sim.http2` as octets of HTTP/2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kvsp_core.heads import Request, Response
from kvsp_core.roles.role import (
    AnswerReceived,
    Call,
    CallFailed,
    Input,
    LineReceived,
    RequestEnded,
    Respond,
)

if TYPE_CHECKING:
    from kvsp_sim.host import Host

__all__ = ["CarriedCall", "CarriedRequest", "Carry"]


class CarriedCall(ABC):
    """A call under way: its time limit, by the caller's clock, and its one end."""

    __slots__ = ("body", "call", "caller", "deadline_ms", "life", "open", "rest")

    def __init__(self, caller: Host, call: Call, body: bytes) -> None:
        self.caller = caller
        self.call = call
        self.body = body
        self.life = caller.life
        self.open = True
        self.deadline_ms = 0
        self.rest = b""

    def begin(self) -> None:
        """Send the request."""
        self.caller.witness.called(self.caller, self.call, self.body)
        self.expect_more()
        self._arm()
        self._send()

    @abstractmethod
    def _send(self) -> None:
        """Send the request."""

    @abstractmethod
    def _give_up(self) -> None:
        """Tell the other side that nobody waits any more."""

    # Time

    def expect_more(self) -> None:
        """Wait for as long as the call says, from now on."""
        self.deadline_ms = self.caller.now_ms + self.call.timeout_ms

    def _arm(self) -> None:
        caller = self.caller
        caller.world.at(caller.process.clock.when(self.deadline_ms), self._expire)

    def _expire(self) -> None:
        if not self.alive:
            return
        if self.caller.now_ms < self.deadline_ms:
            self._arm()
            return
        self.fail("timed out")

    # Answers

    def take_lines(self, data: bytes) -> None:
        """Bring the caller the lines that these octets of a streamed answer complete."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if not self.alive:
                return
            self.expect_more()
            self.caller.witness.line_received(self.caller, self.call, line)
            self.caller.deliver(LineReceived(self.call.call_id, line))

    def end_with(self, response: Response, body: bytes) -> None:
        """Bring the caller an answer that is a document."""
        self.caller.witness.answered(self.caller, self.call, response, body)
        self.end(AnswerReceived(self.call.call_id, response, body))

    # Ends

    @property
    def alive(self) -> bool:
        """Whether the caller still waits."""
        return self.open and self.caller.life == self.life

    def end(self, item: Input) -> None:
        """Bring the caller the last it hears of the call."""
        self.open = False
        self.caller.calls.pop(self.call.call_id, None)
        self.caller.deliver(item)

    def fail(self, reason: str) -> None:
        """Say that there is no whole answer."""
        if self.alive:
            self.caller.cluster.counts["calls failed"] += 1
            self._give_up()
            self.end(CallFailed(self.call.call_id, reason))

    def cancel(self) -> None:
        """The caller gave the call up."""
        self.open = False
        self._give_up()


class CarriedRequest(ABC):
    """A request at the role that serves it, until its one `RequestEnded`."""

    __slots__ = ("body", "life", "open", "request", "request_id", "responded", "sent_bytes", "server")

    def __init__(self, server: Host, request: Request, body: bytes) -> None:
        self.server = server
        self.request = request
        self.body = body
        self.life = 0
        self.request_id = 0
        self.open = False  # the role was told of it, and not yet that it ended
        self.responded = False
        self.sent_bytes = 0

    @property
    @abstractmethod
    def client(self) -> str:
        """The principal of the caller."""

    @property
    @abstractmethod
    def heard(self) -> bool:
        """Whether what is answered now may come to the caller."""

    @abstractmethod
    def receive_body(self, limit_bytes: int) -> None:
        """Bring the role the body."""

    @abstractmethod
    def receive_block(self, buffer: int, limit_bytes: int) -> None:
        """Bring the role the body as a container."""

    @abstractmethod
    def respond(self, effect: Respond, body: bytes) -> None:
        """Send an answer back."""

    @abstractmethod
    def send(self, data: bytes, end: bool) -> None:
        """Send a piece of a streamed answer."""

    def tell(self) -> None:
        """Tell the role of the request."""
        server = self.server
        self.life = server.life
        self.open = True
        self.request_id = server.open_request(self)
        server.receive(self, self.client, self.request)

    @property
    def alive(self) -> bool:
        """Whether the role waits for more of it, or for its end."""
        return self.open and self.server.life == self.life

    def deliver(self, item: Input) -> None:
        """Bring the role something of this request, unless it is over."""
        if self.alive:
            self.server.deliver(item)

    def soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Have something done once the role has done what it does now."""
        self.server.later(self.server.randomness.below(100), call, *arguments)

    def answer(self, effect: Respond, body: bytes) -> tuple[Response, bytes]:
        """Return what the role answers, as its host lets it out."""
        server = self.server
        if self.responded:
            raise AssertionError(f"{server.name} answered a request twice")
        self.responded = True
        server.witness.responded(self, effect, body)
        response = effect.response
        if server.lies is not None and not isinstance(effect.body, bytes):
            body, response = server.lies(body, response)
        return response, body

    def end(self, complete: bool) -> None:
        """Tell the role that the request is over."""
        if not self.alive:
            return
        self.open = False
        self.server.requests.pop(self.request_id, None)
        if not self.responded:
            self.server.left[self.request_id] = self
        self.server.deliver(RequestEnded(self.request_id, complete, self.sent_bytes if self.responded else 0))


Carry: TypeAlias = "Callable[[Host, Call, bytes], CarriedCall]"
"""Makes a call of a host's role; `begin` sends it."""
