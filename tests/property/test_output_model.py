"""The output gate under any engine, controller and front end: nothing leaves that is not covered."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsp_core.machines import output as m
from kvsp_core.machines.output import GateKind
from kvsp_sim.strategies import output as draw

STEP, UNCOVERED, WINDOW = 16, 24, 10


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.sample: list[int] = []
        self.asked: list[int] = []
        self.under_way: int | None = None
        self.acknowledged: int | None = None
        self.stream: list[int] | None = None
        self.next_index = 0
        self.untaken = 0
        self.paused = False
        self.abandoned = False
        self.ended = False

    @initialize(deterministic=st.booleans(), resumed=st.integers(0, 20), prompt=st.integers(1, 9))
    def start(self, deterministic: bool, resumed: int, prompt: int) -> None:
        self.deterministic, self.resumed = deterministic, resumed
        self.prompt = prompt
        self.sample = list(range(resumed))
        self.gate = self.new_gate()
        self.apply(m.Begin())

    def new_gate(self) -> m.OutputGate:
        return m.OutputGate(
            epoch=3,
            deterministic=self.deterministic,
            prompt_tokens=self.prompt,
            block_tokens=4,
            generated=tuple(range(self.resumed)),
            max_tokens_per_checkpoint=STEP,
            max_uncovered_tokens=UNCOVERED,
            window_tokens=WINDOW,
            max_hold_ms=50,
            retry_ms=20,
        )

    def apply(self, event: m.Event) -> None:
        for effect in self.gate.handle(event, self.now_ms):
            match effect:
                case m.SendCheckpoint(offset):
                    assert self.under_way is None
                    assert offset <= len(self.sample)
                    if self.acknowledged is not None:
                        assert self.acknowledged < offset <= self.acknowledged + STEP
                    else:
                        assert offset == self.resumed
                    self.under_way = offset
                    self.asked.append(offset)
                case m.Deliver(first_index, tokens):
                    assert first_index == self.next_index
                    assert list(tokens) == self.sample[first_index : first_index + len(tokens)]
                    self.next_index += len(tokens)
                    self.untaken += len(tokens)
                    assert self.untaken <= WINDOW
                    assert self.acknowledged is not None
                    assert self.deterministic or self.next_index <= self.acknowledged
                case m.DeliverEnd(_, index):
                    assert self.ended
                    assert index == len(self.sample) <= self.next_index
                case m.PauseDecoding():
                    assert not self.paused
                    self.paused = True
                case m.ProceedDecoding():
                    assert self.paused
                    self.paused = False
                case m.Abandon():
                    self.abandoned = True

    # Rules

    @rule(ms=st.integers(0, 60))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.apply(m.TimerFired())

    @precondition(lambda self: not self.ended)
    @rule(tokens=draw.token_runs)
    def engine_draws(self, tokens: tuple[int, ...]) -> None:
        if self.paused:
            tokens = tokens[:1]
        first = len(self.sample)
        if not self.abandoned:
            self.sample += tokens
        self.apply(m.Decoded(first, tokens))

    @precondition(lambda self: not self.ended)
    @rule(really=st.integers(0, 9))
    def engine_ends(self, really: int) -> None:
        if really == 0:
            self.ended = True
            self.apply(m.EngineEnded("stop"))

    @rule(data=st.data())
    def controller_answers(self, data: st.DataObject) -> None:
        event = data.draw(draw.checkpoint_answers(3, self.under_way))
        if self.abandoned or (isinstance(event, m.CheckpointRefused) and len(self.asked) % 4):
            return
        if isinstance(event, m.CheckpointAcknowledged) and self.under_way is not None:
            known = self.resumed if self.acknowledged is None else self.acknowledged
            # The first answer counts once it covers what was asked for.
            if self.acknowledged is not None or event.offset >= self.under_way:
                self.acknowledged = max(known, min(event.offset, self.under_way))
            self.under_way = None
        elif isinstance(event, m.CheckpointFailed):
            self.under_way = None
        self.apply(event)

    @rule(event=draw.stream_events(most=40))
    def front_end_acts(self, event: m.Event) -> None:
        match event:
            case m.Attached(from_index):
                first_time = self.gate.freeze(0).resent
                self.next_index = from_index if first_time else min(from_index, self.resumed)
                self.untaken = 0
            case m.StreamReady():
                self.untaken = 0
        self.apply(event)

    @rule()
    def is_frozen_and_comes_back(self) -> None:
        other = self.new_gate()
        other.thaw(self.gate.freeze(self.now_ms), self.now_ms)
        assert other.freeze(self.now_ms) == self.gate.freeze(self.now_ms)
        self.gate = other

    # What always holds

    @invariant()
    def what_is_due_has_a_checkpoint_or_a_deadline(self) -> None:
        if self.abandoned:
            return
        waits = len(self.sample) > self.gate.covered and not self.deterministic
        if waits or self.gate.kind is GateKind.OPENING:
            assert self.under_way is not None or self.gate.next_deadline_ms() is not None

    @invariant()
    def too_much_that_is_not_covered_pauses_the_engine(self) -> None:
        if not self.abandoned and not self.ended:
            uncovered = len(self.sample) - self.gate.covered
            assert self.paused or uncovered < UNCOVERED
            assert not self.paused or uncovered > UNCOVERED // 2


TestOutputGate = Model.TestCase
