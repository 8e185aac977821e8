"""Fetch a prefix into the caller's memory; what is asked of whom is decided by `kvsp_core`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeAlias

import anyio
import attrs

from kvsp_client.errors import LayersWithdrawn, Unavailable
from kvsp_client.memory import Sections, octets_of
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.wire import Wire
from kvsp_core.container import BlockArrived, BlockRefused
from kvsp_core.container_header import ContainerError, ContainerHeader
from kvsp_core.errors import LocalProtocolError
from kvsp_core.heads import Response
from kvsp_core.identity import component_id
from kvsp_core.index_parts import IndexParts
from kvsp_core.machines import prefix_load as load
from kvsp_core.machines import retrieval
from kvsp_core.machines.prefix_load import Miss, MissReason, PrefixLoad
from kvsp_core.machines.retrieval import Outcome, Retrieval, outcome_of_status
from kvsp_core.messages import Withdrawal
from kvsp_core.prefix import Prefix, in_order
from kvsp_core.registries import RAW_CODEC
from kvsp_core.resources import GetBlock, WithdrawReplica
from kvsp_core.scattered import LayersArrived, ScatteredBlock, ScatteredEvent
from kvsp_h2 import BodyEnded, DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_h2.pool import Call

__all__ = ["Avoided", "Fetch", "FetchResult"]

_NEVER: Final = 1 << 62
_Rooms: TypeAlias = tuple[memoryview, memoryview]


@attrs.frozen(kw_only=True)
class FetchResult:
    """What a fetch has brought: the leading `blocks`, complete and verified.

    `withdrawn` are blocks with layers that were usable once and cannot be relied on any more.
    """

    blocks: int
    tokens: int
    requested: int
    """How many blocks were asked for."""
    misses: tuple[Miss, ...] = ()
    withdrawn: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every block is there."""
        return self.blocks == self.requested


class Avoided:
    """Holders that failed lately."""

    def __init__(self, avoid_ms: int) -> None:
        self._avoid_ms = avoid_ms
        self._until_ms: dict[str, int] = {}

    def add(self, holder: str, now_ms: int) -> None:
        """Ask this holder last for a while."""
        self._until_ms[holder] = now_ms + self._avoid_ms

    def at(self, now_ms: int) -> frozenset[str]:
        """Return who is to be asked last now."""
        if self._until_ms:
            self._until_ms = {holder: due for holder, due in self._until_ms.items() if due > now_ms}
        return frozenset(self._until_ms)


class Fetch:
    """A prefix on its way into memory; made by `Client.fetching`.

    Going through it gives the layers, in ascending order, each once it is usable of all blocks that the
    prefix then has. A thread waits for them by `turn`, which is notified of every change and held while
    anything changes: the loop of a busy client would come to tell it much later.
    """

    def __init__(
        self,
        wire: Wire,
        prefix: Prefix,
        sections: Sections,
        *,
        index: IndexParts,
        settings: ClientSettings,
        stats: ClientStats,
        avoided: Avoided,
        deadline_ms: int | None,
    ) -> None:
        self._wire = wire
        self._prefix = prefix
        self._sections = sections
        self._index = index
        self._settings = settings
        self._stats = stats
        self._avoided = avoided
        self._begun_ms = now_ms = wire.now_ms()
        self._due_ms = _NEVER if deadline_ms is None else now_ms + deadline_ms
        self._least_share_ms = self._share_ms(max(map(len, prefix.replicas), default=1))
        descriptor = prefix.keys.descriptor
        self.layers: Final = descriptor.layers
        avoid = avoided.at(now_ms)
        self._load = PrefixLoad(
            [
                Retrieval(
                    in_order(records, avoid=avoid),
                    block_key=key,
                    compat_id=descriptor.compat_id,
                    scope_id=prefix.keys.scope_id,
                    layers=descriptor.layers,
                    block_tokens=descriptor.block_tokens,
                )
                for key, records in zip(prefix.keys.keys, prefix.replicas, strict=True)
            ],
            layers=descriptor.layers,
            at_a_time=settings.concurrent_fetches,
        )
        self._max_bytes = ContainerHeader.for_layers(descriptor, codec=RAW_CODEC).size_bytes
        self._calls: dict[tuple[int, int], _BlockCall] = {}
        self.heard_ms: Final[dict[str, int]] = {}
        """When each holder last sent anything."""
        self._todo: deque[load.Effect] = deque()
        self._doing = False
        self._error: BaseException | None = None
        self._ended: load.Ended | None = None
        self._changed = anyio.Event()
        self._over = anyio.Event()
        self.turn: Final = threading.Condition()

    # For the caller

    @property
    def done(self) -> bool:
        """Whether nothing more comes: `result` returns at once."""
        return self._ended is not None

    async def wait_layer(self, layer: int) -> int:
        """Wait until a layer, and all before it, are usable of every block that the prefix then has.

        Returns how many leading blocks that is. The prefix may still become shorter: then the next call
        raises `LayersWithdrawn`, as it does where a block that was usable turned out to be bad.
        """
        while (blocks := self.usable(layer)) is None:
            await self._changed.wait()
        return blocks

    def usable(self, layer: int) -> int | None:
        """Return what `wait_layer` returns, or None where that would wait. May be called in any thread."""
        if not 0 <= layer < self.layers:
            raise LocalProtocolError(f"layer {layer}: the model has layers 0 to {self.layers - 1}")
        with self.turn:
            if self._error is not None:
                raise self._error
            if self._load.void:
                raise LayersWithdrawn(self._load.void)
            return self._load.take_layer(layer)

    async def __aiter__(self) -> AsyncIterator[int]:
        for layer in range(self.layers):
            if await self.wait_layer(layer) == 0:
                return
            yield layer

    async def result(self) -> FetchResult:
        """Wait for the end, and return what there is. Faults of peers are told by the result alone."""
        await self._over.wait()
        return self.outcome()

    def outcome(self) -> FetchResult:
        """Return what there is in the end, once it is `done`. May be called in any thread."""
        if self._error is not None:
            raise self._error
        assert self._ended is not None
        return FetchResult(
            blocks=self._ended.blocks,
            tokens=self._ended.blocks * self._prefix.keys.descriptor.block_tokens,
            requested=len(self._prefix),
            misses=self._ended.misses,
            withdrawn=self._ended.void,
        )

    def cancel(self, reason: MissReason = MissReason.CANCELLED) -> None:
        """Fetch no more. What is complete is kept; nothing is written to the memory any more."""
        with self.turn:
            if not self.done:
                self._carry_out(self._load.handle(load.Stop(reason), self._wire.now_ms()))

    # Under way

    async def run(self) -> None:
        """Fetch until everything has come, cannot come, or the deadline is over."""
        if self.done:  # it was given up before it began
            return
        try:
            with self.turn:
                self._carry_out(self._load.handle(load.Start(), self._wire.now_ms()))
            while not self.done:
                now_ms = self._wire.now_ms()
                if now_ms >= self._due_ms:
                    self._avoid_silent(now_ms)
                    self.cancel(MissReason.DEADLINE)
                    break
                for call in tuple(self._calls.values()):
                    if now_ms >= self._stalled_at_ms(call):
                        call.fail()
                due_ms = min(map(self._stalled_at_ms, self._calls.values()), default=_NEVER)
                # A call that begins meanwhile may be given up sooner than any that there is now.
                sooner_ms = now_ms + min(self._settings.stall_ms, self._least_share_ms)
                wait_ms = min(self._due_ms, due_ms, sooner_ms) - now_ms
                with anyio.move_on_after(max(1, wait_ms) / 1000):
                    await self._over.wait()
        except Exception as error:  # is this fetch's alone, not that of all of the client's tasks
            self.broken(error)
        finally:
            self.cancel()

    def _heard_of_ms(self, call: _BlockCall) -> int:
        """Return when a call began, or its holder last sent anything, for whichever block."""
        return max(call.heard_ms, self.heard_ms.get(call.fetch.holder, 0))

    def _share_ms(self, replicas: int) -> int:
        """Return how long each of so many replicas may keep silent before the deadline."""
        return max(1, (self._due_ms - self._begun_ms) // max(1, replicas))

    def _stalled_at_ms(self, call: _BlockCall) -> int:
        """Return when a call is given up. Where its block has other replicas, that leaves time to ask each of
        them before the deadline."""
        share_ms = self._share_ms(len(self._prefix.replicas[call.block]))
        return min(call.heard_ms + self._settings.stall_ms, self._heard_of_ms(call) + share_ms)

    def _avoid_silent(self, now_ms: int) -> None:
        """Take note of holders that were silent for half of the time or longer when it was over."""
        for call in self._calls.values():
            if now_ms - self._heard_of_ms(call) >= (now_ms - self._begun_ms) / 2:
                self._avoided.add(call.fetch.holder, now_ms)

    def _carry_out(self, effects: Iterable[load.Effect]) -> None:
        """Do what the machine wants done, in its order, also where doing one thing leads to the next."""
        self._todo.extend(effects)
        if self._doing:
            return
        self._doing = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._doing = False

    def _do(self, effect: load.Effect) -> None:
        match effect:
            case load.Fetch(block, fetch):
                self._calls[block, fetch.fetch] = call = _BlockCall(self, block, fetch)
                call.begin(self._wire)
            case load.CancelFetch(block, fetch_number):
                if (given_up := self._calls.pop((block, fetch_number), None)) is not None:
                    given_up.cancel()
            case load.ReportBad(block, holder, digest):
                self._stats.failed_attempts[Outcome.CORRUPT] += 1
                self._avoided.add(holder, self._wire.now_ms())
                key = self._prefix.keys.keys[block]
                operation = WithdrawReplica(component_id(holder), key)
                self._wire.tell(self._index.of(key), operation, Withdrawal(digest=digest))
            case load.LayersReady():
                self._notify()
            case load.Ended():
                self._end(effect)

    def _end(self, ended: load.Ended) -> None:
        self._ended = ended
        self._stats.fetched_blocks += ended.blocks
        header = ContainerHeader.for_layers(self._prefix.keys.descriptor, codec=RAW_CODEC)
        self._stats.fetched_bytes += ended.blocks * header.data_bytes
        for miss in ended.misses:
            self._stats.missed_blocks[miss.reason] += 1
        self._over.set()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        self.turn.notify_all()

    # What comes of a call

    def report(self, call: _BlockCall, event: retrieval.LayersArrived | retrieval.BlockEnded) -> None:
        """Take note of layers, or of the end of a container."""
        if isinstance(event, retrieval.BlockEnded):
            self._calls.pop((call.block, call.fetch.fetch), None)
        with self.turn:
            self._carry_out(self._load.handle(load.Fetched(call.block, event), call.heard_ms))
            if call.has_aside:
                call.put_in_place(lambda layer: not self._load.is_owed(call.block, layer))

    def failed(self, call: _BlockCall, event: retrieval.Refused | retrieval.FetchFailed) -> None:
        """Take note that a holder did not serve what it was asked for."""
        self._calls.pop((call.block, call.fetch.fetch), None)
        outcome = Outcome.UNAVAILABLE
        if isinstance(event, retrieval.Refused):
            outcome = outcome_of_status(event.status) or outcome
        self._stats.failed_attempts[outcome] += 1
        if outcome is Outcome.UNAVAILABLE:
            self._avoided.add(call.fetch.holder, self._wire.now_ms())
        with self.turn:
            self._carry_out(self._load.handle(load.Fetched(call.block, event), self._wire.now_ms()))

    def broken(self, error: BaseException) -> None:
        """Give everything up, because the caller's own memory cannot be written to."""
        with self.turn:
            self._error = self._error or error
            self.cancel()

    def operation(self, call: _BlockCall) -> GetBlock:
        """Return the request of a call."""
        keys = self._prefix.keys
        return GetBlock(
            keys.descriptor.compat_id, keys.scope_id, keys.keys[call.block], layers=call.fetch.layers
        )

    def receiver(self, call: _BlockCall, size_bytes: int | None) -> ScatteredBlock:
        """Return what takes the octets of a container in. Raises `ContainerError`."""
        block, layers = call.block, call.fetch.layers

        def sections_of(layer: int) -> tuple[memoryview, memoryview]:
            k_section, v_section = self._sections(block, layer)
            rooms = octets_of(k_section), octets_of(v_section)
            if rooms[0].readonly or rooms[1].readonly:
                raise LocalProtocolError(
                    f"layer {layer}: its memory is read-only; fetch into writable memory"
                )
            return call.put_aside(layer, rooms) if self._load.is_owed(block, layer) else rooms

        return ScatteredBlock(
            sections_of,
            descriptor=self._prefix.keys.descriptor,
            codec=call.fetch.codec,
            layers=None if layers is None else range(layers[0], layers[1] + 1),
            size_bytes=size_bytes,
            max_size_bytes=self._max_bytes,
        )


class _BlockCall:
    """One request for a block, or for some layers of it."""

    def __init__(self, owner: Fetch, block: int, fetch: retrieval.Fetch) -> None:
        self.block = block
        self.fetch = fetch
        self.heard_ms = 0
        self._owner = owner
        self._wire: Wire | None = None
        self._call: Call | None = None
        self._response: Response | None = None
        self._receiver: ScatteredBlock | None = None
        self._aside: dict[int, tuple[_Rooms, _Rooms]] = {}
        """Layers that came before from another holder and may be in use: where they come, and belong."""
        self._over = False

    def begin(self, wire: Wire) -> None:
        """Send the request."""
        self._wire = wire
        self.heard_ms = wire.now_ms()
        try:
            call = wire.call(self.fetch.holder, self._owner.operation(self), on_event=self._on_event)
        except Unavailable:
            self.fail()
            return
        self._call = call
        if self._over:
            call.cancel()

    def fail(self) -> None:
        """Give the call up, and say so."""
        self._end(retrieval.FetchFailed(self.fetch.fetch))

    def cancel(self) -> None:
        """Give the call up."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    def put_aside(self, layer: int, rooms: _Rooms) -> _Rooms:
        """Return memory for a layer that is not written to where it belongs before it is verified."""
        aside = memoryview(bytearray(rooms[0].nbytes)), memoryview(bytearray(rooms[1].nbytes))
        self._aside[layer] = aside, rooms
        return aside

    @property
    def has_aside(self) -> bool:
        """Whether any layer was put aside."""
        return bool(self._aside)

    def put_in_place(self, verified: Callable[[int], bool]) -> None:
        """Write layers to where they belong, of those put aside that are verified and not the same anyway."""
        for layer in [layer for layer in self._aside if verified(layer)]:
            for octets, room in zip(*self._aside.pop(layer), strict=True):
                if room != octets:
                    room[:] = octets

    def _end(self, event: retrieval.Refused | retrieval.FetchFailed) -> None:
        if not self._over:
            self.cancel()
            self._owner.failed(self, event)

    def _on_event(self, event: Event) -> None:
        if self._over:
            return
        assert self._wire is not None
        self.heard_ms = self._owner.heard_ms[self.fetch.holder] = self._wire.now_ms()
        try:
            self._take(event)
        except ContainerError:
            self.fail()
        except Exception as error:  # of the caller's `sections`
            self.cancel()
            self._owner.broken(error)

    def _take(self, event: Event) -> None:
        if isinstance(event, DataReceived):  # the others come once for each block
            assert self._receiver is not None
            for happened in self._receiver.receive_data(event.data):
                self._arrived(happened)
            if self._call is not None and not self._over:
                self._call.acknowledge(event.data.nbytes)
            return
        match event:
            case ResponseReceived(_, response):
                self._response = response
                if not response.is_success:
                    self._end(retrieval.Refused(self.fetch.fetch, response.status))
                else:
                    size_bytes = response.content_length
                    self._receiver = self._owner.receiver(self, size_bytes)
            case BodyEnded():
                assert self._receiver is not None
                for happened in self._receiver.receive_eof():
                    self._arrived(happened)
            case ExchangeEnded():
                self.fail()
            case _:
                pass

    def _arrived(self, event: ScatteredEvent) -> None:
        fetch, owner = self.fetch.fetch, self._owner
        match event:
            case LayersArrived(first, digests) if not self._over:
                owner.report(self, retrieval.LayersArrived(fetch, first, digests))
            case BlockArrived(header, _, sha256) if not self._over:
                assert self._receiver is not None
                assert self._response is not None
                assert sha256 is not None
                self._over = True
                ended = retrieval.BlockEnded(
                    fetch=fetch,
                    header=header,
                    layer_digests=self._receiver.layer_digests,
                    repr_digest_valid=self._response.repr_digest == sha256.hex(),
                )
                owner.report(self, ended)
            case BlockRefused():
                self.fail()
            case _:
                pass
