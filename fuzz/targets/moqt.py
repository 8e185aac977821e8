"""A ``moqt_namespace``: any text gives its five fields and is made of them again, or the documented error."""

from __future__ import annotations

from kvsp_core.validation import MOQT_FIELDS, InvalidValue, moqt_fields, moqt_namespace

SEEDS = (
    moqt_namespace((b"kvsp", b"a" * 32, b"b" * 16, b"c", b"\xff" * 255)).encode(),
    moqt_namespace((b"\x00", b"\x01", b"\x02", b"\x03", b"\x04")).encode(),
    b"AWEBYgFjAWQBZQ",
    b"AWEBYgFjAWQBZQ==",
    b"AAAA",
    b"",
)


def one_input(data: bytes) -> None:
    """Read text as a namespace; and make a namespace of octets, cut into fields where a zero stands."""
    text = data.decode("latin-1")
    try:
        fields = moqt_fields(text)
    except InvalidValue:
        pass
    else:
        assert len(fields) == MOQT_FIELDS
        assert all(1 <= len(field) <= 255 for field in fields)
        assert moqt_namespace(fields) == text
    pieces = data.split(b"\x00")
    try:
        made = moqt_namespace(pieces)
    except InvalidValue:
        return
    assert moqt_fields(made) == tuple(pieces)
