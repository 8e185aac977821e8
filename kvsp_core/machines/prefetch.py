"""Load blocks into an instance before the request that needs them comes (section "Prefetch Directives";
PF-1..PF-7, decision W18).

A `PrefetchTable` holds an instance's directives. Each block of a directive that is not held already goes its
way: find its records in the index, lease it at a source, retrieve it verified, store it in a tier, publish
it, release the lease; where a source fails, the next. A directive is pending until every block is resident
(complete), nothing is left to try (partial, or failed where nothing at all is resident), or its deadline has
come (partial); what completes later than that is listed as loaded where it became resident, and never
changes how the directive ended.

Few blocks load at a time, the earliest deadline first, so that loading does not get in the way of requests
(PF-2); while requests run and none waits for a directive, one by one with pauses between, as far as deadlines
allow (see `prefetch_queue`). What two directives want is loaded once. Loaded blocks stay pinned until the
request comes, or for ``lease_ms`` after the directive has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.lookup_size import LookupSize
from kvsp_core.machines import prefetch_load as load
from kvsp_core.machines import prefetch_queue
from kvsp_core.machines.alarms import Alarms, TimerFired, earliest
from kvsp_core.machines.prefetch_directive import Directive, DirectiveState, PrefetchLimits
from kvsp_core.machines.prefetch_queue import LoadQueue
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.messages import DirectiveStatus, PrefetchDirective
from kvsp_core.problems import CONFLICT, TOO_LARGE, UNAVAILABLE, Problem
from kvsp_core.records import ReplicaRecord
from kvsp_core.registries import RAW_CODEC

__all__ = [
    "TABLE",
    "Accepted",
    "Awaited",
    "CancelLookup",
    "DirectiveState",
    "Effect",
    "Ended",
    "Event",
    "Evicted",
    "Frozen",
    "LoadReport",
    "LoadRequest",
    "Lookup",
    "LookupAnswered",
    "LookupFailed",
    "Pin",
    "PrefetchLimits",
    "PrefetchTable",
    "PublishBlock",
    "Rejected",
    "RequestArrived",
    "RequestsRun",
    "Submit",
    "TimerFired",
    "Unpin",
    "Withdraw",
]


# Events


@attrs.frozen(kw_only=True)
class Submit:
    """The controller sent a directive. `held` are its blocks that are resident here already.

    `layers` and `block_tokens` are the geometry of its blocks. With `producers` only replicas are taken whose
    digest one of these holders has published for the block (SE-2).
    """

    directive: PrefetchDirective
    held: frozenset[str] = attrs.field(default=frozenset(), repr=False)
    layers: int
    block_tokens: int
    producers: tuple[str, ...] | None = None
    any_source: bool = False
    """Whether blocks that name no source are taken from whoever has them: for loads of the instance's own."""


@attrs.frozen
class LookupAnswered:
    """The index answered a `Lookup`: the records of each leading key that has any."""

    directive: str
    records: tuple[tuple[ReplicaRecord, ...], ...] = attrs.field(repr=False)


@attrs.frozen
class LookupFailed:
    """The index did not answer a `Lookup`, or does not take as many keys at a time (LK-4)."""

    directive: str
    too_long: bool = False


@attrs.frozen
class LoadReport:
    """Something happened to the load of a block that an effect asked for."""

    job: int
    event: load.Event


@attrs.frozen
class Evicted:
    """A block is not resident here any more."""

    block_key: str = attrs.field(repr=False)


@attrs.frozen
class RequestArrived:
    """The request that these directives were for is here and holds its blocks itself."""

    request_ref: str = attrs.field(repr=False)


@attrs.frozen
class Awaited:
    """The request that a directive is for is here, and waits until the directive has ended (PF-4)."""

    directive: str


@attrs.frozen
class RequestsRun:
    """Whether requests run here, whose tokens loading would delay."""

    running: bool


@attrs.frozen
class Withdraw:
    """Nobody wants this directive any more: stop loading for it, let go of what it pins, forget it."""

    directive: str


Event: TypeAlias = (
    Submit
    | LookupAnswered
    | LookupFailed
    | LoadReport
    | Evicted
    | RequestArrived
    | Awaited
    | RequestsRun
    | Withdraw
    | TimerFired
)


# Effects


@attrs.frozen
class Accepted:
    """Answer 202: the directive is being worked on, or was already."""

    directive: str


@attrs.frozen
class Rejected:
    """Answer with a problem; nothing has changed."""

    directive: str
    problem: Problem


@attrs.frozen
class Lookup:
    """Ask the index for the records of these keys at these holders, or at any where none is named (our member
    ``holders``, decision W32).
    """

    directive: str
    block_keys: tuple[str, ...] = attrs.field(repr=False)
    holders: tuple[str, ...]


@attrs.frozen
class CancelLookup:
    """Give the lookup of a directive up."""

    directive: str


@attrs.frozen
class LoadRequest:
    """Do this for the load of a block: acquire or release a lease, fetch, cancel, report, store."""

    job: int
    block_key: str = attrs.field(repr=False)
    effect: (
        load.AcquireLease | load.ReleaseLease | load.Fetch | load.CancelFetch | load.ReportBad | load.Store
    )


@attrs.frozen
class PublishBlock:
    """A block is resident: publish the new replica (PF-3)."""

    block_key: str = attrs.field(repr=False)


@attrs.frozen
class Pin:
    """Do not evict this block."""

    block_key: str = attrs.field(repr=False)


@attrs.frozen
class Unpin:
    """This block may be evicted, as far as prefetch goes."""

    block_key: str = attrs.field(repr=False)


@attrs.frozen
class Ended:
    """A directive has ended, in this state, with so many of its blocks resident."""

    directive: str
    state: DirectiveState
    loaded: int
    wanted: int


Effect: TypeAlias = (
    Accepted | Rejected | Lookup | CancelLookup | LoadRequest | PublishBlock | Pin | Unpin | Ended
)

_ABSENT, _PENDING = DirectiveState.ABSENT, DirectiveState.PENDING
_ENDED = (DirectiveState.PARTIAL, DirectiveState.COMPLETE, DirectiveState.FAILED)
_EVENTS: Final = get_args(Event)

TABLE: Final = Table(
    "prefetch directive",
    states=tuple(DirectiveState),
    events=_EVENTS,
    cells={
        # Completions of what was given up come late and change nothing.
        _ABSENT: {**stays(_ABSENT, *_EVENTS), Submit: to(_ABSENT, _PENDING, *_ENDED)},
        _PENDING: {
            **dict.fromkeys(_EVENTS, to(_PENDING, *_ENDED)),
            Submit: to(_PENDING),
            RequestArrived: to(_PENDING),
            Awaited: to(_PENDING),
            RequestsRun: to(_PENDING),
            Withdraw: to(_ABSENT),
        },
        # A terminal state stays until the directive is forgotten.
        **{
            ended: {
                **stays(ended, *_EVENTS),
                Withdraw: to(_ABSENT),
                TimerFired: to(ended, _ABSENT),
            }
            for ended in _ENDED
        },
    },
)


# What the table keeps

_Emit: TypeAlias = Callable[[Effect], None]


@attrs.frozen(kw_only=True, repr=False)
class Frozen:
    """A prefetch table as a value, with deadlines as the time that remains."""

    limits: PrefetchLimits
    lookup_size: LookupSize
    codecs: tuple[int, ...]
    directives: tuple[tuple[Any, ...], ...]
    queue: prefetch_queue.Frozen
    ended: tuple[str, ...]
    next_order: int
    running: bool


class PrefetchTable:
    """The prefetch directives of an instance and the blocks they bring in. `codecs` are those it can take."""

    def __init__(self, bounds: PrefetchLimits | None = None, *, codecs: Sequence[int] = (RAW_CODEC,)) -> None:
        self.limits = bounds or PrefetchLimits()
        self._codecs = tuple(codecs)
        self._lookup_size = LookupSize(self.limits.lookup_keys)
        self._directives: dict[str, Directive] = {}
        self._by_ref: dict[str, dict[str, None]] = {}
        self._by_key: dict[str, dict[str, None]] = {}
        self._pending_blocks = 0
        self.pending = 0
        """How many directives are being worked on."""
        self._awaited = 0
        """How many of those their requests wait for."""
        self._running = False
        self._ended: dict[str, None] = {}
        self._kept_blocks = 0
        self._queue = LoadQueue(self.limits.concurrent_loads, self._codecs)
        self._pins: dict[str, int] = {}
        self._alarms: Alarms[tuple[int, str]] = Alarms()  # of each directive, by its order and name
        self._next_order = 0
        self._now_ms = 0

    # What others ask

    def state_of(self, directive: str) -> DirectiveState:
        """Return the state of a directive."""
        found = self._directives.get(directive)
        return _ABSENT if found is None else found.state

    def status(self, directive: str) -> DirectiveStatus | None:
        """Return what GET of a directive answers: its state and which of its blocks are resident (PF-1,
        PF-7).

        None where it is not known, or not any more.
        """
        found = self._directives.get(directive)
        return None if found is None else found.status()

    def pending_for(self, request_ref: str | None) -> str | None:
        """Return a pending directive for this request, or None."""
        if request_ref is None:
            return None
        names = self._by_ref.get(request_ref, {})
        return next((name for name in names if self._directives[name].pending), None)

    def message_of(self, block_key: str) -> PrefetchDirective | None:
        """Return a directive that names a block: its scope and Compatibility ID are the block's."""
        names = self._by_key.get(block_key)
        return None if names is None else self._directives[next(iter(names))].message

    @property
    def loads(self) -> int:
        """How many blocks are being loaded or stored."""
        return self._queue.running

    def is_wanted(self, block_key: str) -> bool:
        """Return whether a block waits for its turn, or is being loaded or stored."""
        return block_key in self._queue

    def next_from(self, job: int, holder: str, most: int) -> tuple[str, ...]:
        """Return at most so many blocks that are to be loaded after that of a job for the same directive, and
        from the same holder first."""
        return self._queue.next_from(job, holder, most)

    def is_pinned(self, block_key: str) -> bool:
        """Return whether a block is kept from eviction for a request that is to come."""
        return block_key in self._pins

    def next_deadline_ms(self) -> int | None:
        """Return when `TimerFired` is next due, or None."""
        return earliest(self._alarms.next_ms(), self._queue.next_deadline_ms())

    # What happens

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done, in this order. Deadlines that have passed come
        first."""
        self._now_ms = now_ms
        effects: list[Effect] = []
        emit = effects.append
        self._time_passed(emit)
        TABLE.check(self._kind_for(event), event)
        match event:
            case Submit():
                self._submit(event, emit)
            case LookupAnswered(name, records):
                self._looked_up(name, records, emit)
            case LookupFailed(name, too_long):
                self._lookup_failed(name, too_long, emit)
            case LoadReport(number, of_load):
                if self._queue.has_job(number):
                    self._advance(number, of_load, emit)
                elif isinstance(of_load, load.LeaseGranted):
                    emit(LoadRequest(number, "", load.ReleaseLease(of_load.holder, of_load.lease)))
            case Evicted(block_key):
                self._pins.pop(block_key, None)
                for name in self._by_key.get(block_key, ()):
                    self._directives[name].loaded.discard(block_key)
            case RequestArrived(request_ref):
                for name in self._by_ref.get(request_ref, ()):
                    self._unpin_all(self._directives[name], emit)
            case Awaited(name):
                self._await(name)
            case RequestsRun(running):
                self._running = running
            case Withdraw(name):
                self._withdraw(name, emit)
            case TimerFired():
                pass
            case _:
                assert_never(event)
        self._start_loads(emit)
        return tuple(effects)

    def _kind_for(self, event: Event) -> DirectiveState:
        match event:
            case Submit(directive=message):
                return self.state_of(message.directive)
            case LookupAnswered(name) | LookupFailed(name) | Awaited(name) | Withdraw(name):
                return self.state_of(name)
            case _:
                return _ABSENT

    def _time_passed(self, emit: _Emit) -> None:
        while (due := self._alarms.take_next(self._now_ms)) is not None:
            directive = self._directives[due[1]]
            if directive.pending:
                self._end(directive, DirectiveState.PARTIAL, emit)
            elif directive.forget_at_ms <= self._now_ms:
                self._forget(directive, emit)
            else:
                self._unpin_all(directive, emit)

    # A directive comes, and ends

    def _submit(self, event: Submit, emit: _Emit) -> None:
        message = event.directive
        name = message.directive
        known = self._directives.get(name)
        if known is not None:
            conflict = Problem(
                CONFLICT, "this directive was sent before with other content; give it another name"
            )
            emit(Accepted(name) if known.message == message else Rejected(name, conflict))
            return
        problem = self._refusal(message)
        if problem is not None:
            emit(Rejected(name, problem))
            return
        duration_ms = min(message.deadline_ms, self.limits.directive_ms)
        directive = Directive(
            message=message,
            layers=event.layers,
            block_tokens=event.block_tokens,
            producers=event.producers,
            any_source=event.any_source,
            order=self._next_order,
            deadline_ms=self._now_ms + duration_ms,
        )
        self._next_order += 1
        self._enter(directive)
        self.pending += 1
        self._pending_blocks += len(message.blocks)
        emit(Accepted(name))
        directive.await_blocks(event.held, self._lookup_size.most)
        for block in message.blocks:
            if block.block_key in event.held:
                self._count_loaded(directive, block.block_key, emit)
        self._look_up(directive, emit)
        self._settle(directive, emit)

    def _enter(self, directive: Directive) -> None:
        self._directives[directive.name] = directive
        self._set_alarm(directive)
        for block in directive.blocks:
            self._by_key.setdefault(block.block_key, {})[directive.name] = None
        reference = directive.message.request_ref
        if reference is not None:
            self._by_ref.setdefault(reference, {})[directive.name] = None

    def _set_alarm(self, directive: Directive) -> None:
        """Note when something happens to a directive by itself."""
        self._alarms.set((directive.order, directive.name), directive.due_ms())

    def _refusal(self, message: PrefetchDirective) -> Problem | None:
        most, sources = self.limits.directive_blocks, self.limits.sources_per_block
        if len(message.blocks) > most:
            return Problem(TOO_LARGE, f"blocks: at most {most} in a directive; send several")
        for place, block in enumerate(message.blocks):
            if len(block.sources) > sources:
                return Problem(TOO_LARGE, f"blocks[{place}].sources: at most {sources}")
            named = self.message_of(block.block_key)
            if named is not None and not _share_blocks(named, message):
                detail = "another directive names it for another scope or model; it cannot be of both"
                return Problem(CONFLICT, f"blocks[{place}].block_key: {detail}")
        if self.pending >= self.limits.pending_directives:
            return Problem(
                UNAVAILABLE, f"{self.pending} directives are pending, which is the limit; try later"
            )
        if self._pending_blocks + len(message.blocks) > self.limits.pending_blocks:
            return Problem(UNAVAILABLE, "too many blocks are pending; try later")
        return None

    def _settle(self, directive: Directive, emit: _Emit) -> None:
        """End a directive that has nothing left to wait for."""
        if directive.pending and not directive.waiting:
            self._end(directive, directive.outcome(), emit)

    def _end(self, directive: Directive, state: DirectiveState, emit: _Emit) -> None:
        directive.state = state
        self.pending -= 1
        self._awaited -= directive.awaited
        self._pending_blocks -= len(directive.blocks)
        if directive.stop_looking():
            emit(CancelLookup(directive.name))
        for block in directive.blocks:
            if block.block_key not in directive.waiting:
                continue
            if (job := self._queue.give_up(directive.name, block.block_key)) is not None:
                self._advance(job, load.Cancel(), emit)
        directive.waiting.clear()
        kept_pinned_ms = min(directive.message.lease_ms, self.limits.directive_ms)
        directive.pins_until_ms = self._now_ms + kept_pinned_ms
        directive.forget_at_ms = self._now_ms + self.limits.kept_ms
        self._set_alarm(directive)
        emit(Ended(directive.name, state, len(directive.loaded), len(directive.blocks)))
        self._ended[directive.name] = None
        self._kept_blocks += len(directive.blocks)
        while self._kept_blocks > self.limits.kept_blocks and len(self._ended) > 1:
            self._forget(self._directives[next(iter(self._ended))], emit)

    def _await(self, name: str) -> None:
        directive = self._directives.get(name)
        if directive is not None and directive.pending and not directive.awaited:
            directive.awaited = True
            self._awaited += 1

    def _withdraw(self, name: str, emit: _Emit) -> None:
        directive = self._directives.get(name)
        if directive is not None and directive.pending:
            self._end(directive, directive.outcome(), emit)
        if name in self._directives:
            self._forget(self._directives[name], emit)

    def _forget(self, directive: Directive, emit: _Emit) -> None:
        """Drop an ended directive."""
        self._unpin_all(directive, emit)
        del self._ended[directive.name]
        self._kept_blocks -= len(directive.blocks)
        del self._directives[directive.name]
        self._alarms.set((directive.order, directive.name), None)
        for block in directive.blocks:
            _take_out(self._by_key, block.block_key, directive.name)
        reference = directive.message.request_ref
        if reference is not None:
            _take_out(self._by_ref, reference, directive.name)

    # Its records are looked up

    def _look_up(self, directive: Directive, emit: _Emit) -> None:
        lookup = directive.next_lookup(self._lookup_size.most)
        if lookup is not None:
            emit(Lookup(directive.name, *lookup))

    def _looked_up(self, name: str, records: tuple[tuple[ReplicaRecord, ...], ...], emit: _Emit) -> None:
        directive = self._directives.get(name)
        if directive is None or not directive.asked:
            return
        self._lookup_size = self._lookup_size.after_answer(directive.asked)
        for key, replicas in directive.looked_up(records):
            self._queue.claim(directive, key, replicas)
        self._look_up(directive, emit)
        self._settle(directive, emit)

    def _lookup_failed(self, name: str, too_long: bool, emit: _Emit) -> None:
        directive = self._directives.get(name)
        if too_long and directive is not None and directive.asked > 1:
            self._lookup_size = self._lookup_size.after_refusal(directive.asked)
            self._look_up(directive, emit)
        elif directive is not None and directive.stop_looking():
            self._settle(directive, emit)

    # A block is loaded

    def _start_loads(self, emit: _Emit) -> None:
        """Start what may load now (PF-2)."""
        self._queue.spare_requests(self._running and not self._awaited, self._now_ms)
        while (job := self._queue.next_job(self._now_ms)) is not None:
            self._advance(job, load.Start(), emit)

    def _advance(self, job: int, event: load.Event, emit: _Emit) -> None:
        """Let something happen to a load, and act on what comes of it."""
        step = self._queue.advance(job, event, self._now_ms)
        for effect in step.effects:
            match effect:
                case load.Loaded():
                    emit(PublishBlock(step.key))
                    self._resident(step.key, emit)
                case load.LoadFailed():
                    for name in step.given_up:
                        self._directives[name].waiting.discard(step.key)
                        self._settle(self._directives[name], emit)
                case _:
                    emit(LoadRequest(job, step.key, effect))

    def _resident(self, key: str, emit: _Emit) -> None:
        """List a block for every directive that names it, also one that has ended."""
        for name in tuple(self._by_key.get(key, ())):
            directive = self._directives.get(name)
            if directive is None:
                continue  # forgotten, as one before it has ended and there were too many
            directive.waiting.discard(key)
            self._count_loaded(directive, key, emit)
            self._settle(directive, emit)

    # Pins

    def _count_loaded(self, directive: Directive, key: str, emit: _Emit) -> None:
        if key in directive.loaded:
            return
        directive.loaded.add(key)
        if not directive.pinned:
            return
        self._pins[key] = self._pins.get(key, 0) + 1
        if self._pins[key] == 1:
            emit(Pin(key))

    def _unpin_all(self, directive: Directive, emit: _Emit) -> None:
        """Let go of what a directive keeps from eviction."""
        if not directive.pinned:
            return
        directive.pinned = False
        if not directive.pending:
            self._set_alarm(directive)
        for block in directive.blocks:
            key = block.block_key
            if key not in directive.loaded or key not in self._pins:
                continue
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                emit(Unpin(key))

    # As a value

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value, deadlines as the time that remains."""
        return Frozen(
            limits=self.limits,
            lookup_size=self._lookup_size,
            codecs=self._codecs,
            directives=tuple(directive.freeze(now_ms) for directive in self._directives.values()),
            queue=self._queue.freeze(now_ms),
            ended=tuple(self._ended),
            next_order=self._next_order,
            running=self._running,
        )

    @classmethod
    def thaw(cls, frozen: Frozen, now_ms: int) -> PrefetchTable:
        """Return the table that `freeze` made this of, as it stands at another time."""
        self = cls(frozen.limits, codecs=frozen.codecs)
        self._lookup_size = frozen.lookup_size
        for of_directive in frozen.directives:
            directive = Directive.thaw(of_directive, now_ms)
            self._enter(directive)
            self.pending += directive.pending
            self._awaited += directive.pending and directive.awaited
            self._pending_blocks += len(directive.blocks) if directive.pending else 0
            self._kept_blocks += 0 if directive.pending else len(directive.blocks)
            for key in directive.loaded if directive.pinned else ():
                self._pins[key] = self._pins.get(key, 0) + 1
        self._queue.thaw(frozen.queue, self._directives, now_ms)
        self._ended = dict.fromkeys(frozen.ended)
        self._next_order = frozen.next_order
        self._running = frozen.running
        return self


def _share_blocks(one: PrefetchDirective, other: PrefetchDirective) -> bool:
    return (one.scope_id, one.compat_id) == (other.scope_id, other.compat_id)


def _take_out(names: dict[str, dict[str, None]], key: str, name: str) -> None:
    of_key = names[key]
    del of_key[name]
    if not of_key:
        del names[key]
