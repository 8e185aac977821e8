"""A holder with a loop around it that does what it is told, so that tests read as conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import attrs

from kvsp_core import bodies
from kvsp_core.container import decode_container, encode_container
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.messages import LeaseRequest, PublishAnswer
from kvsp_core.resources import CreateLease, GetBlock, Operation, RoleName, StoreBlock, request_for
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockArrived,
    BlockName,
    BodyArrived,
    BodyFailed,
    Call,
    CallFailed,
    Drop,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    Load,
    Observe,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Store,
    StoredBlock,
    TimerFired,
)

__all__ = [
    "ALICE",
    "BOB",
    "COMPAT",
    "DESCRIPTOR",
    "HERE",
    "INDEX",
    "OPERATOR",
    "OTHER_SCOPE",
    "SCOPE",
    "Loop",
    "container",
    "problem_of",
]

HERE, INDEX = "https://h1.example/kvsp/", "https://is.example/kvsp/"
ALICE, BOB, OPERATOR = "https://alice.example/", "https://bob.example/", "spiffe://example/ops"
SCOPE, OTHER_SCOPE = "5c" * 16, "0e" * 16
DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "aa" * 32,
    tokenizer_digest="sha-256:" + "bb" * 32,
    layers=2,
    kv_heads=1,
    head_dim=2,
    kv_dtype="fp16",
    positional="rope",
    block_tokens=4,
)
COMPAT = DESCRIPTOR.compat_id
POLICY = Policy(
    {
        HERE: [RoleName.HOLDER],
        ALICE: [RoleName.INSTANCE],
        BOB: [RoleName.INSTANCE],
        OPERATOR: [RoleName.OPERATOR],
    },
    {
        SCOPE: ScopeRules(read=frozenset({ALICE, BOB}), write=frozenset({ALICE, BOB}), publish={HERE}),
        OTHER_SCOPE: ScopeRules(read=frozenset({BOB}), write=frozenset({BOB}), publish={HERE}),
    },
)


def container(fill: int = 1, layers: int = 2, tokens: int = 4) -> bytes:
    """Return a block of two layers in which every octet is `fill`."""
    section = bytes([fill]) * (tokens * 4)
    header = ContainerHeader(codec=1, token_count=tokens, sections=((len(section),) * 2,) * layers)
    return b"".join(encode_container(header, [(section, section)] * layers))


class Loop:
    """Drives a holder: jobs of its tiers are done at once, calls are kept for the test to answer."""

    def __init__(
        self,
        *,
        index: bool = True,
        index_uris: tuple[str, ...] = (INDEX,),
        blocks: int = 4,
        knows: bool = True,
        **options: Any,
    ) -> None:
        numbers = count(1)
        descriptors = Descriptors()
        if knows:
            descriptors.add(DESCRIPTOR)
        size = len(container())
        random_bytes = lambda n: next(numbers).to_bytes(n, "big")  # noqa: E731
        tiers: Mapping[str, TierLimits] = options.pop(
            "tiers", {"host": TierLimits(capacity_bytes=blocks * size, read_mbit_per_s=400_000)}
        )
        lease_table = options.pop("lease_table", None) or LeaseTable(
            random_bytes=random_bytes, now_ms=0, max_ttl_ms=1000, quota_bytes=10 * size
        )
        self.holder = Holder(
            base_uri=HERE,
            policy=POLICY,
            tiers=tiers,
            random_bytes=random_bytes,
            now_ms=0,
            index_uris=index_uris if index else (),
            replica_ttl_ms=6000,
            lease_table=lease_table,
            descriptors=descriptors,
            **options,
        )
        self.now_ms = 0
        self.tiers: dict[str, dict[BlockName, bytes]] = {tier: {} for tier in tiers}
        self.buffers: dict[int, bytes] = {}
        self.calls: dict[int, Call] = {}
        self.answers: dict[int, Respond] = {}
        self.observed: dict[str, int] = {}
        self.faults: dict[str, JobFault] = {}
        self.log: list[Effect] = []
        self.held_back: list[Input] = []
        self.hold_jobs = False
        self.listed: set[str] = set()  # what the index has
        self._requests = 0

    def start(self, *stored: tuple[str, BlockName, bytes]) -> Loop:
        """Start the holder with blocks that were in its tiers before."""
        for tier, name, octets in stored:
            self.tiers[tier][name] = octets
        self.do(self.holder.start(self.now_ms))
        return self

    def give(self, item: Input) -> tuple[Effect, ...]:
        """Give the holder one input and do what it asks for."""
        effects = self.holder.handle(item, self.now_ms)
        self.do(effects)
        return effects

    def at(self, now_ms: int) -> tuple[Effect, ...]:
        """Let time pass, firing the timer at each deadline."""
        done: tuple[Effect, ...] = ()
        while (deadline := self.holder.next_deadline_ms()) is not None and deadline <= now_ms:
            self.now_ms = max(self.now_ms, deadline)
            before = deadline
            done += self.give(TimerFired())
            assert self.holder.next_deadline_ms() != before, "the timer has to move on"
        self.now_ms = now_ms
        return done

    def do(self, effects: tuple[Effect, ...]) -> None:
        """Carry effects out, in order; jobs end when all of them are done."""
        outcomes: list[Input] = []
        for effect in effects:
            self.log.append(effect)
            match effect:
                case Call(call_id=number):
                    self.calls[number] = effect
                case Respond(request_id=number):
                    assert number not in self.answers, "each request is answered once"
                    self.answers[number] = effect
                case Store() | ReadBlock() | Load():
                    (self.held_back if self.hold_jobs else outcomes).append(self._job(effect))
                case Drop(name, tier):
                    self.tiers[tier].pop(name, None)
                case FreeBuffer(number):
                    self.buffers.pop(number, None)
                case Observe(name, value):
                    self.observed[name] = self.observed.get(name, 0) + value
                case _:
                    pass
        for outcome in outcomes:
            self.give(outcome)

    def let_jobs_end(self) -> None:
        """Give the holder the outcomes of its jobs that were held back."""
        self.hold_jobs = False
        held_back, self.held_back = self.held_back, []
        for outcome in held_back:
            self.give(outcome)

    def _job(self, effect: Store | ReadBlock | Load) -> Input:
        if effect.tier in self.faults:
            return JobFailed(effect.job_id, self.faults[effect.tier])
        tier = self.tiers[effect.tier]
        match effect:
            case Store():
                tier[effect.name] = self.buffers[effect.buffer]
                return JobDone(effect.job_id)
            case Load():
                return JobDone(effect.job_id, catalogue=tuple(_stored(n, o) for n, o in tier.items()))
            case ReadBlock():
                octets = tier.get(effect.name)
                if octets is None:
                    return JobFailed(effect.job_id, JobFault.MISSING)
                stored = _stored(effect.name, octets)
                first, last = effect.layers or (0, len(stored.layer_digests) - 1)
                self.buffers[effect.buffer] = octets
                return JobDone(
                    effect.job_id, stored.header, stored.layer_digests[first : last + 1], stored.repr_digest
                )

    # Requests

    def ask(
        self, operation: Operation, body: object = None, *, client: str = ALICE, **head: Any
    ) -> Respond | None:
        """Send a request without block data; return its answer, or None where it waits."""
        request, octets = request_for(operation, body)
        number = self._open(client, request, head)
        if any(isinstance(e, ReceiveBody) and e.request_id == number for e in self.log):
            self.give(BodyArrived(number, octets))
        return self.answers.get(number)

    def _open(self, client: str, request: Any, head: Mapping[str, Any]) -> int:
        self._requests += 1
        self.give(RequestReceived(self._requests, client, attrs.evolve(request, **head)))
        return self._requests

    @property
    def last_request(self) -> int:
        """The number of the last request."""
        return self._requests

    def begin_put(
        self, key: str, octets: bytes, *, client: str = ALICE, scope: str = SCOPE, **head: Any
    ) -> int:
        """Send the head of a PUT; return its number."""
        request, _ = request_for(StoreBlock(COMPAT, scope, key), length=len(octets))
        return self._open(client, request, head)

    def send_block(self, number: int, octets: bytes) -> None:
        """Send the body of a PUT, if the holder asked for it."""
        buffer = next(e.buffer for e in self.log if isinstance(e, ReceiveBlock) and e.request_id == number)
        header, digests = decode_container(octets)
        self.buffers[buffer] = octets
        self.give(BlockArrived(number, buffer, header, digests, hashlib.sha256(octets).hexdigest()))

    def put(self, key: str, octets: bytes | None = None, **options: Any) -> int:
        """Store a block; return the status."""
        octets = container() if octets is None else octets
        number = self.begin_put(key, octets, **options)
        if number not in self.answers:
            self.send_block(number, octets)
        self.end(number)
        return self.answers[number].response.status

    def get(self, key: str, *, client: str = ALICE, scope: str = SCOPE, **options: Any) -> Response:
        """Retrieve a block to the end; return the head of the answer."""
        answer = self.ask(GetBlock(COMPAT, scope, key, **options), client=client)
        assert answer is not None
        self.end(self.last_request)
        return answer.response

    def lease(self, *keys: str, client: str = ALICE, ttl_ms: int = 500) -> Respond:
        """Ask for a lease."""
        answer = self.ask(CreateLease(), LeaseRequest(block_keys=keys, ttl_ms=ttl_ms), client=client)
        assert answer is not None
        return answer

    def end(self, number: int, *, complete: bool = True, sent_bytes: int = 1) -> None:
        """End an exchange."""
        self.give(RequestEnded(number, complete, sent_bytes))

    def cut_off(self, number: int, problem: Any) -> None:
        """Fail the body of a request."""
        self.give(BodyFailed(number, problem))

    # The index

    def to_index(self) -> list[tuple[str, str]]:
        """Return method and last part of the path of each call to the index that waits for an answer."""
        return [
            (call.request.method, call.request.path.rsplit("/", 1)[-1])
            for call in self.calls.values()
            if call.base_uri == INDEX
        ]

    def index_answers(self, status: int | None = None, *, ttl_ms: int = 6000) -> list[tuple[str, str]]:
        """Answer all that was asked of the index, until nothing more is; return what it was."""
        seen = []
        while self.calls:
            number, call = next(iter(self.calls.items()))
            del self.calls[number]
            method, key = call.request.method, call.request.path.rsplit("/", 1)[-1]
            seen.append((method, key))
            is_record = method == "PUT" and "replicas" in call.request.path
            body = bodies.encode(PublishAnswer(ttl_ms=ttl_ms)) if is_record and status is None else b""
            code = status or (200 if key in self.listed else 201 if is_record else 204)
            if is_record and status is None:
                self.listed.add(key)
            elif method == "DELETE":
                self.listed.discard(key)
            head = Response(status=code, content_type="application/kvsp+json" if body else None)
            self.give(AnswerReceived(number, head, body))
        return seen

    def index_fails(self) -> None:
        """Let the index answer 503 to all that it was asked so far."""
        calls, self.calls = self.calls, {}
        for number in calls:
            self.give(AnswerReceived(number, Response(status=503), b""))

    def index_is_silent(self, *, hears: bool = False) -> None:
        """Let every call to the index fail once; the index may have heard it all the same."""
        calls, self.calls = self.calls, {}
        for number, call in calls.items():
            key = call.request.path.rsplit("/", 1)[-1]
            if hears and "replicas" in call.request.path:
                (self.listed.add if call.request.method == "PUT" else self.listed.discard)(key)
            self.give(CallFailed(number, "timed out"))


def _stored(name: BlockName, octets: bytes) -> StoredBlock:
    header, digests = decode_container(octets)
    return StoredBlock(name, header, digests, hashlib.sha256(octets).hexdigest())


def problem_of(answer: Respond | None) -> str:
    """Return the type suffix and status of a refusal: ``kvsp-not-found 404``."""
    assert answer is not None
    assert isinstance(answer.body, bytes)
    document = json.loads(answer.body)
    return f"{document['type'].rpartition('#')[2]} {document['status']}"
