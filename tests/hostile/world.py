"""The cluster that is hurt: real processes over mutual TLS with the tiny model, and what it should answer."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from kvsp_client.errors import Refused
from kvsp_client.wire import Answer
from kvsp_core.answers import read_answer
from kvsp_core.container import BlockArrived, ContainerHeader, IncomingBlock, encode_container
from kvsp_core.ext_messages import InstanceListing
from kvsp_core.heads import Response
from kvsp_core.messages import LookupAnswer, LookupRequest
from kvsp_core.problems import Problem
from kvsp_core.records import Sampler
from kvsp_core.resources import GetBlock, ListInstances, Lookup, Operation, StoreBlock
from kvsp_core.roles.engine import SequenceEnded, StartSequence, TokensDecoded
from kvsp_engines.engine import NumpyEngine
from kvsp_engines.prepare import prepare_tiny
from kvsp_engines.text import TextCodec
from kvsp_services.demo.cluster import INSTANCES, Cluster, Member, wait_until

ROLES = ("index", "controller", "cache", *INSTANCES, "front")
T = TypeVar("T")
PATIENCE_S = 90.0
"""For whatever has to come in the end: the machine may be busy."""
RECORD_TTL_MS = 6_000
_CACHE_BYTES = 256 << 20


@attrs.frozen
class Question:
    """A prompt and the answer of an engine that computes everything itself, undisturbed."""

    prompt: str
    max_tokens: int
    text: str
    tokens: int


@attrs.frozen
class Block:
    """A block as it was handed in."""

    key: str
    octets: bytes

    @property
    def digest(self) -> str:
        """The digest that its record should have."""
        block = IncomingBlock(acquire=bytearray, max_size_bytes=len(self.octets))
        *_, last = (*block.receive_data(self.octets), *(() if block.ended else block.receive_eof()))
        assert isinstance(last, BlockArrived)
        return last.digest


class World(Cluster):
    """A cluster whose cache keeps its blocks on disk and tells the index of them every two seconds."""

    def common(self, member: Member) -> str:
        """Return what comes before a member's section; everything is logged."""
        key = 'storage_key_file = "storage.key"\n' if member.name == "cache" else ""
        return key + super().common(member).replace('level = "info"', 'level = "debug"')

    def section(self, name: str) -> str:
        """Return a member's section of its configuration."""
        written = super().section(name)
        if name == "cache":
            head, _, _ = written.partition("[[holder.tiers]]")
            written = (
                f"{head}record_ttl_ms = {RECORD_TTL_MS}\n[[holder.tiers]]\n"
                f'tier = "local-storage"\ndirectory = "blocks"\ncapacity_bytes = {_CACHE_BYTES}\n'
            )
        return written

    def __enter__(self) -> World:
        self.refusals: deque[bytes] = deque(maxlen=10_000)
        super().__enter__()
        return self

    def ask(
        self, who: str, whom: str, operation: Operation, body: object = None, octets: bytes = b""
    ) -> Answer:
        """Make a request with a member's certificate; `octets` are a body that is a container."""
        pieces = (memoryview(octets),) if octets else ()
        answer = self.as_(who).ask(self.uris[whom], operation, body, pieces)
        if not answer.response.is_success:
            self.refusals.append(answer.body)
        return answer

    def ask_for(self, kind: type[T], who: str, whom: str, operation: Operation, body: object = None) -> T:
        """Make a request and return the message its answer holds. Raises `KVSPError` where it is refused."""
        answer = self.ask(who, whom, operation, body)
        found = read_answer(kind, answer.response, answer.body)
        if isinstance(found, Problem):
            raise Refused(self.uris[whom], found)
        return found

    def instances(self) -> InstanceListing:
        """Return the controller's view of the instances."""
        return self.ask_for(InstanceListing, "operator", "controller", ListInstances())

    # Blocks

    def new_block(self, random_source: random.Random) -> Block:
        """Make a block of random octets, under a random key."""
        header = ContainerHeader.for_layers(self.descriptor)
        layers = [(random_source.randbytes(k), random_source.randbytes(v)) for k, v in header.sections]
        return Block(
            random_source.randbytes(32).hex(), b"".join(map(bytes, encode_container(header, layers)))
        )

    def store(self, block: Block, who: str = "alpha") -> Response:
        """Hand a block to the cache."""
        operation = StoreBlock(self.descriptor.compat_id, self.scope.scope_id, block.key)
        return self.ask(who, "cache", operation, octets=block.octets).response

    def fetch(self, key: str, who: str = "alpha") -> Answer:
        """Get a block from the cache."""
        return self.ask(who, "cache", GetBlock(self.descriptor.compat_id, self.scope.scope_id, key))

    def look_up(self, keys: Sequence[str], who: str = "alpha") -> LookupAnswer:
        """Ask the index for blocks."""
        request = LookupRequest(
            scope_id=self.scope.scope_id, compat_id=self.descriptor.compat_id, block_keys=tuple(keys)
        )
        return self.ask_for(LookupAnswer, who, "index", Lookup(), request)

    # Being whole

    def epochs(self) -> dict[str, int]:
        """Return the incarnation of each instance, as the controller knows it."""
        return {self.name_of(info.instance): info.epoch for info in self.instances().instances}

    def wait_whole(self, canary: Block, newer_than: dict[str, int], began_s: float) -> float:
        """Wait until everything works again; return the time since `began_s`.

        Every process is ready, every instance active and none of an incarnation in `newer_than`, and the
        index says of the canary where it is.
        """
        for name in self.members:
            self.wait_ready(name)

        def active() -> bool:
            known = {self.name_of(info.instance): info for info in self.instances().instances}
            return all(
                name in known
                and known[name].state == "active"
                and known[name].epoch > newer_than.get(name, 0)
                for name in INSTANCES
            )

        def found() -> bool:
            return self.look_up([canary.key]).matched == 1

        wait_until(active, PATIENCE_S, "the instances to be active")
        wait_until(found, PATIENCE_S, "the index to know the canary")
        return time.monotonic() - began_s


def compute_alone(world: World, prompt: str, max_tokens: int) -> tuple[str, int]:
    """Return what an engine of our own answers, and how many tokens that is."""
    codec, model = TextCodec(world.model_dir), world.descriptor
    engine = NumpyEngine(world.model_dir, kv_dtype=model.kv_dtype, block_tokens=model.block_tokens)
    tokens = codec.encode_chat([{"role": "user", "content": prompt}])
    sampler = Sampler(method="greedy", params={"max_tokens": max_tokens}, seed=0, step=0, deterministic=True)
    engine.execute(StartSequence(sequence=1, tokens=tokens, cached_tokens=0, sampler=sampler))
    drawn: list[int] = []
    while True:
        for event in engine.step():
            if isinstance(event, TokensDecoded):
                drawn += event.tokens
            elif isinstance(event, SequenceEnded):
                stream = codec.stream()
                return "".join(map(stream.push, drawn)) + stream.finish(), len(drawn)


WORDS = [
    "the",
    "cache",
    "keeps",
    "what",
    "it",
    "was",
    "given",
    "and",
    "says",
    "so",
    "when",
    "it",
    "cannot",
    "be",
    "kept",
    "any",
    "longer",
    "than",
    "that",
]


def questions(world: World, count: int, max_tokens: int, seed: int = 7) -> list[Question]:
    """Return prompts that share a beginning of some blocks, with their answers."""
    drawn = random.Random(seed)
    begin = " ".join(drawn.choices(WORDS, k=40))
    made: list[Question] = []
    while len(made) < count:
        prompt = f"{begin}. {' '.join(drawn.choices(WORDS, k=5))}?"
        text, tokens = compute_alone(world, prompt, max_tokens)
        if tokens >= max_tokens // 2:  # long enough to be disturbed
            made.append(Question(prompt, max_tokens, text, tokens))
    return made


def make_world(directory: Path, kind: Callable[..., World] = World, **options: object) -> World:
    """Return a cluster of the tiny model in a directory, not started yet."""
    prepare_tiny(directory / "tiny")
    return kind(directory / "cluster", directory / "tiny", **options)
