"""The legality table that every machine carries.

A machine's table says, for each kind of state and each kind of event, whether the event is legal there. The
documentation's diagrams and the legality tests are made from it; the machine asks it before it does anything,
so a cell that is not written down can never be acted upon.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.problems import ProblemType

__all__ = [
    "ILLEGAL",
    "Cell",
    "Illegal",
    "Kind",
    "Legal",
    "Refused",
    "Table",
    "name_of",
    "refuse",
    "stays",
    "to",
]

Kind: TypeAlias = Hashable | type
"""A kind of state: a frozen class of the machine's State union, or a member of its StateKind enumeration."""


@attrs.frozen
class Legal:
    """The event is handled, and the machine then is in one of these kinds of state."""

    then: tuple[Kind, ...]


@attrs.frozen
class Refused:
    """A peer's mistake: the answer is this problem, and the state is unchanged."""

    problem: ProblemType


@attrs.frozen
class Illegal:
    """The calling program's mistake: `LocalProtocolError`, and the state is unchanged."""


Cell: TypeAlias = Legal | Refused | Illegal
ILLEGAL: Final = Illegal()


def to(*kinds: Kind) -> Legal:
    """Return the cell of an event that is legal and leads to one of these kinds of state."""
    return Legal(kinds)


def stays(kind: Kind, *events: type) -> dict[type, Cell]:
    """Return the cells of events that are legal in this kind of state and do not lead out of it."""
    return dict.fromkeys(events, to(kind))


def refuse(problem: ProblemType) -> Refused:
    """Return the cell of an event that a peer may not send here."""
    return Refused(problem)


def name_of(kind: Kind) -> str:
    """Return the name by which a kind of state is shown: ``Held``, ``draining``."""
    if isinstance(kind, Enum):
        return kind.name.lower()
    return kind.__name__ if isinstance(kind, type) else str(kind)


class Table:
    """What is legal: kinds of state down, kinds of event across. A cell that is left out is illegal."""

    def __init__(
        self,
        machine: str,
        *,
        states: Sequence[Kind],
        events: Sequence[type],
        cells: Mapping[Kind, Mapping[type, Cell]],
    ) -> None:
        self.machine = machine
        self.states = tuple(states)
        self.events = tuple(events)
        self._cells = MappingProxyType({kind: MappingProxyType(dict(row)) for kind, row in cells.items()})
        strangers = (set(cells) - set(states)) | {e for row in cells.values() for e in row} - set(events)
        if strangers:
            raise LocalProtocolError(f"{machine}: the table names {strangers}, which it does not declare")

    def cell(self, kind: Kind, event: type) -> Cell:
        """Return what the table says of an event of this class in this kind of state."""
        row = self._cells.get(kind)
        return ILLEGAL if row is None else row.get(event, ILLEGAL)

    def check(self, kind: Kind, event: object) -> ProblemType | None:
        """Return None where the event is legal, or the problem a peer gets for it.

        Raises `LocalProtocolError` where the event is the calling program's mistake.
        """
        match self.cell(kind, type(event)):
            case Legal():
                return None
            case Refused(problem):
                return problem
            case Illegal():
                raise LocalProtocolError(
                    f"{self.machine}: {type(event).__name__} is not allowed in state {name_of(kind)}"
                )

    def __iter__(self) -> Iterator[tuple[Kind, type, Cell]]:
        """Go through every cell, row by row."""
        for kind in self.states:
            for event in self.events:
                yield kind, event, self.cell(kind, event)
