"""A session at an instance under any order of messages: one epoch at a time, and never back."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import resume as m
from kvsp_core.problems import STALE_EPOCH
from kvsp_sim.strategies import session as draw


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.state: m.State = m.Absent()
        self.highest = 0
        self.active: int | None = None
        self.started: set[int] = set()

    @rule(event=draw.instance_events(), ms=st.integers(0, 150))
    def something_happens(self, event: m.Event, ms: int) -> None:
        self.now_ms += ms
        try:
            after, effects = m.transition(self.state, event, self.now_ms, block_tokens=4, prompt_wait_ms=100)
        except LocalProtocolError:
            return
        if any(isinstance(effect, m.Refused) for effect in effects):
            assert after == self.state
        asks = isinstance(event, m.BeginReceived | m.ResumeReceived)
        if asks and event.epoch < self.highest:
            assert effects[0].problem.type is STALE_EPOCH  # type: ignore[union-attr]
        self.state = after
        for effect in effects:
            match effect:
                case m.AbortEpoch(epoch):  # also of one that is over, with what is still on its way
                    assert epoch == self.highest
                    self.active = None
                case m.Accepted():
                    assert asks
                    if event.epoch > self.highest:
                        assert self.active is None
                        self.highest = self.active = event.epoch
                case m.LoadBlocks(epoch) | m.AskPrompt(epoch):
                    assert epoch == self.active
                case m.Start(epoch=epoch, checkpoint=checkpoint, cached_blocks=cached):
                    assert epoch == self.active
                    assert epoch not in self.started
                    self.started.add(epoch)
                    if checkpoint is not None:
                        tokens = len(checkpoint.prompt_tail) + len(checkpoint.generated)
                        assert cached * 4 < len(checkpoint.prompt_blocks) * 4 + tokens
                case m.GiveUp(epoch):
                    assert epoch == self.active
        if isinstance(after, m.Ended):
            self.active = None

    @invariant()
    def the_state_is_of_the_highest_epoch_seen(self) -> None:
        if not isinstance(self.state, m.Absent):
            assert self.state.epoch == self.highest
        frozen = m.freeze(self.state, self.now_ms)
        assert m.freeze(m.thaw(frozen, 5), 5) == frozen
        assert (m.next_deadline_ms(self.state) is not None) == isinstance(self.state, m.NeedsPrompt)


TestSessionAtAnInstance = Model.TestCase
