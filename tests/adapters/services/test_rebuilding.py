"""A role that cannot make something durable is rebuilt from its store, and not for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import anyio
import pytest

from kvsp_core.roles.role import Persist, Put
from kvsp_services.config import read_config
from kvsp_services.metrics import Metrics
from kvsp_services.process import running
from kvsp_services.running_role import MAX_REBUILDS
from kvsp_services.stores.durable import back_up
from kvsp_services.stores.sealing import StorageError
from tests.adapters.services.cluster import Cluster

POLICY = '[principals]\n"{controller}" = ["controller"]\n"{index}" = ["index"]\n'


@pytest.mark.requirement("CP-2")
@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_a_role_is_rebuilt_from_its_store_a_bounded_number_of_times(
    tmp_path: Path, loop: Literal["trio", "asyncio"]
) -> None:
    cluster = Cluster(tmp_path, {"index": "", "controller": 'index = ["{index}"]'}, POLICY)
    config = read_config(cluster.config)

    async def main() -> None:
        async with running(config, Metrics()) as (process, _):
            await process.start()
            _, controller = process.roles
            assert controller.served is not None
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
                assert process.failure is None
            controller.served.driver._fail(StorageError("no space left on device"))
            assert process.stopping.is_set()
            assert "failed" in (process.failure or "")
            assert "no space left" in (process.failure or "")

    anyio.run(main, backend=loop)


@pytest.mark.requirement("CP-2")
def test_a_role_whose_file_is_gone_does_not_begin_anew_with_an_empty_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"index": "", "controller": 'index = ["{index}"]'}, POLICY)
    config = read_config(cluster.config)

    async def main() -> None:
        async with running(config, Metrics()) as (process, _):
            await process.start()
            _, controller = process.roles
            assert controller.served is not None
            for file in Path(config.data_dir).glob("controller.sqlite*"):
                file.unlink()
            driver = controller.served.driver
            driver._order(Persist((Put("session", "a", b"1"),)))
            with anyio.fail_after(60):
                await process.stopping.wait()
            assert "is gone; put a backup in its place" in (process.failure or "")
            assert not list(Path(config.data_dir).glob("controller.sqlite"))

    anyio.run(main, backend="trio")


@pytest.mark.requirement("CP-2")
def test_a_role_whose_file_was_replaced_is_not_rebuilt_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, {"index": "", "controller": 'index = ["{index}"]'}, POLICY)
    config = read_config(cluster.config)

    async def main() -> None:
        async with running(config, Metrics()) as (process, _):
            await process.start()
            _, controller = process.roles
            assert controller.served is not None
            monkeypatch.setattr(controller, "build", lambda: pytest.fail("it was rebuilt"))
            path = Path(config.data_dir) / "controller.sqlite"
            back_up(path, tmp_path / "backup")
            (tmp_path / "backup").rename(path)
            controller.served.driver._order(Persist((Put("session", "a", b"1"),)))
            with anyio.fail_after(60):
                await process.stopping.wait()
            assert "was replaced while it was in use" in (process.failure or "")
            assert controller.served.driver.stopped

    anyio.run(main, backend="trio")
