"""Store blocks from the caller's memory at a holder, which publishes what it is given."""

from __future__ import annotations

from typing import Final

import anyio
import attrs

from kvsp_client.errors import Unavailable
from kvsp_client.memory import Sections, octets_of
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.wire import Exchange, Wire
from kvsp_core.container import OutgoingBlock
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Response
from kvsp_core.prefix import PrefixKeys
from kvsp_core.resources import StoreBlock, request_for
from kvsp_core.storing import StoreOutcome, store_outcome
from kvsp_h2 import ContinueReceived, Event

__all__ = ["Store", "StoreResult"]

_TRIES: Final = 3
"""How often a holder is asked for one block, where it has too much to do or the connection was lost."""
_MAX_WAIT_S: Final = 1.0
_CONTINUE_S: Final = 1.0
"""How long a holder is waited for to say that it wants a body."""
_ANSWER_BYTES: Final = 16 << 10


@attrs.frozen(kw_only=True)
class StoreResult:
    """What became of blocks that were to be stored: an outcome for each, in order."""

    outcomes: tuple[StoreOutcome, ...]

    @property
    def stored(self) -> int:
        """How many blocks are new at the holder."""
        return self.outcomes.count(StoreOutcome.STORED)

    @property
    def present(self) -> int:
        """How many blocks the holder had already."""
        return self.outcomes.count(StoreOutcome.PRESENT)

    @property
    def failed(self) -> tuple[tuple[int, StoreOutcome], ...]:
        """The blocks that the holder does not have now, and why."""
        return tuple((n, outcome) for n, outcome in enumerate(self.outcomes) if not outcome.is_stored)

    @property
    def complete(self) -> bool:
        """Whether the holder has every block now."""
        return all(outcome.is_stored for outcome in self.outcomes)


class Store:
    """Blocks on their way to a holder, in prefix order, a few at a time."""

    def __init__(
        self,
        wire: Wire,
        holder: str,
        keys: PrefixKeys,
        sections: Sections,
        *,
        settings: ClientSettings,
        stats: ClientStats,
    ) -> None:
        self._wire = wire
        self._holder = holder
        self._keys = keys
        self._sections = sections
        self._settings = settings
        self._stats = stats
        self._header = ContainerHeader.for_layers(keys.descriptor)
        self._outcomes: list[StoreOutcome | None] = [None] * len(keys)
        self._next = 0
        self._ended = False
        self._error: Exception | None = None

    async def run(self, deadline_ms: int | None) -> StoreResult:
        """Store the blocks, and return what became of them. Faults of the holder are told by the result."""
        timeout = None if deadline_ms is None else deadline_ms / 1000
        with anyio.move_on_after(timeout) as scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(self._settings.concurrent_stores, len(self._keys))):
                    tasks.start_soon(self._work)
        if self._error is not None:
            raise self._error
        left = StoreOutcome.DEADLINE if scope.cancelled_caught else StoreOutcome.NOT_TRIED
        outcomes = tuple(outcome or left for outcome in self._outcomes)
        self._stats.stores.update(outcomes)
        result = StoreResult(outcomes=outcomes)
        self._stats.stored_bytes += result.stored * self._header.data_bytes
        return result

    async def _work(self) -> None:
        while self._next < len(self._keys) and not self._ended and self._error is None:
            block = self._next
            self._next += 1
            try:
                self._outcomes[block] = outcome = await self._store(block)
            except Exception as error:  # of the caller's `sections`
                self._error = self._error or error
                return
            self._ended = self._ended or outcome.ends_all

    async def _store(self, block: int) -> StoreOutcome:
        sections = [self._sections(block, layer) for layer in range(self._keys.descriptor.layers)]
        octets = [(octets_of(k_section), octets_of(v_section)) for k_section, v_section in sections]
        # One copy: many small pieces would cost more on their way, and the caller's memory is free again.
        container = b"".join(OutgoingBlock(self._header, octets).pieces)
        outcome = StoreOutcome.UNAVAILABLE
        for attempt in range(1, _TRIES + 1):
            response, wait_s = await self._send(block, container), 0.0
            if response is not None:
                outcome = store_outcome(response.status)
                if outcome is not StoreOutcome.UNAVAILABLE or response.retry_after_s is None:
                    return outcome
                wait_s = min(response.retry_after_s, _MAX_WAIT_S) * attempt / _TRIES
            await anyio.sleep(wait_s)
        return outcome

    async def _send(self, block: int, container: bytes) -> Response | None:
        """Send a container; return what the holder answered, or None where it did not."""
        keys = self._keys
        operation = StoreBlock(keys.descriptor.compat_id, keys.scope_id, keys.keys[block])
        sending = _Sending(container)
        try:
            sending.begin(self._wire, self._holder, operation)
        except Unavailable:
            return None
        try:
            quiet_s = 0.0
            while not sending.over.is_set() and quiet_s < self._settings.stall_ms / 1000:
                sending.moved = False
                with anyio.move_on_after(_CONTINUE_S):
                    await sending.over.wait()
                quiet_s = 0.0 if sending.moved else quiet_s + _CONTINUE_S
                sending.go_on()
        finally:
            sending.cancel()
        return sending.response if sending.over.is_set() and not sending.failure else None


class _Sending(Exchange):
    """Sends a container once the holder has said that it wants it, so that what is there already costs only
    a question; and after a while anyway, since not every server says so."""

    def __init__(self, container: bytes) -> None:
        super().__init__(_ANSWER_BYTES)
        self._container: bytes | None = container
        self.moved = False
        """Whether anything has happened; set back by who watches."""

    def begin(self, wire: Wire, holder: str, operation: StoreBlock) -> None:
        """Send the head of the request."""
        assert self._container is not None
        request, _ = request_for(operation, length=len(self._container))
        pool = wire.pool(holder)
        self.call = pool.call(request, on_event=self.on_event, end=False, expect_continue=True)
        if self.over.is_set():
            self.call.cancel()

    def on_event(self, event: Event) -> None:
        """Take an event of the exchange."""
        self.moved = True
        super().on_event(event)
        if isinstance(event, ContinueReceived):
            self.go_on()

    def go_on(self) -> None:
        """Send the body."""
        if self._container is not None and self.call is not None and not self.over.is_set():
            container, self._container = self._container, None
            self.call.send_data(container, end=True)

    def cancel(self) -> None:
        """Give the exchange up where it is not over."""
        if self.call is not None:
            self.call.cancel()
