"""A block that is retrieved layer by layer, for the explorer: the shipped retrieval machine, holders that
have one layer each of one of two replicas, and as little around them as makes them roles.

The two replicas differ in digest, as those of two engines may (decision W17). One holder gives out other
octets than its record says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.answers import empty_response
from kvsp_core.container import replica_digest
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request
from kvsp_core.machines import retrieval
from kvsp_core.machines.retrieval import Retrieval
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.roles.role import (
    AnswerReceived,
    Call,
    CallFailed,
    CancelCall,
    Effect,
    Input,
    RequestReceived,
    Respond,
)
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.facts import LayersUsed
from kvsp_sim.host import Start

__all__ = ["HOLDERS", "LOADER", "RETRIEVAL_EFFECTS", "Loader", "Part", "part_holder", "want_a_block"]

LOADER: Final = "https://loader/"

_BLOCK: Final = "block"
_KEY, _COMPAT, _SCOPE = "b" * 64, "c" * 64, "5" * 32
_LAYERS: Final = 2
_TOKENS: Final = 4
_CALL_MS: Final = 1_000


@attrs.frozen
class Part:
    """A layer of a replica, by their numbers; `rotten` where its holder gives out other octets."""

    replica: int
    layer: int
    rotten: bool = False

    @property
    def octets(self) -> bytes:
        """What the holder gives out."""
        return b"%d/%d" % (self.replica, self.layer) + b"!" * self.rotten


HOLDERS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "https://holder0/": Part(0, 0),
        "https://holder1/": Part(1, 1),
        "https://holder2/": Part(0, 1, rotten=True),
        "https://holder3/": Part(0, 1),
        "https://holder4/": Part(1, 0),
    }
)


def _layer_digest(replica: int, layer: int) -> str:
    return hashlib.sha256(Part(replica, layer).octets).hexdigest()


def _record(holder: str, part: Part) -> ReplicaRecord:
    digests = tuple(_layer_digest(part.replica, layer) for layer in range(_LAYERS))
    return ReplicaRecord(
        block_key=_KEY,
        compat_id=_COMPAT,
        scope_id=_SCOPE,
        holder=holder,
        codec=1,
        size=16,
        digest=replica_digest(digests),
        layer_digests=digests,
        residency=(Residency(tier="host", layers=(part.layer, part.layer)),),
        ttl_ms=60_000,
    )


@attrs.frozen
class Used:
    """An effect: the engine computes with these layers, each as its octets."""

    layers: tuple[bytes, ...]


@attrs.frozen
class Over:
    """An effect: the block is there, or cannot be had."""


@attrs.frozen
class Wanted:
    """An input: the block is wanted."""


def want_a_block(node: ExploredNode) -> None:
    """Have somebody wait for the block."""
    node.waiting |= {_BLOCK}
    node.deliver(Wanted())  # type: ignore[arg-type]  # an input that only this role has


def _used(node: ExploredNode, effect: Used) -> None:
    known = {part.octets: part.replica for part in HOLDERS.values() if not part.rotten}
    node.observe(LayersUsed(instance=node.base_uri, layers=tuple(map(known.get, effect.layers))))


def _over(node: ExploredNode, _: Over) -> None:
    node.waiting -= {_BLOCK}


RETRIEVAL_EFFECTS: Final[Mapping[type, Callable[..., None]]] = MappingProxyType({Used: _used, Over: _over})
"""What to do with the effects that only a loader has."""


class _PartHolder:
    """Gives out the layer it has."""

    def __init__(self, base_uri: str) -> None:
        self.base_uri = base_uri

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin: there is nothing to do."""
        return ()

    def next_deadline_ms(self) -> int | None:
        """Return None: it has no timers."""
        return None

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in."""
        if isinstance(item, RequestReceived):
            return (Respond(item.request_id, empty_response(200)[0], HOLDERS[self.base_uri].octets),)
        return ()


def part_holder(base_uri: str, _: Start) -> _PartHolder:
    """Return the holder of this name."""
    return _PartHolder(base_uri)


class Loader:
    """Retrieves the block from whoever has its layers, and computes with each as soon as it may."""

    def __init__(self, base_uri: str, holders: Sequence[str]) -> None:
        self.base_uri = base_uri
        records = [_record(holder, HOLDERS[holder]) for holder in holders]
        self._retrieval = Retrieval(
            records,
            block_key=_KEY,
            compat_id=_COMPAT,
            scope_id=_SCOPE,
            layers=_LAYERS,
            block_tokens=_TOKENS,
        )
        self._asked: dict[int, int] = {}  # fetch -> its layer
        self._arrived: dict[int, bytes] = {}  # fetch -> what came of it
        self._used: dict[int, bytes] = {}  # layer -> what is computed with

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin: the block is not wanted yet."""
        return ()

    def next_deadline_ms(self) -> int | None:
        """Return None: it has no timers."""
        return None

    def handle(self, item: Input | Wanted, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in. The number of a call is one more than that of its fetch."""
        match item:
            case Wanted():
                return self._event(retrieval.Start(), now_ms)
            case AnswerReceived(call_id, _, body):
                return self._answered(call_id - 1, body, now_ms)
            case CallFailed(call_id):
                return self._event(retrieval.FetchFailed(call_id - 1), now_ms)
        return ()

    def _answered(self, fetch: int, octets: bytes, now_ms: int) -> tuple[Effect, ...]:
        layer, self._arrived[fetch] = self._asked[fetch], octets
        digest = hashlib.sha256(octets).hexdigest()
        ended = retrieval.BlockEnded(
            fetch=fetch,
            header=ContainerHeader(codec=1, token_count=_TOKENS, first_layer=layer, sections=((4, 4),)),
            layer_digests=(digest,),
            repr_digest_valid=True,
        )
        return (
            *self._event(retrieval.LayersArrived(fetch, layer, (digest,)), now_ms),
            *self._event(ended, now_ms),
        )

    def _event(self, event: retrieval.Event, now_ms: int) -> tuple[Effect, ...]:
        done: list[Effect | Used | Over] = []
        for effect in self._retrieval.handle(event, now_ms):
            match effect:
                case retrieval.Fetch(fetch=fetch, holder=holder):
                    done.append(self._fetch(fetch, holder))
                case retrieval.CancelFetch(fetch):
                    done.append(CancelCall(fetch + 1))
                case retrieval.LayersUsable(fetch, layers):
                    self._used |= dict.fromkeys(layers, self._arrived[fetch])
                    done.append(Used(tuple(self._used.values())))
                case retrieval.LayersWithdrawn(_, layers):
                    self._used = {n: octets for n, octets in self._used.items() if n not in layers}
                case retrieval.Done() | retrieval.GiveUp():
                    done.append(Over())
        return tuple(done)  # type: ignore[arg-type]  # effects that only this role has

    def _fetch(self, fetch: int, holder: str) -> Call:
        self._asked[fetch] = HOLDERS[holder].layer
        request = Request(method="GET", path="layer")
        return Call(call_id=fetch + 1, base_uri=holder, request=request, body=b"", timeout_ms=_CALL_MS)
