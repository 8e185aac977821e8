"""The sessions of an instance: they begin or are resumed, run in the engine, and their output goes out when
it may.

For each session three machines meet: `resume` (which epoch is served here, and how it comes to run), the
output gate (what may be released, when a checkpoint is due), and the engine's sequence. How sessions come
into the engine is in `instance_places`, who gets their output in `instance_streams`. Requirements CP-1, CP-3,
CP-5, MG-2, MG-3; decisions W19, W20, W31.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import attrs

from kvsp_core.answers import read_answer
from kvsp_core.block_keys import BlockKeyChain
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.ext_messages import OutputEnd, OutputRequest
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import MAX_INSTANCE_SESSIONS
from kvsp_core.machines import output, prefetch, resume
from kvsp_core.machines.alarms import Alarms, earliest
from kvsp_core.messages import CheckpointRecorded, ResumeRequest
from kvsp_core.problems import (
    BAD_REQUEST,
    INCOMPATIBLE,
    NOT_FOUND,
    PRECONDITION_REQUIRED,
    SCOPE_DENIED,
    STALE_EPOCH,
    UNAVAILABLE,
    Problem,
)
from kvsp_core.records import SessionCheckpoint
from kvsp_core.resources import Operation, RecordCheckpoint, StreamOutput
from kvsp_core.roles import engine, instance_imports
from kvsp_core.roles.engine_watch import EngineWatch
from kvsp_core.roles.instance_copies import Copies
from kvsp_core.roles.instance_loads import Loads
from kvsp_core.roles.instance_meter import Meter
from kvsp_core.roles.instance_places import Places
from kvsp_core.roles.instance_settings import InstanceSettings
from kvsp_core.roles.instance_streams import Streams
from kvsp_core.roles.local_blocks import LocalBlocks
from kvsp_core.roles.role import AnswerReceived, CallFailed, JobDone, JobFailed
from kvsp_core.roles.served_session import ServedSession
from kvsp_core.roles.serving import done, refuse
from kvsp_core.roles.work import Work

__all__ = ["CheckpointFor", "Sessions"]

_PROMPT_WANTED: Final = Problem(PRECONDITION_REQUIRED, "prompt: blocks of it are gone; send its tokens again")
_GONE_ON: Final = Problem(STALE_EPOCH, "the session has gone on in another epoch; ask its controller")


@attrs.frozen
class CheckpointFor:
    """A checkpoint under way. `run` numbers the attempts to serve the session: what is of a former one is
    over."""

    session: str = attrs.field(repr=False)
    run: int


class Sessions:
    """All sessions of an instance.

    `shared_scopes` gives the shared scopes that a client may read and whose key is here. `open_session` asks
    the lifecycle whether one may begin, and `close_session` tells it that one has ended. `models` and
    `scopes` are what the instance computes and the scopes whose key it holds.
    """

    def __init__(
        self,
        work: Work,
        blocks: LocalBlocks,
        loads: Loads,
        prefetches: Loads,
        copies: Copies,
        meter: Meter,
        watch: EngineWatch,
        *,
        settings: InstanceSettings,
        models: Mapping[str, CompatibilityDescriptor],
        scopes: Mapping[str, Scope],
        shared_scopes: Callable[[str], Iterable[str]],
        open_session: Callable[[int], Problem | None],
        close_session: Callable[[int], None],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._work = work
        self._loads = loads
        self._prefetches = prefetches
        self._copies = copies
        self._meter = meter
        self._settings = settings
        self._models = models
        self._scopes = scopes
        self._shared = shared_scopes
        self._open_session = open_session
        self._close_session = close_session
        self._random_bytes = random_bytes
        self._sessions: dict[str, ServedSession] = {}
        self._over: dict[str, None] = {}  # those that are only remembered, in the order in which they ended
        self._streams = Streams(work)
        self._places = Places(
            work,
            blocks,
            prefetches,
            copies,
            meter,
            watch,
            sessions=self._sessions,
            models=models,
            batch_size=settings.batch_size,
            prefix_lost=self._prefix_lost,
        )
        self._loading: dict[str, tuple[str, int]] = {}  # directive -> session, epoch
        self._awaited: dict[str, list[str]] = {}  # directive -> sessions that wait for its end
        self._alarms: Alarms[str] = Alarms()  # when something happens to each by itself

    # What the status reports

    @property
    def running(self) -> int:
        """Sequences the engine has."""
        return self._places.running

    @property
    def queued(self) -> int:
        """Sessions that wait for a place in the engine."""
        return self._places.queued

    # Requests

    def resume_session(
        self, request_id: int, name: str, body: ResumeRequest, now_ms: int, cause: str | None
    ) -> None:
        """Serve POST sessions/{session}/resume; `cause` is what the request belongs to."""
        checkpoint = body.checkpoint
        if checkpoint.session != name:
            problem = Problem(BAD_REQUEST, "checkpoint.session: is not the session that the path names")
            self._work.emit(refuse(request_id, problem))
            return
        session = self._sessions.get(name) or ServedSession(name=name)
        session.asked = cause
        refusal = self._refusal(checkpoint.compat_id, checkpoint.scope_id, session, now_ms)
        event = resume.ResumeReceived(epoch=body.epoch, checkpoint=checkpoint, refusal=refusal)
        self._advance(session, event, now_ms, request_id=request_id)

    def get(self, name: str) -> ServedSession | None:
        """Return a session; None where it is not known here."""
        return self._sessions.get(name)

    def stream_output(
        self, request_id: int, client: str, name: str, body: OutputRequest, now_ms: int, cause: str | None
    ) -> None:
        """Serve POST ext/sessions/{session}/output: begin a session, or take its output up again."""
        session = self._sessions.get(name)
        if session is None or isinstance(session.state, resume.Absent):
            if body.sampler is None:
                self._work.emit(refuse(request_id, Problem(NOT_FOUND, "the session is not served here")))
                return
            session = session or ServedSession(name=name)
        session.asked = cause
        if body.sampler is not None and body.epoch > getattr(session.state, "epoch", 0):
            assert body.compat_id is not None
            assert body.scope_id is not None
            assert body.prompt is not None
            refusal = self._refusal(body.compat_id, body.scope_id, session, now_ms)
            if refusal is None:
                session.compat_id, session.scope_id = body.compat_id, body.scope_id
                session.shared_scopes = tuple(s for s in self._shared(client) if s != body.scope_id)
                session.sampler, session.prompt = body.sampler, body.prompt
                session.request_ref = body.request_ref
            event = resume.BeginReceived(epoch=body.epoch, refusal=refusal)
            if not self._advance(session, event, now_ms, request_id=request_id):
                return
        self._attach(session, request_id, client, body, now_ms)

    def _refusal(self, compat_id: str, scope_id: str, session: ServedSession, now_ms: int) -> Problem | None:
        """Return why a session cannot begin here; where it can, the lifecycle counts it from now on."""
        if compat_id not in self._models:
            return Problem(INCOMPATIBLE, "compat_id: this instance computes another model")
        if scope_id not in self._scopes:
            return Problem(SCOPE_DENIED, "scope_id: this instance does not hold the key of the scope")
        if session.counted:
            return None
        if session.name not in self._sessions and not self._has_room(now_ms):
            return Problem(UNAVAILABLE, "the instance has as many sessions as it takes; try another")
        problem = self._open_session(now_ms)
        session.counted = problem is None
        return problem

    def _has_room(self, now_ms: int) -> bool:
        """Have room for a further session: the first that is over, and that nobody reads, goes early."""
        if len(self._sessions) < MAX_INSTANCE_SESSIONS:
            return True
        for session in map(self._sessions.__getitem__, self._over):
            if session.stream is None and not session.waiting and not session.leaving:
                self._forget(session, now_ms)
                return True
        return False

    def _attach(
        self, session: ServedSession, request_id: int, client: str, body: OutputRequest, now_ms: int
    ) -> None:
        state = session.state
        if isinstance(state, resume.Absent) or body.epoch != state.epoch:
            problem = Problem(
                STALE_EPOCH, "epoch: the session is not served here in this epoch; ask its controller"
            )
            self._work.emit(refuse(request_id, problem))
            return
        if isinstance(state, resume.Ended) and session.gate is None:
            self._work.emit(refuse(request_id, Problem(NOT_FOUND, "the session is not served here any more")))
            return
        self._streams.enter(session, request_id, client)
        if isinstance(state, resume.Loading | resume.NeedsPrompt):
            session.waiting.append((request_id, body.from_index))
            if body.prompt is not None:
                self._prompt_came(session, request_id, body.prompt, now_ms)
            elif isinstance(state, resume.NeedsPrompt):
                self._streams.refuse_waiting(session, _PROMPT_WANTED)
            else:
                session.belong()
            return
        session.belong()
        self._begin_stream(session, request_id, body.from_index, now_ms)

    def _begin_stream(self, session: ServedSession, request_id: int, from_index: int, now_ms: int) -> None:
        self._streams.begin(session, request_id)
        self._through_gate(session, output.Attached(from_index), now_ms)

    def _prompt_came(
        self, session: ServedSession, request_id: int, prompt: tuple[int, ...], now_ms: int
    ) -> None:
        state = session.state
        assert isinstance(state, resume.Loading | resume.NeedsPrompt)
        chain = self._chain(state.checkpoint.compat_id, state.checkpoint.scope_id)
        keys = tuple(key.hex() for key in chain.feed(prompt))
        matches = keys == state.checkpoint.prompt_blocks and chain.tail == state.checkpoint.prompt_tail
        if matches:
            session.prompt = prompt
            session.belong()
        self._advance(session, resume.PromptReceived(state.epoch, matches), now_ms, request_id=request_id)

    # The session's own machine

    def _advance(
        self, session: ServedSession, event: resume.Event, now_ms: int, *, request_id: int | None = None
    ) -> bool:
        """Let something happen to a session; return whether a request that led to it was accepted."""
        compat_id = (
            event.checkpoint.compat_id if isinstance(event, resume.ResumeReceived) else session.compat_id
        )
        model = self._models.get(compat_id)
        block_tokens = model.block_tokens if model is not None else 1
        session.state, effects = resume.transition(session.state, event, now_ms, block_tokens=block_tokens)
        if not isinstance(session.state, resume.Absent):
            self._sessions[session.name] = session
        accepted = True
        for effect in effects:
            match effect:
                case resume.Accepted():
                    session.belong()
                    if isinstance(event, resume.ResumeReceived) and request_id is not None:
                        self._work.emit(done(request_id, 202))
                case resume.Refused(problem):
                    accepted = False
                    if request_id is not None:
                        session.waiting = [w for w in session.waiting if w[0] != request_id]
                        self._work.emit(refuse(request_id, problem))
                case resume.AbortEpoch():
                    self._abort(session, now_ms)
                    session.forget_at_ms = None
                case resume.LoadBlocks(epoch):
                    assert isinstance(event, resume.ResumeReceived)
                    self._load(session, epoch, event.checkpoint, now_ms)
                case resume.AskPrompt():
                    self._streams.refuse_waiting(session, _PROMPT_WANTED)
                case resume.Start(checkpoint=checkpoint):
                    self._start(session, checkpoint, now_ms)
                case resume.GiveUp():
                    self._work.observe("kvsp_instance_resumes_given_up")
                    self._close(session, now_ms)
        if session.counted and isinstance(session.state, resume.Absent | resume.Ended):
            self._close(session, now_ms)
        self._schedule(session)
        return accepted

    def _chain(self, compat_id: str, scope_id: str, parent: str | None = None) -> BlockKeyChain:
        start = None if parent is None else bytes.fromhex(parent)
        return BlockKeyChain(self._scopes[scope_id], self._models[compat_id], parent=start)

    def _load(self, session: ServedSession, epoch: int, checkpoint: SessionCheckpoint, now_ms: int) -> None:
        """Load the blocks of a checkpoint, from whoever has them."""
        session.run += 1
        session.compat_id, session.scope_id = checkpoint.compat_id, checkpoint.scope_id
        session.sampler, session.prompt, session.request_ref = checkpoint.sampler, None, None
        session.shared_scopes, session.shared_keys = (), {}
        parent = checkpoint.prompt_blocks[-1] if checkpoint.prompt_blocks else None
        chain = self._chain(checkpoint.compat_id, checkpoint.scope_id, parent)
        generated = chain.feed((*checkpoint.prompt_tail, *checkpoint.generated))
        session.keys = [*checkpoint.prompt_blocks, *(key.hex() for key in generated)]
        session.chain = chain
        self._work.observe("kvsp_instance_migrations")
        if not session.keys:
            self._advance(session, resume.BlocksLoaded(epoch, 0), now_ms)
            return
        session.loading = self._random_bytes(16).hex()
        self._loading[session.loading] = (session.name, epoch)
        taken = self._loads.begin(
            session.loading,
            dict.fromkeys(session.keys, ()),
            model=self._models[checkpoint.compat_id],
            scope_id=checkpoint.scope_id,
            duration_ms=self._settings.resume_load_ms,
            now_ms=now_ms,
            cause=session.cause,
        )
        if not taken:
            self.load_ended(session.loading, now_ms)

    def load_ended(self, directive: str, now_ms: int) -> None:
        """Take note that loads have ended: those of a resume, or a prefetch directive that a session waits
        for."""
        name, epoch = self._loading.pop(directive, ("", 0))
        session = self._sessions.get(name)
        if session is not None:
            session.loading = None
            self._advance(session, resume.BlocksLoaded(epoch, self._places.leading_held(session)), now_ms)
            return
        for name in self._awaited.pop(directive, ()):
            session = self._sessions.get(name)
            if session is not None and session.awaits == directive:
                session.awaits = None
                self._places.enqueue(session, now_ms)

    # Into the engine

    def _start(self, session: ServedSession, checkpoint: SessionCheckpoint | None, now_ms: int) -> None:
        """Start gate and engine. Of a resumed session whose prompt blocks are all here, the prompt is not
        known."""
        model = self._models[session.compat_id]
        generated: tuple[int, ...] = ()
        if checkpoint is None:
            assert session.prompt is not None
            session.run += 1
            session.chain = self._chain(session.compat_id, session.scope_id)
            session.keys = [key.hex() for key in session.chain.feed(session.prompt)]
            session.prompt_keys, session.prompt_tail = tuple(session.keys), session.chain.tail
            session.tokens, session.known_from = session.prompt, 0
            session.shared_keys = {}
            for scope_id in session.shared_scopes:
                keys = self._chain(session.compat_id, scope_id).feed(session.prompt)
                session.shared_keys[scope_id] = [key.hex() for key in keys]
        else:
            generated = checkpoint.generated
            session.prompt_keys, session.prompt_tail = checkpoint.prompt_blocks, checkpoint.prompt_tail
            prompt_start = len(checkpoint.prompt_blocks) * model.block_tokens
            session.known_from = prompt_start if session.prompt is None else 0
            prompt = session.prompt or (*(0,) * prompt_start, *checkpoint.prompt_tail)
            session.tokens = (*prompt, *generated)
            if session.known_from:
                self._places.keep_prompt(session)
        assert session.sampler is not None
        session.gate = output.OutputGate(
            epoch=session.state.epoch if not isinstance(session.state, resume.Absent) else 0,
            deterministic=session.sampler.deterministic,
            prompt_tokens=len(session.tokens) - len(generated),
            block_tokens=model.block_tokens,
            generated=generated,
        )
        self._through_gate(session, output.Begin(), now_ms)
        for request_id, from_index in session.waiting:
            self._begin_stream(session, request_id, from_index, now_ms)
        session.waiting.clear()
        pending = self._prefetches.table.pending_for(session.request_ref) if checkpoint is None else None
        if pending is not None:
            # PF-4: the prefix that is being loaded is used, at the deadline at the latest.
            self._awaited.setdefault(pending, []).append(session.name)
            session.awaits = pending
            self._prefetches.handle(prefetch.Awaited(pending), now_ms)
        else:
            self._places.enqueue(session, now_ms)

    def _prefix_lost(self, session: ServedSession, blocks: int, now_ms: int) -> None:
        """A block of the prompt was lost on the way into the engine, and its tokens are not known: end the
        stream, so that the front end comes back and is asked for the prompt."""
        gate = session.gate
        assert gate is not None
        checkpoint = session.checkpoint(gate.decoded)
        lost = resume.PrefixLost(epoch=gate.epoch, checkpoint=checkpoint, blocks=blocks)
        self._abort(session, now_ms)
        self._advance(session, lost, now_ms)

    # What comes of calls and jobs

    def job_ended(self, purpose: instance_imports.Purpose, item: JobDone | JobFailed, now_ms: int) -> None:
        """Take in how a read or an import has ended."""
        self._places.job_ended(purpose, item, now_ms)

    def call_ended(self, purpose: CheckpointFor, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        """Take in how a checkpoint was answered."""
        session = self._sessions.get(purpose.session)
        if session is None or session.run != purpose.run or session.gate is None:
            return
        event: output.Event = output.CheckpointFailed()
        if isinstance(item, AnswerReceived):
            try:
                found = read_answer(CheckpointRecorded, item.response, item.body)
            except RemoteProtocolError:
                found = None
            if isinstance(found, CheckpointRecorded):
                event = output.CheckpointAcknowledged(found.epoch, found.output_offset)
            elif isinstance(found, Problem) and found.status < 500 and found.status not in (408, 429):
                event = output.CheckpointRefused(found)
        self._through_gate(session, event, now_ms)

    def engine_event(self, event: engine.EngineEvent, now_ms: int) -> None:
        """Take in what the engine did."""
        session = self._places.session_of(event.sequence)
        if session is None or session.gate is None:
            return
        match event:
            case engine.Prefilled():
                self._work.observe("kvsp_instance_prefills")
                self._meter.prefilled(event.sequence, now_ms)
            case engine.TokensDecoded(_, first_index, tokens):
                assert session.chain is not None
                self._meter.decoded(len(tokens))
                session.keys += [key.hex() for key in session.chain.feed(tokens)]
                self._through_gate(session, output.Decoded(first_index, tokens), now_ms)
            case engine.BlockComputed(sequence, index):
                if index < len(session.keys):
                    self._copies.export(session.name, session.run, session.name_of(index), sequence, index)
            case engine.SequenceEnded(_, reason):
                self._through_gate(session, output.EngineEnded(reason), now_ms)

    def fail_all(self, now_ms: int) -> int:
        """End what the engine has of sessions, and those that wait for it, as if it had failed them; return
        how many it has failed.

        Their copies stay leased for a while, for who goes on. What the engine still says of them is ignored.
        """
        failed = 0
        for session in self._places.sessions:
            self._copies.abandon(session.name, session.run)
            self._places.give_up(session)
            self._places.leave(session, now_ms)
            if session.gate is not None and not session.gate.engine_ended:
                failed += 1
                self._through_gate(session, output.EngineEnded("error"), now_ms)
        return failed

    # The gate

    def _through_gate(self, session: ServedSession, event: output.Event, now_ms: int) -> None:
        gate = session.gate
        if gate is None:
            return
        for effect in gate.handle(event, now_ms):
            match effect:
                case output.SendCheckpoint(offset):
                    self._send_checkpoint(session, offset)
                case output.Deliver(first_index, tokens):
                    self._streams.send(session, gate.epoch, first_index, tokens)
                case output.DeliverEnd(reason, index):
                    if session.stream is not None:
                        refused = True if reason == "refused" else None
                        end = "error" if refused else reason
                        said = OutputEnd(end=end, index=index, epoch=gate.epoch, refused=refused)
                        self._streams.end(session, said)
                        gate.handle(output.Detached(), now_ms)
                case output.PauseDecoding():
                    if session.started and session.sequence is not None:
                        self._work.emit(engine.Pause(session.sequence))
                case output.ProceedDecoding():
                    if session.started and session.sequence is not None:
                        self._work.emit(engine.Proceed(session.sequence))
                case output.Abandon():
                    self._give_up(session, now_ms)
                    return
        if gate.kind is output.GateKind.ENDED and isinstance(session.state, resume.Serving):
            self._finish(session, now_ms)
        self._schedule(session)

    def _send_checkpoint(self, session: ServedSession, offset: int) -> None:
        self._work.call(
            self._settings.controller_uri,
            RecordCheckpoint(session.name),
            session.checkpoint(offset),
            purpose=CheckpointFor(session.name, session.run),
            timeout_ms=self._settings.call_timeout_ms,
            cause=session.cause,
        )

    # Ends

    def _finish(self, session: ServedSession, now_ms: int) -> None:
        """The output is whole: free the engine, and keep the output for a while, for who asks again."""
        state = session.state
        assert isinstance(state, resume.Serving)
        self._copies.close(session.name, session.run)
        if self._copies.busy(session.name, session.run):
            session.leaving = True  # Its last blocks have yet to come out of the engine.
        else:
            self._places.leave(session, now_ms)
        session.forget_at_ms = now_ms + self._settings.session_kept_ms
        self._advance(session, resume.SessionEnded(state.epoch), now_ms)

    def _give_up(self, session: ServedSession, now_ms: int) -> None:
        """The session is served elsewhere, or not at all: stop without a word."""
        state = session.state
        self._abort(session, now_ms)
        if not isinstance(state, resume.Absent):
            self._advance(session, resume.SessionEnded(state.epoch), now_ms)

    def give_up(self, scopes: Collection[str], now_ms: int) -> None:
        """Stop serving the sessions of these scopes, and forget what they have said."""
        for session in tuple(self._sessions.values()):
            if session.scope_id in scopes:
                self._give_up(session, now_ms)

    def put_out(self, allow: Callable[[str, Operation, str | None], Problem | None], now_ms: int) -> None:
        """End the streams of clients that `allow` refuses the output now, and refuse what of theirs waits.

        The session goes on, as where a client hangs up.
        """
        for request_id, name, client in self._streams.asked():
            session = self._sessions.get(name)
            problem = None if session is None else allow(client, StreamOutput(name), session.scope)
            if session is None or problem is None:
                continue
            if session.stream == request_id:
                self._streams.cut(session)
                self._through_gate(session, output.Detached(), now_ms)
            for waiting in [each for each in session.waiting if each[0] == request_id]:
                session.waiting.remove(waiting)
                self._work.emit(refuse(request_id, problem))

    def _abort(self, session: ServedSession, now_ms: int) -> None:
        """Stop everything that is done for a session in its present epoch."""
        self._copies.abandon(session.name, session.run)
        self._places.give_up(session)
        if session.loading is not None:
            del self._loading[session.loading]
            self._loads.withdraw(session.loading, now_ms)
        session.run += 1
        session.gate = session.awaits = session.loading = None
        self._places.leave(session, now_ms)
        self._streams.cut(session)
        self._streams.refuse_waiting(session, _GONE_ON)

    def exported(self, name: str, now_ms: int) -> None:
        """Take note that a block of a session has come out of the engine, or never will."""
        session = self._sessions.get(name)
        if session is not None and session.leaving and not self._copies.busy(name, session.run):
            self._places.leave(session, now_ms)

    def _close(self, session: ServedSession, now_ms: int) -> None:
        if session.counted:
            session.counted = False
            self._close_session(now_ms)
        if session.forget_at_ms is None:
            session.forget_at_ms = now_ms + self._settings.session_kept_ms

    def abort_all(self, now_ms: int) -> None:
        """Stop every session without a word: a later incarnation of the instance exists (ST-4)."""
        for session in list(self._sessions.values()):
            self._give_up(session, now_ms)

    # Streams and time

    def output_ready(self, request_id: int, now_ms: int) -> None:
        """Take note that a stream has room again."""
        session = self._sessions.get(self._streams.session_of(request_id))
        if session is not None and session.stream == request_id:
            self._through_gate(session, output.StreamReady(), now_ms)

    def request_ended(self, request_id: int, now_ms: int) -> None:
        """Take note that a request is gone, answered or not."""
        session = self._sessions.get(self._streams.gone(request_id))
        if session is None:
            return
        session.waiting = [waiting for waiting in session.waiting if waiting[0] != request_id]
        if session.stream == request_id:
            session.stream = None
            self._through_gate(session, output.Detached(), now_ms)

    def _schedule(self, session: ServedSession) -> None:
        """Note when something happens to a session by itself."""
        due_ms = earliest(
            resume.next_deadline_ms(session.state),
            None if session.gate is None else session.gate.next_deadline_ms(),
            session.forget_at_ms,
        )
        self._alarms.set(session.name, due_ms)
        if session.is_over:
            self._over.setdefault(session.name)
        else:
            self._over.pop(session.name, None)

    def _forget(self, session: ServedSession, now_ms: int) -> None:
        self._abort(session, now_ms)
        self._alarms.set(session.name, None)
        del self._sessions[session.name], self._over[session.name]

    def next_deadline_ms(self) -> int | None:
        """Return when `time_passed` is next due, or None."""
        return self._alarms.next_ms()

    def time_passed(self, now_ms: int) -> None:
        """Let deadlines that have come take effect."""
        for name in self._alarms.take_due(now_ms):
            session = self._sessions[name]
            if session.is_over and session.forget_at_ms is not None and session.forget_at_ms <= now_ms:
                self._forget(session, now_ms)
                continue
            self._advance(session, resume.TimerFired(), now_ms)
            self._through_gate(session, output.TimerFired(), now_ms)
            self._schedule(session)
            again_ms = self._alarms.of(name)
            if again_ms is not None and again_ms <= now_ms:  # what was due could not be done yet
                self._alarms.set(name, now_ms + 1)
