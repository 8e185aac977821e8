"""Legality tests made from a machine's table: every (state, event) pair is legal, or refused and unchanged.

A test file says how to bring its machine into each kind of state and which event to try there:

    @pytest.mark.parametrize(("kind", "event_type", "cell"), cells(LEASES))
    def test_legality(kind, event_type, cell):
        check_cell(cell, subject=lease_in(kind), event=event_of(event_type))
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.table import Cell, Illegal, Kind, Legal, Refused, Table, name_of
from kvsp_core.problems import Problem

__all__ = ["Subject", "cells", "check_cell", "problems_in"]


class Subject(Protocol):
    """One machine in one kind of state, as the legality tests see it."""

    def kind(self) -> Kind:
        """Return the kind of state it is in now."""
        ...

    def freeze(self) -> Hashable:
        """Return its whole state."""
        ...

    def handle(self, event: Any) -> tuple[Any, ...]:
        """Let the event happen and return the effects."""
        ...


def cells(table: Table) -> list[Any]:
    """Return a parameter set for each cell: kind of state, kind of event, what the table says."""
    return [
        pytest.param(kind, event, cell, id=f"{name_of(kind)}-{event.__name__}") for kind, event, cell in table
    ]


def problems_in(effects: tuple[Any, ...]) -> Iterator[Problem]:
    """Go through the problems that the effects answer."""
    for effect in effects:
        problem = getattr(effect, "problem", None)
        if isinstance(problem, Problem):
            yield problem


def check_cell(cell: Cell, *, subject: Subject, event: object) -> None:
    """Try the event on the subject and compare with what the table says."""
    before = subject.freeze()
    match cell:
        case Legal(then):
            subject.handle(event)
            if then:
                assert subject.kind() in then
        case Refused(problem):
            effects = subject.handle(event)
            assert [p.type for p in problems_in(effects)] == [problem]
            assert subject.freeze() == before
        case Illegal():
            with pytest.raises(LocalProtocolError):
                subject.handle(event)
            assert subject.freeze() == before
