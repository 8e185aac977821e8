"""Block keys: the keyed chain that names each block together with its whole prefix.

Protocol section "Scopes and Block Keys"; requirements SK-2 and SK-3. Tokens come as lists or other
iterables of integers, as arrays, memoryviews or numpy arrays of any integer type; each way accepts and
refuses the same values. Keys are 32 raw octets here and ``key.hex()`` on the wire.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from struct import Struct
from sys import byteorder
from typing import Any, Final, NoReturn, SupportsIndex, TypeAlias

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope

__all__ = ["KEY_BYTES", "BlockKeyChain", "Tokens", "block_keys"]

Tokens: TypeAlias = Iterable[SupportsIndex]
"""Token identifiers in order: integers from 0 to 2^32-1."""

KEY_BYTES: Final = 32
_START: Final = bytes(KEY_BYTES)
_TOKEN_BYTES: Final = 4
_MAX_TOKEN: Final = 2**32 - 1
_UINT32: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"


class BlockKeyChain:
    """Computes the keys of a token sequence that arrives in pieces of any size.

    `parent` is the key of the block before the first token fed, to continue a sequence whose earlier keys
    are known; None starts at the beginning of the sequence. Raises `LocalProtocolError` where it is not 32
    octets.
    """

    def __init__(
        self, scope: Scope, descriptor: CompatibilityDescriptor, *, parent: bytes | None = None
    ) -> None:
        if parent is not None and (not isinstance(parent, bytes) or len(parent) != KEY_BYTES):
            raise LocalProtocolError(f"the parent of a block is a key of {KEY_BYTES} octets, or None")
        self._block = Struct(f"{descriptor.block_tokens * _TOKEN_BYTES}s")
        self._inner, self._outer = scope.start_hmac()
        self._inner.update(b"KVSP-BLOCK-1\0" + bytes.fromhex(descriptor.compat_id))
        self._parent = _START if parent is None else parent
        self._tail = b""

    def feed(self, tokens: Tokens) -> list[bytes]:
        """Append tokens and return the keys of the blocks they complete, in order.

        Raises `LocalProtocolError`, naming the position, for whatever is not an integer from 0 to 2^32-1;
        booleans and floats are none. Then nothing has been appended.
        """
        packed = self._tail + _packed(tokens)
        end = len(packed) - len(packed) % self._block.size
        start_inner, start_outer = self._inner.copy, self._outer.copy
        key = self._parent
        keys = []
        for (block,) in self._block.iter_unpack(packed[:end]):
            inner = start_inner()
            inner.update(key + block)
            outer = start_outer()
            outer.update(inner.digest())
            key = outer.digest()
            keys.append(key)
        self._parent = key
        self._tail = packed[end:]
        return keys

    @property
    def parent(self) -> bytes | None:
        """The key of the last complete block, from which another chain can go on; None before the first."""
        return None if self._parent == _START else self._parent

    @property
    def tail(self) -> tuple[int, ...]:
        """The tokens after the last complete block, which have no key."""
        words = array(_UINT32, self._tail)
        if byteorder == "little":
            words.byteswap()
        return tuple(words)

    def __repr__(self) -> str:
        return f"<BlockKeyChain: {len(self._tail) // _TOKEN_BYTES} tokens in the tail>"


def block_keys(
    scope: Scope, descriptor: CompatibilityDescriptor, tokens: Tokens, *, parent: bytes | None = None
) -> tuple[list[bytes], tuple[int, ...]]:
    """Return the keys of the complete blocks of a token sequence and the tokens after them.

    40 tokens at a block size of 16 give two keys and a tail of 8. See `BlockKeyChain` for arguments and
    errors.
    """
    chain = BlockKeyChain(scope, descriptor, parent=parent)
    return chain.feed(tokens), chain.tail


# Tokens as uint32 in network byte order -----------------------------------------------------------


def _packed(tokens: Tokens) -> bytes:
    if isinstance(tokens, (list, tuple)):
        return _packed_integers(tokens)
    if isinstance(tokens, (str, bytes, bytearray, Mapping, Set)):
        raise LocalProtocolError(
            f"tokens are integers in order, found {type(tokens).__name__}; "
            "octets that hold packed tokens go through memoryview(...).cast('I')"
        )
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return _packed_integers(_listed(tokens))
    return _packed_buffer(tokens, view)


def _listed(tokens: Tokens) -> list[SupportsIndex]:
    if not isinstance(tokens, Iterable):
        raise LocalProtocolError(f"tokens are integers in order, found {type(tokens).__name__}")
    return list(tokens)


def _packed_integers(tokens: Sequence[Any]) -> bytes:
    if operator.countOf(map(type, tokens), int) != len(tokens):  # rare: integers of other types, and mistakes
        tokens = [_plain_integer(token, position) for position, token in enumerate(tokens)]
    try:
        words = array(_UINT32, tokens)
    except OverflowError:
        _refuse_range(tokens)
    return _network_order(words)


def _plain_integer(token: Any, position: int) -> int:
    kind = type(token)
    if not (kind is bool or kind.__name__ in ("bool", "bool_")):
        try:
            return operator.index(token)
        except TypeError:
            pass
    raise LocalProtocolError(f"tokens[{position}]: expected an integer, found {kind.__name__}")


def _refuse_range(tokens: Iterable[int]) -> NoReturn:
    position = next(i for i, token in enumerate(tokens) if not 0 <= token <= _MAX_TOKEN)
    raise LocalProtocolError(f"tokens[{position}]: expected an integer from 0 to {_MAX_TOKEN}")


def _packed_buffer(tokens: Any, view: memoryview) -> bytes:
    order, code = view.format[:-1], view.format[-1:]
    if view.ndim != 1:
        raise LocalProtocolError(f"tokens are one sequence, found {view.ndim} dimensions")
    if code == "O":
        return _packed_integers(list(tokens))
    if code not in "bBhHiIlLqQnN" or order not in ("", "@", "=", "<", ">", "!"):
        raise LocalProtocolError(f"tokens are integers, found elements of format {view.format!r}")
    if hasattr(tokens, "astype"):  # a numpy array, without importing numpy here
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_TOKEN):
            _refuse_range(tokens.tolist())
        packed: bytes = tokens.astype(">u4").tobytes()
        return packed
    typecode = next(signed for signed in "bhiq" if array(signed).itemsize == view.itemsize)
    words = array(typecode.upper() if code.isupper() else typecode, view.tobytes())
    if order in (">", "!") if byteorder == "little" else order == "<":
        words.byteswap()
    if words.typecode in "IL" and words.itemsize == _TOKEN_BYTES:
        return _network_order(words)
    return _packed_integers(words.tolist())


def _network_order(words: array[int]) -> bytes:
    if byteorder == "little":
        words.byteswap()
    return words.tobytes()
