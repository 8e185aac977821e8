"""The safety properties of sessions and of their output; all are gathered in `kvsp_sim.properties`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import Final

import attrs

from kvsp_sim.facts import (
    CheckpointAcknowledged,
    LineSeen,
    OutputEnded,
    SessionClosed,
    SessionGivenUp,
    SessionOwned,
    SessionResumed,
    SessionTold,
    SessionUnknown,
    StatusAcknowledged,
    StreamOpened,
    TokenDelivered,
    TokenDrawn,
)
from kvsp_sim.property import Property, shortened

__all__ = ["AcknowledgedIsKept", "OneSample", "SessionsAreFenced", "extend_history"]

_DIGEST_BYTES: Final = 16


def extend_history(history: bytes, token: int) -> bytes:
    """Return the digest of a token sequence with one token more; the empty sequence has ``b""``."""
    return hashlib.blake2b(history + token.to_bytes(4, "big"), digest_size=_DIGEST_BYTES).digest()


def _name(session: str) -> str:
    return f"session {shortened(session)}"


@attrs.define
class _Stream:
    history: bytes
    expected: int | None
    delivered: list[int] = attrs.field(factory=list)
    epoch: int = 0
    fresh: dict[int, int] = attrs.field(factory=dict)  # index -> token, as not overtaken by a newer epoch
    overtaken: bool = False
    ended: bool = False


class OneSample(Property):
    """Each index is delivered once, in order, none missing; what a user gets was drawn by engines token
    after token, each after exactly the tokens delivered before it; a token of an epoch older than one
    already seen is not delivered (CP-3, CP-4, CP-5, MG-3, MG-4).
    """

    name = "one_sample"

    def __init__(self) -> None:
        self._streams: dict[Hashable, _Stream] = {}
        self._drawn: dict[bytes, set[int]] = {}

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            StreamOpened: self._opened,
            TokenDrawn: self._token_drawn,
            LineSeen: self._line_seen,
            TokenDelivered: self._delivered,
            OutputEnded: self._ended,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return what was drawn, seen and delivered."""
        streams = frozenset(
            (name, s.history, tuple(s.delivered), s.epoch, frozenset(s.fresh.items()), s.overtaken, s.ended)
            for name, s in self._streams.items()
        )
        return streams, frozenset((history, frozenset(tokens)) for history, tokens in self._drawn.items())

    def _opened(self, fact: StreamOpened) -> None:
        self._streams[fact.stream] = _Stream(fact.history, fact.expected)

    def _token_drawn(self, fact: TokenDrawn) -> None:
        self._drawn.setdefault(fact.history, set()).add(fact.token)

    def _line_seen(self, fact: LineSeen) -> None:
        stream = self._streams[fact.stream]
        if fact.epoch > stream.epoch:
            stream.overtaken = stream.overtaken or bool(stream.fresh)
            stream.fresh.clear()
        if fact.epoch >= stream.epoch:
            stream.epoch = fact.epoch
            stream.fresh[fact.index] = fact.token
        elif fact.index not in stream.fresh:
            stream.overtaken = True

    def _delivered(self, fact: TokenDelivered) -> None:
        stream = self._streams[fact.stream]
        due = len(stream.delivered)
        if stream.ended:
            self.fail(f"{fact.stream}: index {fact.index} was delivered after the end")
        if fact.index != due:
            kind = "twice" if fact.index < due else "too early"
            self.fail(f"{fact.stream}: index {fact.index} was delivered {kind}; {due} was due")
        if fact.token not in self._drawn.get(stream.history, ()):
            self.fail(
                f"{fact.stream}: no engine drew the token at index {fact.index} after those delivered before"
            )
        fresh = stream.fresh.pop(fact.index, None)
        if stream.overtaken and fresh is None:
            self.fail(
                f"{fact.stream}: index {fact.index} was delivered from an epoch older than one already seen"
            )
        stream.delivered.append(fact.token)
        stream.history = extend_history(stream.history, fact.token)

    def _ended(self, fact: OutputEnded) -> None:
        stream = self._streams[fact.stream]
        if stream.ended:
            self.fail(f"{fact.stream}: the end was delivered twice")
        stream.ended = True
        count = len(stream.delivered)
        if fact.count is not None and fact.count != count:
            self.fail(f"{fact.stream}: the end says {fact.count} tokens, {count} were delivered")
        if stream.expected is not None and count != stream.expected:
            self.fail(f"{fact.stream}: {count} tokens were delivered, {stream.expected} were due")


class SessionsAreFenced(Property):
    """At most one instance extends a session in an epoch, and nothing of an old epoch takes effect (CP-2,
    MG-1, MG-3, ST-4).
    """

    name = "sessions_are_fenced"

    def __init__(self) -> None:
        self._owners: dict[str, tuple[int, str]] = {}
        self._epochs: dict[str, int] = {}

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            SessionOwned: self._owned,
            CheckpointAcknowledged: self._acknowledged,
            StatusAcknowledged: self._status,
            SessionClosed: self._closed,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return who owns which session in which epoch."""
        return frozenset(self._owners.items()), frozenset(self._epochs.items())

    def _owned(self, fact: SessionOwned) -> None:
        epoch, instance = self._owners.get(fact.session, (0, ""))
        if fact.epoch == epoch and fact.instance != instance:
            self.fail(f"{_name(fact.session)}: {instance} and {fact.instance} own epoch {epoch}")
        if fact.epoch < epoch:
            self.fail(f"{_name(fact.session)}: epoch {fact.epoch} was given to {fact.instance} after {epoch}")
        self._owners[fact.session] = (fact.epoch, fact.instance)

    def _acknowledged(self, fact: CheckpointAcknowledged) -> None:
        owner = self._owners.get(fact.session)
        if owner is not None and owner != (fact.epoch, fact.instance):
            self.fail(
                f"{_name(fact.session)}: a checkpoint of {fact.instance} in epoch {fact.epoch} was "
                f"acknowledged, {owner[1]} owns epoch {owner[0]}"
            )

    def _status(self, fact: StatusAcknowledged) -> None:
        if fact.epoch < self._epochs.get(fact.instance, 0):
            self.fail(
                f"{fact.instance}: a status of epoch {fact.epoch} was taken after one of a higher epoch"
            )
        self._epochs[fact.instance] = fact.epoch

    def _closed(self, fact: SessionClosed) -> None:
        self._owners.pop(fact.session, None)


class AcknowledgedIsKept(Property):
    """What was acknowledged is there after any crash (CP-2): a session resumes from all tokens
    acknowledged, and is not unknown before it is closed or its front end asks to end it.
    """

    name = "acknowledged_is_kept"

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, ...]] = {}
        self._given_up: set[str] = set()

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        return {
            CheckpointAcknowledged: self._acknowledged,
            SessionResumed: self._resumed,
            SessionTold: self._told,
            SessionGivenUp: self._gave_up,
            SessionUnknown: self._unknown,
            SessionClosed: self._closed,
        }

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return what was acknowledged, and which sessions may end."""
        return frozenset(self._kept.items()), frozenset(self._given_up)

    def _acknowledged(self, fact: CheckpointAcknowledged) -> None:
        kept = self._kept.get(fact.session, ())
        shorter, longer = sorted((kept, fact.generated), key=len)
        if longer[: len(shorter)] != shorter:
            self.fail(f"{_name(fact.session)}: a checkpoint was acknowledged that contradicts an earlier one")
        self._kept[fact.session] = longer

    def _resumed(self, fact: SessionResumed) -> None:
        kept = self._kept.get(fact.session, ())
        if fact.generated[: len(kept)] != kept:
            self.fail(
                f"{_name(fact.session)}: resumed from {len(fact.generated)} tokens, {len(kept)} were "
                "acknowledged"
            )

    def _told(self, fact: SessionTold) -> None:
        kept = len(self._kept.get(fact.session, ()))
        if fact.offset < kept:
            self.fail(f"{_name(fact.session)}: {fact.offset} tokens are recorded, {kept} were acknowledged")

    def _gave_up(self, fact: SessionGivenUp) -> None:
        self._given_up.add(fact.session)

    def _unknown(self, fact: SessionUnknown) -> None:
        if fact.session in self._kept and fact.session not in self._given_up:
            self.fail(f"{_name(fact.session)} is unknown, though a checkpoint of it was acknowledged")

    def _closed(self, fact: SessionClosed) -> None:
        self._kept.pop(fact.session, None)
