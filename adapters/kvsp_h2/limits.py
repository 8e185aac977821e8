"""Every limit and timeout of a connection with its default, and what happens when it is reached."""

from __future__ import annotations

import attrs

__all__ = ["WireLimits"]


def _positive(limits: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name}: expected at least 1")


def _window(limits: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 65_535 <= value < 1 << 31:
        raise ValueError(f"{attribute.name}: expected 65,535 (where every peer begins) to 2^31 - 1")


def _frame(limits: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 16_384 <= value < 1 << 24:
        raise ValueError(f"{attribute.name}: expected 16,384 to 2^24 - 1 (RFC 9113, 6.5.2)")


@attrs.frozen(kw_only=True)
class WireLimits:
    """Bounds of one connection. Sizes are in octets, durations in milliseconds."""

    max_streams: int = attrs.field(default=128, validator=_positive)
    """Exchanges at a time that a peer may have open with us; one more is reset with REFUSED_STREAM."""

    max_frame_bytes: int = attrs.field(default=1 << 20, validator=_frame)
    """Payload of a frame we take in; a larger one ends the connection with FRAME_SIZE_ERROR. DATA is
    passed on as it comes, so its size costs no memory."""

    stream_window_bytes: int = attrs.field(default=1 << 20, validator=_window)
    """Body octets of one exchange that a peer may send before we acknowledge them; more ends the connection
    with FLOW_CONTROL_ERROR."""

    connection_window_bytes: int = attrs.field(default=16 << 20, validator=_window)
    """The same for all exchanges together."""

    max_header_list_bytes: int = attrs.field(default=16 << 10, validator=_positive)
    """Size of a header list as RFC 9113, 6.5.2 counts it; a larger request is answered with 431, a larger
    response fails its exchange."""

    max_header_block_bytes: int = attrs.field(default=64 << 10, validator=_positive)
    """Header block as it is sent, and header list once decoded; more ends the connection with
    ENHANCE_YOUR_CALM."""

    max_header_frames: int = attrs.field(default=16, validator=_positive)
    """Frames of one header block; more ends the connection with ENHANCE_YOUR_CALM."""

    max_settings: int = attrs.field(default=64, validator=_positive)
    """Entries of a SETTINGS frame; more ends the connection with ENHANCE_YOUR_CALM."""

    max_control_bytes: int = attrs.field(default=256 << 10, validator=_positive)
    """Octets of heads and control frames that wait for a peer which does not read; more drops the
    connection."""

    resets_burst: int = attrs.field(default=1000, validator=_positive)
    """Exchanges that a peer may make us give up in a burst, by a reset or by frames that break the protocol;
    more ends the connection with ENHANCE_YOUR_CALM. Refilled by `resets_per_s`."""

    resets_per_s: int = attrs.field(default=100, validator=_positive)
    """See `resets_burst`."""

    control_burst: int = attrs.field(default=1000, validator=_positive)
    """Frames that bring nothing (PING, SETTINGS, PRIORITY, unknown ones, empty DATA, WINDOW_UPDATE of
    less than 1 KiB, heads with a status below 200, a second GOAWAY) in a burst; more ends the connection
    with ENHANCE_YOUR_CALM. Refilled by `control_per_s`."""

    control_per_s: int = attrs.field(default=100, validator=_positive)
    """See `control_burst`."""

    turn_frames: int = attrs.field(default=32, validator=_positive)
    """Frames that are read before other connections have their turn; the rest waits, and nothing more is
    taken from the peer meanwhile."""

    turn_bytes: int = attrs.field(default=4 << 20, validator=_positive)
    """About how many octets go out before other connections have their turn; the rest waits."""

    send_queue_bytes: int = attrs.field(default=1 << 20, validator=_positive)
    """Octets queued on an exchange from which on `send_data` reports pressure. `OutputReady` follows
    when it is down to half of that."""

    handshake_ms: int = attrs.field(default=10_000, validator=_positive)
    """Time for the TLS handshake; after it the connection is dropped."""

    head_ms: int = attrs.field(default=10_000, validator=_positive)
    """Time for a peer's first SETTINGS, and for the rest of a frame or header block that has begun;
    after it the connection ends with ENHANCE_YOUR_CALM."""

    idle_body_ms: int = attrs.field(default=30_000, validator=_positive)
    """Time without any octet moving on an exchange that waits for its peer, after which it is reset with
    CANCEL. Noticed at the latest after twice that."""

    linger_ms: int = attrs.field(default=2_000, validator=_positive)
    """Time for a client that is answered early to take note, before its body is cut off with a reset."""

    ping_ms: int = attrs.field(default=20_000, validator=_positive)
    """Silence of a peer after which it is asked with a PING whether it is there."""

    ping_timeout_ms: int = attrs.field(default=10_000, validator=_positive)
    """Time for any sign of life after that PING; then the connection is given up."""

    doubt_ms: int = attrs.field(default=2_000, validator=_positive)
    """Silence of a server that has a request of ours after which it is asked already; and time after any
    PING from which on a pool opens another connection rather than use that one."""

    idle_ms: int = attrs.field(default=300_000, validator=_positive)
    """Time without an exchange after which a connection is closed in order."""

    drain_ms: int = attrs.field(default=30_000, validator=_positive)
    """Time that a graceful shutdown leaves to exchanges under way."""

    close_ms: int = attrs.field(default=2_000, validator=_positive)
    """Time to hand the last octets to a peer that does not read, before the connection is dropped."""
