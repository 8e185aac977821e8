"""A role and its well-behaved client while others are slow, broken or worse: latency and memory."""

from __future__ import annotations

import os
import random
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import httpx

from kvsp_services.pki import issue
from tests.adapters.services.cluster import Cluster
from tests.hostile.attackers import ATTACKS
from tests.hostile.report import Section

__all__ = ["Served", "attack", "attacks"]

SCOPE = "6d" * 16
TARGET = 5
"""How many times as long as in quiet the slowest of a hundred answers may take."""
CLIENT, ATTACKER = "spiffe://example/client", "spiffe://example/attacker"
POLICY = f"""
[principals]
"{CLIENT}" = ["holder"]
"{ATTACKER}" = ["operator"]
[scopes.{SCOPE}]
read = ["{CLIENT}", "{ATTACKER}"]
"""


@attrs.define
class Figures:
    """Latencies of lookups, in milliseconds, and the largest memory of the role while they were made."""

    latencies_ms: list[float]
    memory_mib: float
    wrong: int = 0
    newcomer_ms: float = 0.0
    """How long one who was not connected yet takes to a first answer."""

    def percentile(self, share: float) -> float:
        """Return a percentile."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Served(Cluster):
    """An index as a process, and clients of it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"index": ""}, POLICY)
        for name, uri in (("client", CLIENT), ("attacker", ATTACKER)):
            issue(directory, uri=uri, name=name)

    def client(self) -> httpx.Client:
        """Return a well-behaved client."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        context.load_cert_chain(self.directory / "client.pem", self.directory / "client.key")
        return httpx.Client(http1=False, http2=True, verify=context, base_url=self.uris["index"], timeout=60)

    def memory_mib(self) -> float:
        """Return the memory of the process."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    @contextmanager
    def attacked(self, kind: str, count: int) -> Iterator[list[str]]:
        """Be attacked meanwhile; the list gets what the attacker says in the end."""
        url = httpx.URL(self.uris["index"])
        command = [sys.executable, "-m", "tests.hostile.attackers", kind, str(self.directory)]
        command += [url.host, str(url.port), url.path, str(count)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        root = Path(__file__).resolve().parents[2]
        said: list[str] = []
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        ) as attacker:
            assert attacker.stdin is not None
            assert attacker.stdout is not None
            try:
                assert attacker.stdout.readline() == "ready\n"
                yield said
            finally:
                attacker.stdin.close()
                said += attacker.stdout.read().splitlines()

    def measured(self, client: httpx.Client, seconds: float, *, at_least: int = 20) -> Figures:
        """Look something up a hundred times a second; every answer has to be right."""
        body = {"compat_id": "c" * 64, "scope_id": SCOPE, "block_keys": ["b" * 64]}
        drawn, figures = random.Random(1), Figures([], self.memory_mib())
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(figures.latencies_ms) < at_least:
            began = time.perf_counter()
            answer = client.post("lookup", json=body, headers={"content-type": "application/kvsp+json"})
            figures.latencies_ms.append((time.perf_counter() - began) * 1000)
            figures.wrong += answer.status_code != 200 or answer.json()["matched"] != 0
            if len(figures.latencies_ms) % 20 == 0:
                figures.memory_mib = max(figures.memory_mib, self.memory_mib())
            time.sleep(drawn.random() * 0.02)
        return figures

    def first_answer_ms(self) -> float:
        """Return how long it takes to connect and be answered once."""
        began = time.perf_counter()
        with self.client() as newcomer:
            figures = self.measured(newcomer, 0, at_least=1)
        assert not figures.wrong
        return (time.perf_counter() - began) * 1000


def attack(
    served: Served, client: httpx.Client, kind: str, count: int, seconds: float
) -> tuple[Figures, str]:
    """Measure under an attack; return the figures and what the attacker saw."""
    with served.attacked(kind, count) as said:
        figures = served.measured(client, seconds)
        figures.newcomer_ms = served.first_answer_ms()
    return figures, " ".join(said)


def attacks(directory: Path, seconds: float = 15.0) -> Section:
    """Attack an index in every way, and measure a client that is there already."""
    header = (
        "peers",
        "connections",
        "p50",
        "p99",
        "p99 to quiet",
        "a newcomer",
        "memory",
        "the attacker saw",
    )
    section = Section("peers", header)
    served = Served(directory)
    served.start()
    try:
        with served.client() as client:
            served.measured(client, 2)
            quiet = served.measured(client, seconds)
            quiet.newcomer_ms = served.first_answer_ms()
            _row(section, "quiet", 0, quiet, quiet, "")
            for kind, (_, count) in ATTACKS.items():
                figures, said = attack(served, client, kind, count, seconds)
                _row(section, kind, count, figures, quiet, said)
                time.sleep(1)
    finally:
        served.kill()
    over = [str(row[0]) for row in section.rows if float(str(row[4])) > TARGET]
    reached = f"missed by {' and '.join(over)}" if over else "reached by all"
    section.notes.append(
        "A hundred lookups a second at most, over one connection, at an index in a process of its own; a"
        " newcomer connects in the midst of it, and is timed to its first answer;"
        f" attacker, client and index share {os.cpu_count()} cores. Target: p99 within {TARGET} times of"
        f" quiet; {reached}."
    )
    return section


def _row(section: Section, kind: str, count: int, figures: Figures, quiet: Figures, said: str) -> None:
    p99, ratio = figures.percentile(0.99), figures.percentile(0.99) / quiet.percentile(0.99)
    row = (kind, f"{count:,}", f"{figures.percentile(0.5):.1f} ms", f"{p99:.1f} ms", f"{ratio:.1f}")
    newcomer = f"{figures.newcomer_ms:.0f} ms"
    section.rows.append((*row, newcomer, f"{figures.memory_mib:.0f} MiB", said))
    if figures.wrong:
        section.broken.append(f"{kind}: {figures.wrong} answers were not right")
