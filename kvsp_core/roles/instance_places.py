"""The places of an instance's engine: sessions wait for one in the order in which they came, have the blocks
that are held of them brought in, and then run.

Requirements KC-3, MG-2, PF-4; decision W20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.machines import prefetch
from kvsp_core.roles import engine, instance_imports
from kvsp_core.roles.engine_watch import EngineWatch
from kvsp_core.roles.instance_copies import Copies
from kvsp_core.roles.instance_imports import Imports
from kvsp_core.roles.instance_loads import Loads
from kvsp_core.roles.instance_meter import Meter
from kvsp_core.roles.local_blocks import LocalBlocks
from kvsp_core.roles.role import BlockName, JobDone, JobFailed
from kvsp_core.roles.served_session import ServedSession
from kvsp_core.roles.work import Work

__all__ = ["Places"]


class Places:
    """The `batch_size` places of an engine, and the sessions that wait for one.

    `sessions` are all of the instance, by name. `prefix_lost` is told of a session that cannot run because
    only so many of its blocks came in, and the tokens of those that follow are not known. While the engine is
    silent, as `watch` tells, nobody gets a place.
    """

    def __init__(
        self,
        work: Work,
        blocks: LocalBlocks,
        prefetches: Loads,
        copies: Copies,
        meter: Meter,
        watch: EngineWatch,
        *,
        sessions: Mapping[str, ServedSession],
        models: Mapping[str, CompatibilityDescriptor],
        batch_size: int,
        prefix_lost: Callable[[ServedSession, int, int], None],
    ) -> None:
        self._work = work
        self._blocks = blocks
        self._prefetches = prefetches
        self._meter = meter
        self._watch = watch
        self._imports = Imports(work, blocks, copies)
        self._sessions = sessions
        self._models = models
        self._batch_size = batch_size
        self._prefix_lost = prefix_lost
        self._sequences: dict[int, str] = {}
        self._queue: dict[str, None] = {}  # sessions that wait, in order
        self._admitting = False
        self._last_sequence = 0

    # What others ask

    @property
    def running(self) -> int:
        """Sequences the engine has."""
        return len(self._sequences)

    @property
    def queued(self) -> int:
        """Sessions that wait for a place."""
        return len(self._queue)

    @property
    def sessions(self) -> tuple[ServedSession, ...]:
        """Those that wait for a place, and those that have one."""
        return tuple(self._sessions[name] for name in (*self._queue, *self._sequences.values()))

    def session_of(self, sequence: int) -> ServedSession | None:
        """Return the session that has a place as this sequence."""
        session = self._sessions.get(self._sequences.get(sequence, ""))
        return session if session is not None and session.sequence == sequence else None

    def leading_held(self, session: ServedSession) -> int:
        """Return how many leading blocks of a session are held here."""
        held = (self._held(session, index) for index in range(len(session.keys)))
        return next((index for index, name in enumerate(held) if name is None), len(session.keys))

    def _held(self, session: ServedSession, index: int) -> BlockName | None:
        """Return the name under which a block is held here, or None."""
        return next((n for n in session.names_of(index) if self._blocks.tier_of(n) is not None), None)

    # Into the engine

    def keep_prompt(self, session: ServedSession) -> None:
        """Keep the blocks of a prompt that is not known here from eviction until they are in the engine."""
        session.kept = tuple(session.name_of(index) for index in range(len(session.prompt_keys)))
        for name in session.kept:
            self._blocks.keep(name)

    def _let_prompt_go(self, session: ServedSession) -> None:
        for name in session.kept:
            self._blocks.let_go(name)
        session.kept = ()

    def enqueue(self, session: ServedSession, now_ms: int) -> None:
        """Have a session run as soon as there is a place."""
        self._queue[session.name] = None
        self._admit(now_ms)

    def _admit(self, now_ms: int) -> None:
        """Give waiting sessions the free places of the engine, in the order in which they came, and start
        the sequences whose blocks are in the engine."""
        if self._admitting:
            return  # where a start has failed its place is free again, and the loop below sees that
        self._admitting = True
        while self._can_give_place or self._imports.any_done:
            if self._can_give_place:
                self._give_place(self._sessions[next(iter(self._queue))], now_ms)
            for (name, run), count in self._imports.take_done():
                session = self._sessions.get(name)
                if session is not None and session.run == run:
                    self._start_sequence(session, count, now_ms)
        self._admitting = False

    @property
    def _can_give_place(self) -> bool:
        return bool(self._queue) and len(self._sequences) < self._batch_size and not self._watch.silent

    def _give_place(self, session: ServedSession, now_ms: int) -> None:
        """Take a session out of the queue, and bring the blocks that are held of it into the engine."""
        del self._queue[session.name]
        self._last_sequence += 1
        session.sequence = self._last_sequence
        self._sequences[session.sequence] = session.name
        most = (len(session.tokens) - 1) // self._models[session.compat_id].block_tokens
        count = min(self.leading_held(session), most)
        copy_as = tuple(session.name_of(index) for index in range(count))
        names = tuple(self._held(session, index) or own for index, own in enumerate(copy_as))
        self._imports.begin((session.name, session.run), session.sequence, names, copy_as)
        self._let_prompt_go(session)
        self._prefetches.handle(prefetch.RequestsRun(True), now_ms)
        if session.request_ref is not None:
            self._prefetches.handle(prefetch.RequestArrived(session.request_ref), now_ms)

    def _start_sequence(self, session: ServedSession, blocks: int, now_ms: int) -> None:
        model, gate = self._models[session.compat_id], session.gate
        assert session.sequence is not None
        assert session.sampler is not None
        assert gate is not None
        cached = blocks * model.block_tokens
        if cached < session.known_from:
            self._prefix_lost(session, blocks, now_ms)
            return
        session.started = True
        self._meter.started(session.sequence, len(session.tokens) - cached, now_ms)
        self._work.observe("kvsp_cached_tokens", cached)
        self._work.observe("kvsp_recomputed_tokens", len(session.tokens) - cached)
        self._work.emit(
            engine.StartSequence(
                sequence=session.sequence,
                tokens=session.tokens,
                cached_tokens=cached,
                sampler=attrs.evolve(session.sampler, step=gate.decoded),
                known_from=session.known_from,
            )
        )

    def job_ended(self, purpose: instance_imports.Purpose, item: JobDone | JobFailed, now_ms: int) -> None:
        """Take in how a read or an import has ended."""
        self._imports.job_ended(purpose, item, now_ms)
        self._admit(now_ms)

    # Out of it

    def give_up(self, session: ServedSession) -> None:
        """Stop what brings a session into the engine. A place that it has is its own until it leaves."""
        self._imports.abandon((session.name, session.run))
        self._queue.pop(session.name, None)
        self._let_prompt_go(session)

    def leave(self, session: ServedSession, now_ms: int) -> None:
        """Give the place of a session to the next."""
        session.leaving = False
        if session.sequence is not None:
            self._work.emit(engine.Abort(session.sequence))
            self._meter.left(session.sequence)
            del self._sequences[session.sequence]
            session.sequence, session.started = None, False
            self._admit(now_ms)
            if not self._sequences:
                self._prefetches.handle(prefetch.RequestsRun(False), now_ms)
