"""Where a controller sends a request or a session that has lost its instance: looked up, compared, chosen.

A placement asks the index for the replicas of the prompt's blocks, in each scope the request names, and for
the descriptor of its model where that is not known. What has come is compared by the estimates of
`kvsp_core.machines.placement` (PL-1, PL-2; decisions W13, W24, W25). An index that cannot be reached makes a
placement worse, never impossible, and those that follow do not wait for it until it answers again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, assert_never

import attrs

from kvsp_core.answers import read_answer
from kvsp_core.errors import KVSPError, RemoteProtocolError
from kvsp_core.ext_messages import CandidateCost, MissedBlocks, PlacementAnswer, ScopedPrefix
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.index_parts import IndexParts
from kvsp_core.limits import LOOKUP_TIMEOUT_MS, MAX_DESCRIPTORS, MAX_LOOKUP_KEYS, UNREACHABLE_MS
from kvsp_core.lookup_size import LookupSize
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.placement import (
    Candidate,
    Known,
    LowestCost,
    Placement,
    Policy,
    Prompt,
    explain_misses,
    mean_service_us,
    place,
)
from kvsp_core.machines.session import SessionRecord
from kvsp_core.machines.silent_peers import SilentPeers
from kvsp_core.messages import LookupAnswer, LookupRequest, PrefetchBlock
from kvsp_core.problems import Problem
from kvsp_core.records import InstanceStatus, ReplicaRecord
from kvsp_core.resources import GetDescriptor, Lookup
from kvsp_core.roles.authorization import Policy as Permissions
from kvsp_core.roles.role import AnswerReceived, CallFailed
from kvsp_core.roles.work import Work

__all__ = ["Match", "PlacementSettings", "Placements", "Subject", "placement_answer"]

_NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_DESCRIPTORS: Final[Mapping[str, CompatibilityDescriptor]] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class PlacementSettings:
    """What a deployment says about placement.

    `classes` names for an instance the class within which all results are bit-identical (CP-6); an instance
    that has none is alone in its class, and no session is placed as deterministic on it.
    """

    index_uris: tuple[str, ...]
    """The parts of the index (OP-3); without any, every block counts as not cached."""
    policy: Policy = attrs.field(factory=LowestCost)
    classes: Mapping[str, str] = _NO_NAMES
    descriptors: Mapping[str, CompatibilityDescriptor] = _NO_DESCRIPTORS
    default_service_us: int = 1_000_000
    call_timeout_ms: int = LOOKUP_TIMEOUT_MS
    max_lookup_keys: int = MAX_LOOKUP_KEYS


_NO_CLASS: Final = "no other instance is known to give the same results"


@attrs.frozen(kw_only=True)
class Subject:
    """What is to be placed.

    `prefixes` are the block keys of the prompt in each scope, the scope of the session first. A request says
    how many tokens it has; of a session that moves the `tail_tokens` are known, those that follow the blocks
    of its prompt. `alike` is the class of results that the chosen one must have; `avoid` are instances to be
    taken last, `cause` the ``traceparent`` of the request that it is for.
    """

    compat_id: str = attrs.field(repr=False)
    prefixes: tuple[ScopedPrefix, ...]
    token_count: int = 0
    tail_tokens: int = 0
    deterministic: bool = False
    alike: str | None = None
    avoid: frozenset[str] = frozenset()
    cause: str | None = None


@attrs.frozen(kw_only=True)
class Match:
    """The prefix whose leading blocks are known best: its replicas, in the order of the blocks."""

    prefix: ScopedPrefix
    replicas: tuple[tuple[ReplicaRecord, ...], ...] = attrs.field(repr=False)


@attrs.frozen
class LookupCall:
    """Asks a part of the index for the replicas of a prefix."""

    gather: int
    prefix: int
    part: str


@attrs.frozen
class DescriptorCall:
    """Asks a part of the index for the descriptor of a model."""

    gather: int
    part: str
    compat_id: str = attrs.field(repr=False)


@attrs.frozen
class ProbeCall:
    """Asks a part of the index that was silent whether it answers. No placement waits for it."""

    part: str


PlacementCall: TypeAlias = LookupCall | DescriptorCall | ProbeCall

_NOTHING: Final = LookupAnswer(matched=0, blocks=())
"""What counts as the answer of a part that gives none: it knows nothing."""


@attrs.frozen(kw_only=True)
class Found:
    """All that could be found out for a subject."""

    purpose: Any
    subject: Subject
    match: Match


@attrs.define(eq=False)
class _Gather:
    """A placement whose answers have not all come."""

    purpose: Any
    subject: Subject
    calls: set[int] = attrs.Factory(set)
    """Those that have not been answered."""
    replicas: list[list[tuple[ReplicaRecord, ...]]] = attrs.Factory(list)
    """Of the leading blocks of each prefix, as far as they are known."""
    lookups: dict[int, _Lookup] = attrs.Factory(dict)
    """Prefix -> the lookup of it that is under way."""


@attrs.define(eq=False)
class _Lookup:
    """A lookup on its way to the parts of the index."""

    request: LookupRequest
    parts: int
    answers: dict[str, LookupAnswer] = attrs.Factory(dict)
    too_long: bool = False
    """Whether a part takes fewer keys at a time."""


class Placements:
    """Looks up what is needed for each placement.

    `policy` returns what holds now: which replicas count, and whose digests (SE-2). `may_serve` says whether
    an instance has a part in a scope: others would only refuse. Calls are made through `work`; their ends
    come back to `handle`. When all of a placement have come, it is `Found`.
    """

    def __init__(
        self,
        work: Work,
        fleet: Fleet,
        settings: PlacementSettings,
        policy: Callable[[], Permissions],
        may_serve: Callable[[str, str], bool],
    ) -> None:
        self._work = work
        self._fleet = fleet
        self._settings = settings
        self._policy = policy
        self._index = IndexParts(settings.index_uris)
        self._may_serve = may_serve
        self._descriptors = dict(settings.descriptors)
        self._lookup_size = LookupSize(settings.max_lookup_keys)
        self._service_us: dict[str, int] = {}
        self._gathers: dict[int, _Gather] = {}
        self._number_of: dict[Any, int] = {}  # what a placement is for -> its gather
        self._last = 0
        self._silent = SilentPeers(retry_ms=UNREACHABLE_MS)
        self._probes: dict[str, LookupRequest | GetDescriptor] = {}  # part -> what it gave no answer to

    def __len__(self) -> int:
        return len(self._gathers)

    # Looking up

    def begin(self, subject: Subject, purpose: Any) -> Found | None:
        """Find out what is known of a prompt; return it where nobody has to be asked."""
        self._last += 1
        number = self._last
        gather = _Gather(purpose=purpose, subject=subject, replicas=[[] for _ in subject.prefixes])
        self._gathers[number] = gather
        self._number_of[purpose] = number
        for index, prefix in enumerate(subject.prefixes):
            if prefix.block_keys and self._index:
                self._look_up(number, index)
        if subject.compat_id not in self._descriptors and self._index:
            keys = [key for prefix in subject.prefixes for key in prefix.block_keys[:1]]
            parts = (*map(self._index.of, keys[:1]), *self._index.uris)  # who knows its record knows it
            part = next((part for part in parts if part not in self._silent), None)
            if part is not None:
                call = DescriptorCall(number, part, subject.compat_id)
                gather.calls.add(self._call(part, GetDescriptor(subject.compat_id), call, subject.cause))
        return self._finish(number)

    def cancel(self, purpose: Any) -> None:
        """Give a placement up that nobody waits for any more."""
        number = self._number_of.pop(purpose, None)
        if number is not None:
            for call in sorted(self._gathers.pop(number).calls):
                self._work.cancel(call)

    def _look_up(self, number: int, prefix: int) -> None:
        """Ask each part of the index for its share of the next keys of a prefix, up to the first key of one
        that is silent."""
        gather = self._gathers[number]
        keys, scope_id = gather.subject.prefixes[prefix].block_keys, gather.subject.prefixes[prefix].scope_id
        known = len(gather.replicas[prefix])
        keys = keys[known : known + self._lookup_size.most]
        keys = tuple(itertools.takewhile(lambda key: self._index.of(key) not in self._silent, keys))
        if not keys:
            return
        request = LookupRequest(
            scope_id=scope_id,
            compat_id=gather.subject.compat_id,
            block_keys=keys,
            holders=self._policy().producers(scope_id),
        )
        shares = self._index.shares(request)
        gather.lookups[prefix] = _Lookup(request, len(shares))
        for part, share in shares.items():
            call = LookupCall(number, prefix, part)
            gather.calls.add(self._call(part, share, call, gather.subject.cause))

    def _call(
        self,
        part: str,
        asked: LookupRequest | GetDescriptor,
        purpose: PlacementCall,
        cause: str | None = None,
    ) -> int:
        operation, body = (Lookup(), asked) if isinstance(asked, LookupRequest) else (asked, None)
        return self._work.call(
            part,
            operation,
            body,
            purpose=purpose,
            timeout_ms=self._settings.call_timeout_ms,
            cause=cause,
        )

    def handle(self, call: PlacementCall, item: AnswerReceived | CallFailed, now_ms: int) -> Found | None:
        """Take in the end of a call; return what was found where it was the last of a placement."""
        if isinstance(item, AnswerReceived):
            self._silent.note_answer(call.part)
        match call:
            case ProbeCall(part):
                if isinstance(item, CallFailed):
                    self._silent.note_probe_failed(part, now_ms)
                return None
            case LookupCall():
                self._looked_up(call, item, now_ms)
            case DescriptorCall(part=part, compat_id=compat_id):
                if isinstance(item, CallFailed):
                    self._note_silence(part, GetDescriptor(compat_id), now_ms)
                self._described(compat_id, item)
            case _:
                assert_never(call)
        self._gathers[call.gather].calls.discard(item.call_id)
        return self._finish(call.gather)

    def _note_silence(self, part: str, asked: LookupRequest | GetDescriptor, now_ms: int) -> None:
        """A part gave no answer: placements go on as if it knew nothing, and probes ask it this again."""
        self._probes[part] = asked
        self._silent.note_silence(part, now_ms)
        self.fire(now_ms)

    def fire(self, now_ms: int) -> None:
        """Probe the parts of the index for which it is time."""
        for part in self._silent.take_due(now_ms):
            self._call(part, self._probes[part], ProbeCall(part))

    def next_deadline_ms(self) -> int | None:
        """Return when `fire` is next due, or None."""
        return self._silent.next_deadline_ms()

    def _looked_up(self, call: LookupCall, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        """Take the answer of a part in; what it does not say, it does not know."""
        gather = self._gathers[call.gather]
        lookup = gather.lookups[call.prefix]
        if isinstance(item, CallFailed):
            share = self._index.shares(lookup.request)[call.part]
            self._note_silence(call.part, attrs.evolve(share, block_keys=share.block_keys[:1]), now_ms)
        elif item.response.status == 413:
            lookup.too_long = True
        lookup.answers[call.part] = _read(item)
        if len(lookup.answers) < lookup.parts:
            return
        del gather.lookups[call.prefix]
        asked = len(lookup.request.block_keys)
        if lookup.too_long and asked > 1:
            self._lookup_size = self._lookup_size.after_refusal(asked)
            self._look_up(call.gather, call.prefix)
            return
        self._lookup_size = self._lookup_size.after_answer(asked)
        try:
            blocks = self._index.joined(lookup.request, lookup.answers)
        except RemoteProtocolError:
            return
        found = gather.replicas[call.prefix]
        for records in blocks:
            replicas = self._policy().trusted(records)
            if not replicas:
                return
            found.append(replicas)
        if len(blocks) == len(lookup.request.block_keys) and len(found) < len(
            gather.subject.prefixes[call.prefix].block_keys
        ):
            self._look_up(call.gather, call.prefix)

    def _described(self, compat_id: str, item: AnswerReceived | CallFailed) -> None:
        if isinstance(item, CallFailed) or not item.response.is_success:
            return
        try:
            descriptor = CompatibilityDescriptor.from_json(item.body)
        except KVSPError:
            return
        if descriptor.compat_id == compat_id:  # CD-6: computed, not believed
            self._descriptors[compat_id] = descriptor
            if len(self._descriptors) > len(self._settings.descriptors) + MAX_DESCRIPTORS:
                learnt = (known for known in self._descriptors if known not in self._settings.descriptors)
                del self._descriptors[next(learnt)]

    def _finish(self, number: int) -> Found | None:
        gather = self._gathers[number]
        if gather.calls:
            return None
        del self._gathers[number], self._number_of[gather.purpose]
        best = max(range(len(gather.replicas)), key=lambda index: (len(gather.replicas[index]), -index))
        match = Match(prefix=gather.subject.prefixes[best], replicas=tuple(gather.replicas[best]))
        return Found(purpose=gather.purpose, subject=gather.subject, match=match)

    # Choosing

    def choose(self, subject: Subject, match: Match, now_ms: int) -> Placement:
        """Compare all instances that live and choose; explain every one and every miss (PL-2)."""
        descriptor = self._descriptors.get(subject.compat_id)
        keys = len(match.prefix.block_keys)
        block_tokens = descriptor.block_tokens if descriptor else max(1, subject.token_count // max(1, keys))
        prompt = Prompt(
            tokens=max(subject.token_count, keys * block_tokens + subject.tail_tokens),
            block_tokens=block_tokens,
            layers=descriptor.layers if descriptor else None,
            blocks=match.replicas,
        )
        known = [tuple(map(Known, replicas)) for replicas in match.replicas]
        known += [()] * (keys - len(known))
        misses = explain_misses(
            known,
            compat_id=subject.compat_id,
            scope_id=match.prefix.scope_id,
            layers=descriptor.layers if descriptor else None,
        )
        statuses = [
            status
            for instance in self._fleet.instances()
            if (status := self._fleet.status_of(instance)) is not None
        ]
        names = [status.instance for status in statuses]
        refused = {s.instance: why for s in statuses if (why := self._refusal(s, subject))}
        failing = {name: "its engine fails" for name in names if self._fleet.is_failing(name)}
        avoided: Mapping[str, str] = dict.fromkeys(subject.avoid, "it has failed this before") | failing
        for fewer in (failing, _NO_NAMES):
            if all(name in refused or name in avoided for name in names):
                avoided = fewer  # nobody else is left: better one that has failed before
        return place(
            prompt,
            statuses,
            mean_service_us=self._service_us,
            default_service_us=self._settings.default_service_us,
            policy=self._settings.policy,
            warmth={name: self._fleet.warmth(name, now_ms) for name in names},
            refused={**avoided, **refused},
            misses=misses,
        )

    def class_of(self, instance: str) -> str | None:
        """Return the class of an instance's results: as configured, else what its engine says of its
        numerics; None where neither is known."""
        status = self._fleet.status_of(instance)
        reported = status.numerics if status is not None else None
        return self._settings.classes.get(instance, reported)

    def lacks_class(self, subject: Subject) -> bool:
        """Return whether a deterministic request waits for what cannot come: instances that could take it are
        here, none says whose results it repeats, one that rests or drains included, and none is configured
        to."""
        if not subject.deterministic or self._settings.classes:
            return False
        statuses = [s for i in self._fleet.instances() if (s := self._fleet.status_of(i)) is not None]
        if any(s.numerics is not None and not self._unable(s, subject) for s in statuses):
            return False
        return any(self._refusal(status, subject) == _NO_CLASS for status in statuses)

    def _refusal(self, status: InstanceStatus, subject: Subject) -> str:
        """Return why an instance may not take this, or an empty string."""
        if not self._fleet.is_assignable(status.instance):
            return f"it is {status.state}, or asked to drain"
        if unable := self._unable(status, subject):
            return unable
        results = self.class_of(status.instance)
        if subject.alike is not None:
            if (results or status.instance) != subject.alike:
                return "its results are not those of the instance that was lost"
        elif subject.deterministic and results is None:
            return _NO_CLASS
        return ""

    def _unable(self, status: InstanceStatus, subject: Subject) -> str:
        """Return why an instance could not take this in any state, or an empty string."""
        if status.compat_ids and subject.compat_id not in status.compat_ids:
            return "it does not compute with this model"
        if not self._may_serve(status.instance, subject.prefixes[0].scope_id):
            return "it has no part in the scope of the session"
        return ""

    def forget(self, instance: str) -> None:
        """Forget an instance that is not to come back."""
        self._service_us.pop(instance, None)

    def served(self, instance: str, sample_us: int) -> None:
        """Take note of how long an instance took for a request (decision W25)."""
        mean_us = self._service_us.get(instance, self._settings.default_service_us)
        self._service_us[instance] = mean_service_us(mean_us, sample_us)


def _read(item: AnswerReceived | CallFailed) -> LookupAnswer:
    if isinstance(item, CallFailed):
        return _NOTHING
    try:
        answer = read_answer(LookupAnswer, item.response, item.body)
    except KVSPError:
        return _NOTHING
    return _NOTHING if isinstance(answer, Problem) else answer


def blocks_to_load(instance: str, match: Match) -> tuple[PrefetchBlock, ...]:
    """Return the leading blocks that an instance does not hold whole, each with the others who have some."""
    blocks = []
    for key, replicas in zip(match.prefix.block_keys, match.replicas, strict=False):
        last = max(entry.layers[1] for record in replicas for entry in record.residency)
        if any(record.holder == instance and record.has_layers(0, last) for record in replicas):
            continue
        sources = tuple(dict.fromkeys(record.holder for record in replicas if record.holder != instance))
        if sources:
            blocks.append(PrefetchBlock(block_key=key, sources=sources))
    return tuple(blocks)


def placement_answer(record: SessionRecord, reference: str, placement: Placement) -> PlacementAnswer:
    """Return what a front end gets for its request: where it goes, and why."""
    assert placement.chosen is not None
    return PlacementAnswer(
        session=record.session,
        epoch=record.epoch,
        instance=placement.chosen.instance,
        request_ref=reference,
        candidates=tuple(map(_candidate_cost, placement.candidates)),
        misses=tuple(MissedBlocks(blocks=miss.blocks, reason=miss.reason.value) for miss in placement.misses),
    )


def _candidate_cost(candidate: Candidate) -> CandidateCost:
    return CandidateCost(
        instance=candidate.instance,
        refused=candidate.refused or None,
        cost_us=candidate.cost_us,
        wait_us=candidate.wait_us,
        fetch_us=candidate.fetch_us,
        recompute_us=candidate.recompute_us,
        resident_tokens=candidate.resident_tokens,
        fetched_tokens=candidate.fetched_tokens,
        recomputed_tokens=candidate.recomputed_tokens,
        explanation=candidate.explanation,
    )
