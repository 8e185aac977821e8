"""The header of a KV block container: as a value, and as octets that arrive (requirements KC-1, KC-2,
decision W6).

Protocol section "KV Block Container". `kvsp_core.container` is what programs use.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import MAX_CONTAINER_LAYERS
from kvsp_core.problems import BAD_REQUEST, INCOMPATIBLE, TOO_LARGE, Problem, ProblemType
from kvsp_core.registries import RAW_CODEC

__all__ = [
    "ENTRY_BYTES",
    "FIXED_BYTES",
    "ContainerError",
    "ContainerHeader",
    "HeaderReader",
    "section_bytes",
]

_FIXED: Final = struct.Struct(">4sBBHIII")
_ENTRY: Final = struct.Struct(">QQ")
FIXED_BYTES: Final = 20
ENTRY_BYTES: Final = 16
_MAGIC: Final = 0x4B564231
_VERSION: Final = 1
_MAX_UINT32: Final = 2**32 - 1
_MAX_UINT64: Final = 2**64 - 1


class ContainerError(RemoteProtocolError):
    """A container is not as the protocol says; `problem` is the answer to whoever sent it."""

    def __init__(self, problem_type: ProblemType, detail: str) -> None:
        super().__init__(detail)
        self.problem = Problem(problem_type, detail)


@attrs.frozen(kw_only=True)
class ContainerHeader:
    """The header of a container: what it holds and the octets of each section.

    `sections` gives for each layer, from `first_layer` on, the octets of its K and of its V section. Raises
    `LocalProtocolError` for a value that the header cannot carry.
    """

    codec: int
    first_layer: int = 0
    token_count: int
    sections: tuple[tuple[int, int], ...]

    def __attrs_post_init__(self) -> None:
        for name, value, lowest, highest in (
            ("codec", self.codec, 1, 0xFFFF),
            ("first_layer", self.first_layer, 0, _MAX_UINT32),
            ("token_count", self.token_count, 1, _MAX_UINT32),
            ("sections", len(self.sections), 1, _MAX_UINT32 + 1 - self.first_layer),
        ):
            if not lowest <= value <= highest:
                raise LocalProtocolError(f"container {name}: {value} is not within {lowest}..{highest}")
        if not all(0 <= size <= _MAX_UINT64 for pair in self.sections for size in pair):
            raise LocalProtocolError("container sections: a length is not within 0..2^64-1")

    @classmethod
    def for_layers(
        cls,
        descriptor: CompatibilityDescriptor,
        *,
        codec: int = RAW_CODEC,
        first_layer: int = 0,
        layer_count: int | None = None,
        token_count: int | None = None,
    ) -> ContainerHeader:
        """Return the header of a block, or of a range of its layers, in a codec whose sections have one size.

        All layers from `first_layer` on and a complete block are the defaults.
        """
        entry = descriptor.registries.codecs.get(codec)
        if entry is None or entry.section_bytes is None:
            raise LocalProtocolError(f"codec {codec}: its sections have no fixed size; give them one by one")
        tokens = descriptor.block_tokens if token_count is None else token_count
        count = descriptor.layers - first_layer if layer_count is None else layer_count
        size = section_bytes(descriptor, codec, tokens)
        assert size is not None
        return cls(codec=codec, first_layer=first_layer, token_count=tokens, sections=((size, size),) * count)

    @property
    def layers(self) -> range:
        """The layers of the container, in order."""
        return range(self.first_layer, self.first_layer + len(self.sections))

    @property
    def header_bytes(self) -> int:
        """The octets of the header itself."""
        return FIXED_BYTES + ENTRY_BYTES * len(self.sections)

    @property
    def data_bytes(self) -> int:
        """The octets of all sections, which is the `size` of a replica of all layers (decision W9)."""
        return sum(k_bytes + v_bytes for k_bytes, v_bytes in self.sections)

    @property
    def size_bytes(self) -> int:
        """The octets of the whole container."""
        return self.header_bytes + self.data_bytes

    def encode(self) -> bytes:
        """Return the header as it goes on the wire."""
        fixed = _FIXED.pack(
            b"KVB1", _VERSION, 0, self.codec, self.first_layer, len(self.sections), self.token_count
        )
        return fixed + b"".join(_ENTRY.pack(*pair) for pair in self.sections)


def section_bytes(descriptor: CompatibilityDescriptor, codec: int, token_count: int) -> int | None:
    """Return the octets that each section must have, or None where the codec does not fix them."""
    entry = descriptor.registries.codecs.get(codec)
    if entry is None or entry.section_bytes is None:
        return None
    elements = token_count * descriptor.kv_heads * descriptor.head_dim
    return entry.section_bytes(elements, descriptor.registries.element_types[descriptor.kv_dtype].size_bytes)


class HeaderReader:
    """Reads a header as it arrives and refuses it at the first octet after which no allowed header remains.

    `descriptor`, `codec` and `layers` are what the header has to fit, `declared` the size of the whole
    container that its sender states, `room` the largest allowed. Raises `ContainerError` where `declared` is
    larger than that.
    """

    def __init__(
        self,
        *,
        descriptor: CompatibilityDescriptor | None = None,
        codec: int | None = None,
        layers: range | None = None,
        declared: int | None = None,
        room: int,
    ) -> None:
        if declared is not None and declared > room:
            raise ContainerError(
                TOO_LARGE, f"a container of {declared} octets is larger than the {room} allowed"
            )
        self._descriptor = descriptor
        self._codec = codec
        self._layers = layers
        self._declared = declared
        self._room = room if declared is None else declared
        self._size_problem, self._size_detail = (
            (TOO_LARGE, f"the container is larger than the {room} octets allowed")
            if declared is None
            else (BAD_REQUEST, f"the header does not give the {declared} octets that were declared")
        )
        self._section_bytes: int | None = None
        self._count: int | None = None
        self._sections: list[tuple[int, int]] = []
        self._used = 0

    @property
    def header_bytes(self) -> int:
        """The octets of the header, as far as is known."""
        return FIXED_BYTES + ENTRY_BYTES * (self._count or 0)

    def read(self, octets: memoryview) -> ContainerHeader | None:
        """Read on, given all octets so far; return the header once it is complete.

        Raises `ContainerError` where it is not allowed.
        """
        if self._count is None:
            token_count = self._check_prefixes(octets)
            if token_count is None:
                return None
            self._count = int.from_bytes(octets[12:16], "big")
            self._used = self.header_bytes
        if not self._check_table(octets, self._count):
            return None
        _, _, _, codec, first_layer, _, token_count = _FIXED.unpack_from(octets)
        return ContainerHeader(
            codec=codec, first_layer=first_layer, token_count=token_count, sections=tuple(self._sections)
        )

    def _check_prefixes(self, octets: memoryview) -> int | None:
        """Check what precedes the table, giving the fault that a sender of single octets would be told first:
        several bounds meet in one field, and which is exceeded first must not depend on the split.
        """
        try:
            return self._check_fixed(octets)
        except ContainerError:
            for end in range(min(octets.nbytes, FIXED_BYTES)):
                self._check_fixed(octets[:end])
            raise

    def _check_fixed(self, octets: memoryview) -> int | None:
        """Check what precedes the table of lengths; return the token count once it is there."""
        _field(octets, 0, 4, _MAGIC, _MAGIC, BAD_REQUEST, "no container: it does not start with KVB1")
        _field(
            octets, 4, 1, _VERSION, _VERSION, BAD_REQUEST, f"the version of the container is not {_VERSION}"
        )
        _field(octets, 5, 1, 0, 0, BAD_REQUEST, "the container has flags, which version 1 does not define")
        codec = _field(
            octets, 6, 2, 1, 0xFFFF, BAD_REQUEST, "the codec of the container is 0, which is reserved"
        )
        if self._codec is not None:
            detail = f"the codec of the container is not the {self._codec} that was asked for"
            _field(octets, 6, 2, self._codec, self._codec, BAD_REQUEST, detail)
        if codec is None:
            return None
        tokens, most_tokens, problem = 1, _MAX_UINT32, BAD_REQUEST
        if self._descriptor is not None:
            tokens = most_tokens = self._descriptor.block_tokens
            problem = INCOMPATIBLE
            self._section_bytes = section_bytes(self._descriptor, codec, tokens)
        self._check_layers(octets)
        detail = f"the token count of the container is not within {tokens}..{most_tokens}"
        return _field(octets, 16, 4, tokens, most_tokens, problem, detail)

    def _check_layers(self, octets: memoryview) -> None:
        asked = self._layers
        if asked is not None:
            detail = "the container does not hold the layers asked for"
            _field(octets, 8, 4, asked.start, asked.start, BAD_REQUEST, detail)
            _field(octets, 12, 4, len(asked), len(asked), BAD_REQUEST, detail)
        known = _MAX_UINT32 + 1 if self._descriptor is None else self._descriptor.layers
        problem = BAD_REQUEST if self._descriptor is None else INCOMPATIBLE
        detail = f"the container has layers beyond the {known} of its model"
        first = _field(octets, 8, 4, 0, known - 1, problem, detail)
        if first is None:
            return
        _field(octets, 12, 4, 0, known - first, problem, detail)
        _field(octets, 12, 4, 1, _MAX_UINT32, BAD_REQUEST, "the container holds no layer")
        too_many = f"the container has more than {MAX_CONTAINER_LAYERS} layers"
        _field(octets, 12, 4, 1, MAX_CONTAINER_LAYERS, TOO_LARGE, too_many)
        layer_bytes = ENTRY_BYTES + 2 * (self._section_bytes or 0)
        fit, rest = divmod(self._room - FIXED_BYTES, layer_bytes)
        if self._declared is not None and self._section_bytes is not None:
            self._size_field(octets, 12, 4, *((fit, fit) if rest == 0 else (1, 0)))
        else:
            self._size_field(octets, 12, 4, 1, fit)

    def _check_table(self, octets: memoryview, count: int) -> bool:
        """Check the lengths of the sections that are here; return whether all are."""
        fixed = self._section_bytes
        if not self._sections and octets.nbytes >= self.header_bytes:
            self._take_whole_table(octets, fixed)
        while len(self._sections) < count:
            start = FIXED_BYTES + ENTRY_BYTES * len(self._sections)
            left = self._room - self._used
            is_last = len(self._sections) == count - 1 and self._declared is not None
            if fixed is None:
                k_bytes = self._size_field(octets, start, 8, 0, left)
                least = left - (k_bytes or 0) if is_last else 0
                v_bytes = self._size_field(octets, start + 8, 8, least, left - (k_bytes or 0))
            else:
                detail = f"a section does not have the {fixed} octets that the descriptor gives it"
                k_bytes = _field(octets, start, 8, fixed, fixed, INCOMPATIBLE, detail)
                v_bytes = _field(octets, start + 8, 8, fixed, fixed, INCOMPATIBLE, detail)
            if k_bytes is None or v_bytes is None:
                return False
            self._sections.append((k_bytes, v_bytes))
            self._used += k_bytes + v_bytes
        return True

    def _take_whole_table(self, octets: memoryview, fixed: int | None) -> None:
        """Take a table that is here as a whole and right; any other is left to be read field by field."""
        table = tuple(_ENTRY.iter_unpack(octets[FIXED_BYTES : self.header_bytes]))
        total = self.header_bytes + sum(k_bytes + v_bytes for k_bytes, v_bytes in table)
        fits = total == self._room if self._declared is not None else total <= self._room
        if fits and (fixed is None or table.count((fixed, fixed)) == len(table)):
            self._sections, self._used = list(table), total

    def _size_field(self, octets: memoryview, start: int, width: int, least: int, most: int) -> int | None:
        return _field(octets, start, width, least, most, self._size_problem, self._size_detail)


def _field(
    octets: memoryview, start: int, width: int, least: int, most: int, problem: ProblemType, detail: str
) -> int | None:
    """Return the number in a field, or None where it is not complete.

    Raises `ContainerError` once it cannot become a number within `least` and `most`, which may be before it
    is complete.
    """
    seen = octets[start : start + width]
    if not seen:
        return None
    missing_bits = 8 * (width - len(seen))
    lowest = int.from_bytes(seen, "big") << missing_bits
    highest = lowest | (1 << missing_bits) - 1
    if highest < least or lowest > most:
        raise ContainerError(problem, detail)
    return None if missing_bits else lowest
