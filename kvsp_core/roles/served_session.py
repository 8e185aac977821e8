"""What an instance keeps of a session that it serves, or served a while ago."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvsp_core.block_keys import BlockKeyChain
from kvsp_core.machines import output, resume
from kvsp_core.records import Sampler, SessionCheckpoint
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
    cause: str | None = None
    """What the request belongs to that it answers: a ``traceparent``."""
    asked: str | None = None
    """What the request belongs to that was taken in last, accepted or not."""
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

    @property
    def is_over(self) -> bool:
        """Whether it is only remembered, for who asks for its output again."""
        return self.forget_at_ms is not None and isinstance(self.state, resume.Ended | resume.Absent)

    def belong(self) -> None:
        """Belong to the request that was taken in last, which is accepted, where that says what it is of."""
        self.cause = self.asked or self.cause

    @property
    def scope(self) -> str | None:
        """The scope that it is in, as soon as that is known."""
        if isinstance(self.state, resume.Loading | resume.NeedsPrompt):
            return self.state.checkpoint.scope_id
        return self.scope_id or None

    def name_of(self, index: int) -> BlockName:
        """Return the name of a complete block in the session's scope."""
        return BlockName(self.compat_id, self.scope_id, self.keys[index])

    def names_of(self, index: int) -> Iterator[BlockName]:
        """Go through the names under which a complete block may be held: its own, then those in shared
        scopes."""
        yield self.name_of(index)
        for scope_id, keys in self.shared_keys.items():
            if index < len(keys):
                yield BlockName(self.compat_id, scope_id, keys[index])

    def checkpoint(self, offset: int) -> SessionCheckpoint:
        """Return from where another instance can go on after so many output tokens."""
        assert self.gate is not None
        assert self.sampler is not None
        return SessionCheckpoint(
            session=self.name,
            epoch=self.gate.epoch,
            compat_id=self.compat_id,
            scope_id=self.scope_id,
            prompt_blocks=self.prompt_keys,
            prompt_tail=self.prompt_tail,
            generated=self.gate.tokens(0, offset),
            output_offset=offset,
            sampler=attrs.evolve(self.sampler, step=offset),
        )
