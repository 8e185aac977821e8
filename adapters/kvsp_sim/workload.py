"""What users of a simulated cluster ask for: prompts that share prefixes as in a real trace, scaled down.

A block of 512 tokens of the trace becomes one block of the simulation. System prompts are put before it, in a
shared scope; the rest is in the scope of one of two tenants. A few long contexts are meant to be resharded.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Final

import attrs

from kvsp_core.records import Sampler
from kvsp_sim.engine import VOCABULARY
from kvsp_sim.randomness import Randomness
from kvsp_sim.session_properties import extend_history

__all__ = ["Wish", "Workload"]

_MAX_BLOCKS: Final = 4
_LONG_BLOCKS: Final = 12
_TOKENS_PER_TOKEN: Final = 24
"""So many output tokens of the trace become one."""
_MAX_OUTPUT: Final = 40
_SYSTEM_PROMPTS: Final = 2
_NEW_CONVERSATION: Final = 0.4
"""How often a request begins a conversation; others come back to one of the last few."""
_CONVERSATIONS: Final = 3


@attrs.frozen(kw_only=True)
class Wish:
    """A request of a user. `shared_tokens` of the prompt are a system prompt, whole blocks."""

    tenant: int
    prompt: tuple[int, ...] = attrs.field(repr=False)
    shared_tokens: int
    sampler: Sampler = attrs.field(repr=False)
    output_tokens: int

    def history(self) -> bytes:
        """Return the digest of the prompt, as the properties want it."""
        history = b""
        for token in self.prompt:
            history = extend_history(history, token)
        return history


@cache
def _conversations() -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    text = files("kvsp_sim").joinpath("data/conversations.jsonl").read_text(encoding="utf-8")
    rows = (json.loads(line) for line in text.splitlines())
    return tuple((start, prompt, output, tuple(blocks)) for start, prompt, output, blocks in rows)


def _block(name: str, size: int) -> tuple[int, ...]:
    octets = hashlib.shake_128(name.encode()).digest(4 * size)
    return tuple(int.from_bytes(octets[4 * i : 4 * i + 4], "big") % VOCABULARY for i in range(size))


class Workload:
    """Draws wishes; `block_tokens` is the size of a block in tokens, and outputs are longer by `stretch`."""

    def __init__(self, random: Randomness, block_tokens: int, stretch: int = 1) -> None:
        self._random = random
        self._block_tokens = block_tokens
        self._stretch = stretch
        conversations = _conversations()
        start = random.below(len(conversations))
        self._rows = (*conversations[start:], *conversations[:start])
        self._next = 0

    def next(self) -> Wish:
        """Return the next wish."""
        random, size = self._random, self._block_tokens
        if self._next == 0 or random.chance(_NEW_CONVERSATION):
            self._next += 1
        first = max(0, self._next - _CONVERSATIONS)
        _, _, output, blocks = self._rows[random.between(first, self._next - 1) % len(self._rows)]
        most = _LONG_BLOCKS if random.chance(0.05) else _MAX_BLOCKS
        system = random.below(_SYSTEM_PROMPTS + 1)
        shared = () if system == 0 else _block(f"system {system}", 2 * size)
        prompt = [*shared]
        for number in blocks[1:most] if len(blocks) > 1 else blocks:
            prompt += _block(f"conversation {number}", size)
        # No two users say the very same: the tail tells them apart, and may be empty of whole blocks.
        prompt += _block(f"user {random.octets(8).hex()}", random.between(1, 2 * size))
        output_tokens = max(1, min(_MAX_OUTPUT, output // _TOKENS_PER_TOKEN)) * self._stretch
        sampler = Sampler(
            method="simulated",
            params={"max_tokens": output_tokens},
            seed=random.below(2**32),
            step=0,
            deterministic=random.chance(0.5),
        )
        return Wish(
            tenant=blocks[-1] % 2,
            prompt=tuple(prompt),
            shared_tokens=len(shared),
            sampler=sampler,
            output_tokens=output_tokens,
        )
