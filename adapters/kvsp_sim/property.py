"""What all safety properties of KVSP share: they take facts, and say where one breaks them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import ClassVar, Final, NoReturn

from kvsp_sim.facts import Fact

__all__ = ["Property", "Violation", "shortened"]

_SHORT: Final = 8


def shortened(name: str) -> str:
    """Return a confidential name as a failure shows it: enough to find it in the last events."""
    return name if len(name) <= _SHORT else f"{name[:4]}~"


class Violation(AssertionError):
    """A safety property does not hold: its name, and which facts contradict each other."""

    def __init__(self, name: str, explanation: str) -> None:
        super().__init__(f"{name}: {explanation}")
        self.name = name
        self.explanation = explanation


class Property:
    """A property: `observe` takes the facts it wants, in the order in which they happened."""

    name: ClassVar[str]

    def _handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return what to call for each kind of fact."""
        raise NotImplementedError

    def observe(self, fact: Fact) -> None:
        """Take a fact; raise `Violation` where it breaks the property."""
        handler = self._handlers().get(type(fact))
        if handler is not None:
            handler(fact)

    def freeze(self, now_ms: int = 0) -> Hashable:
        """Return what the property remembers as a hashable value."""
        raise NotImplementedError

    def fail(self, explanation: str) -> NoReturn:
        """Say that the property does not hold."""
        raise Violation(self.name, explanation)
