"""One lease for many blocks that are to be loaded from a holder (sections "Leases" and "Prefetch Directives";
PF-3, decision W16).

Each load asks for its block to be leased and says when it is done with it. The first to ask at a holder has
the blocks that are to be loaded from there after it leased along with its own, so that a prefetch of a long
prefix asks for a few leases and not for one a block. A lease that covers a block serves a load of it for half
of its time; after that a new one is asked for, together with what is left. It is given back when the last
load is done and none of its other blocks is wanted any more.

Where a holder grants shorter leases only, and says so, such a one is asked for from then on. It grants a
lease on all blocks or on none. Where it refuses several, those that loads wait for are asked for one by one,
and the next lease there is half as large; each that is granted may be twice as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.limits import MAX_MEASURED_LINKS, SHARED_LEASE_KEYS
from kvsp_core.machines.table import Table, to

__all__ = [
    "TABLE",
    "Answered",
    "Ask",
    "Done",
    "Effect",
    "Event",
    "GiveBack",
    "Granted",
    "Refused",
    "SharedLeases",
    "SharedState",
    "Unanswered",
    "Want",
]


class SharedState(Enum):
    """What there is of a lease that was asked for."""

    ABSENT = "absent"
    ASKED = "asked"
    HELD = "held"


# Events


@attrs.frozen(kw_only=True)
class Want:
    """A load wants its block leased at a holder; `ahead` are the blocks to be loaded from there next."""

    load: int
    holder: str
    block_key: str = attrs.field(repr=False)
    ttl_ms: int
    ahead: tuple[str, ...] = attrs.field(default=(), repr=False)


@attrs.frozen(kw_only=True)
class Answered:
    """A holder answered an `Ask`: with a lease and its time, or with a refusal's status, and the longest time
    that it grants where it said so."""

    request: int
    status: int
    lease: str = attrs.field(default="", repr=False)
    ttl_ms: int = 0
    max_ttl_ms: int | None = None


@attrs.frozen
class Unanswered:
    """A holder did not answer an `Ask`."""

    request: int


@attrs.frozen
class Done:
    """A load does not need what it was granted at this holder any more."""

    load: int
    holder: str


Event: TypeAlias = Want | Answered | Unanswered | Done


# Effects


@attrs.frozen
class Ask:
    """Ask a holder for a lease on these blocks; report `Answered` or `Unanswered`."""

    request: int
    holder: str
    block_keys: tuple[str, ...] = attrs.field(repr=False)
    ttl_ms: int


@attrs.frozen
class GiveBack:
    """Release a lease; the answer changes nothing."""

    holder: str
    lease: str = attrs.field(repr=False)


@attrs.frozen
class Granted:
    """A load has its block leased."""

    load: int
    holder: str
    lease: str = attrs.field(repr=False)


@attrs.frozen
class Refused:
    """A load's block is not leased at this holder: its refusal's status, or None without an answer."""

    load: int
    holder: str
    status: int | None


Effect: TypeAlias = Ask | GiveBack | Granted | Refused

_ABSENT, _ASKED, _HELD = SharedState

TABLE: Final = Table(
    "lease that loads share",
    states=tuple(SharedState),
    events=get_args(Event),
    cells={
        _ABSENT: {Want: to(_ASKED), Done: to(_ABSENT)},
        _ASKED: {
            Want: to(_ASKED),
            Answered: to(_HELD, _ASKED, _ABSENT),
            Unanswered: to(_ABSENT),
            Done: to(_ASKED),
        },
        # A load that asks when its time is half over has a new one asked for.
        _HELD: {Want: to(_HELD, _ASKED), Done: to(_HELD, _ABSENT)},
    },
)


@attrs.define(kw_only=True, repr=False)
class _Lease:
    """A lease that was asked for, and who needs it."""

    holder: str
    ttl_ms: int
    asked_ms: int
    waiting: dict[int, str]
    """The loads that wait for it, and their blocks."""
    ahead: dict[str, None]
    """The blocks that no load has asked for yet."""
    using: dict[int, str] = attrs.field(factory=dict)
    """The loads that it was granted to, and their blocks."""
    lease: str | None = None
    fresh_until_ms: int = 0

    @property
    def state(self) -> SharedState:
        return _ASKED if self.lease is None else _HELD


class SharedLeases:
    """The leases that the loads of one table share, at all holders; each of at most `most_keys` blocks."""

    def __init__(self, *, most_keys: int = SHARED_LEASE_KEYS) -> None:
        self._most_keys = most_keys
        self._leases: dict[int, _Lease] = {}  # by the number of the request for it
        self._covering: dict[tuple[str, str], int] = {}  # holder, block key -> lease
        self._granted: dict[tuple[int, str], int] = {}  # load, holder -> lease
        # How large, and how long, a lease may be at a holder that has refused one.
        self._sizes: dict[str, int] = {}
        self._longest_ms: dict[str, int] = {}
        self._idle: dict[int, None] = {}  # leases without a load, kept for the blocks ahead
        self._next_request = 0

    def room_at(self, holder: str) -> int:
        """Return how many blocks beside its own a load should name as `ahead` at this holder."""
        return self._sizes.get(holder, self._most_keys) - 1

    def state_of(self, holder: str, block_key: str) -> SharedState:
        """Return what there is of a lease on this block at this holder."""
        number = self._covering.get((holder, block_key))
        return _ABSENT if number is None else self._leases[number].state

    def next_deadline_ms(self) -> int | None:
        """Return None: leases run out at their holders, and nothing is done about it here."""
        return None

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done, in this order."""
        TABLE.check(self._state_for(event), event)
        match event:
            case Want():
                return self._want(event, now_ms)
            case Answered(request=request, status=status):
                lease = self._leases[request]
                if 200 <= status < 300:
                    return self._answered(request, lease, event)
                if event.max_ttl_ms is not None and event.max_ttl_ms < lease.ttl_ms:
                    return self._shortened(request, lease, event.max_ttl_ms, now_ms)
                return self._refused(request, lease, status, now_ms)
            case Unanswered(request):
                return self._refused(request, self._leases[request], None, now_ms)
            case Done(load, holder):
                number = self._granted.pop((load, holder), None)
                if number is None:
                    return ()
                lease = self._leases[number]
                self._uncover(number, holder, lease.using.pop(load))
                return self._settle(number)
            case _:
                assert_never(event)

    def release_unwanted(self, is_wanted: Callable[[str], bool]) -> tuple[GiveBack, ...]:
        """Give back the leases that no load has and of whose blocks none is wanted any more."""
        effects: list[GiveBack] = []
        for number in tuple(self._idle):
            lease = self._leases[number]
            for key in itertools.takewhile(lambda key: not is_wanted(key), tuple(lease.ahead)):
                del lease.ahead[key]
                self._uncover(number, lease.holder, key)
            effects += self._settle(number)
        return tuple(effects)

    def _state_for(self, event: Event) -> SharedState:
        match event:
            case Want():
                return self.state_of(event.holder, event.block_key)
            case Answered(request=request) | Unanswered(request):
                found = self._leases.get(request)
                return _ABSENT if found is None else found.state
            case Done():
                number = self._granted.get((event.load, event.holder))
                return _ABSENT if number is None else self._leases[number].state
            case _:
                assert_never(event)

    def _want(self, event: Want, now_ms: int) -> tuple[Effect, ...]:
        holder, key = event.holder, event.block_key
        number = self._covering.get((holder, key))
        lease = None if number is None else self._leases[number]
        if number is None or lease is None or not self._serves(lease, now_ms):
            ahead = (k for k in event.ahead if k != key and not self.is_served(holder, k, now_ms))
            return self._ask(holder, {event.load: key}, ahead, event.ttl_ms, now_ms)
        lease.ahead.pop(key, None)
        if lease.lease is None:
            lease.waiting[event.load] = key
            return ()
        self._idle.pop(number, None)
        return (self._grant(number, lease, event.load, key),)

    @staticmethod
    def _serves(lease: _Lease, now_ms: int) -> bool:
        return lease.lease is None or now_ms < lease.fresh_until_ms

    def is_served(self, holder: str, key: str, now_ms: int) -> bool:
        """Return whether a lease that is held or asked for will do for a load that begins now."""
        number = self._covering.get((holder, key))
        return number is not None and self._serves(self._leases[number], now_ms)

    def _ask(
        self, holder: str, waiting: dict[int, str], ahead: Iterable[str], ttl_ms: int, now_ms: int
    ) -> tuple[Effect, ...]:
        number = self._next_request
        self._next_request += 1
        ttl_ms = min(ttl_ms, self._longest_ms.get(holder, ttl_ms))
        own = dict.fromkeys(waiting.values())
        room = max(0, self.room_at(holder) + 1 - len(own))
        lease = self._leases[number] = _Lease(
            holder=holder,
            ttl_ms=ttl_ms,
            asked_ms=now_ms,
            waiting=waiting,
            ahead=dict.fromkeys(itertools.islice(ahead, room)),
        )
        effects: list[Effect] = [Ask(number, holder, (*own, *lease.ahead), ttl_ms)]
        for key in (*own, *lease.ahead):
            replaced = self._covering.get((holder, key))
            self._covering[holder, key] = number
            if replaced is not None:
                self._leases[replaced].ahead.pop(key, None)
                effects += self._settle(replaced)
        return tuple(effects)

    def _answered(self, number: int, lease: _Lease, event: Answered) -> tuple[Effect, ...]:
        lease.lease = event.lease
        # The holder counts from when it was asked, which is after we sent it; we count from before.
        lease.fresh_until_ms = lease.asked_ms + max(1, event.ttl_ms // 2)
        size = 2 * self._sizes.pop(lease.holder, self._most_keys)
        if size < self._most_keys:
            self._sizes[lease.holder] = size
        waiting, lease.waiting = lease.waiting, {}
        return tuple(self._grant(number, lease, load, key) for load, key in waiting.items())

    def _grant(self, number: int, lease: _Lease, load: int, key: str) -> Granted:
        assert lease.lease is not None
        lease.using[load] = key
        self._granted[load, lease.holder] = number
        return Granted(load, lease.holder, lease.lease)

    def _shortened(self, number: int, lease: _Lease, longest_ms: int, now_ms: int) -> tuple[Effect, ...]:
        """Ask for the same lease anew, for as long as the holder grants one."""
        del self._leases[number]
        for key in (*lease.waiting.values(), *lease.ahead):
            self._uncover(number, lease.holder, key)
        self._longest_ms.pop(lease.holder, None)
        self._longest_ms[lease.holder] = longest_ms
        if len(self._longest_ms) > MAX_MEASURED_LINKS:
            del self._longest_ms[next(iter(self._longest_ms))]
        return self._ask(lease.holder, lease.waiting, lease.ahead, longest_ms, now_ms)

    def _refused(self, number: int, lease: _Lease, status: int | None, now_ms: int) -> tuple[Effect, ...]:
        """Ask for the blocks of several one by one where the holder may have some of them."""
        del self._leases[number]
        keys = dict.fromkeys((*lease.waiting.values(), *lease.ahead))
        for key in keys:
            self._uncover(number, lease.holder, key)
        if len(keys) == 1 or status is None or status >= 500:
            return tuple(Refused(load, lease.holder, status) for load in lease.waiting)
        self._sizes.pop(lease.holder, None)
        self._sizes[lease.holder] = max(1, len(keys) // 2)
        if len(self._sizes) > MAX_MEASURED_LINKS:
            del self._sizes[next(iter(self._sizes))]
        asked: list[Effect] = []
        for load, key in lease.waiting.items():
            asked += self._ask(lease.holder, {load: key}, (), lease.ttl_ms, now_ms)
        return tuple(asked)

    def _uncover(self, number: int, holder: str, key: str) -> None:
        if self._covering.get((holder, key)) == number:
            del self._covering[holder, key]

    def _settle(self, number: int) -> tuple[GiveBack, ...]:
        """Give a lease back that nobody needs; keep it in mind where only blocks ahead need it."""
        lease = self._leases[number]
        if lease.lease is None or lease.using:
            return ()
        if lease.ahead:
            self._idle[number] = None
            return ()
        self._idle.pop(number, None)
        del self._leases[number]
        return (GiveBack(lease.holder, lease.lease),)

    def freeze(self, now_ms: int) -> Hashable:
        """Return all of it as a hashable value, times as what remains."""
        leases = (
            (
                *(number, each.holder, each.lease, each.ttl_ms),
                *(each.fresh_until_ms - now_ms, each.asked_ms - now_ms),
                *(tuple(each.waiting.items()), tuple(each.using.items()), tuple(each.ahead)),
            )
            for number, each in self._leases.items()
        )
        bounds = (tuple(self._sizes.items()), tuple(self._longest_ms.items()))
        return tuple(leases), bounds, self._next_request
