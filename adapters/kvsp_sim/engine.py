"""A simulated inference engine: its tokens and its KV are functions of the tokens before, so that every
wrong use of either shows.

- The next token of a deterministic sampler depends on the whole history, the seed and the step; any other
  sampler draws from the engine's own randomness, so that two engines never agree by chance.
- The KV octets of a layer of a block depend on all tokens up to its end, on the layer and on the engine's
  `kind`: engines of two kinds differ in their last bits, as real ones do, and both are right.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Final

import attrs

from kvsp_core.container import ContainerHeader, OutgoingBlock
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.records import Sampler
from kvsp_core.roles.engine import (
    Abort,
    Attend,
    BlockComputed,
    DropShard,
    EngineCommand,
    EngineEvent,
    ExportBlock,
    ImportBlock,
    LoadShard,
    Pause,
    Prefilled,
    Proceed,
    SequenceEnded,
    StartSequence,
    TokensDecoded,
)
from kvsp_core.roles.role import JobDone, JobFailed, JobFault
from kvsp_sim.blocks import described
from kvsp_sim.facts import Fact, LayersUsed, TokenDrawn
from kvsp_sim.randomness import Randomness
from kvsp_sim.session_properties import extend_history

__all__ = ["KINDS", "EngineSpeed", "SimulatedEngine", "block_octets", "next_token"]

KINDS: Final = 2
"""How many kinds of engines there are."""

VOCABULARY: Final = 50_000


def next_token(history: bytes, seed: int, step: int) -> int:
    """Return the token a deterministic sampler draws after this history."""
    digest = hashlib.blake2b(history + b"%d/%d" % (seed, step), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


@functools.lru_cache(maxsize=4096)
def _sections(history: bytes, layer: int, kind: int, size_bytes: int) -> tuple[bytes, bytes]:
    octets = hashlib.shake_128(history + bytes([layer, kind])).digest(2 * size_bytes)
    return octets[:size_bytes], octets[size_bytes:]


@functools.lru_cache(maxsize=4096)
def block_octets(descriptor: CompatibilityDescriptor, history: bytes, kind: int) -> bytes:
    """Return the container of the complete block that ends with this history, as an engine of this kind
    computes it.
    """
    header = ContainerHeader.for_layers(descriptor)
    sections = [
        _sections(history, layer, kind, size[0])
        for layer, size in zip(header.layers, header.sections, strict=True)
    ]
    octets = b"".join(OutgoingBlock(header, sections).pieces)
    _HISTORIES[hashlib.blake2b(octets, digest_size=16).digest()] = history
    return octets


# What the blocks that were ever computed are the KV of: as a real engine finds it in the octets themselves.
_HISTORIES: Final[dict[bytes, bytes]] = {}


def _history_of(octets: bytes | None) -> bytes | None:
    """Return the history whose block this is, or None."""
    return None if octets is None else _HISTORIES.get(hashlib.blake2b(octets, digest_size=16).digest())


@attrs.frozen(kw_only=True)
class EngineSpeed:
    """How fast a simulated engine is, how often it fails, and how many tokens it draws in a step."""

    token_us: int = 20
    decode_us: int = 10_000
    job_us: int = 300
    failure: float = 0.0
    burst: int = 1


@attrs.define
class _Sequence:
    tokens: list[int]
    histories: list[bytes]  # after each token
    sampler: Sampler
    step: int
    limit: int | None
    stop: frozenset[int]
    computed: int  # tokens whose KV is there
    paused: bool = False
    prefilled: bool = False
    ended: bool = False
    ticking: bool = False
    kinds: dict[int, int] = attrs.field(factory=dict)  # block -> kind of the engine that computed it


class SimulatedEngine:
    """Executes the commands of one instance. `deliver` takes its events, `later` has something done after
    some us, `observe` takes facts, `buffers` are those of the instance.
    """

    def __init__(
        self,
        *,
        name: str,
        descriptor: CompatibilityDescriptor,
        kind: int,
        speed: EngineSpeed,
        randomness: Randomness,
        buffers: dict[int, bytes],
        deliver: Callable[[EngineEvent | JobDone | JobFailed], None],
        later: Callable[..., None],
        observe: Callable[[Fact], None],
    ) -> None:
        self._name = name
        self._descriptor = descriptor
        self._block = descriptor.block_tokens
        self._kind = kind
        self._speed = speed
        self._random = randomness
        self._buffers = buffers
        self._deliver = deliver
        self._host_later = later
        self._observe = observe
        self.dead = False
        """Whether everything it is asked for fails."""
        self._hung: list[Callable[[], None]] | None = None  # what it would have done since
        self._sequences: dict[int, _Sequence] = {}
        self._imported: dict[int, dict[int, bytes]] = {}
        self._handlers: dict[type, Callable[..., None]] = {
            StartSequence: self._start,
            ImportBlock: self._import,
            ExportBlock: self._export,
            Pause: self._pause,
            Proceed: self._proceed,
            Abort: self._abort,
            LoadShard: self._load_shard,
            DropShard: self._drop_shard,
            Attend: self._attend,
        }

    def execute(self, command: EngineCommand) -> None:
        """Carry out a command."""
        self._do(self._handlers[type(command)], command)

    @property
    def hung(self) -> bool:
        """Whether it takes commands and says nothing."""
        return self._hung is not None

    def hang(self) -> None:
        """Do nothing any more, until `go_on`."""
        if self._hung is None:
            self._hung = []

    def go_on(self) -> None:
        """Do what there was to do meanwhile, in order, and go on."""
        left, self._hung = self._hung or [], None
        for each in left:
            each()

    def _do(self, call: Callable[..., None], *arguments: object) -> None:
        if self._hung is None:
            call(*arguments)
        else:
            self._hung.append(partial(call, *arguments))

    def _later(self, delay_us: int, call: Callable[..., None], *arguments: object) -> None:
        self._host_later(delay_us, self._do, call, *arguments)

    @property
    def idle(self) -> bool:
        """Whether nothing is held for any sequence."""
        return not self._sequences and not self._imported

    # Blocks

    def _import(self, command: ImportBlock) -> None:
        octets = self._buffers.get(command.buffer)
        if octets is None or self._fails():
            self._later(self._speed.job_us, self._deliver, JobFailed(command.job_id, JobFault.BROKEN))
            return
        self._imported.setdefault(command.sequence, {})[command.index] = octets
        self._later(self._speed.job_us, self._deliver, JobDone(command.job_id))

    def _export(self, command: ExportBlock) -> None:
        self._later(self._speed.job_us, self._exported, command)

    def _exported(self, command: ExportBlock) -> None:
        sequence = self._sequences.get(command.sequence)
        end = (command.index + 1) * self._block
        if sequence is None or sequence.computed < end or self._fails():
            self._deliver(JobFailed(command.job_id, JobFault.MISSING))
            return
        kind = sequence.kinds.get(command.index, self._kind)
        octets = block_octets(self._descriptor, sequence.histories[end - 1], kind)
        self._buffers[command.buffer] = octets
        self._deliver(described(command.job_id, octets))

    def _check_import(self, sequence: _Sequence, index: int, octets: bytes | None) -> None:
        """Say which kind of engine computed each layer of an imported block."""
        history = sequence.histories[(index + 1) * self._block - 1]
        layers: tuple[int | None, ...] = (None,) * self._descriptor.layers
        for kind in range(KINDS):
            if octets == block_octets(self._descriptor, history, kind):
                sequence.kinds[index] = kind
                layers = (kind,) * self._descriptor.layers
        if octets is not None and layers[0] is None:
            layers = self._layer_kinds(history, octets)
        self._observe(LayersUsed(instance=self._name, layers=layers))

    def _layer_kinds(self, history: bytes, octets: bytes) -> tuple[int | None, ...]:
        header = ContainerHeader.for_layers(self._descriptor)
        kinds: list[int | None] = []
        start = header.header_bytes
        for layer, (k_bytes, v_bytes) in zip(header.layers, header.sections, strict=True):
            sections = octets[start : start + k_bytes + v_bytes]
            right = [k for k in range(KINDS) if sections == b"".join(_sections(history, layer, k, k_bytes))]
            kinds.append(right[0] if right else None)
            start += k_bytes + v_bytes
        return tuple(kinds)

    # Sequences

    def _start(self, command: StartSequence) -> None:
        history, histories = b"", []
        imported = self._imported.pop(command.sequence, {})
        for index in range(command.known_from // self._block):
            # Its tokens are not known; whatever was computed from them is in the KV.
            history = _history_of(imported.get(index)) or b""
            histories += [history] * self._block
        for token in command.tokens[command.known_from :]:
            history = extend_history(history, token)
            histories.append(history)
        parameters = command.sampler.params
        sequence = _Sequence(
            tokens=list(command.tokens),
            histories=histories,
            sampler=command.sampler,
            step=command.sampler.step,
            limit=parameters.get("max_tokens"),
            stop=frozenset(parameters.get("stop", ())),
            computed=command.cached_tokens,
        )
        self._sequences[command.sequence] = sequence
        for index in range(command.cached_tokens // self._block):
            self._check_import(sequence, index, imported.get(index))
        missing = len(command.tokens) - command.cached_tokens
        self._later(
            self._speed.job_us + missing * self._speed.token_us, self._prefilled, command.sequence, sequence
        )

    def _is_current(self, number: int, sequence: _Sequence) -> bool:
        return self._sequences.get(number) is sequence and not sequence.ended

    def _prefilled(self, number: int, sequence: _Sequence) -> None:
        if not self._is_current(number, sequence):
            return
        if self._fails():
            self._end(number, sequence, "error")
            return
        first = sequence.computed // self._block
        sequence.computed = len(sequence.tokens)
        sequence.prefilled = True
        self._deliver(Prefilled(number))
        for index in range(first, sequence.computed // self._block):
            self._deliver(BlockComputed(number, index))
        self._tick(number, sequence)

    def _tick(self, number: int, sequence: _Sequence) -> None:
        if sequence.prefilled and not sequence.paused and not sequence.ticking and not sequence.ended:
            sequence.ticking = True
            self._later(self._random.between(1, 2 * self._speed.decode_us), self._decode, number, sequence)

    def _decode(self, number: int, sequence: _Sequence) -> None:
        sequence.ticking = False
        if not self._is_current(number, sequence) or sequence.paused:
            return
        if sequence.limit is not None and sequence.step >= sequence.limit:
            self._end(number, sequence, "length")
            return
        if self._fails():
            self._end(number, sequence, "error")
            return
        self._compute_last(number, sequence)
        if not self._is_current(number, sequence):
            return
        first, tokens = sequence.step, [self._draw(sequence)]
        while (
            len(tokens) < self._speed.burst
            and sequence.step != sequence.limit
            and tokens[-1] not in sequence.stop
        ):
            tokens.append(self._draw(sequence))
        self._deliver(TokensDecoded(number, first, tuple(tokens)))
        if not self._is_current(number, sequence):
            return
        if tokens[-1] in sequence.stop:
            self._end(number, sequence, "stop")
        elif sequence.step == sequence.limit:
            self._end(number, sequence, "length")
        else:
            self._tick(number, sequence)

    def _draw(self, sequence: _Sequence) -> int:
        history = sequence.histories[-1] if sequence.histories else b""
        sampler = sequence.sampler
        if sampler.deterministic:
            token = next_token(history, sampler.seed or 0, sequence.step)
        else:
            token = self._random.below(VOCABULARY)
        self._observe(TokenDrawn(history=history, token=token))
        sequence.tokens.append(token)
        sequence.histories.append(extend_history(history, token))
        sequence.step += 1
        return token

    def _compute_last(self, number: int, sequence: _Sequence) -> None:
        """Compute the KV of the tokens drawn last, which the next one attends to."""
        before = sequence.computed // self._block
        sequence.computed = len(sequence.tokens)
        for index in range(before, sequence.computed // self._block):
            self._deliver(BlockComputed(number, index))

    def _end(self, number: int, sequence: _Sequence, reason: str) -> None:
        if reason != "error":
            self._compute_last(number, sequence)
        if self._is_current(number, sequence):
            sequence.ended = True
            self._deliver(SequenceEnded(number, reason))

    def _pause(self, command: Pause) -> None:
        sequence = self._sequences.get(command.sequence)
        if sequence is not None:
            sequence.paused = True

    def _proceed(self, command: Proceed) -> None:
        sequence = self._sequences.get(command.sequence)
        if sequence is not None and sequence.paused:
            sequence.paused = False
            self._tick(command.sequence, sequence)

    def _abort(self, command: Abort) -> None:
        self._sequences.pop(command.sequence, None)
        self._imported.pop(command.sequence, None)

    # Shards

    def _load_shard(self, command: LoadShard) -> None:
        if self._fails():
            self._later(self._speed.job_us, self._deliver, JobFailed(command.job_id, JobFault.BROKEN))
        else:
            self._later(self._speed.job_us, self._deliver, JobDone(command.job_id))

    def _drop_shard(self, command: DropShard) -> None:
        """Free the memory, which this engine has not got."""

    def _attend(self, command: Attend) -> None:
        ended = (
            JobFailed(command.job_id, JobFault.BROKEN) if self.dead else JobDone(command.job_id, data=b"{}")
        )
        self._later(self._speed.job_us, self._deliver, ended)

    def _fails(self) -> bool:
        return self.dead or (bool(self._speed.failure) and self._random.chance(self._speed.failure))
