"""What an instance keeps of a session that it serves, or served a while ago."""

from __future__ import annotations

import attrs

from kvsp_core.block_keys import BlockKeyChain
from kvsp_core.machines import output, resume
from kvsp_core.records import Sampler
from kvsp_core.roles.role import BlockName

__all__ = ["ServedSession"]


@attrs.define(kw_only=True, repr=False)
class ServedSession:
    """A session at an instance: which epoch is served, what it is made of, and how far it has come."""

    name: str
    state: resume.State = attrs.field(factory=resume.Absent)
    run: int = 0
    compat_id: str = ""
    scope_id: str = ""
    sampler: Sampler | None = None
    prompt: tuple[int, ...] | None = None
    prompt_keys: tuple[str, ...] = ()
    prompt_tail: tuple[int, ...] = ()
    request_ref: str | None = None
    gate: output.OutputGate | None = None
    chain: BlockKeyChain | None = None
    """Over all tokens with a position so far; None where the session has not begun to run."""
    keys: list[str] = attrs.field(factory=list)
    """Of the complete blocks, prompt and output."""
    shared_scopes: tuple[str, ...] = ()
    """Shared scopes that its front end may read: blocks of the prompt may come from there (decision W24)."""
    shared_keys: dict[str, list[str]] = attrs.field(factory=dict)
    """Shared scope -> the keys that the blocks of the prompt have in it."""
    tokens: tuple[int, ...] = ()
    """What the sequence is started with."""
    known_from: int = 0
    sequence: int | None = None
    started: bool = False
    leaving: bool = False
    """Whether it leaves the engine as soon as its blocks have."""
    loading: str | None = None
    """The directive that loads the blocks of its checkpoint."""
    kept: tuple[BlockName, ...] = attrs.field(default=(), repr=False)
    """Blocks kept from eviction until they are in the engine."""
    awaits: str | None = None
    """The prefetch directive whose end it waits for."""
    stream: int | None = None
    waiting: list[tuple[int, int]] = attrs.field(factory=list)
    """Requests for output that wait until it is known whether the prompt is needed: (request, from_index)."""
    counted: bool = False
    """Whether the lifecycle counts it."""
    forget_at_ms: int | None = None
    due_ms: int | None = None
