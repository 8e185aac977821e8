"""The errors the core raises.

Three kinds, told apart by who has to act: `LocalProtocolError` is a mistake of the calling program,
`RemoteProtocolError` a mistake in what a peer sent, `LimitExceeded` a bound that was reached. No other
exception leaves the core on account of its input.
"""

from __future__ import annotations

__all__ = ["KVSPError", "LimitExceeded", "LocalProtocolError", "RemoteProtocolError"]


class KVSPError(Exception):
    """The base of every error of KVSP."""


class LocalProtocolError(KVSPError):
    """The calling program did what the protocol or the state does not allow. Nothing has changed."""


class RemoteProtocolError(KVSPError):
    """What a peer sent is not what the protocol allows. Nothing has changed.

    `member` is the path of the faulty member in its document, such as ``residency[1].layers``, or an empty
    string where the fault is not in a member.
    """

    def __init__(self, detail: str, *, member: str = "") -> None:
        super().__init__(f"{member}: {detail}" if member else detail)
        self.detail = detail
        self.member = member


class LimitExceeded(KVSPError):
    """A configured limit was reached. Nothing has changed."""
