"""Two small roles that exercise what drives them: a register that persists, and a client of it."""

from __future__ import annotations

from kvsp_core.heads import Request, Response
from kvsp_core.roles.role import (
    BodyArrived,
    Call,
    Effect,
    Input,
    Persist,
    Put,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Stored,
)
from kvsp_sim.clock import Clock
from kvsp_sim.disk import StorageFaults
from kvsp_sim.exchange import Exchange
from kvsp_sim.host import Cluster, Host, Process
from kvsp_sim.http2 import Http2
from kvsp_sim.network import Network, NetworkFaults
from kvsp_sim.properties import Properties
from kvsp_sim.randomness import Randomness
from kvsp_sim.trace import Trace
from kvsp_sim.witness import Witness
from kvsp_sim.world import World

REGISTER = "https://register.example/"
CLIENT = "https://client.example/"


class Register:
    """Keeps the highest number it was sent; answers once that is durable."""

    base_uri = REGISTER

    def __init__(self, stored: Stored) -> None:
        self.value = int(stored.get("register", {}).get("value", b"0"))
        self.requests: dict[int, int] = {}
        self.ended: list[int] = []
        self.received: list[int] = []

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return ()

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case RequestReceived(request_id):
                return (ReceiveBody(request_id, 100),)
            case BodyArrived(request_id, body):
                self.received.append(int(body))
                self.value = max(self.value, int(body))
                value = b"%d" % self.value
                return (
                    Persist((Put("register", "value", value),)),
                    Respond(request_id, Response(status=200, content_length=len(value)), value),
                )
            case RequestEnded(request_id):
                self.ended.append(request_id)
        return ()

    def next_deadline_ms(self) -> int | None:
        return None


class Client:
    """Sends a number more every so often, whatever became of the one before."""

    base_uri = CLIENT

    def __init__(self, every_ms: int = 10, timeout_ms: int = 50) -> None:
        self.every_ms = every_ms
        self.timeout_ms = timeout_ms
        self.due_ms = 0
        self.sent = 0
        self.heard: list[Input] = []

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        self.due_ms = now_ms + self.every_ms
        return ()

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        self.heard.append(item)
        if now_ms < self.due_ms:
            return ()
        self.due_ms = now_ms + self.every_ms
        self.sent += 1
        body = b"%d" % self.sent
        return (
            Call(
                call_id=self.sent,
                base_uri=REGISTER,
                request=Request(method="PUT", path="value", content_length=len(body)),
                body=body,
                timeout_ms=self.timeout_ms,
            ),
        )

    def next_deadline_ms(self) -> int | None:
        return self.due_ms


class Toy:
    """A world with a register and a client."""

    def __init__(
        self,
        seed: int = 1,
        trace: Trace | None = None,
        client_clock: Clock | None = None,
        wire: str = "messages",
    ) -> None:
        self.world = World(seed, trace)
        self.network_faults = NetworkFaults()
        self.storage_faults = StorageFaults()
        network = Network(self.world, self.network_faults)
        carry = Http2(self.world.randomness.split("http2")) if wire == "h2" else Exchange
        self.cluster = Cluster(self.world, network, Witness(Properties()), carry)
        self.register = self._host("register", REGISTER, lambda start: Register(start.stored))
        self.client = self._host("client", CLIENT, lambda *_: Client())
        if client_clock is not None:
            self.client.process.set_clock(client_clock)
        for process in self.cluster.processes.values():
            process.start()

    def _host(self, name: str, base_uri: str, factory: object) -> Host:
        process: Process = self.cluster.process(name)
        return Host(process, base_uri, factory, storage=self.storage_faults)  # type: ignore[arg-type]


def run_with_faults(
    seed: int,
    trace: Trace | None = None,
    faults: tuple[str, ...] = ("slow", "breaks", "storage", "crash", "pause", "block"),
    wire: str = "messages",
) -> Toy:
    """Run a world in which these go wrong now and then."""
    toy = Toy(seed, trace, wire=wire)
    random = Randomness(seed).split("faults")
    if "slow" in faults:
        toy.network_faults.slow = 0.1
    if "breaks" in faults:
        toy.network_faults.breaks = 0.05
    if "storage" in faults:
        toy.storage_faults.late = 0.1
        toy.storage_faults.persist_fails = 0.02
    for _ in range(60):
        process = random.pick(list(toy.cluster.processes.values()))
        fault = random.pick(faults)
        if fault == "crash":
            process.crash()
        elif fault == "pause":
            process.pause()
        elif fault == "block":
            toy.cluster.network.block("client", "register")
        toy.world.run(until_us=toy.world.now_us + random.spread(1_000, 100_000))
        if fault == "crash":
            process.start()
        elif fault == "pause":
            process.proceed()
        elif fault == "block":
            toy.cluster.network.unblock("client", "register")
        toy.world.run(until_us=toy.world.now_us + 50_000)
    return toy
