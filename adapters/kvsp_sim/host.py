"""What drives a role in the simulation: it executes effects, and brings the role what comes of them.

A `Process` has a clock, storage and hosts that stop and start together; a `Host` drives one role under its
base URI. Both follow what `kvsp_core.roles.role` says of the loop that drives a role.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import attrs

from kvsp_core.container import OutgoingBlock
from kvsp_core.heads import Request, Response
from kvsp_core.roles.engine import (
    Abort,
    Attend,
    DropShard,
    EngineCommand,
    ExportBlock,
    ImportBlock,
    LoadShard,
    Pause,
    Proceed,
    StartSequence,
)
from kvsp_core.roles.role import (
    BlockBody,
    Call,
    CancelCall,
    Drop,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    Load,
    Observe,
    Persist,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestReceived,
    Respond,
    Role,
    Send,
    Store,
    Stored,
    TimerFired,
)
from kvsp_sim.blocks import described
from kvsp_sim.carried import CarriedCall, CarriedRequest, Carry
from kvsp_sim.clock import Clock
from kvsp_sim.disk import DurableStore, StorageFaults, Tier, catalogue
from kvsp_sim.engine import SimulatedEngine
from kvsp_sim.exchange import Exchange
from kvsp_sim.network import Network
from kvsp_sim.trace import Event
from kvsp_sim.witness import Witness
from kvsp_sim.world import World

__all__ = ["Cluster", "Host", "Instruction", "Process", "RoleFactory", "Start"]

WALL_CLOCK_MS: Final = 1_800_000_000_000
"""What all wall clocks show when a world begins."""

ENGINE_COMMANDS: Final = (
    StartSequence,
    ImportBlock,
    ExportBlock,
    Pause,
    Proceed,
    Abort,
    LoadShard,
    DropShard,
    Attend,
)


@attrs.frozen(kw_only=True)
class Start:
    """What a role is built from, at its first start and after each crash.

    `life` counts the starts from 1, and `wall_ms` is what the wall clock shows.
    """

    stored: Stored
    now_ms: int
    wall_ms: int
    life: int
    random_bytes: Callable[[int], bytes]


@attrs.frozen
class Instruction:
    """Something that the program around a role has it do, apart from the protocol: `do` is given the role and
    its time, and returns effects.
    """

    what: str
    do: Callable[[Any, int], tuple[Effect, ...]] = attrs.field(repr=False)


RoleFactory: TypeAlias = Callable[[Start], Role]


class Cluster:
    """All processes of a simulation, and what they share; `carry` is what carries their calls."""

    def __init__(self, world: World, network: Network, witness: Witness, carry: Carry = Exchange) -> None:
        self.world = world
        self.network = network
        self.witness = witness
        self.carry = carry
        self.processes: dict[str, Process] = {}
        self.hosts: dict[str, Host] = {}
        self.counts: Counter[str] = Counter()

    def process(self, name: str) -> Process:
        """Add a process; give it hosts, then `start` it."""
        process = Process(self, name)
        self.processes[name] = process
        return process


class Process:
    """Hosts that share a clock and stop and start together."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.randomness = cluster.world.randomness.split("process", name)
        self.clock = self._former = Clock()
        self.clock_shift_ms = 0
        self.up = False
        self.paused = False
        self.retired = False
        """Whether it does not start again."""
        self.starts = 0
        self.hosts: list[Host] = []
        self._inbox: deque[tuple[Host, int, Callable[..., None], tuple[object, ...]]] = deque()

    def add(self, host: Host) -> None:
        """Add a host."""
        self.hosts.append(host)
        self.cluster.hosts[host.base_uri] = host

    def set_clock(self, clock: Clock) -> None:
        """Set the clock, before a start."""
        self.clock = clock

    def start(self) -> None:
        """Start all roles from what they stored."""
        if self.retired:
            return
        self.up = True
        self.starts += 1
        former, self._former = self._former, self.clock
        now_us = self.cluster.world.now_us
        self.clock_shift_ms = self.clock.read(now_us) - former.read(now_us)
        for host in self.hosts:
            host.start()

    def crash(self) -> None:
        """Stop at once: memory is lost, connections break, of writes under way some are durable."""
        self.up = False
        self.paused = False
        self._inbox.clear()
        for host in self.hosts:
            host.crash()
        self.cluster.network.break_all(self.name)

    def pause(self) -> None:
        """Stand still; what comes meanwhile is taken in afterwards."""
        self.paused = True

    def proceed(self) -> None:
        """Go on, and take in what came meanwhile."""
        self.paused = False
        while self._inbox and not self.paused:
            host, life, call, arguments = self._inbox.popleft()
            if life == host.life:
                call(*arguments)
        for host in self.hosts:
            host.arm_timer()

    def keep(self, host: Host, call: Callable[..., None], *arguments: object) -> None:
        """Have something done for a host when the process goes on."""
        self._inbox.append((host, host.life, call, arguments))


class Host:
    """Drives one role. `own_effects` says what to do with effects that only this role has."""

    def __init__(
        self,
        process: Process,
        base_uri: str,
        factory: RoleFactory,
        *,
        storage: StorageFaults,
        tiers: Iterable[Tier] = (),
        engine: Callable[[Host], SimulatedEngine] | None = None,
        own_effects: Mapping[type, Callable[..., None]] = MappingProxyType({}),
        on_start: Callable[[Host], None] = lambda _: None,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        cluster = process.cluster
        self.process = process
        self.base_uri = base_uri
        self.number = len(cluster.hosts)
        self.name = f"{process.name}"
        self.world = cluster.world
        self.network = cluster.network
        self.cluster = cluster
        self.witness = cluster.witness
        self.randomness = process.randomness.split(base_uri)
        written = partial(self.witness.written, self)
        self.store = DurableStore(self.world, self.randomness.split("store"), storage, written)
        self.tiers = {tier.name: tier for tier in tiers}
        self.life = 0
        self.role: Role | None = None
        self.lies: Callable[[bytes, Response], tuple[bytes, Response]] | None = None
        self.calls: dict[int, CarriedCall] = {}
        self.requests: dict[int, CarriedRequest] = {}
        self.left: dict[int, CarriedRequest] = {}  # whose client is gone, and which the role may still answer
        self.buffers: dict[int, bytes] = {}
        self.in_engine: set[tuple[str, tuple[int, int]]] = set()
        """The ranges of shard maps that the engine was told to hold."""
        self._loading: dict[int, tuple[str, tuple[int, int]]] = {}
        self.engine: SimulatedEngine | None = None
        self._factory = factory
        self._make_engine = engine
        self._held: deque[Effect] = deque()
        self._persisting = 0
        self._next_request = 0
        self._timer_us: int | None = None
        self._mark = b"%d" % self.number
        self._execute_one: Mapping[type, Callable[..., None]] = {**self._dispatch(), **own_effects}
        self._on_start = on_start
        self._on_crash = on_crash
        process.add(self)

    @property
    def now_ms(self) -> int:
        """What the clock of the process shows."""
        return self.process.clock.read(self.world.now_us)

    @property
    def clock_shift_ms(self) -> int:
        """By how much the clock moved in the last restart."""
        return self.process.clock_shift_ms

    # Life

    def start(self) -> None:
        """Build the role from what is stored, and start it."""
        self.life += 1
        now_ms = self.now_ms
        if self._make_engine is not None:
            self.engine = self._make_engine(self)
        self.role = self._factory(
            Start(
                stored=self.store.load(),
                now_ms=now_ms,
                wall_ms=WALL_CLOCK_MS + self.world.now_us // 1000,
                life=self.life,
                random_bytes=self.randomness.split("life", self.life).octets,
            )
        )
        self.witness.started(self)
        self._execute(self.role.start(now_ms))
        self.arm_timer()
        self._on_start(self)

    def crash(self) -> None:
        """Lose everything but what is durable."""
        self.life += 1
        self.role = None
        self.engine = None
        self.store.crash()
        for tier in self.tiers.values():
            tier.crash()
        self.calls.clear()
        self.requests.clear()
        self.left.clear()
        self.buffers.clear()
        self._held.clear()
        self._loading.clear()
        self._persisting = 0
        self._timer_us = None
        self.witness.crashed(self)
        self._on_crash()

    def later(self, delay_us: int, call: Callable[..., None], *arguments: object) -> None:
        """Have something done after a time, unless the role is gone by then."""
        self.world.after(delay_us, self._if_alive, self.life, call, arguments)

    def _if_alive(self, life: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if life == self.life:
            call(*arguments)

    # Inputs

    def deliver(self, item: Any) -> None:
        """Bring the role an input (an `Input`, or one that only this role has), now or once its process goes
        on.
        """
        if self.process.paused:
            self.process.keep(self, self.take, item)
        else:
            self.take(item)

    def take(self, item: Input | Instruction) -> None:
        """Bring the role an input now."""
        role = self.role
        if role is None:
            return
        if type(item) is JobFailed:  # where it was to load a range, the engine does not have it
            self.in_engine.discard(self._loading.pop(item.job_id, ("", (0, 0))))
        world = self.world
        world.steps += 1
        event = Event(world.now_us, self.name, item)
        world.trace.note(self._mark, event)
        now_ms = self.process.clock.read(world.now_us)
        effects = item.do(role, now_ms) if isinstance(item, Instruction) else role.handle(item, now_ms)
        event.effects = effects
        if effects:
            self._execute(effects)
        self.arm_timer()

    def arm_timer(self) -> None:
        """Have the role woken at its next deadline."""
        if self.role is None or self.process.paused:
            return
        deadline_ms = self.role.next_deadline_ms()
        if deadline_ms is not None:
            self._wake_at(deadline_ms)

    def _wake_at(self, deadline_ms: int) -> None:
        due_us = self.process.clock.when(deadline_ms)
        armed = self._timer_us
        if armed is None or due_us < armed:
            self._timer_us = due_us
            self.world.at(due_us, self._timer, self.life, due_us)

    def _timer(self, life: int, due_us: int) -> None:
        if life != self.life or self._timer_us != due_us or self.role is None:
            return
        self._timer_us = None
        if self.process.paused:
            return
        deadline_ms = self.role.next_deadline_ms()
        if deadline_ms is None:
            return
        if deadline_ms <= self.now_ms:
            self.take(TimerFired())
        else:
            self._wake_at(deadline_ms)

    # Effects

    def _execute(self, effects: Iterable[Effect]) -> None:
        if self._persisting:
            self._held.extend(effects)
            return
        execute_one = self._execute_one
        left = iter(effects)
        for effect in left:
            execute_one[type(effect)](effect)
            if self._persisting:
                self._held.extend(left)
                return

    def _dispatch(self) -> Mapping[type, Callable[..., None]]:
        return {
            ReceiveBody: self._receive_body,
            ReceiveBlock: self._receive_block,
            Respond: self._respond,
            Send: self._send,
            Call: self._call,
            CancelCall: self._cancel_call,
            Persist: self._persist,
            Store: self._store,
            ReadBlock: self._read_block,
            Drop: self._drop,
            FreeBuffer: self._free_buffer,
            Load: self._load,
            Observe: self._observe,
            **dict.fromkeys(ENGINE_COMMANDS, self._command_engine),
        }

    def _persist(self, effect: Persist) -> None:
        self._persisting += 1
        self.store.persist(effect.writes, self._persisted)

    def _persisted(self, durable: bool) -> None:
        if not durable:
            self.cluster.counts["persist failed"] += 1
            self.crash()
            if self.process.up:
                self.later(1_000, self.start)
            return
        self._persisting = 0
        held, self._held = self._held, deque()
        self._execute(held)

    def _observe(self, effect: Observe) -> None:
        self.cluster.counts[effect.name] += effect.value

    # Requests to the role

    def open_request(self, leg: CarriedRequest) -> int:
        """Number a request."""
        self._next_request += 1
        self.requests[self._next_request] = leg
        return self._next_request

    def receive(self, leg: CarriedRequest, client: str, request: Request) -> None:
        """Bring the role the head of a request."""
        self.deliver(RequestReceived(leg.request_id, client, request))

    def _receive_body(self, effect: ReceiveBody) -> None:
        leg = self.requests.get(effect.request_id)
        if leg is not None:
            leg.receive_body(effect.limit_bytes)

    def _receive_block(self, effect: ReceiveBlock) -> None:
        leg = self.requests.get(effect.request_id)
        if leg is not None:
            leg.receive_block(effect.buffer, effect.limit_bytes)

    def _respond(self, effect: Respond) -> None:
        leg = self.requests.get(effect.request_id)
        if leg is not None:
            leg.respond(effect, self.octets(effect.body))
            return
        leg = self.left.pop(effect.request_id, None)
        if leg is not None:  # nobody hears it, but what was asked for is done
            body = effect.body if isinstance(effect.body, bytes) else b""
            self.witness.responded(leg, effect, body)

    def _send(self, effect: Send) -> None:
        leg = self.requests.get(effect.request_id)
        if leg is not None:
            self.witness.sent(leg, effect.data)
            leg.send(effect.data, effect.end)

    # Calls of the role

    def _call(self, effect: Call) -> None:
        exchange = self.cluster.carry(self, effect, self.octets(effect.body))
        self.calls[effect.call_id] = exchange
        exchange.begin()

    def _cancel_call(self, effect: CancelCall) -> None:
        exchange = self.calls.pop(effect.call_id, None)
        if exchange is not None:
            exchange.cancel()

    def octets(self, body: bytes | BlockBody) -> bytes:
        """Return the octets of a body."""
        if isinstance(body, bytes):
            return body
        container = self.buffers[body.buffer]
        if body.layers is None:
            return container
        part = OutgoingBlock.from_container(container, range(body.layers[0], body.layers[1] + 1))
        return b"".join(part.pieces)

    # Blocks

    def _store(self, effect: Store) -> None:
        octets, tier = self.buffers[effect.buffer], self.tiers[effect.tier]
        tier.begin(effect.name, octets)
        self.later(tier.delay_us(), self._stored, effect, octets)

    def _stored(self, effect: Store, octets: bytes) -> None:
        fault = self.tiers[effect.tier].store(effect.name, octets)
        self.deliver(JobDone(effect.job_id) if fault is None else JobFailed(effect.job_id, fault))

    def _read_block(self, effect: ReadBlock) -> None:
        self.later(self.tiers[effect.tier].delay_us(), self._read, effect)

    def _read(self, effect: ReadBlock) -> None:
        tier = self.tiers[effect.tier]
        stored = tier.blocks.get(effect.name)
        octets = tier.read(effect.name)
        if octets is not stored:
            self.witness.tier_fault(self, effect.name)
        if isinstance(octets, JobFault):
            self.deliver(JobFailed(effect.job_id, octets))
            return
        if effect.layers is not None:
            asked = range(effect.layers[0], effect.layers[1] + 1)
            octets = b"".join(OutgoingBlock.from_container(octets, asked).pieces)
        self.buffers[effect.buffer] = octets
        self.deliver(described(effect.job_id, octets))

    def _drop(self, effect: Drop) -> None:
        self.tiers[effect.tier].drop(effect.name)
        self.witness.dropped(self, effect.name)

    def _free_buffer(self, effect: FreeBuffer) -> None:
        self.buffers.pop(effect.buffer, None)

    def _load(self, effect: Load) -> None:
        self.later(self.tiers[effect.tier].delay_us(), self._loaded, effect)

    def _loaded(self, effect: Load) -> None:
        held = catalogue(self.tiers[effect.tier].blocks)
        self.deliver(JobDone(effect.job_id, catalogue=held))

    def _command_engine(self, effect: EngineCommand) -> None:
        assert self.engine is not None, f"{self.name} has no engine"
        self.witness.commanded(self, effect)
        if type(effect) is LoadShard:
            self._loading[effect.job_id] = (effect.map_id, effect.tokens)
        self.engine.execute(effect)
