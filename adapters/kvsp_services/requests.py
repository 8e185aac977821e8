"""A request to a role, from its head to the end of its response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsp_core.container import LayerArrived as Layer
from kvsp_core.problems import DIGEST_MISMATCH, Problem
from kvsp_core.roles.role import (
    BlockArrived,
    BlockBody,
    BodyArrived,
    BodyFailed,
    Input,
    LayerArrived,
    OutputReady,
    ReceiveBlock,
    ReceiveBody,
    Respond,
    Send,
)
from kvsp_services.buffers import BlockBuffer
from kvsp_services.ports import Incoming
from kvsp_services.receivers import NOWHERE, ContainerReceiver, DocumentReceiver, Refusal

__all__ = ["IncomingRequest"]


class IncomingRequest:
    """Takes in the body of one request when the role asks for it, and sends what the role answers.

    Octets that come before the role has asked wait here, at most the peer's window of them: they are
    acknowledged when they are taken in. `tell` hands an input to the role.
    """

    def __init__(
        self,
        number: int,
        exchange: Incoming,
        tell: Callable[[Input], None],
        *,
        ended: bool,
        traceparent: str,
        began_ms: int,
    ) -> None:
        self.exchange = exchange
        self.traceparent = traceparent
        self.began_ms = began_ms
        self.status: int | None = None
        """That of its answer, once there is one."""
        self._number = number
        self._tell = tell
        self._ended = ended
        self._early = bytearray()
        self._receiver: DocumentReceiver | ContainerReceiver | None = None
        self._buffer = -1
        self._body_done = False
        self._sending: BlockBuffer | None = None

    # The body

    def data_received(self, data: memoryview) -> None:
        """Take in octets of the body; they are not looked at after this returns."""
        if self._receiver is None and not self._body_done:
            self._early += data
            return
        self._feed(data)
        self.exchange.acknowledge(len(data))

    def data_placed(self, size_bytes: int) -> None:
        """Take note of octets that were put where they belong."""
        if not self._body_done and isinstance(self._receiver, ContainerReceiver):
            try:
                self._tell_layers(self._receiver.placed(size_bytes))
            except Refusal as refusal:
                self._refuse(refusal)
        self.exchange.acknowledge(size_bytes)

    def _free(self) -> memoryview:
        """Return where the next octets belong; nowhere any more once the buffer may have another owner."""
        if self._body_done or not isinstance(self._receiver, ContainerReceiver):
            return NOWHERE
        return self._receiver.free

    def body_ended(self) -> None:
        """Take note that the body is whole."""
        self._ended = True
        self._end_body()

    def receive_document(self, effect: ReceiveBody) -> None:
        """Take the body in as a document."""
        declared = self.exchange.request.content_length
        self._receive(lambda: DocumentReceiver(effect.limit_bytes, declared))

    def receive_block(self, effect: ReceiveBlock, buffer: BlockBuffer) -> None:
        """Take the body in as a container, into a buffer."""
        self._buffer = effect.buffer
        declared = self.exchange.request.content_length
        self._receive(lambda: ContainerReceiver(buffer, effect.limit_bytes, declared))

    def _receive(self, make: Callable[[], DocumentReceiver | ContainerReceiver]) -> None:
        if self._body_done:
            return
        self.exchange.accept_body()
        early, self._early = self._early, bytearray()
        try:
            self._receiver = make()
        except Refusal as refusal:
            self._refuse(refusal)
        else:
            self._feed(memoryview(early))
            self.exchange.receive_into(self._free)
        self.exchange.acknowledge(len(early))
        self._end_body()

    def _feed(self, data: memoryview) -> None:
        if self._body_done:
            return
        try:
            if isinstance(self._receiver, ContainerReceiver):
                self._tell_layers(self._receiver.feed(data))
            elif self._receiver is not None:
                self._receiver.feed(data)
        except Refusal as refusal:
            self._refuse(refusal)

    def _tell_layers(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            self._tell(LayerArrived(self._buffer, layer.layer, layer.digest))

    def _end_body(self) -> None:
        if not self._ended or self._body_done or self._receiver is None:
            return
        try:
            if isinstance(self._receiver, DocumentReceiver):
                arrived: Input = BodyArrived(self._number, self._receiver.end())
            else:
                arrived = self._arrived_block(self._receiver)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        self._body_done = True
        self._tell(arrived)

    def _arrived_block(self, found: ContainerReceiver) -> BlockArrived:
        found.end()
        head = self.exchange.request
        for stated in (head.repr_digest, head.content_digest):
            if stated not in (None, found.sha256):
                detail = "the body does not match the digest that the request states"
                raise Refusal(Problem(DIGEST_MISMATCH, detail))
        assert found.header is not None
        return BlockArrived(self._number, self._buffer, found.header, found.layer_digests, found.sha256)

    def _refuse(self, refusal: Refusal) -> None:
        self._body_done = True
        self._tell(BodyFailed(self._number, refusal.problem))

    # The response

    def respond(self, effect: Respond, buffer: BlockBuffer | None) -> None:
        """Send the response; a body that is still coming is not waited for."""
        self._body_done = True
        self.status = effect.response.status
        body, exchange = effect.body, self.exchange
        if isinstance(body, BlockBody):
            assert buffer is not None
            buffer.use()
            self._sending = buffer
            header, data = buffer.pieces(body.layers)
            exchange.respond(effect.response, (header, data), end=True)
        else:
            exchange.respond(effect.response, (body,) if body else (), end=not effect.streaming)

    def send(self, effect: Send) -> None:
        """Send a piece of a streamed response; where there is room for more at once, say so."""
        if self.exchange.send(effect.data, end=effect.end) and not effect.end:
            self._tell(OutputReady(effect.request_id))

    def over(self) -> None:
        """Take note that the exchange is over: its buffer is no longer needed."""
        self._body_done = True
        if self._sending is not None:
            self._sending.free()
            self._sending = None
