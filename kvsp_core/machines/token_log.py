"""An append-only log of a session's output tokens, with a rolling digest.

A checkpoint carries every output token since the session began. What keeps them grows with the output, not
with its square: a log takes in and gives out only what is new, and the digest of all tokens so far costs as
much as the new ones.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from sys import byteorder

from kvsp_core.errors import LocalProtocolError

__all__ = ["TOKEN_OCTETS", "TokenLog", "pack_tokens", "unpack_tokens"]

TOKEN_OCTETS = 4
"""Octets of one token in a packed log."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as 32-bit integers in network byte order."""
    packed = array("I", tokens)
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(octets: bytes) -> tuple[int, ...]:
    """Return the tokens of a packed log. Octets of a torn last token are an error."""
    if len(octets) % TOKEN_OCTETS:
        raise LocalProtocolError("a token log ends within a token; it was not written whole")
    tokens = array("I", octets)
    if byteorder == "little":
        tokens.byteswap()
    return tuple(tokens)


class TokenLog:
    """Output tokens from index 0 on. Nothing that was appended ever changes."""

    __slots__ = ("_digest", "_digested", "_tokens")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("I", tokens)
        self._digest = bytes(hashlib.sha256().digest_size)
        self._digested = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> int:
        return self._tokens[index]

    def __repr__(self) -> str:
        return f"<TokenLog: {len(self)} tokens>"

    @property
    def digest(self) -> str:
        """A chain of SHA-256 over the tokens, in hex: each token with the digest before it."""
        for token in self._tokens[self._digested :]:
            self._digest = hashlib.sha256(self._digest + token.to_bytes(TOKEN_OCTETS, "big")).digest()
        self._digested = len(self._tokens)
        return self._digest.hex()

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._tokens.extend(tokens)

    def tokens(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Return the tokens from index `start` to before `end`."""
        return tuple(self._tokens[start:end])

    def agrees(self, tokens: Sequence[int], start: int = 0) -> bool:
        """Return whether these tokens, the first at index `start`, are what is logged as far as it goes."""
        count = max(0, min(len(tokens), len(self) - start))
        return self._tokens[start : start + count] == array("I", tokens[:count])
