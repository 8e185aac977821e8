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
from kvsp_services.pki import init_ca, issue
from tests.adapters.services.cluster import OPERATOR, Cluster, free_ports

SCOPE = "6d1c6481cd428737da312c089db3832a"
NO_ROLE = (
    "403 the client has no role that may make this request; the policy of that role has to name the URI of"
    " your certificate, in [principals]"
)
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
    status, said, _ = kvsp(capfd, cluster, "sessions", "--controller", cluster.uris["controller"])
    assert (status, said.split()) == (0, ["session", "state", "epoch", "instance", "recorded"])
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


def test_an_address_in_brackets_is_shown_as_it_is() -> None:
    uri, shown = "https://[fd00::1]:8443/kvsp/", io.StringIO()
    Console(width=80, file=shown).print(table(f"Leases at {uri}", ("client", "blocks"), [(uri, 7)]))
    assert shown.getvalue().count(uri) == 2


@pytest.mark.parametrize(
    ("command", "role", "who", "said"),
    [
        (
            "status",
            "index",
            "operator",
            "404 there is no such resource below this base URI; is it the base URI of",
        ),
        ("sessions", "controller", "nobody", NO_ROLE),
        ("index", "index", "nobody", NO_ROLE),
        ("index", "index", "stranger", "the peer was refused: its certificate is not accepted"),
        ("drain", "controller", "operator", "404 no such instance reports here"),
        ("wake", "controller", "operator", "404 no such instance reports here"),
        ("reshard", "controller", "operator", "404 no such shard map"),
    ],
)
def test_what_a_role_says_no_to_is_one_line(
    capfd: pytest.CaptureFixture[str], cluster: Cluster, command: str, role: str, who: str, said: str
) -> None:
    directory = cluster.directory
    if who == "nobody":
        issue(directory, uri="spiffe://example/nobody", name="nobody")
    if who == "stranger":
        directory /= "stranger"
        init_ca(directory)
        issue(directory, uri=OPERATOR, name="stranger")
    option = "--index" if command == "index" else "--controller"
    named = {"drain": ["https://h1.example/kvsp/"], "wake": ["https://h1.example/kvsp/"], "reshard": ["map"]}
    call = [command, *named.get(command, []), option, cluster.uris[role]]
    assert app.run([*call, "--certificate", str(directory / f"{who}.pem")]) == 1
    complained = capfd.readouterr().err
    assert complained.startswith(f"kvsp: {cluster.uris[role]}: {said}")
    assert complained.count("\n") == 1


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
    assert "0 of 1 block, 0 tokens" in said


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
