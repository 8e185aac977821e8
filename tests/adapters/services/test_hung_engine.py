"""A process whose engine hangs in a native call: it answers, says so, is well again, and stops."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx

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
        assert "instance: its engine is silent" in ready(cluster)
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
