"""A lease that renews itself while it is held; when to do what is decided by `kvsp_core`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import anyio
import attrs

from kvsp_client.errors import ClientClosed, Refused, Unavailable
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.wire import Answer, Wire
from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.machines import lease_keeper as keeper
from kvsp_core.machines.lease_keeper import LeaseKeeper
from kvsp_core.messages import LeaseGranted, LeaseRenewal, LeaseRequest
from kvsp_core.problems import Problem
from kvsp_core.resources import CreateLease, ReleaseLease, RenewLease

__all__ = ["HolderLease", "Lease"]


class HolderLease:
    """A lease on blocks at one holder. Raises `InvalidValue` where no lease can be on them for so long."""

    def __init__(
        self,
        wire: Wire,
        holder: str,
        block_keys: Sequence[str],
        ttl_ms: int,
        *,
        settings: ClientSettings,
        stats: ClientStats,
    ) -> None:
        self.holder = holder
        self._wire = wire
        self._request = LeaseRequest(block_keys=tuple(block_keys), ttl_ms=ttl_ms)
        self._settings = settings
        self._stats = stats
        self._keeper = LeaseKeeper(ttl_ms)
        self._todo: deque[keeper.Effect] = deque()
        self._refusal: ClientClosed | Refused | Unavailable | None = None
        self._decided = anyio.Event()
        self._stopped = anyio.Event()

    @property
    def held(self) -> bool:
        """Whether the holder has promised to keep the blocks now."""
        self._let(keeper.TimerFired())
        return self._keeper.is_held

    async def granted(self) -> None:
        """Wait until there is a lease. Raises `Refused` and `Unavailable`, and `ClientClosed` where the
        client is closed meanwhile."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    async def run(self) -> None:
        """Get the lease, and renew it until it is given back or lost.

        One that is granted after it was given up is given back.
        """
        if self._stopped.is_set():  # it was given up before it began
            self._refusal = ClientClosed("the client was closed")
            self._decided.set()
            return
        try:
            self._let(keeper.Start())
            await self._work()
            if self._keeper.is_held:
                self._refusal = None
                self._stats.leases_granted += 1
            else:
                self._stats.leases_refused += 1
        except anyio.get_cancelled_exc_class():
            self._refusal = ClientClosed("the client was closed")
            raise
        finally:
            self._decided.set()
        while (due_ms := self._keeper.next_deadline_ms()) is not None:
            with anyio.move_on_after(max(0, due_ms - self._wire.now_ms()) / 1000):
                await self._stopped.wait()
            self._let(keeper.TimerFired())
            await self._work()

    def release(self) -> None:
        """Give the lease back, without waiting for the holder."""
        self._stopped.set()
        self._let(keeper.Release())
        for effect in self._todo:
            if isinstance(effect, keeper.GiveBack):
                self._wire.tell(self.holder, ReleaseLease(effect.lease))
        self._todo.clear()

    def _let(self, event: keeper.Event) -> None:
        self._todo.extend(self._keeper.handle(event, self._wire.now_ms()))

    async def _work(self) -> None:
        """Do what the keeper wants done, until it wants nothing for now."""
        while self._todo:
            match self._todo.popleft():
                case keeper.Acquire(ttl_ms):
                    await self._ask(CreateLease(), attrs.evolve(self._request, ttl_ms=ttl_ms))
                case keeper.Renew(lease, ttl_ms):
                    await self._ask(RenewLease(lease), LeaseRenewal(ttl_ms=ttl_ms))
                case keeper.GiveBack(lease):
                    self._wire.tell(self.holder, ReleaseLease(lease))
                case keeper.Lost():
                    self._stats.leases_lost += self._decided.is_set()
                case keeper.Held():
                    pass

    async def _ask(self, operation: CreateLease | RenewLease, body: LeaseRequest | LeaseRenewal) -> None:
        try:
            answer = await self._wire.ask(
                self.holder, operation, body, timeout_ms=self._settings.call_timeout_ms
            )
            self._let(self._answered(answer))
        except Unavailable as error:
            self._refusal = error
            self._let(keeper.Unanswered())

    def _answered(self, answer: Answer) -> keeper.Answered:
        problem = read_outcome(answer.response, answer.body)
        if problem is not None:
            self._refusal = Refused(self.holder, problem)
            return keeper.Answered(answer.response.status, max_ttl_ms=problem.max_ttl_ms)
        try:
            granted = read_answer(LeaseGranted, answer.response, answer.body)
        except RemoteProtocolError as error:
            raise Unavailable(f"{self.holder}: its answer is not as the protocol says: {error}") from None
        assert not isinstance(granted, Problem)
        return keeper.Answered(answer.response.status, granted.lease, granted.ttl_ms)


class Lease:
    """Leases on a prefix, one at each of its holders that granted one."""

    def __init__(self, parts: Iterable[HolderLease]) -> None:
        self._parts = tuple(parts)

    @property
    def held(self) -> bool:
        """Whether every holder that granted a lease still keeps its promise, and one did."""
        return bool(self._parts) and all(part.held for part in self._parts)

    @property
    def holders(self) -> tuple[str, ...]:
        """The holders that keep their blocks now."""
        return tuple(part.holder for part in self._parts if part.held)
