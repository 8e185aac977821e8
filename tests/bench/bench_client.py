"""Fetching a prefix of 1,024 tokens by the client, beside the two digests that verify it, and curl."""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from kvsp_client import BlockingClient, Credentials, Prefix, PrefixKeys, PrefixMemory
from kvsp_client.testing import serve_cache
from kvsp_core.identity import CompatibilityDescriptor, Scope
from tests.bench import Row, left_out, row

__all__ = ["rows"]

TOKENS = 1024
ROUNDS = 3
CURLED = 8
"""Blocks that curl fetches in each round."""
SCOPE_KEY = bytes(range(32))
# The geometry of SmolLM2-135M: 23,040 octets a token.
MODEL = CompatibilityDescriptor(
    model="bench",
    model_digest="sha-256:" + "0" * 64,
    tokenizer_digest="sha-256:" + "0" * 64,
    layers=30,
    kv_heads=3,
    head_dim=64,
    kv_dtype="bf16",
    positional="rope",
    block_tokens=16,
)


def _serve(pipe: Connection) -> None:
    with serve_cache(scopes=[Scope(SCOPE_KEY)]) as served:
        files = [str(path) for path in (served.certificate, served.key, served.authorities)]
        pipe.send((served.index_uri, served.cache_uri, files))
        pipe.recv()


def rows() -> Iterator[Row]:
    """Yield the figures of fetching."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,))
    server.start()
    try:
        index_uri, cache_uri, files = ours.recv()
        with BlockingClient(Credentials(*map(Path, files)), index=index_uri) as client:
            yield from _measure(client, cache_uri, files)
    finally:
        ours.send("stop")
        server.join()


def _measure(client: BlockingClient, cache_uri: str, files: list[str]) -> Iterator[Row]:
    keys = PrefixKeys.of(Scope(SCOPE_KEY), MODEL, range(TOKENS))
    stored, loaded = (PrefixMemory(MODEL, len(keys)) for _ in range(2))
    stored._octets[:] = 1
    client.store(cache_uri, keys, stored.sections)
    while len(prefix := client.lookup(keys)) < len(keys):
        time.sleep(0.01)
    size = stored._octets.nbytes

    octets = stored._octets.reshape(-1).data

    def digests() -> None:
        for _ in range(2):  # of each layer, and of the container
            hashlib.sha256(octets)

    def fetch() -> None:
        assert client.fetch(prefix, loaded.sections).complete

    def curl() -> None:
        for url in _urls(prefix.part(0, CURLED), cache_uri):
            certificate, key, authorities = files
            command = ["curl", "-sf", "--cert", certificate, "--key", key, "--cacert", authorities]
            subprocess.run([*command, "-o", "/dev/null", url], check=True)

    ways: dict[str, Callable[[], None]] = {"digests": digests, "fetch": fetch}
    if shutil.which("curl"):
        ways["curl"] = curl
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(ROUNDS):
        for name, work in ways.items():
            before, began = _cpu_s(), time.perf_counter()
            work()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(_cpu_s() - before)
    sizes = {name: size * CURLED // len(prefix) if name == "curl" else size for name in ways}
    rate = {name: sizes[name] / median(times) / 1e6 for name, times in wall.items()}
    yield row("client.fetch_1024.cpu", median(cpu["fetch"]) / size * 1e9, "s/GB")
    yield row(
        "client.fetch_1024.cpu_vs_digests", median(cpu["fetch"]) / median(cpu["digests"]), "ratio", at_most=8
    )
    note = f"{median(wall['fetch']) * 1000:.0f} ms"
    yield row("client.fetch_1024.rate", rate["fetch"], "MB/s", note=note)
    if "curl" not in ways:
        yield left_out("client.fetch_1024.vs_curl", "needs curl")
        return
    note = f"one for each block, unverified, {median(cpu['curl']) / sizes['curl'] * 1e9:.0f} s/GB"
    yield row("client.fetch_1024.vs_curl", rate["fetch"] / rate["curl"], "ratio", at_least=1, note=note)


def _urls(prefix: Prefix, cache_uri: str) -> list[str]:
    keys = prefix.keys
    where = f"{cache_uri}blocks/{keys.descriptor.compat_id}/{keys.scope_id}/"
    return [where + key for key in keys.keys]


def _cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
