"""One session end to end: controller, three instances, a front end, and everything that can go wrong between.

The machines are the shipped ones; the model only carries messages, loses and delays them, and fails
instances. Samplers are not deterministic: every token an engine draws is a value never drawn before, so two
samples spliced together cannot go unnoticed.
"""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvsp_core.machines import assembly, output, resume, session
from kvsp_core.machines.session import Owner, SessionKind
from kvsp_core.records import Sampler, SessionCheckpoint
from tests.property.models import EndingModel

B = 4
INSTANCES = tuple(f"https://ii{n}.example/" for n in (1, 2, 3))
SAMPLER = Sampler(method="top-p", seed=1, step=0, deterministic=False)


@attrs.define
class Instance:
    """What an instance has of the session."""

    name: str
    incarnation: int = 1
    state: resume.State = attrs.field(factory=resume.Absent)
    gate: output.OutputGate | None = None
    paused: bool = False


@attrs.frozen
class Sent:
    """A checkpoint on its way to the controller, or its answer on the way back."""

    instance: str
    incarnation: int
    checkpoint: SessionCheckpoint


class Model(EndingModel):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.drawn = 1000
        self.instances = {name: Instance(name) for name in INSTANCES}
        self.calls: list[Sent] = []
        self.resumes: list[tuple[str, SessionCheckpoint]] = []
        self.on_their_way: list[list[assembly.Event]] = []
        self.assembly = assembly.OutputAssembly()
        self.delivered: list[int] = []
        self.finished = False
        self.acknowledged = 0
        self.needs_target = False

    @initialize()
    def open(self) -> None:
        self.ledger = session.SessionLedger(
            session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
            client="https://fe.example/",
            compat_id="c" * 64,
            scope_id="5" * 32,
            deterministic=False,
            times=session.SessionTimes(attempts=10**6, wait_ms=10**9, placed_ms=10**9, idle_ms=10**9),
        )
        self.to_ledger(session.Open(Owner(INSTANCES[0], 1)))
        self.front_end_attaches()

    # The controller

    def to_ledger(self, event: session.Event) -> tuple[session.Effect, ...]:
        effects = self.ledger.handle(event, self.now_ms)
        self.execute(effects)
        return effects

    def execute(self, effects: tuple[session.Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, session.NeedTarget):
                self.needs_target = True
            elif isinstance(effect, session.SendResume):
                checkpoint = self.ledger.checkpoint()
                assert checkpoint is not None
                self.resumes.append((effect.instance, checkpoint))
            elif isinstance(effect, session.Failed):
                raise AssertionError("there are always further attempts")

    @rule(index=st.integers(0, 2))
    def a_target_is_chosen(self, index: int) -> None:
        if self.needs_target and self.ledger.kind is SessionKind.ORPHANED:
            self.needs_target = False
            target = self.instances[INSTANCES[index]]
            self.to_ledger(session.TargetChosen(Owner(target.name, target.incarnation)))

    @rule()
    def the_owner_is_called_failed(self) -> None:
        """It may be alive all the same, and go on."""
        if self.ledger.owner is not None:
            self.to_ledger(session.OwnerLost(self.ledger.owner))

    @rule()
    def the_controller_restarts(self) -> None:
        frozen = self.ledger.freeze(self.now_ms)
        self.ledger, effects = session.SessionLedger.restore(
            frozen.record, frozen.prompt, frozen.tokens, self.now_ms, times=self.ledger._times
        )
        self.needs_target = self.ledger.kind is SessionKind.ORPHANED
        self.execute(effects)

    # Instances

    def to_instance(self, it: Instance, event: resume.Event) -> None:
        it.state, effects = resume.transition(it.state, event, self.now_ms, block_tokens=B)
        for effect in effects:
            match effect:
                case resume.AbortEpoch():
                    it.gate = None
                case resume.LoadBlocks(epoch):
                    self.to_instance(it, resume.BlocksLoaded(epoch, 1))
                case resume.Start(epoch=epoch, checkpoint=checkpoint):
                    it.paused = False
                    it.gate = output.OutputGate(
                        epoch=epoch,
                        deterministic=False,
                        prompt_tokens=6,
                        block_tokens=B,
                        generated=checkpoint.generated if checkpoint else (),
                        max_uncovered_tokens=8,
                        window_tokens=6,
                    )
                    self.to_gate(it, output.Begin())

    def to_gate(self, it: Instance, event: output.Event) -> None:
        if it.gate is None:
            return
        for effect in it.gate.handle(event, self.now_ms):
            match effect:
                case output.SendCheckpoint(offset):
                    self.calls.append(Sent(it.name, it.incarnation, self.checkpoint_of(it, offset)))
                case output.Deliver(first_index, tokens):
                    for index, token in enumerate(tokens, first_index):
                        arrival = assembly.TokenArrived(index, it.gate.epoch, token)
                        self.on_their_way[-1].append(arrival)
                case output.DeliverEnd(reason, index):
                    self.on_their_way[-1].append(assembly.EndArrived(reason, index, it.gate.epoch))
                case output.PauseDecoding():
                    it.paused = True
                case output.ProceedDecoding():
                    it.paused = False
                case output.Abandon():
                    self.to_instance(it, resume.SessionEnded(it.gate.epoch))

    def checkpoint_of(self, it: Instance, offset: int) -> SessionCheckpoint:
        assert it.gate is not None
        return SessionCheckpoint(
            session=self.ledger.record.session,
            epoch=it.gate.epoch,
            compat_id="c" * 64,
            scope_id="5" * 32,
            prompt_blocks=("1" * 64,),
            prompt_tail=(1, 2),
            generated=it.gate.tokens(0, offset),
            output_offset=offset,
            sampler=attrs.evolve(SAMPLER, step=offset),
        )

    @rule(index=st.integers(0, 2), count=st.integers(1, 5))
    def an_engine_draws(self, index: int, count: int) -> None:
        it = self.instances[INSTANCES[index]]
        if it.gate is None or it.paused or it.gate.kind in (output.GateKind.ENDED, output.GateKind.ENDING):
            return
        if it.gate.decoded >= 30:
            if it.gate.kind is output.GateKind.OPEN:
                self.to_gate(it, output.EngineEnded("length"))
            return
        tokens = tuple(range(self.drawn, self.drawn + count))
        self.drawn += count
        self.to_gate(it, output.Decoded(it.gate.decoded, tokens))

    @rule(index=st.integers(0, 2))
    def an_instance_restarts(self, index: int) -> None:
        it = self.instances[INSTANCES[index]]
        lost = Owner(it.name, it.incarnation)
        self.instances[it.name] = Instance(it.name, it.incarnation + 1)
        self.to_ledger(session.OwnerLost(lost))

    @rule(ms=st.integers(1, 300))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.to_ledger(session.TimerFired())
        for it in self.instances.values():
            self.to_gate(it, output.TimerFired())

    # The network

    @rule(data=st.data(), answered=st.booleans(), kept=st.booleans())
    def a_checkpoint_arrives(self, data: st.DataObject, answered: bool, kept: bool) -> None:
        if not self.calls:
            return
        sent = self.calls[data.draw(st.integers(0, len(self.calls) - 1))]
        if not kept:
            self.calls.remove(sent)
        effects = self.to_ledger(session.CheckpointReceived(sent.instance, sent.checkpoint))
        it = self.instances[sent.instance]
        for effect in effects:
            if isinstance(effect, session.Acknowledge):
                self.acknowledged = max(self.acknowledged, effect.output_offset)
        if it.incarnation != sent.incarnation or it.gate is None or it.gate.epoch != sent.checkpoint.epoch:
            return
        if kept or not answered:
            # The call is over for the instance; the controller may still get it, later.
            self.to_gate(it, output.CheckpointFailed())
            return
        for effect in effects:
            match effect:
                case session.Acknowledge(epoch, offset):
                    self.to_gate(it, output.CheckpointAcknowledged(epoch, offset))
                case session.Refused(problem):
                    self.to_gate(it, output.CheckpointRefused(problem))

    @rule(data=st.data(), lost=st.integers(0, 4))
    def a_resume_arrives(self, data: st.DataObject, lost: int) -> None:
        if not self.resumes:
            return
        call = self.resumes[data.draw(st.integers(0, len(self.resumes) - 1))]
        name, checkpoint = call
        if lost == 0:
            self.resumes.remove(call)
            self.to_ledger(session.ResumeFailed(checkpoint.epoch))
            return
        self.to_instance(
            self.instances[name], resume.ResumeReceived(epoch=checkpoint.epoch, checkpoint=checkpoint)
        )

    @rule()
    def front_end_attaches(self) -> None:
        """The front end asks the controller who owns the session, and its instance for the output."""
        owner, epoch = self.ledger.owner, self.ledger.record.epoch
        if owner is None:
            return
        it = self.instances[owner.instance]
        if self.ledger.kind is SessionKind.PLACED:
            self.to_instance(it, resume.BeginReceived(epoch=epoch))
        if it.gate is None or it.gate.epoch != epoch:
            return
        for other in self.instances.values():
            self.to_gate(other, output.Detached())
        self.on_their_way.append([])
        self.to_gate(it, output.Attached(self.assembly.next_index))

    @rule(data=st.data(), count=st.integers(1, 8))
    def output_arrives(self, data: st.DataObject, count: int) -> None:
        """Each stream keeps its order; streams overtake each other."""
        streams = [stream for stream in self.on_their_way if stream]
        if not streams:
            return
        stream = streams[data.draw(st.integers(0, len(streams) - 1))]
        arrivals = stream[:count]
        del stream[:count]
        for arrival in arrivals:
            self.to_assembly(arrival)
        for it in self.instances.values():
            self.to_gate(it, output.StreamReady())

    @rule(data=st.data())
    def a_stream_breaks(self, data: st.DataObject) -> None:
        if not self.on_their_way:
            return
        self.on_their_way[data.draw(st.integers(0, len(self.on_their_way) - 1))].clear()
        for it in self.instances.values():
            self.to_gate(it, output.Detached())
        self.to_assembly(assembly.StreamCut())

    def to_assembly(self, event: assembly.Event) -> None:
        for effect in self.assembly.handle(event, self.now_ms):
            match effect:
                case assembly.Deliver(index, token):
                    assert index == len(self.delivered)
                    self.delivered.append(token)
                    assert index < self.acknowledged, "a client has what no checkpoint covers"
                case assembly.Finished():
                    self.finished = True
                case assembly.Contradicted(detail):
                    raise AssertionError(detail)

    # What always holds

    @invariant()
    def what_a_client_has_is_recorded(self) -> None:
        recorded = self.ledger.freeze(0).tokens
        assert recorded[: len(self.delivered)] == tuple(self.delivered)
        assert len(recorded) >= self.acknowledged

    def at_end(self) -> None:
        """Everything heals: the session must come to its end, and the client get all of it."""
        for _ in range(60):
            if self.finished:
                break
            self.heal()
        assert self.finished
        assert len(self.delivered) == len(self.ledger.freeze(0).tokens)

    def heal(self) -> None:
        self.now_ms += 300
        self.to_ledger(session.TimerFired())
        if self.ledger.kind is SessionKind.ORPHANED:
            self.needs_target = False
            target = self.instances[INSTANCES[0]]
            self.to_ledger(session.TargetChosen(Owner(target.name, target.incarnation)))
        while self.resumes:
            name, checkpoint = self.resumes.pop()
            event = resume.ResumeReceived(epoch=checkpoint.epoch, checkpoint=checkpoint)
            self.to_instance(self.instances[name], event)
        for it in self.instances.values():
            self.to_gate(it, output.TimerFired())
        owner = self.ledger.owner
        if owner is not None:
            it = self.instances[owner.instance]
            serves = it.gate is not None and it.gate.epoch == self.ledger.record.epoch
            if self.ledger.kind is not SessionKind.PLACED and not serves:
                self.to_ledger(session.OwnerLost(owner))
                return
        for sent in self.calls[:]:
            self.calls.remove(sent)
            effects = self.to_ledger(session.CheckpointReceived(sent.instance, sent.checkpoint))
            it = self.instances[sent.instance]
            mine = it.incarnation == sent.incarnation and it.gate and it.gate.epoch == sent.checkpoint.epoch
            for effect in effects:
                if isinstance(effect, session.Acknowledge):
                    self.acknowledged = max(self.acknowledged, effect.output_offset)
                    if mine:
                        self.to_gate(it, output.CheckpointAcknowledged(effect.epoch, effect.output_offset))
                elif isinstance(effect, session.Refused) and mine:
                    self.to_gate(it, output.CheckpointRefused(effect.problem))
        for it in self.instances.values():
            if it.gate is not None and it.gate.kind is output.GateKind.OPEN:
                self.to_gate(it, output.EngineEnded("stop"))
        self.to_assembly(assembly.StreamCut())
        self.on_their_way.clear()
        self.front_end_attaches()
        while self.on_their_way and self.on_their_way[-1]:
            self.to_assembly(self.on_their_way[-1].pop(0))
            for it in self.instances.values():
                self.to_gate(it, output.StreamReady())


TestFailover = Model.TestCase
