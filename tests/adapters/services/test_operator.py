"""Operators see what a cluster does, from a shell, and so do programs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from kvsp_services.cli import app
from kvsp_services.cli.top import table
from tests.adapters.services.cluster import OPERATOR, Cluster, free_ports

SCOPE = "6d1c6481cd428737da312c089db3832a"
POLICY = f"""
[principals]
"{OPERATOR}" = ["operator"]
"{{controller}}" = ["controller"]
[scopes.{SCOPE}]
read = ["{OPERATOR}"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An index and a controller in one process."""
    sections = {"index": "", "controller": 'index = ["{index}"]'}
    made = Cluster(tmp_path_factory.mktemp("cluster"), sections, POLICY)
    made.start()
    yield made
    assert made.stop() == 0


def kvsp(capfd: pytest.CaptureFixture[str], cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    status = app.run([*arguments, "--certificate", cluster.certificate])
    said, complained = capfd.readouterr()
    return status, said, complained


def test_an_empty_cluster_is_shown(capfd: pytest.CaptureFixture[str], cluster: Cluster) -> None:
    status, said, _ = kvsp(capfd, cluster, "status", "--controller", cluster.uris["controller"])
    assert (status, said.split()[:3]) == (0, ["instance", "state", "epoch"])
    status, said, _ = kvsp(capfd, cluster, "sessions", "--controller", cluster.uris["controller"], "--json")
    assert (status, json.loads(said)) == (0, {"sessions": []})
    status, said, _ = kvsp(capfd, cluster, "index", "--index", cluster.uris["index"])
    assert (status, said.splitlines()[-1].split()[:2]) == (0, ["0", "records"])


def test_top_shows_it_once(capfd: pytest.CaptureFixture[str], cluster: Cluster) -> None:
    where = ("--controller", cluster.uris["controller"], "--index", cluster.uris["index"], "--once")
    status, said, _ = kvsp(capfd, cluster, "top", *where)
    assert status == 0
    assert "Instances" in said
    assert "Index" in said
    nobody = "https://127.0.0.1:1/kvsp/"
    status, said, _ = kvsp(capfd, cluster, "top", *where, "--holder", nobody)
    assert status == 1, "a program that asks can tell that somebody did not answer"
    assert "Instances" in said
    assert f"{nobody}: the service cannot be reached" in said


def test_nothing_of_a_table_is_cut_off_where_it_is_narrow() -> None:
    uri = "https://a-holder-with-quite-a-long-name.of-a-large-deployment.example:8443/kvsp/"
    shown = io.StringIO()
    console = Console(width=40, file=shown)
    console.print(table("Index", ("holder", "records"), [(uri, 7)]))
    assert uri in "".join(re.findall(r"│ (\S+) *│", shown.getvalue()))


def test_a_mistake_in_a_call_is_one_line_and_nobody_is_asked(
    capfd: pytest.CaptureFixture[str], cluster: Cluster, context: tuple[str, ...]
) -> None:
    directory = cluster.directory
    (directory / "empty").touch()
    model = context[:4]
    nobody = ("--holder", "https://127.0.0.1:1/kvsp/", *model)
    key = "ab" * 32
    for call, said in (
        (("status", "--controller", "http://127.0.0.1:1/kvsp/"), "https"),
        (("status", "--controller", "127.0.0.1:1"), "https"),
        (("get", "xyz", "--output", "out", *nobody), "block key: expected 64 lowercase hex digits"),
        (("get", key, "--output", "nowhere/out", *nobody), "nowhere/out: there is no directory nowhere"),
        (
            ("put", str(directory / "empty"), "--block-key", key, *nobody),
            "empty: expected a file with a container",
        ),
        (("put", "/dev/null", "--block-key", key, *nobody), "/dev/null: expected a file with a container"),
    ):
        status, _, complained = kvsp(capfd, cluster, *call)
        assert status == 1
        assert complained.count("\n") == 1
        assert said in complained


@pytest.fixture(scope="module")
def context(cluster: Cluster) -> tuple[str, ...]:
    """Options that tell of a context of four tokens, which are one block."""
    directory = cluster.directory
    key = directory / "tenant.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    (directory / "tokens.json").write_text("[1, 2, 3, 4]")
    (directory / "descriptor.json").write_text(
        json.dumps(
            {
                "model": "m",
                "layers": 2,
                "kv_heads": 1,
                "head_dim": 2,
                "block_tokens": 4,
                "kv_dtype": "fp32",
                "positional": "rope",
                "layout": "kvsp-layout-1",
                "model_digest": "sha-256:" + "1" * 64,
                "tokenizer_digest": "sha-256:" + "2" * 64,
            }
        )
    )
    return (
        *("--scope-key-file", str(key), "--descriptor", str(directory / "descriptor.json")),
        *("--tokens", str(directory / "tokens.json")),
    )


def test_a_lookup_that_finds_nothing_is_a_no(
    capfd: pytest.CaptureFixture[str], cluster: Cluster, context: tuple[str, ...]
) -> None:
    status, said, _ = kvsp(capfd, cluster, "lookup", "--index", cluster.uris["index"], *context)
    assert status == 1
    assert "0 of 1 blocks" in said


def test_a_context_is_split_over_active_instances_only(
    capfd: pytest.CaptureFixture[str], cluster: Cluster, context: tuple[str, ...]
) -> None:
    where, stranger = ("--controller", cluster.uris["controller"]), "https://ii9.example/kvsp/"
    for arguments, expected, words in (
        (("m1",), 1, "no such shard map"),
        (("m1", "--end"), 1, "no such shard map"),
        (("m1", stranger), 2, "--tokens"),
        (("m1", stranger, *context), 1, f"{stranger} is not active"),
    ):
        status, said, complained = kvsp(capfd, cluster, "reshard", *arguments, *where)
        assert (status, said) == (expected, "")
        assert words in complained
        assert complained.count("\n") == 1


def test_a_refusal_is_one_line(capfd: pytest.CaptureFixture[str], cluster: Cluster) -> None:
    stranger = "https://ii9.example/kvsp/"
    where = ("--controller", cluster.uris["controller"])
    status, said, complained = kvsp(capfd, cluster, "drain", stranger, *where)
    assert (status, said) == (1, "")
    assert "404" in complained
    status, _, complained = kvsp(capfd, cluster, "status", "--controller", cluster.uris["index"])
    assert status == 1
    assert complained.count("\n") == 1


def test_nobody_there_is_one_line(capfd: pytest.CaptureFixture[str], cluster: Cluster) -> None:
    (port,) = free_ports(1)
    uri = f"https://127.0.0.1:{port}/kvsp/"
    status, _, complained = kvsp(capfd, cluster, "status", "--controller", uri)
    assert status == 1
    assert uri in complained
    assert complained.count("\n") == 1
