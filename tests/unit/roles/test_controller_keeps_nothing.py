"""Sessions that come and go leave nothing in a controller, whichever way they go."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable

import pytest

from kvsp_core.ext_messages import PlacementAnswer
from kvsp_core.resources import DeleteSession, GetSession
from kvsp_core.roles.controller import Controller
from tests.unit.roles.test_controller import FE, A, B, Talk

_NOT_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def entries(controller: Controller) -> int:
    """Return how many entries all containers have that a controller leads to."""
    total, seen, waiting = 0, set[int](), [vars(controller)]
    while waiting:
        found: object = waiting.pop()
        if id(found) in seen or isinstance(found, _NOT_STATE):
            continue
        seen.add(id(found))
        if isinstance(found, dict | list | set | deque):
            total += len(found)
        waiting += gc.get_referents(found)  # type: ignore[arg-type]
    return total


def end(talk: Talk, placed: PlacementAnswer) -> None:
    assert talk.ask(FE, DeleteSession(placed.session))[0] == 204


def run_out(talk: Talk, placed: PlacementAnswer) -> None:
    """Nobody ends it."""


def fail_over(talk: Talk, placed: PlacementAnswer) -> None:
    other = B if placed.instance == A else A
    talk.report(placed.instance, epoch=talk.now_ms + 2)
    talk.report(other, epoch=1)
    talk.ask(FE, GetSession(placed.session))
    for call in list(talk.calls.values()):
        talk.reply(call, None, 500)


@pytest.mark.requirement("CP-2", "PB-2")
@pytest.mark.parametrize("leave", [end, run_out, fail_over])
def test_sessions_that_are_over_leave_nothing_in_a_controller(
    leave: Callable[[Talk, PlacementAnswer], None],
) -> None:
    talk = Talk()

    def come_and_go(count: int) -> int:
        for _ in range(count):
            talk.report(A, epoch=talk.now_ms + 1)
            talk.report(B, epoch=1)
            placed = talk.place()
            talk.write(placed, 5, 6, 7)
            leave(talk, placed)
        for _ in range(30):  # the longest of what is kept is over then
            talk.pass_time(5000)
            talk.report(B, epoch=1)
            for call in list(talk.calls.values()):
                talk.reply(call, None, 500)
        assert not talk.store.tables.get("sessions"), "nothing is stored of them"
        return entries(talk.controller)

    come_and_go(10)
    before = come_and_go(10)
    assert come_and_go(40) - before < 10
