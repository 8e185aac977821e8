"""The blocks that prefetch directives wait for: each waits for its turn, is loaded, and is stored (PF-2).

What several directives want is loaded once. The blocks of the directive whose deadline is earliest come
first, those of one directive in prefix order, and few are under way at a time. What comes of it for a
directive is `prefetch.PrefetchTable`'s.

While requests are to be spared, a block begins when none is under way and as much time has passed since as
the last one took. It begins without that when an even share of half the time that its directive has is over,
so that a directive with little time meets its deadline, and one whose source hangs goes on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence

import attrs

from kvsp_core.machines import prefetch_load as load
from kvsp_core.machines.prefetch_directive import Directive
from kvsp_core.machines.prefetch_load import BlockLoad
from kvsp_core.machines.retrieval import Retrieval
from kvsp_core.records import ReplicaRecord

__all__ = ["Frozen", "LoadQueue", "Step"]


@attrs.define(repr=False)
class _Claim:
    directive: Directive
    records: tuple[ReplicaRecord, ...]


@attrs.define(kw_only=True, repr=False)
class _Wanted:
    """A block that waits for its turn, is being loaded, or is being stored."""

    claims: dict[str, _Claim] = attrs.field(factory=dict)
    """By directive, with the records at its sources. Those of the first are being tried."""
    job: int | None = None


@attrs.frozen(kw_only=True, repr=False)
class Step:
    """What came of an event of a load. `given_up` names the directives that have to do without the block:
    the one whose sources were tried, or all where it could not be stored."""

    key: str
    effects: tuple[load.Effect, ...]
    given_up: tuple[str, ...] = ()


@attrs.frozen(kw_only=True, repr=False)
class Frozen:
    """A queue as a value, with deadlines as the time that remains."""

    wanted: tuple[tuple[str, tuple[tuple[str, tuple[ReplicaRecord, ...]], ...], int | None], ...]
    jobs: tuple[tuple[int, str, load.Frozen], ...]
    ready: tuple[tuple[int, int, int, str], ...]
    next_job: int
    sparing: tuple[int, int] | None
    """While requests are spared: when the last block began, and since when none is under way."""


class LoadQueue:
    """Loads at most so many blocks at a time, in a codec of `codecs`."""

    def __init__(self, concurrent_loads: int, codecs: Sequence[int]) -> None:
        self._concurrent_loads = concurrent_loads
        self._codecs = codecs
        self._wanted: dict[str, _Wanted] = {}
        self._jobs: dict[int, tuple[str, BlockLoad]] = {}
        # Whose turn it is: deadline, order and place, key. An entry may be of a block that is gone or begun.
        self._ready: list[tuple[int, int, int, str]] = []
        self._next_job = 0
        self._sparing = False
        # While requests are spared: when the last block began, and since when none is under way.
        self._began_ms = self._idle_ms = 0
        self.running = 0
        """How many blocks are being loaded or stored."""

    def __contains__(self, key: str) -> bool:
        """Return whether a block waits for its turn, or is being loaded or stored."""
        return key in self._wanted

    def has_job(self, job: int) -> bool:
        """Return whether a load is under way, or still has a lease to come."""
        return job in self._jobs

    def next_from(self, job: int, holder: str, most: int) -> tuple[str, ...]:
        """Return at most so many blocks that are to be loaded after that of a job for the same directive, and
        from the same holder first."""
        key = self._jobs[job][0] if job in self._jobs else ""
        if key not in self._wanted or most < 1:
            return ()
        directive = next(iter(self._wanted[key].claims.values())).directive
        later = itertools.islice(directive.blocks, directive.places[key] + 1, None)
        keys = (b.block_key for b in later if self._comes_from(b.block_key, directive.name, holder))
        return tuple(itertools.islice(keys, most))

    def _comes_from(self, key: str, directive: str, holder: str) -> bool:
        wanted = self._wanted.get(key)
        claim = wanted.claims.get(directive) if wanted is not None else None
        return claim is not None and bool(claim.records) and claim.records[0].holder == holder

    # Who wants what

    def claim(self, directive: Directive, key: str, records: tuple[ReplicaRecord, ...]) -> None:
        """A directive waits for a block, which these records are of."""
        if not self._wanted:
            self._began_ms = self._idle_ms = 0
        wanted = self._wanted.setdefault(key, _Wanted())
        wanted.claims[directive.name] = _Claim(directive, records)
        if wanted.job is None:
            self._enqueue(directive, key)

    def give_up(self, directive: str, key: str) -> int | None:
        """A directive does not wait for a block any more; return the job that nobody waits for, to be
        cancelled."""
        wanted = self._wanted.get(key)
        if wanted is None or wanted.claims.pop(directive, None) is None or wanted.claims:
            return None
        if wanted.job is None:
            del self._wanted[key]
        return wanted.job

    def _enqueue(self, directive: Directive, key: str) -> None:
        heapq.heappush(self._ready, (directive.deadline_ms, directive.order, directive.places[key], key))
        if len(self._ready) > 2 * len(self._wanted) + 64:
            # While no load ends, entries of blocks that are gone would pile up: keep one for each that waits.
            latest_first = sorted(self._ready, reverse=True)
            first = {entry[-1]: entry for entry in latest_first if self._waits(entry[-1])}
            self._ready = sorted(first.values())

    def _waits(self, key: str) -> bool:
        """Return whether a block is wanted and its load has not begun."""
        wanted = self._wanted.get(key)
        return wanted is not None and wanted.job is None

    # Loads

    def spare_requests(self, sparing: bool, now_ms: int) -> None:
        """Begin to spare requests, or do so no more."""
        if sparing != self._sparing:
            self._sparing = sparing
            self._began_ms = self._idle_ms = now_ms

    def next_job(self, now_ms: int) -> int | None:
        """Begin with the next block, as far as may be; return the job, which wants `Start`."""
        while self._ready and not self._waits(self._ready[0][-1]):
            heapq.heappop(self._ready)
        begins_ms = self.next_deadline_ms()
        if begins_ms is None or now_ms < begins_ms:
            return None
        key = heapq.heappop(self._ready)[-1]
        return self._begin(key, self._wanted[key], now_ms)

    def next_deadline_ms(self) -> int | None:
        """Return when the next block begins, which may have passed; None where there is none, or too many are
        under way."""
        due_ms, _, _, key = self._ready[0] if self._ready else (0, 0, 0, "")
        if not self._waits(key) or self.running >= self._concurrent_loads:
            return None
        if not self._sparing:
            return 0
        left = len(next(iter(self._wanted[key].claims.values())).directive.waiting)
        share_over_ms = self._began_ms + (due_ms - self._began_ms) // (2 * max(1, left))
        if self.running:
            return share_over_ms
        return min(share_over_ms, self._idle_ms + (self._idle_ms - self._began_ms))

    def _begin(self, key: str, wanted: _Wanted, now_ms: int) -> int:
        claim = next(iter(wanted.claims.values()))
        directive, message = claim.directive, claim.directive.message
        fetching = Retrieval(
            claim.records,
            block_key=key,
            compat_id=message.compat_id,
            scope_id=message.scope_id,
            layers=directive.layers,
            block_tokens=directive.block_tokens,
            codecs=self._codecs,
        )
        wanted.job = self._next_job
        self._next_job += 1
        self._jobs[wanted.job] = (key, BlockLoad(fetching, lease_ms=message.lease_ms))
        self.running += 1
        if self._sparing:
            self._began_ms = now_ms
        return wanted.job

    def advance(self, job: int, event: load.Event, now_ms: int) -> Step:
        """Let something happen to a load that is under way."""
        key, block_load = self._jobs[job]
        was_over = block_load.state is load.LoadState.OVER
        effects = block_load.handle(event, now_ms)
        if block_load.finished:
            del self._jobs[job]
        if was_over or block_load.state is not load.LoadState.OVER:
            return Step(key=key, effects=effects)
        self.running -= 1
        if self._sparing and not self.running:
            self._idle_ms = now_ms
        wanted = self._wanted.pop(key)
        given_up: tuple[str, ...] = ()
        for effect in effects:
            if isinstance(effect, load.LoadFailed):
                given_up = self._failed(key, wanted.claims, storage=effect.storage)
        return Step(key=key, effects=effects, given_up=given_up)

    def _failed(self, key: str, claims: dict[str, _Claim], *, storage: bool) -> tuple[str, ...]:
        """Have the sources of the next directive tried, unless it was storage that failed; return who does
        without the block."""
        names = tuple(claims)
        if storage or len(names) < 2:
            return names
        others = {name: claims[name] for name in names[1:]}
        self._wanted[key] = _Wanted(claims=others)
        self._enqueue(claims[names[1]].directive, key)
        return names[:1]

    # As a value

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value."""
        return Frozen(
            wanted=tuple(
                (key, tuple((name, claim.records) for name, claim in wanted.claims.items()), wanted.job)
                for key, wanted in self._wanted.items()
            ),
            jobs=tuple((number, key, each.freeze(now_ms)) for number, (key, each) in self._jobs.items()),
            ready=tuple((due - now_ms, order, place, key) for due, order, place, key in sorted(self._ready)),
            next_job=self._next_job,
            sparing=self._freeze_sparing(now_ms),
        )

    def _freeze_sparing(self, now_ms: int) -> tuple[int, int] | None:
        if not self._sparing:
            return None
        return (self._began_ms - now_ms, self._idle_ms - now_ms) if self._wanted else (0, 0)

    def thaw(self, frozen: Frozen, directives: Mapping[str, Directive], now_ms: int) -> None:
        """Take over what `freeze` made a value of. This one must be new."""
        for key, claims, job in frozen.wanted:
            of_key = {name: _Claim(directives[name], records) for name, records in claims}
            self._wanted[key] = _Wanted(claims=of_key, job=job)
        for number, key, of_job in frozen.jobs:
            self._jobs[number] = (key, BlockLoad.thaw(of_job, now_ms))
            self.running += of_job.state is not load.LoadState.OVER
        self._ready = [(due + now_ms, order, place, key) for due, order, place, key in frozen.ready]
        self._next_job = frozen.next_job
        if frozen.sparing is not None:
            self._sparing = True
            self._began_ms, self._idle_ms = (now_ms + distance for distance in frozen.sparing)
