"""A process whose engine hangs in a native call: it answers, says so, is well again, and stops."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from threading import Event
from typing import Literal

import anyio
import httpx
import pytest

from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.roles.engine import EngineCommand, EngineEvent
from kvsp_engines.engine import JobResult, LayerOctets
from kvsp_services.config import read_config
from kvsp_services.engine_port import ThreadedEngine
from kvsp_services.metrics import Metrics
from kvsp_services.process import running
from tests.adapters.services.cluster import Cluster, cluster_with_an_api, free_ports, until

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
PROGRAM = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
from counting_engine import CountingEngine, configure_logs, read_config, serve

class Hanging(CountingEngine):
    def step(self):
        gate = Path(sys.argv[1]).parent / "gate"
        if gate.exists():
            gate.open().read()  # comes back once somebody has written
        return super().step()

configure_logs("info", "json")
sys.exit(serve(read_config(Path(sys.argv[1])), make_engine=Hanging))
"""


def ready(cluster: Cluster) -> str:
    return httpx.get(f"http://127.0.0.1:{cluster.monitoring_port}/ready").text


def test_a_process_whose_engine_hangs_says_so_is_well_again_and_stops(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    cluster = cluster_with_an_api(tmp_path, port, "engine_silence_ms = 500")
    gate = tmp_path / "gate"

    def ask() -> int:
        question = {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0}
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=question, timeout=60).status_code

    try:
        cluster.start(program=[sys.executable, "-c", PROGRAM])
        assert ask() == 200
        os.mkfifo(gate)
        assert ask() == 502, "there is no other instance"
        assert "instance: its engine is silent; restart the process where that lasts" in ready(cluster)
        assert cluster.metric("kvsp_engine_silences_total") == 1
        writer = os.open(gate, os.O_WRONLY)  # the engine reads
        gate.unlink()
        os.close(writer)
        assert until(lambda: ready(cluster).startswith("ok"))
        assert ask() == 200
        os.mkfifo(gate)
        assert ask() == 502
        assert cluster.stop() == 0, cluster.log
        assert "the engine hangs; its thread is left behind" in cluster.log
        assert '"event": "safe to stop"' in cluster.log
    finally:
        cluster.kill()


class Hanging:
    """An engine that does not come back from its first work until it is let go."""

    numerics = None

    def __init__(self, begun: Event, let_go: Event) -> None:
        self.begun, self.let_go = begun, let_go

    def execute(self, command: EngineCommand, layers: Sequence[LayerOctets] = ()) -> JobResult:
        return ()

    def step(self) -> tuple[EngineEvent, ...]:
        self.begun.set()
        if not self.let_go.wait(20):
            self.let_go.set()
        return ()

    def busy(self) -> bool:
        return not self.let_go.is_set()


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_a_role_is_rebuilt_though_its_engine_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Literal["trio", "asyncio"]
) -> None:
    monkeypatch.setattr(ThreadedEngine, "stop", partialmethod(ThreadedEngine.stop, 0))
    begun, let_go = Event(), Event()

    def make(model: CompatibilityDescriptor) -> Hanging:
        return Hanging(begun, let_go)

    async def main() -> None:
        config = read_config(cluster_with_an_api(tmp_path, free_ports(1)[0]).config)
        async with running(config, Metrics(), make_engine=make) as (process, _):
            await process.start()
            (instance,) = (role for role in process.roles if role.name == "instance")
            assert begun.wait(30)
            assert instance.served is not None
            before = instance.served.driver
            before._fail(OSError("no memory"))
            with anyio.fail_after(60):
                while instance.served.driver is before:
                    await anyio.sleep(0.01)
            assert not let_go.is_set(), "nobody has waited for the engine"
            assert instance.trouble is None
            let_go.set()

    anyio.run(main, backend=loop)
