"""A call of a role to a peer, from its first octet to its one end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsp_core.container import LayerArrived as Layer
from kvsp_core.heads import Response
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BlockBody,
    BlockReceived,
    Call,
    CallFailed,
    Input,
    LayerArrived,
    LineReceived,
    StreamEnded,
    StreamStarted,
)
from kvsp_services.buffers import BlockBuffer
from kvsp_services.ports import Loop, Outgoing, Peers
from kvsp_services.receivers import NOWHERE, ContainerReceiver, DocumentReceiver, LineReceiver, Refusal

__all__ = ["MAX_DOCUMENT_BYTES", "CallOwner", "OutgoingCall"]

MAX_DOCUMENT_BYTES = 64 << 20
"""What an answer may have where the call does not say; a lookup of 8,192 keys brings some 22 MB."""


class CallOwner(Protocol):
    """Who hears what became of a call."""

    def handle(self, item: Input) -> None:
        """Take in an answer, or part of one."""
        ...

    def call_over(self, call_id: int) -> None:
        """Forget the call: nothing more of it comes."""
        ...


class OutgoingCall:
    """Carries one `Call` out. It is the listener of its exchange.

    `sends` is the buffer that its body comes from, `target` the one that the answer goes to. `deadline_ms`
    moves on with every line of a streamed answer.
    """

    def __init__(
        self,
        call: Call,
        owner: CallOwner,
        loop: Loop,
        *,
        sends: BlockBuffer | None,
        target: BlockBuffer | None,
    ) -> None:
        self.call = call
        self._owner = owner
        self._loop = loop
        self._sends = sends
        self._target = target
        self._exchange: Outgoing | None = None
        self.response: Response | None = None
        """The head of the answer, once it has come."""
        self._receiver: DocumentReceiver | ContainerReceiver | LineReceiver | None = None
        self._over = False
        self.failure: str | None = None
        """Why no whole answer has come."""
        self.began_ms = loop.now_ms()
        self.deadline_ms = self.began_ms + call.timeout_ms
        for buffer in (sends, target):
            if buffer is not None:
                buffer.use()

    def begin(self, peers: Peers) -> None:
        """Send the request."""
        call = self.call
        body: Sequence[bytes | memoryview] = ()
        if isinstance(call.body, BlockBody):
            assert self._sends is not None
            body = self._sends.pieces(call.body.layers)
        elif call.body:
            body = (call.body,)
        self._exchange = peers.call(call.base_uri, call.request, body, self, call.traceparent)

    # What the exchange tells

    def response_received(self, response: Response) -> None:
        """Take note of the head of the answer, which says how the rest is taken in."""
        if self._over:
            return
        self.response = response
        call = self.call
        limit = call.limit_bytes if call.limit_bytes is not None else MAX_DOCUMENT_BYTES
        try:
            if response.is_success and call.form is AnswerForm.BLOCK and self._target is not None:
                self._receiver = ContainerReceiver(self._target, limit, response.content_length)
                if self._exchange is not None:
                    self._exchange.receive_into(self._free)
            elif response.is_success and call.form is AnswerForm.LINES:
                self._receiver = LineReceiver()
                self._heard()
                self._owner.handle(StreamStarted(call.call_id, response))
            else:
                self._receiver = DocumentReceiver(MAX_DOCUMENT_BYTES, response.content_length)
        except Refusal as refusal:
            self._give_up(str(refusal))

    def data_received(self, data: memoryview) -> None:
        """Take octets of the answer in."""
        try:
            self._take(data)
        except Refusal as refusal:
            self._give_up(str(refusal))
        self._acknowledge(len(data))

    def data_placed(self, size_bytes: int) -> None:
        """Take note of octets of the answer that were put where they belong."""
        try:
            if not self._over and isinstance(self._receiver, ContainerReceiver):
                self._tell_layers(self._receiver.placed(size_bytes))
        except Refusal as refusal:
            self._give_up(str(refusal))
        self._acknowledge(size_bytes)

    def _take(self, data: memoryview) -> None:
        receiver = self._receiver
        if self._over or receiver is None:
            return
        if isinstance(receiver, ContainerReceiver):
            self._tell_layers(receiver.feed(data))
        elif isinstance(receiver, LineReceiver):
            for line in receiver.feed(data):
                self._heard()
                if not self._over:  # a line may lead the role to give the call up
                    self._owner.handle(LineReceived(self.call.call_id, line))
        else:
            receiver.feed(data)

    def _tell_layers(self, layers: Sequence[Layer]) -> None:
        assert self.call.buffer is not None
        for layer in layers:
            self._owner.handle(LayerArrived(self.call.buffer, layer.layer, layer.digest))

    def _acknowledge(self, count: int) -> None:
        if self._exchange is not None and not self._over:
            self._exchange.acknowledge(count)

    def _free(self) -> memoryview:
        """Return where the next octets belong; nowhere any more once the buffer may have another owner."""
        if self._over or not isinstance(self._receiver, ContainerReceiver):
            return NOWHERE
        return self._receiver.free

    def body_ended(self) -> None:
        """Take note that the answer is whole, and hand it over."""
        if self._over or self.response is None or self._receiver is None:
            return
        try:
            answer = self._answer(self.response, self._receiver)
        except Refusal as refusal:
            self._give_up(str(refusal))
            return
        self._end()
        self._owner.handle(answer)

    def _answer(
        self, response: Response, receiver: DocumentReceiver | ContainerReceiver | LineReceiver
    ) -> Input:
        number = self.call.call_id
        if isinstance(receiver, DocumentReceiver):
            return AnswerReceived(number, response, receiver.end())
        receiver.end()
        if isinstance(receiver, LineReceiver):
            return StreamEnded(number)
        assert receiver.header is not None
        valid = response.repr_digest == receiver.sha256
        return BlockReceived(number, response, receiver.header, receiver.layer_digests, valid)

    def failed(self, reason: str) -> None:
        """Take note that no whole answer will come."""
        if not self._over:
            self.failure = reason
            self._end()
            self._owner.handle(CallFailed(self.call.call_id, reason))

    # Its end

    def time_out(self) -> None:
        """Give the call up, because its time is over."""
        self._give_up("timed out")

    def cancel(self) -> None:
        """Give the call up; its owner hears nothing more."""
        if self._exchange is not None and not self._over:
            self._exchange.cancel()
        self._end()

    def _heard(self) -> None:
        self.deadline_ms = self._loop.now_ms() + self.call.timeout_ms

    def _give_up(self, reason: str) -> None:
        if self._exchange is not None and not self._over:
            self._exchange.cancel()
        self.failed(reason)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._owner.call_over(self.call.call_id)
        for buffer in (self._sends, self._target):
            if buffer is not None:
                buffer.free()
