"""The output assembly against a model that remembers every arrival."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsp_core.machines import assembly as m
from kvsp_core.machines.assembly import AssemblyKind
from kvsp_sim.strategies import output as draw

COUNT, EARLY = 12, 3


def sample(index: int) -> int:
    return 1000 + 7 * index


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.assembly = m.OutputAssembly(max_early_tokens=EARLY)
        self.delivered: list[int] = []
        self.epoch = 0
        self.here: set[int] = set()
        self.finished = False

    def apply(self, event: m.Event) -> tuple[m.Effect, ...]:
        effects = self.assembly.handle(event, 0)
        epoch = getattr(event, "epoch", self.epoch)
        if epoch < self.epoch or self.finished:
            assert effects == ()
        for effect in effects:
            match effect:
                case m.Deliver(index, token):
                    assert index == len(self.delivered)
                    assert token == sample(index)
                    self.delivered.append(token)
                case m.Finished():
                    assert len(self.delivered) == COUNT
                    self.finished = True
                case m.AskAgain(from_index):
                    assert from_index == len(self.delivered)
                    self.here.clear()
                case m.Contradicted():
                    raise AssertionError("one sample does not contradict itself")
        if epoch > self.epoch and not self.finished:
            self.epoch, self.here = epoch, set()
        return effects

    @rule(event=draw.arrivals(sample, COUNT))
    def something_arrives(self, event: m.Event) -> None:
        current = getattr(event, "epoch", 0) >= self.epoch
        effects = self.apply(event)
        if isinstance(event, m.TokenArrived) and current and not self.finished:
            self.here.add(event.index)
            if m.AskAgain(len(self.delivered)) in effects:
                self.here.clear()

    @rule(epoch=st.integers(1, 5))
    def an_instance_sends_everything_from_where_the_client_stands(self, epoch: int) -> None:
        """Whatever came before: with this, nothing is ever missing for good."""
        for index in range(self.assembly.next_index, COUNT):
            self.apply(m.TokenArrived(index, epoch, sample(index)))
        self.apply(m.EndArrived("stop", COUNT, epoch))
        if epoch >= self.epoch:
            assert self.finished

    @rule(index=st.integers(0, COUNT - 1))
    def another_value_is_never_delivered(self, index: int) -> None:
        other = m.OutputAssembly.thaw(self.assembly.freeze(0), 0)
        effects = other.handle(m.TokenArrived(index, self.epoch, sample(index) + 1), 0)
        if index < len(self.delivered) and not self.finished:
            assert isinstance(effects[0], m.Contradicted)

    @invariant()
    def what_is_next_is_not_here_already(self) -> None:
        if self.assembly.kind in (AssemblyKind.OPEN, AssemblyKind.ENDING):
            assert len(self.delivered) not in self.here
        assert self.assembly.tokens() == tuple(self.delivered)


TestOutputAssembly = Model.TestCase
