"""What surrounds an instance in its tests: the holder beside it, and hands that answer its calls and jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import attrs

from kvsp_core.answers import block_response, empty_response, json_response, problem_response
from kvsp_core.block_keys import block_keys
from kvsp_core.bodies import decode
from kvsp_core.container import ContainerHeader, replica_digest
from kvsp_core.ext_messages import OutputEnd, OutputRequest, OutputToken, decode_output_line
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.messages import CheckpointRecorded, LeaseGranted, LookupAnswer, LookupRequest, MatchedBlock
from kvsp_core.problems import Problem
from kvsp_core.records import ReplicaRecord, Residency, Sampler, SessionCheckpoint
from kvsp_core.resources import (
    CreateLease,
    GetBlock,
    Lookup,
    Operation,
    RecordCheckpoint,
    ReportStatus,
    RoleName,
    Router,
    StreamOutput,
    request_for,
)
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.engine import (
    ExportBlock,
    ImportBlock,
    StartSequence,
)
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.local_blocks import BlockAdded, BlockGone, BlockNotAdded, News
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockName,
    BlockReceived,
    BodyArrived,
    Call,
    CallFailed,
    Effect,
    JobDone,
    Observe,
    ReadBlock,
    ReceiveBody,
    RequestReceived,
    Respond,
    Send,
    StoredBlock,
    TimerFired,
)
from kvsp_core.roles.work import Numbers

ME, PC, IS = "https://ii1.example/kvsp/", "https://pc.example/kvsp/", "https://is.example/kvsp/"
FE, HOLDER, CACHE = "https://fe.example/kvsp/", "https://h1.example/kvsp/", "https://cache.example/kvsp/"
LAYERS, B = 2, 4
MODEL = CompatibilityDescriptor.from_members(
    {
        "model": "example-model",
        "model_digest": "sha-256:" + "11" * 32,
        "tokenizer_digest": "sha-256:" + "22" * 32,
        "layers": LAYERS,
        "kv_heads": 1,
        "head_dim": 8,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": B,
        "layout": "kvsp-layout-1",
    }
)
SCOPE = Scope(bytes(range(32)))
SHARED = Scope(bytes(range(1, 33)))
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
HEADER = ContainerHeader.for_layers(MODEL)
POLICY = Policy(
    {
        PC: [RoleName.CONTROLLER],
        FE: [RoleName.FRONT_END],
        ME: [RoleName.INSTANCE, RoleName.HOLDER],
        HOLDER: [RoleName.HOLDER],
        CACHE: [RoleName.HOLDER],
    },
    {
        SCOPE.scope_id: ScopeRules(read=[FE, ME], write=[ME], publish=[ME, HOLDER, CACHE], withdraw=[ME]),
        SHARED.scope_id: ScopeRules(read=[FE, ME], publish=[ME], shared=True),
    },
)
T = TypeVar("T")


def key_of(tokens: tuple[int, ...]) -> list[str]:
    return [key.hex() for key in block_keys(SCOPE, MODEL, tokens)[0]]


def digests_of(key: str) -> tuple[str, ...]:
    return tuple(hashlib.sha256(f"{key}{layer}".encode()).hexdigest() for layer in range(LAYERS))


def record_of(key: str, holder: str = HOLDER) -> ReplicaRecord:
    digests = digests_of(key)
    return ReplicaRecord(
        block_key=key,
        compat_id=MODEL.compat_id,
        scope_id=SCOPE.scope_id,
        holder=holder,
        codec=1,
        size=HEADER.data_bytes,
        digest=replica_digest(digests),
        layer_digests=digests,
        residency=(Residency(tier="host", layers=(0, LAYERS - 1)),),
        ttl_ms=60_000,
    )


class Beside:
    """The holder beside the instance: it keeps names only."""

    def __init__(self) -> None:
        self.policy = POLICY
        self.tiers: dict[BlockName, str] = {}
        self.kept: dict[BlockName, int] = {}
        self.news: list[News] = []
        self.full = False
        self.handled: list[Any] = []
        self.tickets = 0
        self.stopping = False
        self.safe_to_stop = False
        self.fenced = False

    def fence(self) -> None:
        self.fenced = True

    def stop(self, now_ms: int) -> tuple[Effect, ...]:
        self.stopping = True
        return ()

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return ()

    def handle(self, item: Any, now_ms: int) -> tuple[Effect, ...]:
        self.handled.append(item)
        return ()

    def next_deadline_ms(self) -> int | None:
        return None

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        gone = [name for name in self.tiers if name.scope_id in self.policy.purged]
        for name in gone:
            self.lost(name, now_ms)
        return ()

    def expire(self, tier: str, names: Iterable[BlockName], now_ms: int) -> tuple[Effect, ...]:
        for name in names:
            self.lost(name, now_ms)
        return ()

    def tier_of(self, name: BlockName) -> str | None:
        return self.tiers.get(name)

    def is_sound(self, name: BlockName, layer_digests: tuple[str, ...]) -> bool:
        return name in self.tiers and layer_digests == digests_of(name.block_key)

    def keep(self, name: BlockName) -> None:
        self.kept[name] = self.kept.get(name, 0) + 1

    def let_go(self, name: BlockName) -> None:
        self.kept[name] -= 1
        if not self.kept[name]:
            del self.kept[name]

    def add(self, block: StoredBlock, buffer: int, now_ms: int) -> tuple[int, tuple[Effect, ...]]:
        name = block.name
        self.tickets += 1
        if self.full:
            self.news.append(BlockNotAdded(self.tickets, name))
        else:
            self.tiers[name] = "host"
            self.news.append(BlockAdded(self.tickets, name))
        return self.tickets, ()

    def lost(self, name: BlockName, now_ms: int) -> tuple[Effect, ...]:
        self.tiers.pop(name, None)
        self.news.append(BlockGone(name))
        return ()

    def take_news(self) -> tuple[News, ...]:
        news, self.news = tuple(self.news), []
        return news

    def hold(self, *keys: str) -> None:
        for key in keys:
            self.tiers[BlockName(MODEL.compat_id, SCOPE.scope_id, key)] = "host"

    def held(self) -> set[str]:
        return {name.block_key for name in self.tiers}


@attrs.define
class Open:
    """A call that waits for its answer."""

    call: Call
    operation: Operation


class World:
    """An instance, its time, and everything it has asked for so far."""

    def __init__(self, **settings: Any) -> None:
        self.beside = Beside()
        self.now_ms = 1000
        self.role = Instance(
            InstanceSettings(
                **{"base_uri": ME, "controller_uri": PC, "index_uris": (IS,), "epoch": 7} | settings
            ),
            models={MODEL.compat_id: MODEL},
            scopes={SCOPE.scope_id: SCOPE, SHARED.scope_id: SHARED},
            blocks=self.beside,
            numbers=Numbers(),
            policy=POLICY,
            random_bytes=lambda count: hashlib.sha256(b"%d" % self.drawn()).digest()[:count],
            now_ms=self.now_ms,
        )
        self.count = 0
        self.requests = 0
        self.seen: list[Effect] = []
        self.open: dict[int, Open] = {}
        self.traceparent: str | None = None
        """What requests belong to from now on."""
        self.take(self.role.start(self.now_ms))

    def drawn(self) -> int:
        self.count += 1
        return self.count

    def take(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        router = Router(RoleName)
        for effect in effects:
            if isinstance(effect, Call):
                operation = router.route(effect.request)
                self.open[effect.call_id] = Open(effect, operation)  # type: ignore[arg-type]
        self.seen += effects
        return effects

    def do(self, item: Any) -> tuple[Effect, ...]:
        return self.take(self.role.handle(item, self.now_ms))

    def later(self, after_ms: int) -> tuple[Effect, ...]:
        self.now_ms += after_ms
        return self.do(TimerFired())

    # Requests

    def ask(self, client: str, operation: Operation, body: object = None) -> tuple[int, tuple[Effect, ...]]:
        self.requests += 1
        head, octets = request_for(operation, body)
        effects = self.do(RequestReceived(self.requests, client, head, self.traceparent))
        if any(isinstance(effect, ReceiveBody) for effect in effects):
            effects = self.do(BodyArrived(self.requests, octets))
        return self.requests, effects

    def answered(self, request_id: int) -> Respond:
        (found,) = [e for e in self.seen if isinstance(e, Respond) and e.request_id == request_id]
        return found

    def status_of(self, request_id: int) -> int | None:
        found = [e for e in self.seen if isinstance(e, Respond) and e.request_id == request_id]
        return found[0].response.status if found else None

    def lines(self, request_id: int) -> list[OutputToken | OutputEnd]:
        sent = b"".join(e.data for e in self.seen if isinstance(e, Send) and e.request_id == request_id)
        return [decode_output_line(line) for line in sent.splitlines()]

    def output(self, request_id: int) -> list[int]:
        return [line.token for line in self.lines(request_id) if isinstance(line, OutputToken)]

    # Calls

    def calls(self, kind: type[T]) -> list[tuple[int, Open]]:
        return [(number, each) for number, each in self.open.items() if isinstance(each.operation, kind)]

    def answer(self, number: int, message: object = None, status: int = 200) -> tuple[Effect, ...]:
        del self.open[number]
        if isinstance(message, Problem):
            response, octets = problem_response(message)
        elif message is None:
            response, octets = empty_response(status)
        else:
            response, octets = json_response(message, status)
        return self.do(AnswerReceived(number, response, octets))

    def fail(self, number: int) -> tuple[Effect, ...]:
        del self.open[number]
        return self.do(CallFailed(number, "no connection"))

    def acknowledge_checkpoints(self) -> list[SessionCheckpoint]:
        """Answer the checkpoints under way; return them."""
        found = []
        for number, each in self.calls(RecordCheckpoint):
            assert isinstance(each.call.body, bytes)
            checkpoint = decode(SessionCheckpoint, each.call.body)
            found.append(checkpoint)
            recorded = CheckpointRecorded(epoch=checkpoint.epoch, output_offset=checkpoint.output_offset)
            self.answer(number, recorded)
        return found

    def answer_status(self, state: str = "active") -> None:
        from kvsp_core.messages import StatusAnswer

        for number, _ in self.calls(ReportStatus):
            self.answer(number, StatusAnswer(state=state))

    def answer_lookups(self, *keys: str, holder: str = HOLDER) -> None:
        """Answer lookups: these keys are at a holder."""
        for number, _ in self.calls(Lookup):
            self.answer_lookup(number, *keys, holder=holder)

    def answer_lookup(self, number: int, *keys: str, holder: str = HOLDER) -> None:
        """Answer one lookup."""
        body = self.open[number].call.body
        assert isinstance(body, bytes)
        found: list[MatchedBlock] = []
        for key in decode(LookupRequest, body).block_keys:
            if key not in keys:
                break
            found.append(MatchedBlock(block_key=key, replicas=(record_of(key, holder),)))
        self.answer(number, LookupAnswer(matched=len(found), blocks=tuple(found)))

    def grant_leases(self) -> None:
        for number, _ in self.calls(CreateLease):
            self.answer(number, LeaseGranted(lease=f"L{number}", ttl_ms=2000), status=201)

    def serve_blocks(self) -> None:
        for number, each in self.calls(GetBlock):
            del self.open[number]
            assert isinstance(each.operation, GetBlock)
            digest = "ab" * 32
            self.do(
                BlockReceived(
                    number,
                    block_response(size_bytes=HEADER.size_bytes, repr_digest=digest, ttl_ms=1000),
                    HEADER,
                    digests_of(each.operation.block_key),
                    repr_digest_valid=True,
                )
            )

    def load(self, *keys: str, holder: str = HOLDER) -> None:
        """Let everything that is looked up, leased and fetched succeed, where a holder has it."""
        for _ in range(2 * len(keys) + 4):
            self.answer_lookups(*keys, holder=holder)
            self.grant_leases()
            self.serve_blocks()

    def observed(self, name: str) -> list[int]:
        """Return what was counted under a name, one value for each time."""
        return [effect.value for effect in self.of(Observe) if effect.name == name]

    # Jobs

    def of(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def run_jobs(self) -> None:
        """Let all jobs of tiers and engine succeed that have not been answered."""
        progress = True
        while progress:
            progress = False
            for job in list(self.jobs()):
                progress = True
                self.answered_jobs.add(job.job_id)
                header = None if isinstance(job, ImportBlock) else HEADER
                self.do(
                    JobDone(
                        job.job_id, header=header, layer_digests=self.digests_for(job), repr_digest="cd" * 32
                    )
                )

    @staticmethod
    def digests_for(job: ReadBlock | ImportBlock | ExportBlock) -> tuple[str, ...]:
        return digests_of(job.name.block_key if isinstance(job, ReadBlock) else "computed")

    @property
    def answered_jobs(self) -> set[int]:
        if not hasattr(self, "_answered"):
            self._answered: set[int] = set()
        return self._answered

    def jobs(self) -> Iterator[ReadBlock | ImportBlock | ExportBlock]:
        for effect in list(self.seen):
            if isinstance(effect, ReadBlock | ImportBlock | ExportBlock) and (
                effect.job_id not in self.answered_jobs
            ):
                yield effect

    # Sessions

    def begin(
        self,
        prompt: tuple[int, ...],
        *,
        deterministic: bool = True,
        epoch: int = 1,
        session: str = SESSION,
        **more: Any,
    ) -> int:
        """A front end begins a session; return its request."""
        body = OutputRequest(
            from_index=0,
            epoch=1,
            compat_id=MODEL.compat_id,
            scope_id=SCOPE.scope_id,
            prompt=prompt,
            sampler=sampler(deterministic),
            **more,
        )
        return self.ask(FE, StreamOutput(session), body)[0]

    def sequence(self) -> int:
        return self.of(StartSequence)[-1].sequence


def sampler(deterministic: bool = True) -> Sampler:
    return Sampler(
        method="greedy" if deterministic else "top-p",
        params={"max_tokens": 64},
        seed=7,
        step=0,
        deterministic=deterministic,
    )
