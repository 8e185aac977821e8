"""The sessions of a controller: their ledgers, who owns which, and which wait for another instance.

When an instance is lost all its sessions are fenced at once, in one durable batch; finding each another
instance goes through a line with credits, so that a thousand sessions that fail over together are a
thousand small steps and not one flood (decision W20). Half of the credits are kept for sessions that somebody
asks about, the last asked first: those whose front end is gone do not hold up the others. Time in line does
not count as time without an instance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from types import MappingProxyType
from typing import Final

from kvsp_core.ext_messages import SessionInfo
from kvsp_core.limits import MAX_CONCURRENT_RESUMES, MAX_SESSIONS
from kvsp_core.machines.alarms import Alarms
from kvsp_core.machines.session import (
    DEFAULT_TIMES,
    Close,
    Effect,
    Event,
    Forget,
    NeedTarget,
    Owner,
    OwnerLost,
    SessionKind,
    SessionLedger,
    SessionTimes,
    TimerFired,
)
from kvsp_core.roles.controller_store import StoredSession, session_writes
from kvsp_core.roles.role import Persist, Write
from kvsp_core.roles.work import Work

__all__ = ["Sessions"]

_IN_TRANSIT: Final = (SessionKind.ORPHANED, SessionKind.RESUMING)
_STATES: Final = MappingProxyType({SessionKind.ORPHANED: SessionKind.RESUMING.value})


class Sessions:
    """All sessions of one controller.

    `apply` lets something happen to one of them: what is to be durable goes to `work` at once, and the rest
    of the effects come back, for the role to do. Sessions that need an instance are taken with
    `next_orphan`; `wait` puts one back until instances have changed (`retry_waiting`).
    """

    def __init__(
        self,
        work: Work,
        *,
        times: SessionTimes = DEFAULT_TIMES,
        max_sessions: int = MAX_SESSIONS,
        max_resumes: int = MAX_CONCURRENT_RESUMES,
    ) -> None:
        self._work = work
        self._times = times
        self._max_sessions = max_sessions
        self._max_resumes = max_resumes
        self._ledgers: dict[str, SessionLedger] = {}
        self._owned: dict[Owner, dict[str, None]] = {}
        self._alarms: Alarms[str] = Alarms()
        # Sessions that need an instance: in line, under way (each holds a credit), and out of luck for now.
        self._line: OrderedDict[str, None] = OrderedDict()
        self._asked: OrderedDict[str, None] = OrderedDict()  # those of the line that somebody asked about
        self._moving: dict[str, None] = {}
        self._waiting_until_ms: dict[str, int] = {}  # with when each is given up
        self._until_ms: dict[str, int] = {}  # when a session without an instance is given up at the latest
        self._left_ms: dict[str, int] = {}  # how long it may still be put aside, where it was before

    def __iter__(self) -> Iterator[SessionLedger]:
        return iter(self._ledgers.values())

    @property
    def is_full(self) -> bool:
        """Whether no further session can be opened."""
        return len(self._ledgers) >= self._max_sessions

    def get(self, session: str) -> SessionLedger | None:
        """Return the ledger of a session, or None."""
        return self._ledgers.get(session)

    def owned_by(self, owner: Owner) -> int:
        """Return how many sessions an incarnation owns."""
        return len(self._owned.get(owner, ()))

    def owners(self) -> tuple[Owner, ...]:
        """Return the incarnations that own sessions."""
        return tuple(self._owned)

    def next_deadline_ms(self) -> int | None:
        """Return when `fire` is next due, or None. It may be early."""
        return self._alarms.next_ms()

    # Opening and restoring

    def open(
        self, *, session: str, client: str, compat_id: str, scope_id: str, deterministic: bool
    ) -> SessionLedger:
        """Enter a new session, for `Open` to be applied to."""
        ledger = SessionLedger(
            session=session,
            client=client,
            compat_id=compat_id,
            scope_id=scope_id,
            deterministic=deterministic,
            times=self._times,
        )
        self._ledgers[session] = ledger
        return ledger

    def restore(self, stored: StoredSession, now_ms: int) -> tuple[Effect, ...]:
        """Take in a session that was stored; return what the role is to do about it."""
        ledger, effects = SessionLedger.restore(
            stored.record, stored.prompt, stored.tokens, now_ms, times=self._times
        )
        session = stored.record.session
        self._ledgers[session] = ledger
        if ledger.kind is SessionKind.RESUMING:
            self._moving[session] = None
        return self._settle(ledger, None, effects)

    # Events

    def apply(self, ledger: SessionLedger, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen to a session; return what the role is to do, persistence excepted."""
        before = ledger.owner
        effects = ledger.handle(event, now_ms)
        return self._settle(ledger, before, effects)

    def fire(self, now_ms: int) -> list[tuple[SessionLedger, tuple[Effect, ...]]]:
        """Let the deadlines that have come take effect."""
        done = []
        for session in self._alarms.take_due(now_ms):
            ledger = self._ledgers.get(session)
            if ledger is not None:
                done.append((ledger, self.apply(ledger, TimerFired(), now_ms)))
        return done

    def lose(self, owner: Owner, now_ms: int) -> list[tuple[SessionLedger, tuple[Effect, ...]]]:
        """Fence every session of an incarnation that is gone, in one durable batch."""
        return self._fence([self._ledgers[session] for session in self._owned.get(owner, ())], now_ms)

    def displace(
        self, may_serve: Callable[[str, str], bool], now_ms: int
    ) -> list[tuple[SessionLedger, tuple[Effect, ...]]]:
        """Fence every session whose instance may not serve its scope any more, in one durable batch: nothing
        that it sends would be recorded."""
        displaced = [
            ledger
            for ledger in self._ledgers.values()
            if ledger.owner is not None and not may_serve(ledger.owner.instance, ledger.record.scope_id)
        ]
        return self._fence(displaced, now_ms)

    def _fence(
        self, ledgers: Iterable[SessionLedger], now_ms: int
    ) -> list[tuple[SessionLedger, tuple[Effect, ...]]]:
        writes: list[Write] = []
        done = []
        for ledger in ledgers:
            owner = ledger.owner
            assert owner is not None
            effects = ledger.handle(OwnerLost(owner), now_ms)
            writes += session_writes(ledger.record.session, effects)
            done.append((ledger, self._settle(ledger, owner, effects, persist=False)))
        if writes:
            self._work.emit(Persist(tuple(writes)))
        return done

    def purge(self, scopes: Collection[str], now_ms: int) -> list[tuple[SessionLedger, tuple[Effect, ...]]]:
        """End every session of these scopes and delete what is stored of it, in one durable batch."""
        writes: list[Write] = []
        done = []
        for ledger in tuple(self._ledgers.values()):
            if ledger.record.scope_id in scopes:
                before = ledger.owner
                ledger.handle(Close(), now_ms)
                writes += session_writes(ledger.record.session, (Forget(),))
                done.append((ledger, self._settle(ledger, before, (Forget(),), persist=False)))
        if writes:
            self._work.emit(Persist(tuple(writes)))
        return done

    def _settle(
        self,
        ledger: SessionLedger,
        before: Owner | None,
        effects: tuple[Effect, ...],
        *,
        persist: bool = True,
    ) -> tuple[Effect, ...]:
        """Bring in line who owns it, when it is due and whether it waits; persist what is to be durable."""
        session = ledger.record.session
        if persist and (writes := tuple(session_writes(session, effects))):
            self._work.emit(Persist(writes))
        if ledger.owner != before:
            self._disown(before, session)
            if ledger.owner is not None:
                self._owned.setdefault(ledger.owner, {})[session] = None
        until_ms = ledger.next_deadline_ms()
        if ledger.kind is SessionKind.ORPHANED and until_ms is not None:
            latest_ms = self._until_ms.setdefault(session, until_ms + self._times.idle_ms)
            until_ms = self._waiting_until_ms.get(session, latest_ms)
        else:
            self._until_ms.pop(session, None)
            self._left_ms.pop(session, None)
        self._alarms.set(session, until_ms)
        if ledger.kind not in _IN_TRANSIT:
            self._line.pop(session, None)
            self._asked.pop(session, None)
            self._moving.pop(session, None)
            self._waiting_until_ms.pop(session, None)
        for effect in effects:
            match effect:
                case NeedTarget():
                    self._moving.pop(session, None)
                    self._line[session] = None
                case Forget():
                    del self._ledgers[session]
                    self._alarms.set(session, None)
                case _:
                    pass
        return effects

    def _disown(self, owner: Owner | None, session: str) -> None:
        if owner is not None and owner in self._owned:
            self._owned[owner].pop(session, None)
            if not self._owned[owner]:
                del self._owned[owner]

    # Sessions that need an instance

    def next_orphan(self) -> SessionLedger | None:
        """Take the next session that needs an instance, if there is a credit for it."""
        if self._asked and len(self._moving) < self._max_resumes:
            session, _ = self._asked.popitem()
            del self._line[session]
        elif self._line and len(self._moving) < max(1, self._max_resumes // 2):
            session, _ = self._line.popitem(last=False)
            self._asked.pop(session, None)
        else:
            return None
        self._moving[session] = None
        return self._ledgers[session]

    def ask_about(self, ledger: SessionLedger) -> None:
        """Take note that whoever opened a session wants it: where it is in line, it is the next."""
        session = ledger.record.session
        if session in self._line:
            self._asked[session] = None
            self._asked.move_to_end(session)

    def wait(self, ledger: SessionLedger, now_ms: int) -> None:
        """Put a session aside for which there is no instance now. This time counts, in sum."""
        session = ledger.record.session
        self._moving.pop(session, None)
        left_ms = self._left_ms.get(session, self._times.wait_ms)
        self._waiting_until_ms[session] = until_ms = min(self._until_ms[session], now_ms + left_ms)
        self._alarms.set(session, until_ms)

    def retry_waiting(self, now_ms: int) -> None:
        """Put the sessions that were put aside in line again: instances have changed."""
        for session, until_ms in self._waiting_until_ms.items():
            self._left_ms[session] = max(0, until_ms - now_ms)
            self._line[session] = None
            self._alarms.set(session, self._until_ms[session])
        self._waiting_until_ms.clear()

    # Seen from outside

    @staticmethod
    def info(ledger: SessionLedger) -> SessionInfo:
        """Return what a front end or an operator may see of a session."""
        record = ledger.record
        return SessionInfo(
            session=record.session,
            state=_STATES.get(record.kind, record.kind.value),
            epoch=record.epoch,
            instance=record.owner.instance if record.owner else None,
            output_offset=record.output_offset,
            detail=record.reason or None,
        )
