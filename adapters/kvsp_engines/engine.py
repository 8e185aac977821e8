"""What an inference engine is to an instance, and the numpy engine.

An `Engine` computes and nothing else: the instance role sends it `EngineCommand` values and hears
`EngineEvent` values. It never waits; `EngineThread` gives it a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, Protocol, TypeAlias, assert_never

import attrs
import numpy as np
import numpy.typing as npt

from kvsp_core.errors import KVSPError, LocalProtocolError
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
    SequenceRefused,
    StartSequence,
    TokensDecoded,
)
from kvsp_engines.llama import KVCache, Llama, numerics_fingerprint
from kvsp_engines.sampling import check_sampler, draw
from kvsp_engines.shards import Shards

__all__ = ["Engine", "EngineThread", "JobResult", "LayerOctets", "NumpyEngine"]

PREFILL_TOKENS: Final = 64
"""Tokens of one prefill step: the longest a decoding sequence waits for another one's prompt."""

LayerOctets: TypeAlias = tuple["bytes | memoryview", "bytes | memoryview"]
"""The K and V sections of one layer of a block."""
JobResult: TypeAlias = "Sequence[LayerOctets] | bytes"
"""What a job brings: the layers of an exported block, the partial attention of `Attend`, or nothing
(empty).
"""


class Engine(Protocol):
    """An inference engine behind an instance. Its methods are called from one thread."""

    @property
    def numerics(self) -> str | None:
        """What decides the last bits of its results: engines of one name repeat each other's tokens (CP-6).

        None where it makes no such promise.
        """
        ...

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        """Carry out a command. `layers` are those of the block a job imports.

        Returns what the job brings. Raises `KVSPError` where the command cannot be carried out, and
        `SequenceRefused` where that is the request's fault; nothing has changed then.
        """
        ...

    def step(self) -> tuple[EngineEvent, ...]:
        """Do one bounded piece of work, and return what came of it."""
        ...

    def busy(self) -> bool:
        """Tell whether `step` has work."""
        ...


@attrs.define(eq=False)
class _Sequence:
    """One running generation."""

    cache: KVCache
    tokens: list[int]
    sampler: Sampler
    drawn: int
    """Output tokens drawn so far, which is also the sampler's step."""
    max_tokens: int
    stop: frozenset[int]
    reported: int
    """Blocks that were imported or reported as computed."""
    logits: npt.NDArray[np.float32] | None = None
    """Of the last token; None while tokens are still to be computed."""
    paused: bool = False


class NumpyEngine:
    """Llama-architecture models on numpy."""

    def __init__(self, directory: Path, *, kv_dtype: str, block_tokens: int) -> None:
        self._model = Llama(directory, kv_dtype=kv_dtype)
        self._block_tokens = block_tokens
        self._sequences: dict[int, _Sequence] = {}
        self._imports: dict[int, KVCache] = {}
        self._shards: dict[str, Shards] = {}
        self.numerics: str | None = numerics_fingerprint()
        """See `Engine.numerics`: the products are of fixed shapes, so that numpy and BLAS decide the rest."""

    # Commands

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        """Carry out a command; see `Engine.execute`."""
        match command:
            case StartSequence():
                self._start(command)
            case ImportBlock(sequence=sequence, index=index):
                cache = self._imports.setdefault(sequence, self._model.new_cache())
                self._import(cache, index * self._block_tokens, layers)
            case ExportBlock(sequence=sequence, index=index):
                return self._export(self._sequence(sequence).cache, index)
            case Pause(sequence):
                self._sequence(sequence).paused = True
            case Proceed(sequence):
                self._sequence(sequence).paused = False
            case Abort(sequence):
                self._sequences.pop(sequence, None)
                self._imports.pop(sequence, None)
            case LoadShard(map_id=map_id, tokens=tokens):
                self._shards.setdefault(map_id, Shards(self._model)).load(tokens, layers)
            case DropShard(map_id, tokens):
                if (shards := self._shards.get(map_id)) and shards.drop(tokens):
                    del self._shards[map_id]
            case Attend(map_id=map_id, layer=layer, ranges=ranges, queries=queries):
                shards = self._shards.get(map_id) or (None if ranges else Shards(self._model))
                if shards is None:
                    raise LocalProtocolError("the engine holds no shard of that map")
                return shards.attend(layer, ranges, queries)
            case _:
                assert_never(command)
        return ()

    def _sequence(self, number: int) -> _Sequence:
        try:
            return self._sequences[number]
        except KeyError:
            raise LocalProtocolError(f"the engine has no sequence {number}; start it first") from None

    def _start(self, command: StartSequence) -> None:
        if command.sequence in self._sequences:
            raise LocalProtocolError(f"the engine runs sequence {command.sequence} already")
        config, tokens = self._model.config, command.tokens
        if not tokens:
            raise LocalProtocolError("a sequence starts with at least one token")
        if len(tokens) > config.context or max(tokens) >= config.vocabulary:
            raise SequenceRefused(
                f"a sequence has at most {config.context} tokens, each below {config.vocabulary}"
            )
        check_sampler(command.sampler)
        cache = self._imports.get(command.sequence) or self._model.new_cache()
        if cache.end < command.cached_tokens:
            raise LocalProtocolError(f"{command.cached_tokens} tokens are said to be cached, {cache.end} are")
        self._imports.pop(command.sequence, None)
        # The last token is always computed, since its logits are needed; the octets come out the same.
        cache.end = min(command.cached_tokens, len(tokens) - 1)
        params = command.sampler.params
        self._sequences[command.sequence] = _Sequence(
            cache=cache,
            tokens=list(tokens),
            sampler=command.sampler,
            drawn=command.sampler.step,
            max_tokens=int(params.get("max_tokens", config.context)),
            stop=config.stop_tokens | frozenset(params.get("stop", ())),
            reported=command.cached_tokens // self._block_tokens,
        )

    def _import(self, cache: KVCache, position: int, layers: Sequence[LayerOctets]) -> None:
        if position != cache.end:
            raise LocalProtocolError("blocks are imported in ascending order, without a gap")
        if len(layers) != self._model.config.layers:
            raise LocalProtocolError(f"a block has {self._model.config.layers} layers, not {len(layers)}")
        for layer, (keys, values) in enumerate(layers):
            cache.import_layer(layer, position, memoryview(keys), memoryview(values))
        width = self._model.config.kv_heads * self._model.config.head_dim * cache.element.itemsize
        cache.end = position + len(layers[0][0]) // width

    def _export(self, cache: KVCache, index: int) -> list[LayerOctets]:
        tokens = (index * self._block_tokens, (index + 1) * self._block_tokens)
        if tokens[1] > cache.end:
            raise LocalProtocolError(f"block {index} of the sequence is not complete")
        return [cache.export_layer(layer, tokens) for layer in range(self._model.config.layers)]

    # Work

    def busy(self) -> bool:
        """Tell whether a sequence has tokens to compute or to draw."""
        return any(s.logits is None or not s.paused for s in self._sequences.values())

    def step(self) -> tuple[EngineEvent, ...]:
        """Decode one token of every running sequence, then compute one piece of one prompt."""
        events: list[EngineEvent] = []
        for number, sequence in list(self._sequences.items()):
            if sequence.logits is not None and not sequence.paused:
                self._decode(number, sequence, events)
        for number, sequence in self._sequences.items():
            if sequence.logits is None:
                self._prefill(number, sequence, events)
                # A sequence whose prompt is not done yet goes behind the others.
                self._sequences[number] = self._sequences.pop(number)
                break
        return tuple(events)

    def _prefill(self, number: int, sequence: _Sequence, events: list[EngineEvent]) -> None:
        done = sequence.cache.end
        until = min((done // PREFILL_TOKENS + 1) * PREFILL_TOKENS, len(sequence.tokens))
        logits = self._model.forward(sequence.cache, sequence.tokens[done:until])
        if until == len(sequence.tokens):
            sequence.logits = logits
        self._report_blocks(number, sequence, events)
        if sequence.logits is not None:
            events.append(Prefilled(number))

    def _decode(self, number: int, sequence: _Sequence, events: list[EngineEvent]) -> None:
        assert sequence.logits is not None
        if sequence.drawn >= sequence.max_tokens or len(sequence.tokens) >= self._model.config.context:
            self._end(number, "length", events)
            return
        token = draw(sequence.logits, sequence.sampler, sequence.drawn)
        if token in sequence.stop:
            self._end(number, "stop", events)
            return
        events.append(TokensDecoded(number, sequence.drawn, (token,)))
        sequence.drawn += 1
        sequence.tokens.append(token)
        sequence.logits = self._model.forward(sequence.cache, [token])
        self._report_blocks(number, sequence, events)

    def _end(self, number: int, reason: str, events: list[EngineEvent]) -> None:
        """Report the end. The KV stays for exports until `Abort`."""
        self._sequences[number].paused = True
        events.append(SequenceEnded(number, reason))

    def _report_blocks(self, number: int, sequence: _Sequence, events: list[EngineEvent]) -> None:
        complete = sequence.cache.end // self._block_tokens
        events += [BlockComputed(number, index) for index in range(sequence.reported, complete)]
        sequence.reported = max(sequence.reported, complete)


class EngineThread:
    """Runs an engine in a thread of its own.

    Commands come before the next step, but for no longer in a row than the last step took: sequences that run
    go on while the blocks of another come in. `clock` returns seconds.

    `deliver_events`, `deliver_job` and `broken` are called from that thread and must hand over to the loop
    of the role at once. After `broken`, which brings what the engine raised, nothing more is done.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        deliver_events: Callable[[tuple[EngineEvent, ...]], None],
        deliver_job: Callable[[EngineCommand, JobResult | KVSPError], None],
        broken: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._broken = broken
        self._deliver_events = deliver_events
        self._deliver_job = deliver_job
        self._commands: SimpleQueue[tuple[EngineCommand, Sequence[LayerOctets]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="kvsp-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> None:
        """Queue a command. Commands are carried out in order."""
        self._commands.put((command, layers))

    def stop(self, patience_s: float) -> bool:
        """End after the piece of work in hand; return whether it has ended within `patience_s`.

        A thread that hangs in its engine is left behind, and keeps no process from ending.
        """
        self._commands.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._broken(error)

    def _work(self) -> None:
        step_s = commands_s = 0.0
        while True:
            busy = self._engine.busy()
            if busy and (commands_s > step_s or self._commands.empty()):
                began = self._clock()
                self._deliver_events(self._engine.step())
                step_s, commands_s = self._clock() - began, 0.0
                continue
            item = self._commands.get()
            if item is None:
                return
            began = self._clock()
            self._execute(*item)
            commands_s += self._clock() - began

    def _execute(self, command: EngineCommand, layers: Sequence[LayerOctets]) -> None:
        try:
            result: JobResult | KVSPError = self._engine.execute(command, layers)
        except KVSPError as error:
            result = error
        self._deliver_job(command, result)
