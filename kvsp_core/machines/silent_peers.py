"""Which peers gave no answer: who would ask them goes on without, instead of waiting for them anew, and now
and then a probe asks whether they are back.
"""

from __future__ import annotations

from kvsp_core.machines.alarms import earliest

__all__ = ["SilentPeers"]


class SilentPeers:
    """The peers that are silent.

    The first probe of one is due at once, in case only a call was lost, and each further one `retry_ms` after
    the one before has failed. One is under way at a time.
    """

    def __init__(self, *, retry_ms: int) -> None:
        self._retry_ms = retry_ms
        self._probe_at_ms: dict[str, int | None] = {}  # None while the probe is under way

    def __contains__(self, peer: str) -> bool:
        return peer in self._probe_at_ms

    def note_answer(self, peer: str) -> None:
        """A peer has answered, whatever it said: it is not silent."""
        self._probe_at_ms.pop(peer, None)

    def note_silence(self, peer: str, now_ms: int) -> None:
        """A call of a peer got no answer."""
        self._probe_at_ms.setdefault(peer, now_ms)

    def note_probe_failed(self, peer: str, now_ms: int) -> None:
        """The probe of a peer got no answer; nothing changes where another call of it did meanwhile."""
        if peer in self._probe_at_ms:
            self._probe_at_ms[peer] = now_ms + self._retry_ms

    def take_due(self, now_ms: int) -> tuple[str, ...]:
        """Return the peers that are to be probed now."""
        due = tuple(
            peer for peer, at_ms in self._probe_at_ms.items() if at_ms is not None and at_ms <= now_ms
        )
        self._probe_at_ms.update(dict.fromkeys(due))
        return due

    def next_deadline_ms(self) -> int | None:
        """Return when `take_due` is next due, or None."""
        return earliest(*self._probe_at_ms.values())

    def freeze(self, now_ms: int) -> tuple[tuple[str, int | None], ...]:
        """Return all of it as a hashable value, times as what remains."""
        return tuple(
            sorted((p, None if at_ms is None else at_ms - now_ms) for p, at_ms in self._probe_at_ms.items())
        )
