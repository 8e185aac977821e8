"""An instance with an engine of one's own: ``python counting_engine.py instance.toml``, not ``kvsp serve``.

The next token is the sum of all tokens before it, and the K and V of a token are its number. That is no
language model, but all that an instance wants of one: it computes block by block, gives blocks away, takes
those of others in, and goes on from them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.roles.engine import (
    Abort,
    BlockComputed,
    EngineCommand,
    EngineEvent,
    ExportBlock,
    ImportBlock,
    Pause,
    Prefilled,
    Proceed,
    SequenceEnded,
    StartSequence,
    TokensDecoded,
)
from kvsp_engines.engine import JobResult, LayerOctets
from kvsp_services.config import read_config
from kvsp_services.logs import configure_logs
from kvsp_services.process import serve

NUMBER_BYTES = 4


@dataclass
class Running:
    """One generation."""

    tokens: list[int]
    drawn: int
    """Output tokens so far, in this instance and before it."""
    max_tokens: int
    reported: int
    """Blocks that are said to be complete."""
    prefilled: bool = False
    paused: bool = False
    ended: bool = False


class CountingEngine:
    """See `kvsp_engines.engine.Engine`. Its methods are called from one thread, which is not the loop's."""

    numerics = "counting-1"
    """Engines of one name continue each other's greedy answers; None promises nothing."""

    def __init__(self, model: CompatibilityDescriptor) -> None:
        self.model = model
        self.token_bytes = model.section_bytes(1)  # of K, and as much of V, in each layer
        self.running: dict[int, Running] = {}
        self.imported: dict[int, list[int]] = {}

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        """Carry out a command; work that takes long is left to `step`."""
        match command:
            case ImportBlock(sequence=number):  # comes before the sequence starts, in ascending order
                keys, width = bytes(layers[0][0]), self.token_bytes
                numbers = [keys[at : at + NUMBER_BYTES] for at in range(0, len(keys), width)]
                self.imported.setdefault(number, []).extend(int.from_bytes(n, "big") for n in numbers)
            case StartSequence(sequence=number):
                known = self.imported.pop(number, [])[: command.cached_tokens]
                self.running[number] = Running(
                    tokens=[*known, *command.tokens[len(known) :]],
                    drawn=command.sampler.step,
                    max_tokens=int(command.sampler.params.get("max_tokens", 16)),
                    reported=command.cached_tokens // self.model.block_tokens,
                )
            case ExportBlock(sequence=number, index=index):
                size = self.model.block_tokens
                tokens = self.running[number].tokens[index * size : (index + 1) * size]
                copies = self.token_bytes // NUMBER_BYTES
                section = b"".join(token.to_bytes(NUMBER_BYTES, "big") * copies for token in tokens)
                return [(section, section)] * self.model.layers
            case Pause(number) | Proceed(number):
                if number in self.running:
                    self.running[number].paused = isinstance(command, Pause)
            case Abort(number):
                self.running.pop(number, None)
                self.imported.pop(number, None)
            case _:
                raise LocalProtocolError("this engine takes no part in contexts over several instances")
        return ()

    def busy(self) -> bool:
        """Tell whether `step` has work."""
        return any(not (r.ended or (r.prefilled and r.paused)) for r in self.running.values())

    def step(self) -> tuple[EngineEvent, ...]:
        """Do a little of it, so that commands are not kept waiting."""
        events: list[EngineEvent] = []
        for number, running in self.running.items():
            if not running.prefilled:
                running.prefilled = True
                self.report_blocks(number, running, events)
                events.append(Prefilled(number))
            elif not running.paused and not running.ended:
                self.decode(number, running, events)
        return tuple(events)

    def decode(self, number: int, running: Running, events: list[EngineEvent]) -> None:
        """Draw the next token, or end."""
        if running.drawn == running.max_tokens:
            running.ended = True  # its blocks can be exported until `Abort`
            events.append(SequenceEnded(number, "length"))
            return
        token = 3 + sum(running.tokens) % 256
        events.append(TokensDecoded(number, running.drawn, (token,)))
        running.tokens.append(token)
        running.drawn += 1
        self.report_blocks(number, running, events)

    def report_blocks(self, number: int, running: Running, events: list[EngineEvent]) -> None:
        """Say which blocks have become complete."""
        complete = len(running.tokens) // self.model.block_tokens
        events += [BlockComputed(number, index) for index in range(running.reported, complete)]
        running.reported = max(running.reported, complete)


if __name__ == "__main__":
    config = read_config(Path(sys.argv[1]))
    configure_logs(config.log.level, config.log.format)
    sys.exit(serve(config, make_engine=CountingEngine))
