"""The interface an inference engine implements, as commands to it and events from it.

A **sequence** is one running generation; the instance role numbers them. An engine computes KV in blocks of
B tokens, in the descriptor's dtype and in layout "kvsp-layout-1", and never blocks the loop. It decodes
until told to pause, stop or abort. The instance decides what is released, checkpointed and stored; the
engine only computes.

Blocks pass between engine and tiers through buffers, as containers, in ascending layer order: an engine may
begin to compute with layer l of a block as soon as it was imported.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.records import Sampler

__all__ = [
    "Abort",
    "Attend",
    "BlockComputed",
    "DropShard",
    "EngineCommand",
    "EngineEvent",
    "ExportBlock",
    "ImportBlock",
    "LoadShard",
    "Pause",
    "Prefilled",
    "Proceed",
    "SequenceEnded",
    "SequenceRefused",
    "StartSequence",
    "TokensDecoded",
]


@attrs.frozen(kw_only=True)
class StartSequence:
    """Begin a sequence: the first `cached_tokens` tokens have their KV imported by the `ImportBlock` jobs
    that came before; compute the rest, then decode with the sampler, whose `step` counts the output tokens
    already drawn.
    """

    sequence: int
    tokens: tuple[int, ...] = attrs.field(repr=False)
    """Prompt tokens, then the output tokens so far: everything that has a position."""
    cached_tokens: int
    known_from: int = 0
    """Tokens before this position are not known, but their KV is imported: they stand as 0 in `tokens`."""
    sampler: Sampler = attrs.field(repr=False)


@attrs.frozen
class ImportBlock:
    """Take a block's container from a buffer as block `index` of a sequence (a job)."""

    job_id: int
    sequence: int
    index: int
    buffer: int


@attrs.frozen
class ExportBlock:
    """Write block `index` of a sequence to a buffer as a container (a job)."""

    job_id: int
    sequence: int
    index: int
    buffer: int


@attrs.frozen
class Pause:
    """Draw no further tokens until `Proceed`. Tokens already drawn may still be reported."""

    sequence: int


@attrs.frozen
class Proceed:
    """Draw tokens again."""

    sequence: int


@attrs.frozen
class Abort:
    """Forget a sequence, running or ended; nothing more of it is reported, and its memory is free."""

    sequence: int


@attrs.frozen
class LoadShard:
    """Hold these tokens' KV of a shard map, imported from a buffer (a job)."""

    job_id: int
    map_id: str = attrs.field(repr=False)
    tokens: tuple[int, int]
    buffer: int


@attrs.frozen
class DropShard:
    """Free the KV of these tokens of a shard map."""

    map_id: str = attrs.field(repr=False)
    tokens: tuple[int, int]


@attrs.frozen
class Attend:
    """Compute partial attention of one layer over the ranges held here (a job). `JobDone.data` is the
    partial output and log-sum-exp, as the body of the answer.
    """

    job_id: int
    map_id: str = attrs.field(repr=False)
    layer: int
    ranges: tuple[tuple[int, int], ...]
    queries: bytes = attrs.field(repr=False)


EngineCommand: TypeAlias = (
    StartSequence | ImportBlock | ExportBlock | Pause | Proceed | Abort | LoadShard | DropShard | Attend
)


@attrs.frozen
class Prefilled:
    """The KV of all tokens a sequence started with is there; decoding begins, unless it is paused."""

    sequence: int


@attrs.frozen
class TokensDecoded:
    """The engine drew these output tokens: indices `first_index` on, counted from the start of the
    session.
    """

    sequence: int
    first_index: int
    tokens: tuple[int, ...] = attrs.field(repr=False)


@attrs.frozen
class BlockComputed:
    """Block `index` of a sequence is complete and can be exported."""

    sequence: int
    index: int


@attrs.frozen
class SequenceEnded:
    """A sequence ended of itself: ``stop``, ``length``, ``error`` (the engine failed), or ``refused`` (it has
    not begun, see `SequenceRefused`).
    """

    sequence: int
    reason: str


class SequenceRefused(LocalProtocolError):
    """What an engine raises at `StartSequence` for the request's sake: it is too long, or asks for what this
    engine does not do. It is no failure of the engine, and goes nowhere else.
    """


EngineEvent: TypeAlias = Prefilled | TokensDecoded | BlockComputed | SequenceEnded
