"""A holder that does what a test says: serves, stalls, lies, cuts connections; and grants leases."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from kvsp_client import Prefix, PrefixKeys, PrefixMemory
from kvsp_client.testing import Served
from kvsp_core.answers import block_response
from kvsp_core.container import OutgoingBlock, replica_digest
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request, Response
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_h2 import BodyEnded, DataReceived, Event, ExchangeEnded, RequestReceived

__all__ = ["LAYERS", "MODEL", "ScriptedHolder", "content", "keys_of", "prefix_of"]

LAYERS = 4
MODEL = CompatibilityDescriptor.from_members(
    {
        "model": "m",
        "model_digest": "sha-256:" + "1" * 64,
        "tokenizer_digest": "sha-256:" + "2" * 64,
        "layers": LAYERS,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 4,
        "layout": "kvsp-layout-1",
    }
)
HEADER = ContainerHeader.for_layers(MODEL)
SECTION = MODEL.section_bytes(MODEL.block_tokens)


def keys_of(served: Served, name: str, blocks: int, *, model: CompatibilityDescriptor = MODEL) -> PrefixKeys:
    """Return the keys of some tokens that no other test has."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big")
    return PrefixKeys.of(served.scope, model, range(seed, seed + blocks * model.block_tokens))


def content(blocks: int, version: int = 0, *, model: CompatibilityDescriptor = MODEL) -> PrefixMemory:
    """Return memory with content that differs from octet to octet, and from version to version."""
    memory = PrefixMemory(model, blocks)
    fill = np.random.default_rng(version).integers(1, 256, memory._octets.shape, dtype=np.uint8)
    memory._octets[:] = fill
    return memory


def octets(memory: PrefixMemory, block: int) -> OutgoingBlock:
    """Return the container of a block."""
    return OutgoingBlock(HEADER, [memory.sections(block, layer) for layer in range(LAYERS)])


def record_of(
    keys: PrefixKeys, block: int, memory: PrefixMemory, holder: str, **changes: Any
) -> ReplicaRecord:
    """Return the record of a block with this content at a holder."""
    digests = octets(memory, block).layer_digests()
    record = ReplicaRecord(
        block_key=keys.keys[block],
        compat_id=keys.descriptor.compat_id,
        scope_id=keys.scope_id,
        holder=holder,
        codec=1,
        size=HEADER.data_bytes,
        digest=replica_digest(digests),
        layer_digests=digests,
        residency=(Residency(tier="host", layers=(0, LAYERS - 1)),),
        ttl_ms=60_000,
    )
    return attrs.evolve(record, **changes)


def prefix_of(keys: PrefixKeys, *replicas: tuple[str, PrefixMemory]) -> Prefix:
    """Return a prefix whose blocks are at these holders, tried in this order, with this content each."""
    return Prefix(
        keys=keys,
        replicas=tuple(
            tuple(
                # A slower tier each, so that the order is this one.
                record_of(
                    keys,
                    block,
                    memory,
                    holder,
                    residency=(Residency(tier=tier, layers=(0, LAYERS - 1)),),
                )
                for (holder, memory), tier in zip(replicas, ("device", "host", "local-storage"), strict=False)
            )
            for block in range(len(keys))
        ),
    )


@attrs.define
class _Held:
    link: Any
    stream_id: int
    rest: bytes


class ScriptedHolder:
    """Takes the place of a cache server. `fault` says what it does wrong with requests for blocks.

    ``missing``, ``busy`` and ``denied`` are refusals; ``silent`` never answers; ``stall`` and ``cut`` stop
    before the last layer, the latter with the connection; ``corrupt`` sends a wrong octet in the last layer;
    ``undigested`` states a wrong Repr-Digest; ``malformed`` is no container, ``codec`` one in a codec that
    nobody asked for; ``stranger`` an answer without sense.
    """

    def __init__(self, served: Served, number: int = 0) -> None:
        self.served = served
        self.uri = served.cache_uris[number]
        self.fault = ""
        self.faulty: Sequence[int] | None = None
        """The blocks that the fault concerns; None for all."""
        self.blocks: dict[str, tuple[int, PrefixMemory]] = {}
        self.requests: list[str] = []
        self.at_a_time = self.most_at_a_time = 0
        self.grant = True
        self.knows_models = True
        """Whether it takes descriptors (below ``ext``)."""
        self.hold_leases = False
        self.lease_ttl_ms = 3000
        self._held: list[_Held] = []
        self._bodies: dict[tuple[int, int], Request] = {}
        self._changed = threading.Condition()
        served.serve_instead(number, self._on_event)

    def serve(self, keys: PrefixKeys, memory: PrefixMemory) -> ScriptedHolder:
        """Have blocks with this content."""
        self.blocks.update({key: (n, memory) for n, key in enumerate(keys.keys)})
        return self

    def go_on(self) -> None:
        """Send what was held back."""

        def send() -> None:
            held, self._held = self._held, []
            for each in held:
                each.link.http.send_data(each.stream_id, each.rest, end=True)
                each.link.flush()

        self.served.do(send)

    def count(self, start: str) -> int:
        """Return how many requests began so."""
        return sum(line.startswith(start) for line in self.requests)

    def wait_for(self, check: Callable[[], bool]) -> bool:
        """Wait until something is so, which is looked at after each request; blocks."""
        with self._changed:
            return self._changed.wait_for(check, timeout=60)

    def _on_event(self, link: Any, event: Event) -> None:
        match event:
            case RequestReceived(stream_id, request, ended):
                with self._changed:
                    self.requests.append(f"{request.method} {request.path.split('/')[0]}")
                    self.at_a_time += 1
                    self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
                    self._changed.notify_all()
                if ended:
                    self._answer(link, stream_id, request)
                else:
                    self._bodies[id(link), stream_id] = request
                    link.http.accept_body(stream_id)
            case DataReceived(stream_id, data):
                link.http.acknowledge(stream_id, len(data))
            case BodyEnded(stream_id):
                self._answer(link, stream_id, self._bodies.pop((id(link), stream_id)))
            case ExchangeEnded():
                self.at_a_time -= 1
            case _:
                pass

    def _answer(self, link: Any, stream_id: int, request: Request) -> None:
        what = request.path.split("/")[0]
        if what == "leases":
            self._lease(link, stream_id, request)
        elif what == "blocks" and request.method == "GET":
            self._block(link, stream_id, request)
        else:
            refused = what == "ext" and not self.knows_models
            link.http.respond(stream_id, Response(status=507 if refused else 204))

    def _lease(self, link: Any, stream_id: int, request: Request) -> None:
        if request.method == "DELETE":
            link.http.respond(stream_id, Response(status=204))
            return
        if not self.grant:
            link.http.respond(stream_id, Response(status=404, content_length=0))
            return
        body = json.dumps({"lease": "a-lease", "ttl_ms": self.lease_ttl_ms}).encode()
        head = Response(status=201, content_type="application/kvsp+json", content_length=len(body))
        if self.hold_leases and request.method == "POST":
            link.http.respond(stream_id, head, end=False)
            self._held.append(_Held(link, stream_id, body))
        else:
            link.http.respond(stream_id, head, body)

    def _block(self, link: Any, stream_id: int, request: Request) -> None:
        found = self.blocks.get(request.path.rsplit("/", 1)[1])
        if found is None:
            link.http.respond(stream_id, Response(status=404, content_length=0))
            return
        number, memory = found
        outgoing = octets(memory, number)
        body, digest = bytearray(b"".join(outgoing.pieces)), outgoing.sha256().hex()
        fault = self.fault if self.faulty is None or number in self.faulty else ""
        refusals = {"missing": 404, "busy": 503, "denied": 403}
        if fault in refusals:
            link.http.respond(stream_id, Response(status=refusals[fault], content_length=0))
            return
        if fault == "silent":
            self._held.append(_Held(link, stream_id, b""))
            return
        if fault == "stranger":
            link.http.respond(stream_id, Response(status=204))
            return
        if fault == "corrupt":
            body[-1] ^= 1
            digest = hashlib.sha256(body).hexdigest()
        if fault == "undigested":
            digest = "0" * 64
        if fault == "malformed":
            body[0] ^= 1
        if fault == "codec":
            sections = ((1, 0),) * LAYERS
            header = ContainerHeader(codec=0xFF00, token_count=MODEL.block_tokens, sections=sections)
            body = bytearray(header.encode() + bytes(LAYERS))
        head = block_response(size_bytes=len(body), repr_digest=digest, ttl_ms=1000)
        if fault in ("stall", "cut"):
            sent = len(body) - 2 * SECTION
            link.http.respond(stream_id, head, bytes(body[:sent]), end=False)
            self._held.append(_Held(link, stream_id, bytes(body[sent:])))
            if fault == "cut":
                link.http.reset(stream_id)
            return
        link.http.respond(stream_id, head, bytes(body))
