"""Load one block for a prefetch directive: lease, fetch, verify, store, release (PF-3, PF-6).

A `BlockLoad` drives a `Retrieval` and puts a lease before each of its fetches: nothing is fetched from a
holder before it has granted a lease on the block, so that it cannot evict it meanwhile. A refused lease is a
failed source, and the next one follows. Whatever way a load ends, every lease it was granted is released,
also one that is granted afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.machines import retrieval
from kvsp_core.machines.retrieval import CancelFetch, Fetch, Part, ReportBad, Retrieval
from kvsp_core.machines.table import Table, stays, to

__all__ = [
    "TABLE",
    "AcquireLease",
    "BlockLoad",
    "Cancel",
    "CancelFetch",
    "Effect",
    "Event",
    "Fetch",
    "Fetched",
    "Frozen",
    "LeaseGranted",
    "LeaseRefused",
    "LoadFailed",
    "LoadState",
    "Loaded",
    "ReleaseLease",
    "ReportBad",
    "Start",
    "Store",
    "StoreFailed",
    "Stored",
]


class LoadState(Enum):
    """How far a load has come."""

    READY = "ready"
    LOADING = "loading"
    STORING = "storing"
    OVER = "over"


# Events


@attrs.frozen
class Start:
    """Begin."""


@attrs.frozen
class LeaseGranted:
    """A holder granted the lease it was asked for."""

    holder: str
    lease: str = attrs.field(repr=False)


@attrs.frozen
class LeaseRefused:
    """A holder refused a lease, with this status, or did not answer (None)."""

    holder: str
    status: int | None


@attrs.frozen
class Fetched:
    """Something came of a fetch: an event of the retrieval."""

    event: retrieval.LayersArrived | retrieval.BlockEnded | retrieval.Refused | retrieval.FetchFailed


@attrs.frozen
class Stored:
    """The block is in a tier."""


@attrs.frozen
class StoreFailed:
    """The block could not be stored."""


@attrs.frozen
class Cancel:
    """Nobody waits for the block any more."""


Event: TypeAlias = Start | LeaseGranted | LeaseRefused | Fetched | Stored | StoreFailed | Cancel


# Effects


@attrs.frozen
class AcquireLease:
    """Ask a holder for a lease on the block."""

    holder: str
    ttl_ms: int


@attrs.frozen
class ReleaseLease:
    """Give a lease back."""

    holder: str
    lease: str = attrs.field(repr=False)


@attrs.frozen
class Store:
    """Put the verified block, whose layers came in these parts, in a tier; report `Stored` or
    `StoreFailed`."""

    digest: str = attrs.field(repr=False)
    parts: tuple[Part, ...]


@attrs.frozen
class Loaded:
    """The block is resident."""


@attrs.frozen
class LoadFailed:
    """The block cannot be had from these sources (`attempts`), or not be kept."""

    attempts: tuple[retrieval.Attempt, ...]
    storage: bool = False
    """Whether it is storage that failed: other sources would not help."""


Effect: TypeAlias = (
    AcquireLease | ReleaseLease | Fetch | CancelFetch | ReportBad | Store | Loaded | LoadFailed
)

_READY, _LOADING, _STORING, _OVER = LoadState
_LATE: Final = (LeaseGranted, LeaseRefused, Fetched)

TABLE: Final = Table(
    "load of a block",
    states=tuple(LoadState),
    events=get_args(Event),
    cells={
        _READY: {Start: to(_LOADING, _OVER), Cancel: to(_OVER)},
        _LOADING: {
            LeaseGranted: to(_LOADING),
            LeaseRefused: to(_LOADING, _OVER),
            Fetched: to(_LOADING, _STORING, _OVER),
            Cancel: to(_OVER),
        },
        # What is being stored becomes resident whether somebody waits or not.
        _STORING: {
            **stays(_STORING, *_LATE),
            Stored: to(_OVER),
            StoreFailed: to(_OVER),
            Cancel: to(_STORING),
        },
        _OVER: {**stays(_OVER, *_LATE), Cancel: to(_OVER)},
    },
)


@attrs.frozen(repr=False)
class Frozen:
    """A load as a value."""

    state: LoadState
    fetching: retrieval.Frozen
    lease_ms: int
    leases: tuple[tuple[str, str | None], ...]
    held_back: tuple[tuple[str, tuple[Fetch, ...]], ...]


class BlockLoad:
    """One block on its way into a tier, each of its sources under a lease of `lease_ms`."""

    def __init__(self, fetching: Retrieval, *, lease_ms: int) -> None:
        self.state = LoadState.READY
        self._retrieval = fetching
        self._lease_ms = lease_ms
        # Holder -> lease, or None while it is being asked for.
        self._leases: dict[str, str | None] = {}
        # Holder -> fetches that wait for its lease.
        self._held_back: dict[str, tuple[Fetch, ...]] = {}
        # Fetches that fail with the lease they waited for; empty between events.
        self._failing: set[int] = set()

    @property
    def finished(self) -> bool:
        """Whether it is over and no lease is still to come."""
        return self.state is LoadState.OVER and not self._leases

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done, in this order."""
        TABLE.check(self.state, event)
        match event:
            case Start():
                self.state = LoadState.LOADING
                return self._carry_out(self._retrieval.handle(retrieval.Start(), now_ms))
            case Fetched(of_fetch):
                return self._carry_out(self._retrieval.handle(of_fetch, now_ms))
            case LeaseGranted(holder, lease):
                return self._lease_granted(holder, lease)
            case LeaseRefused(holder, status):
                return self._lease_refused(holder, status, now_ms)
            case Stored():
                return (Loaded(), *self._end())
            case StoreFailed():
                return (*self._end(), LoadFailed((), storage=True))
            case Cancel():
                if self.state in (LoadState.STORING, LoadState.OVER):
                    return ()
                stopped = self._carry_out(self._retrieval.handle(retrieval.Cancel(), now_ms))
                return (*stopped, *self._end())
            case _:
                assert_never(event)

    def next_deadline_ms(self) -> int | None:
        """Return None: a load has no timers of its own."""
        return None

    def _carry_out(self, effects: Iterable[retrieval.Effect]) -> tuple[Effect, ...]:
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case Fetch():
                    done += self._fetch(effect)
                case CancelFetch(fetch):
                    if not self._was_held_back(fetch):
                        done.append(effect)
                case ReportBad():
                    done.append(effect)
                case retrieval.Done(digest, parts):
                    self.state = LoadState.STORING
                    done.append(Store(digest, parts))
                case retrieval.GiveUp(attempts):
                    done += (*self._end(), LoadFailed(attempts))
                case retrieval.LayersUsable() | retrieval.LayersWithdrawn():
                    pass  # Nobody computes with the block before the request is here.
                case _:
                    assert_never(effect)
        return tuple(done)

    def _fetch(self, fetch: Fetch) -> tuple[Effect, ...]:
        holder = fetch.holder
        if self._leases.get(holder) is not None:
            return (fetch,)
        self._held_back[holder] = (*self._held_back.get(holder, ()), fetch)
        if holder in self._leases:
            return ()
        self._leases[holder] = None
        return (AcquireLease(holder, self._lease_ms),)

    def _was_held_back(self, fetch: int) -> bool:
        if fetch in self._failing:
            self._failing.remove(fetch)
            return True
        for holder, waiting in self._held_back.items():
            kept = tuple(each for each in waiting if each.fetch != fetch)
            if kept != waiting:
                self._held_back[holder] = kept
                return True
        return False

    def _asked(self, holder: str) -> bool:
        return holder in self._leases and self._leases[holder] is None

    def _lease_granted(self, holder: str, lease: str) -> tuple[Effect, ...]:
        asked = self._asked(holder)
        if asked and self.state is LoadState.OVER:
            del self._leases[holder]
        if not asked or self.state is LoadState.OVER:
            return (ReleaseLease(holder, lease),)
        self._leases[holder] = lease
        return self._held_back.pop(holder, ())

    def _lease_refused(self, holder: str, status: int | None, now_ms: int) -> tuple[Effect, ...]:
        if not self._asked(holder):
            return ()
        del self._leases[holder]
        effects: list[Effect] = []
        waited = self._held_back.pop(holder, ())
        self._failing = {fetch.fetch for fetch in waited}
        for fetch in waited:
            if fetch.fetch not in self._failing:
                continue  # given up with one that failed before it
            self._failing.remove(fetch.fetch)
            failed: retrieval.Event = retrieval.FetchFailed(fetch.fetch)
            if status is not None:
                failed = retrieval.Refused(fetch.fetch, status)
            effects += self._carry_out(self._retrieval.handle(failed, now_ms))
        return tuple(effects)

    def _end(self) -> tuple[Effect, ...]:
        """Release the leases; those that are still being asked for are released when they come."""
        self.state = LoadState.OVER
        granted = [(holder, lease) for holder, lease in self._leases.items() if lease is not None]
        self._leases = {holder: None for holder, lease in self._leases.items() if lease is None}
        self._held_back.clear()
        self._failing.clear()
        return tuple(ReleaseLease(holder, lease) for holder, lease in granted)

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value."""
        return Frozen(
            self.state,
            self._retrieval.freeze(now_ms),
            self._lease_ms,
            tuple(self._leases.items()),
            tuple(self._held_back.items()),
        )

    @classmethod
    def thaw(cls, frozen: Frozen, now_ms: int) -> BlockLoad:
        """Return the load that `freeze` made this of."""
        self = cls(Retrieval.thaw(frozen.fetching, now_ms), lease_ms=frozen.lease_ms)
        self.state = frozen.state
        self._leases = dict(frozen.leases)
        self._held_back = dict(frozen.held_back)
        return self
