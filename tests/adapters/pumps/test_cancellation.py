"""A program that is cancelled, at whatever checkpoint, leaves no task, socket, call, lease or half a block
behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest
import trio

from kvsp_h2 import ExchangeEnded
from tests.adapters.certificates import Certificates
from tests.adapters.pumps.worlds import KINDS, Kind, Outcome, World, open_descriptors, open_world

TURNS = (*range(1, 30, 7), *range(30, 150, 31), *range(150, 600, 150))
"""Turns of an asyncio loop at which the program is cancelled, beside every step of its tasks."""


async def scenario(world: World, made: list[Outcome]) -> None:
    """Store, fetch, stream and give up, with the connection being opened on the way."""
    await world.listen()
    world.connect_to()
    made.append(world.call("store", bytes(1_500_000)))
    made.append(world.call("block"))
    made.append(world.call("hold"))
    for outcome in made[:2]:
        await outcome.done.wait()
    made.append(world.call("half"))
    await made[3].answered.wait()


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, each from one checkpoint to the next; cancels a scope at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.scope: anyio.CancelScope | None = None

    def before_task_step(self, task: object) -> None:
        if self.scope is not None:
            self.count += 1
            if self.count == self.at:
                self.scope.cancel()


class Counted(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are counted."""

    def __init__(self, inner: Coroutine[Any, Any, Any], steps: Steps) -> None:
        self.inner, self.steps = inner, steps

    def send(self, value: Any) -> Any:
        self.steps.before_task_step(None)
        return self.inner.send(value)

    def throw(self, *error: Any) -> Any:
        return self.inner.throw(*error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Any:
        return self.inner.__await__()


def run_counted(kind: Kind, steps: Steps, main: Callable[[], Awaitable[None]]) -> None:
    """Run a program on a loop whose tasks' steps are counted."""
    options: dict[str, Any] = dict(kind.options)
    if kind.backend == "trio":
        options["instruments"] = [steps]

    async def counted() -> None:
        if kind.backend == "trio":
            await main()
            return
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda _, inner, **more: asyncio.Task(Counted(inner, steps), loop=loop, **more))  # type: ignore
        await loop.create_task(main())  # type: ignore[arg-type]
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"

    anyio.run(counted, backend=kind.backend, backend_options=options)


def play_and_cancel(
    kind: Kind, certificates: Certificates, steps: Steps, turn: int | None = None
) -> tuple[list[Outcome], bool]:
    """Run the scenario, cancelled at a step or a turn; return the calls made, and whether it was cut off."""
    made: list[Outcome] = []
    turns = Steps(turn or 0)
    cut = False

    async def main() -> None:
        nonlocal cut
        with anyio.CancelScope() as scope:
            steps.scope = scope
            if turn is not None:
                turns.scope = scope
                count(asyncio.get_running_loop(), turns)
            async with open_world(kind, certificates) as world:
                await scenario(world, made)
                scope.cancel()
                await anyio.sleep(1)
        cut = scope.cancelled_caught
        steps.scope = turns.scope = None
        await anyio.sleep(0)

    run_counted(kind, steps, main)
    return made, cut


def count(loop: asyncio.AbstractEventLoop, steps: Steps) -> None:
    """Count turns of a loop as steps too, as long as there is a scope to be cancelled."""
    if steps.scope is not None:
        steps.before_task_step(None)
        loop.call_soon(count, loop, steps)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.in_memory], ids=lambda kind: kind.name)
def test_nothing_is_left_behind_whenever_it_is_cancelled(kind: Kind, certificates: Certificates) -> None:
    whole = Steps(0)
    play_and_cancel(kind, certificates, whole)
    assert whole.count >= 5
    gc.collect()
    before = open_descriptors()
    cuts: list[tuple[Steps, int | None]] = [(Steps(at), None) for at in range(1, whole.count + 1)]
    if kind.backend == "asyncio":
        cuts += [(Steps(0), turn) for turn in TURNS]
    for steps, turn in cuts:
        made, cut = play_and_cancel(kind, certificates, steps, turn)
        assert cut
        for outcome in made:
            ends = [e for e in outcome.events if isinstance(e, ExchangeEnded)]
            assert len(ends) == 1, f"step {steps.at}, turn {turn}: {outcome.events}"
            assert outcome.events[-1] is ends[0]
    gc.collect()
    assert open_descriptors() == before
