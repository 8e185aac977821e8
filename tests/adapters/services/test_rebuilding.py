"""A role that cannot make something durable is rebuilt from its store, and not for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import pytest

from kvsp_core.roles.controller import Controller
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import Persist, Put
from kvsp_services.config import read_config
from kvsp_services.metrics import Metrics
from kvsp_services.process import Process, running
from kvsp_services.running_role import MAX_REBUILDS, RunningRole
from kvsp_services.stores.durable import back_up
from kvsp_services.stores.sealing import StorageError
from tests.adapters.services.cluster import Cluster

POLICY = '[principals]\n"{controller}" = ["controller"]\n"{index}" = ["index"]\n'


@asynccontextmanager
async def a_controller(directory: Path) -> AsyncIterator[tuple[Process, RunningRole]]:
    """Serve an index and a controller from a directory."""
    cluster = Cluster(directory, {"index": "", "controller": 'index = ["{index}"]'}, POLICY)
    async with running(read_config(cluster.config), Metrics()) as (process, _):
        await process.start()
        _, controller = process.roles
        assert controller.served is not None
        assert shares(process)
        yield process, controller


def shares(process: Process) -> bool:
    """Whether the index goes by what the controller knows of instances, and nobody else."""
    index, controller = (role.role for role in process.roles)
    assert isinstance(index, Index)
    assert isinstance(controller, Controller)
    return index._fleet is controller._fleet is process.fleet and not index._owns_fleet


@pytest.mark.requirement("CP-2", "LK-2")
@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_a_role_is_rebuilt_from_its_store_a_bounded_number_of_times(
    tmp_path: Path, loop: Literal["trio", "asyncio"]
) -> None:
    async def main() -> None:
        async with a_controller(tmp_path) as (process, controller):
            assert process.trouble() is None
            for number in range(1, MAX_REBUILDS + 1):
                before = controller.served.driver
                before._fail(StorageError("no space left on device"))
                assert before.stopped
                assert process.trouble() == "controller: being rebuilt"
                with anyio.fail_after(60):
                    while controller.served.driver is before:
                        await anyio.sleep(0.01)
                assert process.trouble() is None, number
                assert shares(process)
                assert process.failure is None
            controller.served.driver._fail(StorageError("no space left on device"))
            assert process.stopping.is_set()
            assert "failed" in (process.failure or "")
            assert "no space left" in (process.failure or "")

    anyio.run(main, backend=loop)


@pytest.mark.requirement("CP-2")
def test_a_store_that_cannot_be_closed_leaves_no_role_that_is_being_rebuilt_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with a_controller(tmp_path) as (process, controller):

            def fail() -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            store = controller._committer._store
            monkeypatch.setattr(store, "close", fail)
            controller.served.driver._fail(StorageError("input/output error"))
            with anyio.fail_after(60):
                await process.stopping.wait()
            assert "is in use by another process" in (process.failure or "")
            monkeypatch.undo()
            store.close()

    anyio.run(main, backend="trio")


@pytest.mark.requirement("CP-2")
def test_a_role_whose_file_is_gone_does_not_begin_anew_with_an_empty_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_controller(tmp_path) as (process, controller):
            for file in (tmp_path / "data").glob("controller.sqlite*"):
                file.unlink()
            driver = controller.served.driver
            driver._order(Persist((Put("session", "a", b"1"),)))
            with anyio.fail_after(60):
                await process.stopping.wait()
            assert "is gone; put a backup in its place" in (process.failure or "")
            assert not list((tmp_path / "data").glob("controller.sqlite"))

    anyio.run(main, backend="trio")


@pytest.mark.requirement("CP-2")
def test_a_role_whose_file_was_replaced_is_not_rebuilt_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with a_controller(tmp_path) as (process, controller):
            monkeypatch.setattr(controller, "build", lambda: pytest.fail("it was rebuilt"))
            path = (tmp_path / "data") / "controller.sqlite"
            back_up(path, tmp_path / "backup")
            (tmp_path / "backup").rename(path)
            controller.served.driver._order(Persist((Put("session", "a", b"1"),)))
            with anyio.fail_after(60):
                await process.stopping.wait()
            assert "was replaced while it was in use" in (process.failure or "")
            assert controller.served.driver.stopped

    anyio.run(main, backend="trio")
