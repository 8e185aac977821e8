"""Randomness that a seed decides: the same draws on every machine, Python version and hash seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Randomness"]

T = TypeVar("T")


class Randomness:
    """A stream of draws that can be split by name; what one part draws never moves what another part gets.

    Only `random.Random.random` and `getrandbits` are used, whose results for a seed Python keeps.
    """

    def __init__(self, seed: int | bytes) -> None:
        self._seed = seed if isinstance(seed, bytes) else b"%d" % seed
        source = random.Random(int.from_bytes(hashlib.sha256(self._seed).digest(), "big"))
        self._random = source.random
        self._bits = source.getrandbits

    def split(self, *names: object) -> Randomness:
        """Return the stream of that name, which depends on the seed and the name alone."""
        label = "/".join(str(name) for name in names).encode()
        return Randomness(hashlib.sha256(self._seed + b"/" + label).digest())

    def below(self, bound: int) -> int:
        """Return an integer from 0 to `bound` - 1."""
        return int(self._random() * bound)

    def between(self, least: int, most: int) -> int:
        """Return an integer from `least` to `most`, both included."""
        return least + int(self._random() * (most - least + 1))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random() < probability

    def spread(self, least: int, most: int) -> int:
        """Return an integer from `least` (at least 1) to `most`, each order of magnitude as likely as
        another.
        """
        return min(most, int(least * (most / least) ** self._random()))

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[int(self._random() * len(choices))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in another order."""
        rest = list(items)
        for end in range(len(rest) - 1, 0, -1):
            other = int(self._random() * (end + 1))
            rest[end], rest[other] = rest[other], rest[end]
        return rest

    def octets(self, count: int) -> bytes:
        """Return `count` random octets."""
        return self._bits(8 * count).to_bytes(count, "big") if count else b""
