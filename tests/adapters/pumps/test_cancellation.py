"""A program that is cancelled, at whatever step, leaves no task, socket or call behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import anyio
import pytest
import trio

from kvsp_h2 import ExchangeEnded
from tests.adapters.certificates import Certificates
from tests.adapters.pumps.worlds import KINDS, Kind, Outcome, World, open_descriptors, open_world

STEPS = (*range(1, 30, 3), *range(30, 150, 11), *range(150, 600, 75))


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
    """Cancels a scope at the given step of any task."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.scope: anyio.CancelScope | None = None

    def before_task_step(self, task: object) -> None:
        if self.scope is not None:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


def play_and_cancel(kind: Kind, certificates: Certificates, at: int) -> tuple[list[Outcome], bool]:
    """Run the scenario, cancelled at a step; return the calls made, and whether it was cut off."""
    made: list[Outcome] = []
    steps = Steps(at)
    cut = False

    async def main() -> None:
        nonlocal cut
        with anyio.CancelScope() as scope:
            steps.scope = scope
            if kind.backend == "asyncio":
                count(asyncio.get_running_loop(), steps)
            async with open_world(kind, certificates) as world:
                await scenario(world, made)
                scope.cancel()
                await anyio.sleep(1)
        cut = scope.cancelled_caught
        steps.scope = None
        await anyio.sleep(0)

    options: dict[str, Any] = dict(kind.options)
    if kind.backend == "trio":
        options["instruments"] = [steps]
    anyio.run(main, backend=kind.backend, backend_options=options)
    return made, cut


def count(loop: asyncio.AbstractEventLoop, steps: Steps) -> None:
    """Count turns of a loop as steps."""
    if steps.scope is not None:
        steps.before_task_step(None)
        loop.call_soon(count, loop, steps)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.in_memory], ids=lambda kind: kind.name)
def test_nothing_is_left_behind_whenever_it_is_cancelled(kind: Kind, certificates: Certificates) -> None:
    play_and_cancel(kind, certificates, 10**9)
    gc.collect()
    before = open_descriptors()
    for at in STEPS:
        made, cut = play_and_cancel(kind, certificates, at)
        assert cut
        for outcome in made:
            ends = [e for e in outcome.events if isinstance(e, ExchangeEnded)]
            assert len(ends) == 1, f"step {at}: {outcome.events}"
            assert outcome.events[-1] is ends[0]
    gc.collect()
    assert open_descriptors() == before
