"""A cache server beside an index, as processes: stored, found, fetched, leased, killed and started again."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsp_core.block_keys import block_keys
from kvsp_core.container_header import ContainerHeader
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_services.cli import app
from tests.adapters.services.cluster import OPERATOR, Cluster, until

SCOPE_KEY = bytes(range(32))
DESCRIPTOR = {
    "model": "m",
    "model_digest": "sha-256:" + "1" * 64,
    "tokenizer_digest": "sha-256:" + "2" * 64,
    "layers": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "kv_dtype": "fp32",
    "positional": "rope",
    "block_tokens": 4,
    "layout": "kvsp-layout-1",
}
POLICY = f"""
[principals]
"{{holder}}" = ["holder"]
"{OPERATOR}" = ["operator"]
[scopes.{Scope(SCOPE_KEY).scope_id}]
read = ["{OPERATOR}", "{{holder}}"]
write = ["{OPERATOR}"]
publish = ["{{holder}}"]
"""
SECTIONS = {
    "index": "",
    "holder": 'index = ["{index}"]\nrecord_ttl_ms = 3000\n'
    '[[holder.tiers]]\ntier = "local-storage"\ncapacity_bytes = 1000000\ndirectory = "blocks"\n',
}
TOKENS = list(range(8))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, SECTIONS, POLICY)
    (tmp_path / "descriptor.json").write_text(json.dumps(DESCRIPTOR))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    (tmp_path / "tenant.key").write_bytes(SCOPE_KEY)
    (tmp_path / "tenant.key").chmod(0o600)
    model = CompatibilityDescriptor.from_members(DESCRIPTOR)
    header = ContainerHeader.for_layers(model)
    for number in (0, 1):
        octets = header.encode() + bytes((number + n) % 251 for n in range(header.data_bytes))
        (tmp_path / f"block-{number}").write_bytes(octets)
    made.start()
    yield made
    made.kill()


class Shell:
    """The operator's shell."""

    def __init__(self, cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
        self.cluster = cluster
        self.capfd = capfd
        model = CompatibilityDescriptor.from_members(DESCRIPTOR)
        self.keys = [key.hex() for key in block_keys(Scope(SCOPE_KEY), model, TOKENS)[0]]

    def __call__(self, *arguments: str, scope: bool = True) -> tuple[int, str, str]:
        directory = self.cluster.directory
        common = ["--certificate", self.cluster.certificate]
        if scope:
            common += ["--descriptor", str(directory / "descriptor.json")]
            common += ["--scope-key-file", str(directory / "tenant.key")]
        status = app.run([*arguments, *common])
        said, complained = self.capfd.readouterr()
        return status, said, complained

    def put(self, number: int, *options: str) -> tuple[int, str, str]:
        file, holder = str(self.cluster.directory / f"block-{number}"), self.cluster.uris["holder"]
        return self("put", file, "--block-key", self.keys[number], "--holder", holder, *options)

    def get(self, number: int, *options: str) -> tuple[int, str, str]:
        output = str(self.cluster.directory / "fetched")
        where = ("--holder", self.cluster.uris["holder"], "--output", output)
        return self("get", self.keys[number], *where, *options)

    def matched(self) -> int:
        tokens = str(self.cluster.directory / "tokens.json")
        _, said, _ = self("lookup", "--index", self.cluster.uris["index"], "--tokens", tokens, "--json")
        return int(json.loads(said)["matched"])


@pytest.fixture
def shell(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(cluster, capfd)


@pytest.mark.requirement("BR-1", "BR-2", "BR-6", "PB-3", "LK-1")
def test_blocks_are_stored_published_found_and_fetched(cluster: Cluster, shell: Shell) -> None:
    assert shell.matched() == 0
    for number in (0, 1):
        status, said, complained = shell.put(number, "--json")
        assert status == 0, complained
    size = (cluster.directory / "block-1").stat().st_size
    assert json.loads(said) == {"holder": cluster.uris["holder"], "size_bytes": size}
    assert until(lambda: shell.matched() == 2)
    assert shell.put(0)[0] == 1, "a block is stored once"
    status, said, complained = shell.get(1, "--json")
    assert status == 0, complained
    assert json.loads(said) == {"output": str(cluster.directory / "fetched"), "size_bytes": size}
    fetched, stored = (cluster.directory / name for name in ("fetched", "block-1"))
    assert fetched.read_bytes() == stored.read_bytes()
    status, said, complained = shell("lease", *shell.keys, "--holder", cluster.uris["holder"], scope=False)
    assert status == 0, complained
    status, said, _ = shell("leases", "--holder", cluster.uris["holder"], scope=False)
    assert OPERATOR in said


def test_a_fetch_to_a_disk_that_is_full_leaves_nothing_or_the_file_that_was_there(
    cluster: Cluster, shell: Shell
) -> None:
    assert shell.put(0)[0] == 0
    fetched, before = cluster.directory / "fetched", resource.getrlimit(resource.RLIMIT_FSIZE)
    less = (cluster.directory / "block-0").stat().st_size - 1
    for there in (None, b"old"):
        if there is not None:
            fetched.write_bytes(there)
        resource.setrlimit(resource.RLIMIT_FSIZE, (less, before[1]))
        try:
            status, _, complained = shell.get(0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (status, complained) == (1, f"kvsp: {fetched}: File too large\n")
        assert (fetched.read_bytes() if fetched.exists() else None) == there
    assert not list(cluster.directory.glob("fetched.*"))


@pytest.mark.requirement("PB-3")
def test_an_orderly_stop_withdraws_and_keeps_what_is_on_disk(cluster: Cluster, shell: Shell) -> None:
    assert shell.put(0)[0] == 0
    assert until(lambda: shell.matched() == 1)
    assert cluster.stop() == 0
    assert (cluster.directory / "blocks" / "clean-stop").exists()
    assert '"event": "safe to stop"' in cluster.log
    cluster.start()
    assert until(lambda: shell.matched() == 1)
    assert shell.get(0)[0] == 0


@pytest.mark.requirement("OP-4")
def test_a_holder_is_added_to_a_running_index_by_its_policy_alone(cluster: Cluster, shell: Shell) -> None:
    policy = cluster.directory / "policy.toml"
    complete = policy.read_text()
    publisher = f'publish = ["{cluster.uris["holder"]}"]'
    policy.write_text(complete.replace(publisher, ""))
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGHUP)
    assert until(lambda: cluster.log.count('"event": "reloaded"') == 1)
    assert shell.put(0)[0] == 0
    assert shell.matched() == 0, "it holds the block, and may not say so yet"
    policy.write_text(complete)
    cluster.process.send_signal(signal.SIGHUP)
    assert until(lambda: shell.matched() == 1)


@pytest.mark.requirement("SE-4", "PB-3")
def test_a_scope_is_purged_from_a_running_holder_by_its_policy(cluster: Cluster, shell: Shell) -> None:
    assert shell.put(0)[0] == shell.put(1)[0] == 0
    assert until(lambda: shell.matched() == 2)
    files = lambda: [p for p in (cluster.directory / "blocks").glob("*/*/*") if p.is_file()]  # noqa: E731
    assert len(files()) == 2
    policy = cluster.directory / "policy.toml"
    complete = policy.read_text()
    policy.write_text(complete[: complete.index("\nread =")] + "\npurged = true\n")
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGHUP)
    assert until(lambda: not files())
    assert shell.get(0)[0] == 1
    policy.write_text(complete)
    cluster.process.send_signal(signal.SIGHUP)
    assert until(lambda: cluster.log.count('"event": "reloaded"') == 2)
    assert shell.matched() == 0, "no record is left"


@pytest.mark.requirement("PB-3", "SE-4")
def test_after_kill_9_what_is_on_disk_is_served_and_published_again(cluster: Cluster, shell: Shell) -> None:
    assert shell.put(0)[0] == shell.put(1)[0] == 0
    assert until(lambda: shell.matched() == 2)
    cluster.kill()
    files = [path for path in (cluster.directory / "blocks").glob("*/*/*") if path.is_file()]
    torn = files[0].read_bytes()
    files[0].write_bytes(torn[: len(torn) - 100])
    cluster.start()
    assert until(lambda: shell.get(0)[0] + shell.get(1)[0] == 1), (
        "the whole one is served, the torn one is not"
    )
    left = 0 if shell.get(0)[0] == 0 else 1
    assert until(lambda: shell.matched() == (1 if left == 0 else 0))
    assert shell.put(1 - left)[0] == 0, "what was torn can be stored again"
    assert until(lambda: shell.matched() == 2)


@pytest.mark.requirement("SE-5")
def test_nothing_of_a_tenant_is_in_logs_metrics_or_on_disk(cluster: Cluster, shell: Shell) -> None:
    assert shell.put(0)[0] == 0
    assert until(lambda: shell.matched() == 1)
    shell.get(0)
    content = (cluster.directory / "block-0").read_bytes()[-64:]
    assert cluster.stop() == 0
    secrets = [SCOPE_KEY, shell.keys[0].encode(), bytes.fromhex(shell.keys[0]), content]
    served = [cluster.directory / "serve.log", *(cluster.directory / "blocks").rglob("*")]
    served += (cluster.directory / "data").rglob("*")
    for path in served:
        if path.is_file():
            octets = path.read_bytes()
            assert not any(secret in octets for secret in secrets), path
