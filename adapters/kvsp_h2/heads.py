"""Header blocks both ways (RFC 7541).

HPACK in Python is most of the cost of a small message, and the heads of a busy connection are alike: what
comes or goes again is neither decoded nor encoded again. Heads of requests that are alike but for the last
field, a ``traceparent``, count as alike: it is another one in each request (decision W34).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

from h2.errors import ErrorCodes
from hpack import Decoder, Encoder, HPACKError, OversizedHeaderListError

from kvsp_core.heads import Response, is_traceparent, response_fields
from kvsp_h2.fields import HeaderList, list_bytes
from kvsp_h2.frames import Fault

__all__ = ["HeadDecoder", "HeadEncoder", "ReceivedHead"]

_KEPT: Final = 32
_KEPT_BYTES: Final = 2048
"""The largest header list that is kept."""
_VARYING: Final = b"traceparent"
_VALUE_BYTES: Final = 55
_LITERAL: Final = b"\x10" + bytes((len(_VARYING),)) + _VARYING + bytes((_VALUE_BYTES,))
"""How the field begins as a literal that is never indexed and has no Huffman code (RFC 7541, 6.2.3)."""
_LITERAL_BYTES: Final = len(_LITERAL) + _VALUE_BYTES
_KIND: Final = 0xE0
_NEW_TABLE_SIZE: Final = 0x20
_NO_TABLE: Final = b"\x20"
"""What a block begins with to say that nothing is kept in the dynamic table from now on (RFC 7541, 6.3)."""

K = TypeVar("K")
V = TypeVar("V")


class ReceivedHead:
    """A header list that came, and what its reader made of it: the same object where the same block comes
    again."""

    __slots__ = ("headers", "meaning", "size_bytes")

    def __init__(self, headers: HeaderList) -> None:
        self.headers = headers
        self.size_bytes = list_bytes(headers)
        self.meaning: object = None


class HeadDecoder:
    """Decodes header blocks. The same octets mean the same as long as the dynamic table stays as it is, so
    what is kept is thrown away whenever that or its size changes: where nothing fits into it, a block that
    puts something there leaves it as it was."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kept: dict[bytes, ReceivedHead] = {}
        self._rests: dict[bytes, ReceivedHead] = {}

    def decode(self, block: bytes) -> tuple[ReceivedHead, bytes | None]:
        """Return what a header block holds, apart from a ``traceparent`` that ends it, and that. Raises
        `Fault`."""
        if (known := self._kept.get(block)) is not None:
            return known, None
        begins = len(block) - _LITERAL_BYTES
        varies = begins > 0 and block.startswith(_LITERAL, begins)
        value = block[begins + len(_LITERAL) :] if varies else b""
        varies = varies and is_traceparent(value)
        if varies and (rest := self._rests.get(block[:begins])) is not None:
            return rest, value
        table = self._decoder.header_table.dynamic_entries
        newest, count = table[0] if table else None, len(table)
        try:
            head = ReceivedHead(cast(HeaderList, self._decoder.decode(block, raw=True)))
        except OversizedHeaderListError:
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "a header list is too large") from None
        except HPACKError:
            raise Fault(ErrorCodes.COMPRESSION_ERROR, "a header block cannot be decoded") from None
        resized = block[:1] and block[0] & _KIND == _NEW_TABLE_SIZE
        if resized or len(table) != count or (table and table[0] is not newest):
            self._kept.clear()
            self._rests.clear()
        elif head.size_bytes <= _KEPT_BYTES and block:
            if varies and _find(head.headers) == [(len(head.headers) - 1, value)]:
                # The field with this value ends the block, so what is before these octets means the rest.
                rest = ReceivedHead(head.headers[:-1])
                _keep(self._rests, block[:begins], rest)
                return rest, value
            _keep(self._kept, block, head)
        return head, None


class HeadEncoder:
    """Encodes heads. Values stay out of the compression tables of both ends, so that a block means the same
    each time it is sent. Huffman's code is left out: it would cost both ends more than the octets it saves.

    The first block says so, by a table of no octets. No size that the peer sets later is below that, so none
    has to be followed.
    """

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._first = _NO_TABLE
        self._kept: dict[Response | tuple[tuple[bytes, bytes], ...], bytes] = {}

    def encode(self, headers: HeaderList, traceparent: str | None = None) -> bytes:
        """Return the header block of a header list, and of a ``traceparent`` that ends it."""
        block = self._encode(tuple(headers), lambda: headers)
        return block if traceparent is None else block + _LITERAL + traceparent.encode("ascii")

    def encode_response(self, response: Response) -> bytes:
        """Return the header block of a response."""
        return self._encode(
            response, lambda: [(b":status", b"%d" % response.status), *response_fields(response)]
        )

    def _encode(
        self, key: Response | tuple[tuple[bytes, bytes], ...], headers: Callable[[], HeaderList]
    ) -> bytes:
        block = self._kept.get(key)
        if block is None:
            block = self._encoder.encode([(name, value, True) for name, value in headers()], huffman=False)
            _keep(self._kept, key, block)
        first, self._first = self._first, b""
        return first + block


def _find(headers: HeaderList) -> list[tuple[int, bytes]]:
    """Return each ``traceparent``: its place and value."""
    return [(place, value) for place, (name, value) in enumerate(headers) if name == _VARYING]


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
