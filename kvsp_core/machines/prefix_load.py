"""Load the blocks of a prefix, layer by layer, each from whoever has it (sections "KV Block Container" and
"Block Retrieval and Storage"; KC-3, PB-5, BR-4, BR-5).

A `PrefixLoad` drives a `Retrieval` for each block, so many at a time, in prefix order. A layer is ready once
every block of the prefix has it, verified; layers are ready in ascending order, so that an engine computes
with the first while the last is on its way. A block that cannot be had ends the prefix before it: what comes
after a gap is of no use to whoever computes from its end on.

A layer that was taken may be withdrawn, where its block then fails: the block is `void` unless it comes again
with the same digest, since all that was computed from it has to be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.machines import retrieval
from kvsp_core.machines.retrieval import Attempt, Outcome, Retrieval
from kvsp_core.machines.table import Table, to

__all__ = [
    "TABLE",
    "CancelFetch",
    "Effect",
    "Ended",
    "Event",
    "Fetch",
    "Fetched",
    "Frozen",
    "LayersReady",
    "LoadState",
    "Miss",
    "MissReason",
    "PrefixLoad",
    "ReportBad",
    "Start",
    "Stop",
]


class LoadState(Enum):
    """How far a load has come."""

    READY = "ready"
    LOADING = "loading"
    OVER = "over"


class MissReason(Enum):
    """Why a block was not loaded."""

    NOT_FOUND = "not found"
    """No replica is known that can be used."""
    GONE = "gone"
    """No holder has it any more."""
    REFUSED = "refused"
    """Its holders do not serve it to us."""
    UNAVAILABLE = "unavailable"
    """Its holders cannot serve now, or did not answer in time."""
    CORRUPT = "corrupt"
    """What came did not verify."""
    DEADLINE = "deadline"
    """The time was over."""
    AFTER_GAP = "after gap"
    """A block before it is missing."""
    CANCELLED = "cancelled"
    """It was not wanted any more."""


_REASONS: Final = MappingProxyType(
    {
        Outcome.MISS: MissReason.GONE,
        Outcome.REFUSED: MissReason.REFUSED,
        Outcome.UNAVAILABLE: MissReason.UNAVAILABLE,
        Outcome.CORRUPT: MissReason.CORRUPT,
    }
)


@attrs.frozen
class Miss:
    """A block that was not loaded: its place in the prefix, why, and what was tried."""

    block: int
    reason: MissReason
    attempts: tuple[Attempt, ...] = ()


# Events


@attrs.frozen
class Start:
    """Begin."""


@attrs.frozen
class Fetched:
    """Something came of a fetch for a block: an event of its retrieval."""

    block: int
    event: retrieval.LayersArrived | retrieval.BlockEnded | retrieval.Refused | retrieval.FetchFailed


@attrs.frozen
class Stop:
    """Load no more; what is complete is kept. `reason` is that of the first block that is not."""

    reason: MissReason


Event: TypeAlias = Start | Fetched | Stop


# Effects


@attrs.frozen
class Fetch:
    """Ask a holder for a block, or some layers of it."""

    block: int
    fetch: retrieval.Fetch


@attrs.frozen
class CancelFetch:
    """Give a fetch up: nothing more of it may be written to memory."""

    block: int
    fetch: int


@attrs.frozen
class ReportBad:
    """What this holder served is not what its record says: withdraw the record on its behalf, where
    authorized."""

    block: int
    holder: str
    digest: str = attrs.field(repr=False)


@attrs.frozen
class LayersReady:
    """So many leading layers are now ready, or void blocks are known: whoever waits looks again."""

    layers: int


@attrs.frozen(kw_only=True)
class Ended:
    """Nothing more comes: the leading `blocks` are complete and verified, the others missed.

    `void` are blocks with layers that were taken and cannot be relied on any more.
    """

    blocks: int
    misses: tuple[Miss, ...]
    void: tuple[int, ...]


Effect: TypeAlias = Fetch | CancelFetch | ReportBad | LayersReady | Ended

_READY, _LOADING, _OVER = LoadState

TABLE: Final = Table(
    "load of a prefix",
    states=tuple(LoadState),
    events=get_args(Event),
    cells={
        _READY: {Start: to(_LOADING, _OVER), Stop: to(_OVER)},
        _LOADING: {Fetched: to(_LOADING, _OVER), Stop: to(_OVER)},
        # What was on its way when it ended changes nothing any more.
        _OVER: {Fetched: to(_OVER), Stop: to(_OVER)},
    },
)


@attrs.define
class _Block:
    retrieval: Retrieval
    arrived: dict[int, str] = attrs.field(factory=dict, repr=False)
    """The digest of each layer as it last came."""
    usable: set[int] = attrs.field(factory=set)
    owed: dict[int, str] = attrs.field(factory=dict, repr=False)
    """Layers that were taken and then withdrawn: the same must come again."""
    complete: bool = False


@attrs.frozen(kw_only=True)
class Frozen:
    """A load as a value."""

    state: LoadState
    blocks: tuple[tuple[object, ...], ...] = attrs.field(repr=False)
    end: int
    started: int
    taken: tuple[int, int]
    misses: tuple[Miss, ...]
    void: tuple[int, ...]


class PrefixLoad:
    """The blocks of a prefix on their way here, `at_a_time` of them at a time.

    `retrievals` has one for each block, in prefix order, not started.
    """

    def __init__(self, retrievals: Sequence[Retrieval], *, layers: int, at_a_time: int) -> None:
        self.state = LoadState.READY
        self._blocks = [_Block(each) for each in retrievals]
        self._layers = layers
        self._at_a_time = at_a_time
        self._end = len(self._blocks)
        self._started = 0
        self._running = 0
        self._have = [0] * layers
        """For each layer, how many blocks of the prefix have it."""
        self._ready = 0
        self._taken = self._taken_blocks = 0
        """So many leading layers were taken, at first of so many blocks."""
        self._leading = 0
        """How many leading blocks are complete, whether the prefix reaches so far or not."""
        self._misses: dict[int, Miss] = {}
        self._void: set[int] = set()

    @property
    def blocks(self) -> int:
        """How many leading blocks are loaded or still may be."""
        return self._end

    @property
    def void(self) -> tuple[int, ...]:
        """The blocks with layers that were taken and cannot be relied on any more."""
        return tuple(sorted(self._void))

    @property
    def complete_blocks(self) -> int:
        """How many leading blocks are complete."""
        return min(self._leading, self._end)

    def take_layer(self, layer: int) -> int | None:
        """Return of how many leading blocks a layer and those before it may now be computed with; None where
        they are not ready.

        What is taken is noted, so that it is known to be void if it has to be withdrawn.
        """
        if layer >= self._ready:
            return None
        if not self._taken:
            self._taken_blocks = self._end
        self._taken = max(self._taken, layer + 1)
        return self._end

    def is_owed(self, block: int, layer: int) -> bool:
        """Return whether a layer was taken and then withdrawn: what came of it may be in use, and nothing but
        a verified layer may be written over it."""
        return layer in self._blocks[block].owed

    def next_deadline_ms(self) -> int | None:
        """Return None: a load has no timers of its own."""
        return None

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done, in this order."""
        TABLE.check(self.state, event)
        if self.state is LoadState.OVER:
            return ()
        effects: list[Effect] = []
        ready, void = self._ready, len(self._void)
        match event:
            case Start():
                self.state = LoadState.LOADING
                self._look()  # of no block at all, every layer is here
            case Fetched(number, of_fetch):
                if isinstance(of_fetch, retrieval.LayersArrived):
                    self._blocks[number].arrived.update(enumerate(of_fetch.digests, of_fetch.first))
                elif isinstance(of_fetch, retrieval.BlockEnded):
                    layers = of_fetch.header.layers
                    self._blocks[number].arrived.update(zip(layers, of_fetch.layer_digests, strict=False))
                self._let(number, of_fetch, effects, now_ms)
            case Stop(reason):
                self.state = LoadState.OVER
                first = self.complete_blocks
                if first < self._end:
                    self._cut(Miss(first, reason), effects, now_ms)
            case _:
                assert_never(event)
        self._go_on(effects, now_ms)
        if self.state is LoadState.OVER or self.complete_blocks == self._end:
            self.state = LoadState.OVER
            misses = tuple(self._misses[number] for number in sorted(self._misses))
            effects.append(Ended(blocks=self._end, misses=misses, void=self.void))
        elif (self._ready, len(self._void)) != (ready, void):
            effects.append(LayersReady(self._ready))
        return tuple(effects)

    def _go_on(self, effects: list[Effect], now_ms: int) -> None:
        """Begin with further blocks, as many as may be under way."""
        while (
            self.state is LoadState.LOADING and self._running < self._at_a_time and self._started < self._end
        ):
            self._started += 1
            self._running += 1
            self._let(self._started - 1, retrieval.Start(), effects, now_ms)

    def _let(self, number: int, event: retrieval.Event, effects: list[Effect], now_ms: int) -> None:
        """Let something happen to the retrieval of a block."""
        block = self._blocks[number]
        for effect in block.retrieval.handle(event, now_ms):
            match effect:
                case retrieval.Fetch():
                    effects.append(Fetch(number, effect))
                case retrieval.CancelFetch(fetch):
                    effects.append(CancelFetch(number, fetch))
                case retrieval.ReportBad(holder, digest):
                    effects.append(ReportBad(number, holder, digest))
                case retrieval.LayersUsable(_, layers):
                    self._usable(number, block, layers)
                case retrieval.LayersWithdrawn(_, layers):
                    self._withdrawn(number, block, layers)
                case retrieval.Done():
                    block.complete = True
                    self._running -= 1
                    while self._leading < len(self._blocks) and self._blocks[self._leading].complete:
                        self._leading += 1
                case retrieval.GiveUp(attempts):
                    self._running -= 1
                    reason = _REASONS[attempts[-1].outcome] if attempts else MissReason.NOT_FOUND
                    self._cut(Miss(number, reason, attempts), effects, now_ms)
                case _:
                    assert_never(effect)

    def _usable(self, number: int, block: _Block, layers: Sequence[int]) -> None:
        if number >= self._end:
            return
        for layer in layers:
            if layer in block.usable:
                continue
            if block.owed and block.owed.pop(layer, block.arrived[layer]) != block.arrived[layer]:
                self._void.add(number)
            block.usable.add(layer)
            self._have[layer] += 1
        self._look()

    def _withdrawn(self, number: int, block: _Block, layers: Sequence[int]) -> None:
        for layer in block.usable.intersection(layers):
            block.usable.discard(layer)
            if number >= self._end:
                continue
            self._have[layer] -= 1
            self._ready = min(self._ready, layer)
            if layer < self._taken:
                block.owed[layer] = block.arrived[layer]

    def _look(self) -> None:
        """Find out how many leading layers all blocks have."""
        while self._ready < self._layers and self._have[self._ready] == self._end:
            self._ready += 1

    def _cut(self, miss: Miss, effects: list[Effect], now_ms: int) -> None:
        """End the prefix before a block that cannot be had."""
        old_end, self._end = self._end, miss.block
        if self._taken:
            self._void.update(range(miss.block, min(old_end, self._taken_blocks)))
        self._misses[miss.block] = miss
        for number in range(miss.block, old_end):
            block = self._blocks[number]
            self._misses.setdefault(number, Miss(number, MissReason.AFTER_GAP))
            for layer in block.usable:
                self._have[layer] -= 1
            block.usable.clear()
            self._cancel(number, block, effects, now_ms)
        self._look()

    def _cancel(self, number: int, block: _Block, effects: list[Effect], now_ms: int) -> None:
        if block.retrieval.state is not retrieval.StateKind.FETCHING:
            return
        self._running -= 1
        for effect in block.retrieval.handle(retrieval.Cancel(), now_ms):
            if isinstance(effect, retrieval.CancelFetch):
                effects.append(CancelFetch(number, effect.fetch))

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value."""
        return Frozen(
            state=self.state,
            blocks=tuple(
                (
                    block.retrieval.freeze(now_ms),
                    tuple(sorted(block.arrived.items())),
                    tuple(sorted(block.usable)),
                    tuple(sorted(block.owed.items())),
                    block.complete,
                )
                for block in self._blocks
            ),
            end=self._end,
            started=self._started,
            taken=(self._taken, self._taken_blocks),
            misses=tuple(self._misses.values()),
            void=self.void,
        )
