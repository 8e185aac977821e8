"""What a controller keeps on disk, as writes to its store and back (the tables of `Persist`).

`epochs`: the highest epoch of each instance. `sessions`, `prompts`, `outputs`: the record of a session, its
prompt, and the log of its output. `maps`: each shard map with its context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.bodies import decode, encode
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.machines.reshard import ReshardRecord
from kvsp_core.machines.session import (
    AppendOutput,
    Effect,
    Forget,
    PersistPrompt,
    PersistSession,
    Prompt,
    SessionRecord,
)
from kvsp_core.machines.token_log import TOKEN_OCTETS, pack_tokens, unpack_tokens
from kvsp_core.roles.role import Append, Delete, Put, Stored, Write

__all__ = [
    "MapContext",
    "StoredMap",
    "StoredSession",
    "epoch_drop",
    "epoch_write",
    "map_drop",
    "map_write",
    "session_writes",
    "stored_epochs",
    "stored_maps",
    "stored_sessions",
]

EPOCHS: Final = "epochs"
SESSIONS: Final = "sessions"
PROMPTS: Final = "prompts"
OUTPUTS: Final = "outputs"
MAPS: Final = "maps"

_NOTHING: Final[Mapping[str, bytes]] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class MapContext:
    """The context that a shard map splits: what its plans carry (decision W32)."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    block_tokens: int


@attrs.frozen(kw_only=True)
class StoredMap:
    """A shard map as it is stored."""

    record: ReshardRecord
    context: MapContext


@attrs.frozen(kw_only=True)
class StoredSession:
    """A session as it was stored: what `SessionLedger.restore` takes."""

    record: SessionRecord
    prompt: Prompt | None
    tokens: tuple[int, ...] = attrs.field(repr=False)


# Written


def epoch_write(instance: str, epoch: int) -> Write:
    """Return the write that keeps the epoch of an instance."""
    return Put(EPOCHS, instance, str(epoch).encode())


def epoch_drop(instance: str) -> Write:
    """Return the write that forgets an instance."""
    return Delete(EPOCHS, instance)


def map_write(stored: StoredMap) -> Write:
    """Return the write that keeps a shard map."""
    return Put(MAPS, stored.record.map.map, encode(stored))


def session_writes(session: str, effects: Iterable[Effect]) -> Iterator[Write]:
    """Go through the writes that the effects of a session's ledger ask for."""
    for effect in effects:
        match effect:
            case PersistSession(record):
                yield Put(SESSIONS, session, encode(record))
            case PersistPrompt(prompt):
                yield Put(PROMPTS, session, encode(prompt))
            case AppendOutput(offset, tokens):
                yield Append(OUTPUTS, session, offset * TOKEN_OCTETS, pack_tokens(tokens))
            case Forget():
                yield from (Delete(table, session) for table in (SESSIONS, PROMPTS, OUTPUTS))
            case _:
                pass


def map_drop(map_id: str) -> Write:
    """Return the write that forgets a shard map."""
    return Delete(MAPS, map_id)


# Read back


def _damaged(table: str) -> LocalProtocolError:
    return LocalProtocolError(f"the store is damaged: a row of {table!r} cannot be read; restore a backup")


def stored_epochs(stored: Stored) -> dict[str, int]:
    """Return the highest epoch of each instance."""
    try:
        return {instance: int(value) for instance, value in stored.get(EPOCHS, _NOTHING).items()}
    except ValueError:
        raise _damaged(EPOCHS) from None


def stored_sessions(stored: Stored) -> Iterator[StoredSession]:
    """Go through the sessions."""
    prompts, outputs = stored.get(PROMPTS, _NOTHING), stored.get(OUTPUTS, _NOTHING)
    for session, value in stored.get(SESSIONS, _NOTHING).items():
        try:
            record = decode(SessionRecord, value)
            prompt = decode(Prompt, prompts[session]) if session in prompts else None
            octets = outputs.get(session, b"")
            # What lies beyond the record was not acknowledged; a log that is too short fails its session.
            count = min(record.output_offset, len(octets) // TOKEN_OCTETS)
            tokens = unpack_tokens(octets[: count * TOKEN_OCTETS])
        except KVSPError:
            raise _damaged(SESSIONS) from None
        yield StoredSession(record=record, prompt=prompt, tokens=tokens)


def stored_maps(stored: Stored) -> Iterator[StoredMap]:
    """Go through the shard maps."""
    for value in stored.get(MAPS, _NOTHING).values():
        try:
            yield decode(StoredMap, value)
        except KVSPError:
            raise _damaged(MAPS) from None
