"""The session ledger against a model in a few lines, with a store that keeps only what was persisted."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import session as m
from kvsp_core.machines.session import SessionKind as K
from kvsp_core.problems import CONFLICT, FORBIDDEN, NOT_FOUND, STALE_EPOCH, ProblemType
from kvsp_sim.strategies import session as draw
from tests.machine_kit import problems_in

TIMES = m.SessionTimes(placed_ms=100, idle_ms=300, wait_ms=120, resume_ms=60, kept_ms=80, attempts=3)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.stored: m.SessionRecord | None = None
        self.prompt: m.Prompt | None = None
        self.log: list[int] = []
        self.acknowledged: tuple[int, ...] = ()
        self.acknowledged_in = 0
        self.confirmed: dict[int, str] = {}
        self.asked: dict[int, str] = {}
        self.forgotten = False

    @initialize()
    def open(self) -> None:
        self.ledger = m.SessionLedger(
            session=draw.SESSION,
            client="https://fe.example/",
            compat_id="c" * 64,
            scope_id="5" * 32,
            deterministic=False,
            times=TIMES,
        )
        self.apply(m.Open(draw.OWNERS[0]))

    def apply(self, event: m.Event) -> ProblemType | None:
        """Let an event happen; return the problem it was refused with, or None."""
        before = self.ledger.freeze(self.now_ms)
        epoch = self.ledger.record.epoch
        try:
            effects = self.ledger.handle(event, self.now_ms)
        except LocalProtocolError:
            assert self.ledger.freeze(self.now_ms) == before
            return None
        self.execute(effects)
        assert self.ledger.record.epoch >= epoch
        refused = next((p.type for p in problems_in(effects)), None)
        if refused is not None:
            assert len(effects) == 1
            assert self.ledger.freeze(self.now_ms) == before
        return refused

    def execute(self, effects: tuple[m.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case m.PersistSession(record):
                    self.stored = record
                case m.PersistPrompt(prompt):
                    assert self.prompt in (None, prompt)
                    self.prompt = prompt
                case m.AppendOutput(offset, tokens):
                    assert offset == len(self.log)
                    self.log += tokens
                case m.Acknowledge(epoch, offset):
                    assert self.stored is not None
                    assert (self.stored.epoch, self.stored.output_offset) == (epoch, offset)
                    tokens = tuple(self.log[:offset])
                    assert tokens[: len(self.acknowledged)] == self.acknowledged
                    self.acknowledged, self.acknowledged_in = tokens, epoch
                case m.SendResume(instance, epoch):
                    assert self.asked.setdefault(epoch, instance) == instance
                    assert self.stored is not None
                    assert (self.stored.epoch, self.stored.owner and self.stored.owner.instance) == (
                        epoch,
                        instance,
                    )
                case m.Forget():
                    self.forgotten = True

    # Rules

    @rule(ms=st.integers(0, 150))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.apply(m.TimerFired())

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        record = self.ledger.record
        event = data.draw(draw.ledger_events(tuple(self.log[: record.output_offset]), record.epoch))
        refused = self.apply(event)
        if isinstance(event, m.CheckpointReceived):
            assert refused is self.expected(record, event)

    @rule(data=st.data())
    def the_owner_writes(self, data: st.DataObject) -> None:
        record = self.ledger.record
        if record.owner is None:
            return
        more = tuple(data.draw(st.lists(st.integers(0, 2), max_size=3)))
        checkpoint = self.ledger.checkpoint() or data.draw(draw.checkpoints())
        tokens = checkpoint.generated + more
        checkpoint = m.attrs.evolve(
            checkpoint,
            epoch=record.epoch,
            scope_id="5" * 32,
            generated=tokens,
            output_offset=len(tokens),
        )
        assert self.apply(m.CheckpointReceived(record.owner.instance, checkpoint)) is None
        assert self.ledger.kind is K.RUNNING
        assert self.acknowledged == tokens

    def expected(self, record: m.SessionRecord, event: m.CheckpointReceived) -> ProblemType | None:
        checkpoint = event.checkpoint
        tokens, known = checkpoint.generated, tuple(self.log[: record.output_offset])
        if record.kind in (K.CLOSED, K.FAILED):
            return NOT_FOUND
        if checkpoint.epoch != record.epoch:
            return STALE_EPOCH if checkpoint.epoch < record.epoch else CONFLICT
        if record.owner is None or event.client != record.owner.instance:
            return FORBIDDEN
        sampler = record.sampler
        agrees = (
            checkpoint.scope_id == record.scope_id
            and tokens[: len(known)] == known[: len(tokens)]
            and (sampler is None or self.prompt == m.Prompt(checkpoint.prompt_blocks, checkpoint.prompt_tail))
            and (sampler is None or m.attrs.evolve(checkpoint.sampler, step=sampler.step) == sampler)
        )
        return None if agrees else CONFLICT

    @rule(lag=st.booleans())
    def the_controller_restarts(self, lag: bool) -> None:
        if self.stored is None or self.forgotten:
            return
        tokens = tuple(self.log[: self.stored.output_offset]) + ((9,) if lag else ())
        del self.log[self.stored.output_offset :]
        self.ledger, effects = m.SessionLedger.restore(
            self.stored, self.prompt, tokens, self.now_ms, times=TIMES
        )
        self.execute(effects)

    @rule(really=st.integers(0, 9))
    def the_front_end_closes(self, really: int) -> None:
        if really == 0 and not self.forgotten:
            self.apply(m.Close())

    # What always holds

    @invariant()
    def what_is_durable_is_what_is_known(self) -> None:
        if self.stored is not None:
            assert self.ledger.record == self.stored
            assert self.ledger.freeze(0).tokens == tuple(self.log[: self.stored.output_offset])

    @invariant()
    def a_session_that_is_not_over_has_a_deadline(self) -> None:
        if self.stored is not None and not self.forgotten:
            assert self.ledger.next_deadline_ms() is not None


TestSessionLedger = Model.TestCase
