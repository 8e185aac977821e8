"""Retrieve one block, verified, from whichever of its replicas has it (section "Block Retrieval and
Storage"; BR-4, BR-5, BR-8, BR-9, PB-5, HT-6, SE-2, decision W17).

A `Retrieval` asks one replica for the whole block, or several of the same digest for layer ranges of it, and
falls through to the next until the block is complete or nothing is left to try; then it is to be computed.
Layers of replicas with different digests are never mixed. A layer whose digest is right is usable as it
arrives, and withdrawn from use if what it came with fails in the end. Who served a block that fails
verification is reported, so that the index can be told.

Octets do not pass through here: the container decoder runs over them and reports digests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.container import ContainerHeader, replica_digest
from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.records import ReplicaRecord
from kvsp_core.registries import RAW_CODEC

__all__ = [
    "TABLE",
    "Attempt",
    "BlockEnded",
    "Cancel",
    "CancelFetch",
    "Done",
    "Effect",
    "Event",
    "Fetch",
    "FetchFailed",
    "Frozen",
    "GiveUp",
    "LayersArrived",
    "LayersUsable",
    "LayersWithdrawn",
    "Outcome",
    "Part",
    "Refused",
    "ReportBad",
    "Retrieval",
    "Start",
    "StateKind",
    "outcome_of_status",
]


class StateKind(Enum):
    """How far a retrieval has come."""

    READY = "ready"
    FETCHING = "fetching"
    COMPLETE = "complete"
    UNAVAILABLE = "unavailable"


class Outcome(Enum):
    """Why an attempt at a replica came to nothing."""

    MISS = "miss"
    """404: it is not there (any more), or not these layers."""
    REFUSED = "refused"
    """The holder does not serve it to us."""
    UNAVAILABLE = "unavailable"
    """The holder cannot serve now, or did not answer in order."""
    CORRUPT = "corrupt"
    """What came did not verify."""


def outcome_of_status(status: int) -> Outcome | None:
    """Return what the status of an answer to GET means: None for a block (2xx), else by its class (HT-6)."""
    if 200 <= status < 300:
        return None
    if status == 404 or status == 410:
        return Outcome.MISS
    return Outcome.UNAVAILABLE if status >= 500 or status in (408, 429) else Outcome.REFUSED


@attrs.frozen
class Attempt:
    """A replica that was tried in vain."""

    holder: str
    outcome: Outcome


# Events


@attrs.frozen
class Start:
    """Begin."""


@attrs.frozen
class LayersArrived:
    """Layers of a fetch have arrived whole, `first` and those after it; their octets have these digests."""

    fetch: int
    first: int
    digests: tuple[str, ...] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class BlockEnded:
    """A fetch has ended with a well-formed container."""

    fetch: int
    header: ContainerHeader
    layer_digests: tuple[str, ...] = attrs.field(repr=False)
    """Of its layers in ascending order, computed from the octets that came."""
    repr_digest_valid: bool
    """Whether Repr-Digest was there and matched the octets."""


@attrs.frozen
class Refused:
    """A fetch was answered with something else than a block."""

    fetch: int
    status: int


@attrs.frozen
class FetchFailed:
    """A fetch got no whole answer."""

    fetch: int


@attrs.frozen
class Cancel:
    """The block is not wanted any more."""


Event: TypeAlias = Start | LayersArrived | BlockEnded | Refused | FetchFailed | Cancel


# Effects


@attrs.frozen(kw_only=True)
class Fetch:
    """GET the block from a holder: these layers, both included, or all, in this codec."""

    fetch: int
    holder: str
    layers: tuple[int, int] | None
    codec: int


@attrs.frozen
class CancelFetch:
    """Give a fetch up."""

    fetch: int


@attrs.frozen
class LayersUsable:
    """These layers, which came with this fetch, may be computed with."""

    fetch: int
    layers: tuple[int, ...]


@attrs.frozen
class LayersWithdrawn:
    """Stop using these layers of this fetch, and what was computed from them."""

    fetch: int
    layers: tuple[int, ...]


@attrs.frozen
class ReportBad:
    """What this holder served is not what its record says: withdraw the record on its behalf, where
    authorized."""

    holder: str
    digest: str = attrs.field(repr=False)


@attrs.frozen
class Part:
    """Layers of a block, both ends included, and the fetch they came with."""

    fetch: int
    layers: tuple[int, int]


@attrs.frozen
class Done:
    """The block is complete and verified; its layers are in these parts, in ascending order.

    `digest` is that of the block as it came: the replica's, or another where it was transcoded.
    """

    digest: str = attrs.field(repr=False)
    parts: tuple[Part, ...]


@attrs.frozen
class GiveUp:
    """No replica is left: compute the block. `attempts` says what was tried and why it came to nothing."""

    attempts: tuple[Attempt, ...]


Effect: TypeAlias = Fetch | CancelFetch | LayersUsable | LayersWithdrawn | ReportBad | Done | GiveUp

_READY, _FETCHING = StateKind.READY, StateKind.FETCHING
_COMPLETE, _UNAVAILABLE = StateKind.COMPLETE, StateKind.UNAVAILABLE

TABLE: Final = Table(
    "retrieval",
    states=tuple(StateKind),
    events=get_args(Event),
    cells={
        _READY: {Start: to(_FETCHING, _UNAVAILABLE), Cancel: to(_UNAVAILABLE)},
        _FETCHING: {
            LayersArrived: to(_FETCHING, _UNAVAILABLE),
            BlockEnded: to(_FETCHING, _COMPLETE, _UNAVAILABLE),
            Refused: to(_FETCHING, _UNAVAILABLE),
            FetchFailed: to(_FETCHING, _UNAVAILABLE),
            Cancel: to(_UNAVAILABLE),
        },
        # What was on its way when it ended changes nothing any more.
        _COMPLETE: stays(_COMPLETE, LayersArrived, BlockEnded, Refused, FetchFailed, Cancel),
        _UNAVAILABLE: stays(_UNAVAILABLE, LayersArrived, BlockEnded, Refused, FetchFailed, Cancel),
    },
)


@attrs.frozen(kw_only=True)
class _Running:
    """A fetch under way, or ended and verified: what was asked of whom, and which layers are in use."""

    fetch: int
    record: ReplicaRecord
    layers: tuple[int, int]
    codec: int
    usable: tuple[int, ...] = ()
    ended: bool = False

    @property
    def transcoded(self) -> bool:
        return self.codec != self.record.codec

    def with_usable(self, usable: tuple[int, ...], *, ended: bool) -> _Running:
        """Return it with these layers in use; `attrs.evolve` would take most of a layer's time."""
        return _Running(
            fetch=self.fetch,
            record=self.record,
            layers=self.layers,
            codec=self.codec,
            usable=usable,
            ended=ended,
        )


@attrs.frozen(kw_only=True)
class Frozen:
    """A retrieval as a value."""

    state: StateKind
    records: tuple[ReplicaRecord, ...]
    layers: int
    block_tokens: int
    codec: int | None
    bad: tuple[ReplicaRecord, ...]
    running: tuple[_Running, ...]
    attempts: tuple[Attempt, ...]
    next_fetch: int


class Retrieval:
    """One block on its way here.

    `records` are its replicas in order of preference. Those of another block, compatibility ID or scope, in
    a codec not in `codecs`, or at a holder that is not reached by HTTPS are left out. With
    `producer_digests` only replicas with one of these digests are taken (SE-2). `codec` asks the holders for
    that codec where their replica has another; what they then make of it is protected by Repr-Digest alone
    (BR-9), so it cannot be had together with `producer_digests`. `next_fetch` is the number of the first
    fetch.
    """

    def __init__(
        self,
        records: Iterable[ReplicaRecord],
        *,
        block_key: str,
        compat_id: str,
        scope_id: str,
        layers: int,
        block_tokens: int,
        codecs: Collection[int] = (RAW_CODEC,),
        codec: int | None = None,
        producer_digests: Collection[str] | None = None,
        next_fetch: int = 0,
    ) -> None:
        if codec is not None and producer_digests is not None:
            raise LocalProtocolError(
                "a transcoded block has no producer's digest: choose codec or producer_digests"
            )
        self.state = StateKind.READY
        self._layers = layers
        self._block_tokens = block_tokens
        self._codec = codec
        fitting = [
            record
            for record in records
            if (record.block_key, record.compat_id, record.scope_id) == (block_key, compat_id, scope_id)
            and record.holder.startswith("https://")
            and (record.codec in codecs or codec is not None)
            and (producer_digests is None or record.digest in producer_digests)
            and len(record.layer_digests or range(layers)) == layers
        ]
        self._records = [record for record in fitting if record.digests_agree()]
        self._bad = tuple(record for record in fitting if not record.digests_agree())
        self._running: dict[int, _Running] = {}
        self._attempts: list[Attempt] = []
        self._next_fetch = next_fetch

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done. Events of fetches that are over are no-ops."""
        TABLE.check(self.state, event)
        match event:
            case Start():
                self.state = StateKind.FETCHING
                self._attempts += [Attempt(record.holder, Outcome.CORRUPT) for record in self._bad]
                reports = (ReportBad(record.holder, record.digest) for record in self._bad)
                return (*reports, *self._go_on())
            case LayersArrived(fetch):
                running = self._open(fetch)
                return () if running is None else self._layers_arrived(running, event)
            case BlockEnded():
                running = self._open(event.fetch)
                return () if running is None else self._block_ended(running, event)
            case Refused(fetch, status):
                running = self._open(fetch)
                outcome = outcome_of_status(status) or Outcome.UNAVAILABLE
                return () if running is None else self._attempt_failed(running, outcome)
            case FetchFailed(fetch):
                running = self._open(fetch)
                return () if running is None else self._attempt_failed(running, Outcome.UNAVAILABLE)
            case Cancel():
                if self.state is StateKind.COMPLETE:
                    return ()
                self.state = StateKind.UNAVAILABLE
                return self._stop()
            case _:
                assert_never(event)

    def next_deadline_ms(self) -> int | None:
        """Return None: a retrieval has no timers of its own; its fetches have theirs."""
        return None

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value."""
        return Frozen(
            state=self.state,
            records=tuple(self._records),
            layers=self._layers,
            block_tokens=self._block_tokens,
            codec=self._codec,
            bad=self._bad,
            running=tuple(self._running.values()),
            attempts=tuple(self._attempts),
            next_fetch=self._next_fetch,
        )

    @classmethod
    def thaw(cls, frozen: Frozen, now_ms: int) -> Retrieval:
        """Return the retrieval that `freeze` made this of."""
        self = cls.__new__(cls)
        self.state = frozen.state
        self._records = list(frozen.records)
        self._layers = frozen.layers
        self._block_tokens = frozen.block_tokens
        self._codec = frozen.codec
        self._bad = frozen.bad
        self._running = {running.fetch: running for running in frozen.running}
        self._attempts = list(frozen.attempts)
        self._next_fetch = frozen.next_fetch
        return self

    # What arrives

    def _open(self, fetch: int) -> _Running | None:
        running = self._running.get(fetch)
        return None if running is None or running.ended else running

    def _layers_arrived(self, running: _Running, event: LayersArrived) -> tuple[Effect, ...]:
        first, last = running.layers
        digests = running.record.layer_digests
        arrived = range(event.first, event.first + len(event.digests))
        if not first <= arrived.start <= arrived.stop <= last + 1:
            return self._corrupt(running, CancelFetch(running.fetch))
        if digests is None or running.transcoded:
            return ()  # Nothing vouches for a single layer: it waits for the end.
        if digests[arrived.start : arrived.stop] != event.digests:
            return self._corrupt(running, CancelFetch(running.fetch))
        return self._use(running, arrived)

    def _use(self, running: _Running, layers: Iterable[int], *, ended: bool = False) -> tuple[Effect, ...]:
        """Let verified layers be computed with, those that are not already."""
        known = frozenset(running.usable)
        new = tuple(layer for layer in layers if layer not in known)
        if new or ended:
            self._running[running.fetch] = running.with_usable((*running.usable, *new), ended=ended)
        return (LayersUsable(running.fetch, new),) if new else ()

    def _block_ended(self, running: _Running, event: BlockEnded) -> tuple[Effect, ...]:
        if not self._verified(running, event):
            return self._corrupt(running)
        first, last = running.layers
        released = self._use(running, range(first, last + 1), ended=True)
        digest = running.record.digest
        if running.transcoded:
            digest = replica_digest(event.layer_digests)
        if self._missing() or any(not other.ended for other in self._running.values()):
            return (*released, *self._go_on())
        self.state = StateKind.COMPLETE
        parts = sorted(
            (Part(part.fetch, part.layers) for part in self._running.values()), key=lambda p: p.layers
        )
        return (*released, Done(digest, tuple(parts)))

    def _verified(self, running: _Running, event: BlockEnded) -> bool:
        """Whether what came is what was asked for and what the record says (BR-4)."""
        first, last = running.layers
        header = event.header
        if not event.repr_digest_valid or header.codec != running.codec:
            return False
        if (header.layers.start, header.layers.stop) != (first, last + 1):
            return False
        if header.token_count != self._block_tokens or len(event.layer_digests) != last + 1 - first:
            return False
        if running.transcoded:
            return True
        digests = running.record.layer_digests
        if digests is not None and event.layer_digests != digests[first : last + 1]:
            return False
        whole = last + 1 - first == self._layers
        return not whole or replica_digest(event.layer_digests) == running.record.digest

    def _corrupt(self, running: _Running, *first: Effect) -> tuple[Effect, ...]:
        """Discard all that came from this replica, by other fetches too (BR-5), and say that it is bad
        (BR-8)."""
        others = [r for r in self._running.values() if r.record == running.record and r is not running]
        for other in others:
            del self._running[other.fetch]
        report = ReportBad(running.record.holder, running.record.digest)
        discarded = self._discarded(others)
        return (*first, *discarded, *self._attempt_failed(running, Outcome.CORRUPT, report))

    def _attempt_failed(self, running: _Running, outcome: Outcome, *more: Effect) -> tuple[Effect, ...]:
        """Do without this replica: withdraw what came from it with this fetch, and try the next (PB-5)."""
        del self._running[running.fetch]
        if running.record in self._records:
            self._records.remove(running.record)
        self._attempts.append(Attempt(running.record.holder, outcome))
        return (*self._withdrawn(running), *more, *self._go_on())

    @staticmethod
    def _withdrawn(running: _Running) -> tuple[Effect, ...]:
        return (LayersWithdrawn(running.fetch, running.usable),) if running.usable else ()

    # What is asked for

    def _missing(self) -> list[int]:
        """Return the layers that no fetch has brought or is about to bring."""
        covered = {n for part in self._running.values() for n in range(part.layers[0], part.layers[1] + 1)}
        return [layer for layer in range(self._layers) if layer not in covered]

    def _go_on(self) -> tuple[Effect, ...]:
        """Ask for what is missing, at replicas of one digest; where they cannot give it, start over with the
        next."""
        effects: list[Effect] = []
        digest = next((part.record.digest for part in self._running.values()), None)
        if digest is not None:
            asked = self._ask(digest, self._missing())
            if asked is not None:
                return asked
            effects += self._stop()
        for other in dict.fromkeys(record.digest for record in self._records):
            asked = self._ask(other, self._missing())
            if asked is not None:
                return (*effects, *asked)
        self.state = StateKind.UNAVAILABLE
        return (*effects, GiveUp(tuple(self._attempts)))

    def _ask(self, digest: str, missing: Sequence[int]) -> tuple[Effect, ...] | None:
        """Ask replicas of this digest for these layers; None where some layer is at none of them."""
        group = [
            record for record in self._records if record.digest == digest and self._serves(record, missing)
        ]
        whole = next((r for r in group if missing and _has_all(r, missing)), None)
        chosen: list[tuple[int, int, ReplicaRecord]] = []
        for layer in missing:
            record = whole or next((r for r in group if r.has_layers(layer, layer)), None)
            if record is None:
                return None
            if chosen and chosen[-1][1] == layer - 1 and chosen[-1][2] is record:
                chosen[-1] = (chosen[-1][0], layer, record)
            else:
                chosen.append((layer, layer, record))
        return tuple(self._fetch(record, (first, last)) for first, last, record in chosen)

    def _serves(self, record: ReplicaRecord, missing: Sequence[int]) -> bool:
        """Whether a replica can be asked for these: in parts only where every layer has its digest."""
        by_range = record.layer_digests is not None and self._codec in (None, record.codec)
        return by_range or (len(missing) == self._layers and record.has_layers(0, self._layers - 1))

    def _fetch(self, record: ReplicaRecord, layers: tuple[int, int]) -> Fetch:
        fetch = self._next_fetch
        self._next_fetch += 1
        codec = record.codec if self._codec is None else self._codec
        self._running[fetch] = _Running(fetch=fetch, record=record, layers=layers, codec=codec)
        whole = layers == (0, self._layers - 1)
        return Fetch(fetch=fetch, holder=record.holder, layers=None if whole else layers, codec=codec)

    def _stop(self) -> tuple[Effect, ...]:
        """Give up all that is under way and withdraw all that came."""
        stopped = list(self._running.values())
        self._running.clear()
        return self._discarded(stopped)

    def _discarded(self, stopped: Sequence[_Running]) -> tuple[Effect, ...]:
        return (
            *(CancelFetch(running.fetch) for running in stopped if not running.ended),
            *(effect for running in stopped for effect in self._withdrawn(running)),
        )


def _has_all(record: ReplicaRecord, layers: Sequence[int]) -> bool:
    """Whether each of these layers, in ascending order, is resident."""
    first, last = layers[0], layers[-1]
    if last - first + 1 == len(layers):
        return record.has_layers(first, last)
    return all(record.has_layers(layer, layer) for layer in layers)
