"""What a shell hears of every mistake, in one line, and by which status: 1 is no, 2 a wrong call of which
nothing was done."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

from kvsp_services.cli import app
from kvsp_services.pki import init_ca, issue
from tests.adapters.services.cluster import free_ports
from tests.adapters.services.test_cli_values import DESCRIPTOR, HEADER

ROOT = Path(__file__).resolve().parents[3]
KEY, SCOPE_ID = "ab" * 32, "ab" * 16
NOBODY = "https://127.0.0.1:1/kvsp/"
"""A base URI at which no role is."""
WHO = ("--certificate", "ops.pem")
SCOPE = ("--descriptor", "descriptor.json", "--scope-key-file", "tenant.key")
TOKENS = ("--tokens", "tokens.json")
PURGE = ("--storage-key-file", "tenant.key", "--scope", SCOPE_ID)
FILES = {
    "policy.toml": "principals = {}\nscopes.abc = {}\n",
    "wrong.toml": """authorities_file = "ca.pem"
        policy_file = "policy.toml"
        [index]
        base_uri = "https://h1.example/"
        certificate_file = "ops.pem"
        key_file = "ops.key"
        """,
}
FILES["learnt.toml"] = 'descriptor_files = ["descriptor.json", "wrong"]\n' + FILES["wrong.toml"]
FILES["nobody.toml"] = "principals = {}\n"
FILES["model.toml"] = """authorities_file = "ca.pem"
    policy_file = "nobody.toml"
    [instance]
    base_uri = "https://h1.example/"
    certificate_file = "role.pem"
    key_file = "role.key"
    model_dir = "folder"
    index = ["https://h2.example/"]
    controller = "https://h3.example/"
    """
FILES["key.toml"] = 'storage_key_file = "short.key"\n' + FILES["wrong.toml"]
UNREACHED = "the service cannot be reached; is it running, and is this its base URI?"
NO_URI = "a base URI starts with 'https://'"
MISSING, FOLDER = "No such file or directory", "Is a directory"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files that are right and wrong."""
    made = tmp_path_factory.mktemp("mistakes")
    init_ca(made)
    issue(made, uri="spiffe://example/ops", name="ops")
    issue(made, uri="https://h1.example/", name="role")
    (made / "descriptor.json").write_text(json.dumps(DESCRIPTOR))
    (made / "tokens.json").write_text("[1, 2, 3, 4]")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "mixed.json").write_text('[1, "2"]')
    (made / "alone").mkdir()
    for ending in (".pem", ".key"):
        (made / "alone" / f"ops{ending}").write_bytes((made / f"ops{ending}").read_bytes())
    (made / "block").write_bytes(HEADER + bytes(4 * 8192))
    (made / "wrong").write_bytes(b"nonsense" * 20)
    (made / "empty").touch()
    for name, octets in (("tenant.key", bytes(range(32))), ("short.key", b"short")):
        (made / name).write_bytes(octets)
        (made / name).chmod(0o600)
    (made / "open.key").write_bytes(bytes(range(32)))
    (made / "open.key").chmod(0o644)
    for name in ("folder", "full"):
        (made / name).mkdir()
    (made / "full" / "letter").write_text("dear")
    return made


def asking(command: str, option: str, *arguments: str) -> list[tuple[list[str], int, str]]:
    """Return the mistakes of a command that asks a role, whose base URI is given by an option."""
    call = [command, *arguments]
    return [
        (call, 2, f"Missing option '{option}'"),
        ([*call, option, "foo", *WHO], 2, f"Invalid value for '{option}'", ),
        ([*call, option, "foo", *WHO], 2, NO_URI),
        ([*call, option, "http://h1.example/", *WHO], 2, NO_URI),
        ([*call, option, "https://h1.example", *WHO], 2, "a base URI ends in '/'"),
        ([*call, option, NOBODY], 2, "Missing option '--certificate' (env var: 'KVSP_CERTIFICATE')"),
        ([*call, option, NOBODY, "--certificate", "none.pem"], 2, "File 'none.pem' does not exist"),
        ([*call, option, NOBODY, "--certificate", "folder"], 2, "File 'folder' is a directory"),
        ([*call, option, NOBODY, "--certificate", "wrong"], 1, "wrong.key: there is no such file"),
        ([*call, option, NOBODY, "--certificate", "alone/ops.pem"], 1, "name yours with --authorities"),
        ([*call, option, NOBODY, *WHO, "--private-key", "ca.key"], 1, "they do not belong together"),
        ([*call, option, NOBODY, *WHO, "--authorities", "wrong"], 1, "wrong"),
        ([*call, option, NOBODY, *WHO], 1, UNREACHED),
    ]  # fmt: skip


CASES: list[tuple[list[str], int, str]] = [
    ([], 2, "Usage: kvsp"),
    (["lokup"], 2, "there is no command 'lokup'; did you mean lookup? See: kvsp --help"),
    (["nonsense"], 2, "there is no command 'nonsense'. See: kvsp --help"),
    (["--nonsense"], 2, "o such option"),
    (["status", "--controler", "x"], 2, "o such option"),
    *asking("status", "--controller"),
    *asking("sessions", "--controller"),
    *asking("drain", "--controller", NOBODY),
    *asking("wake", "--controller", NOBODY),
    *asking("index", "--index"),
    *asking("leases", "--holder"),
    *asking("lookup", "--index", *SCOPE, *TOKENS),
    *asking("get", "--holder", KEY, *SCOPE, "--output", "out"),
    *asking("put", "--holder", "block", *SCOPE, "--block-key", KEY),
    *asking("lease", "--holder", KEY),
    *asking("reshard", "--controller", "map"),
    *asking("reshard", "--controller", "map", NOBODY, *SCOPE, *TOKENS),
    *[case for case in asking("top", "--controller", "--once") if case[2] != UNREACHED],
    (["drain", "--controller", NOBODY, *WHO], 2, "Missing argument 'INSTANCE'"),
    (["drain", "foo", "--controller", NOBODY, *WHO], 2, f"Invalid value for 'INSTANCE': 'foo': {NO_URI}"),
    (["wake", "foo", "--controller", NOBODY, *WHO], 2, NO_URI),
    (["index", "--index", NOBODY, "--index", NOBODY, *WHO], 2, "names one base URI twice"),
    (["lookup", "--index", NOBODY, "--index", NOBODY, *SCOPE, *TOKENS, *WHO], 2, "twice"),
    (["lookup", "--index", NOBODY, *SCOPE, "--tokens", "none", *WHO], 2, MISSING),
    (["lookup", "--index", NOBODY, *SCOPE, "--tokens", "folder", *WHO], 2, FOLDER),
    (["lookup", "--index", NOBODY, *SCOPE, "--tokens", "wrong", *WHO], 1, "wrong: this is no JSON array"),
    (["lookup", "--index", NOBODY, "--scope-key-file", "tenant.key", *TOKENS, *WHO], 2, "'--descriptor'"),
    (["top", "--controller", NOBODY, "--index", "foo", *WHO], 2, "Invalid value for '--index'"),
    (["top", "--controller", NOBODY, "--holder", "foo", *WHO], 2, "Invalid value for '--holder'"),
    (["top", "--controller", NOBODY, "--interval", "0", *WHO], 2, "Invalid value for '--interval'"),
    (["get", "xyz", "--holder", NOBODY, *SCOPE, "--output", "out", *WHO], 2, "a block key is 64 lowercase"),
    (["get", KEY.upper(), "--holder", NOBODY, *SCOPE, "--output", "out", *WHO], 2, "lowercase"),
    (["get", KEY, "--holder", NOBODY, *SCOPE, "--output", "folder", *WHO], 2, "is a directory"),
    (["get", KEY, "--holder", NOBODY, *SCOPE, "--output", "no/out", *WHO], 2, "there is no directory no"),
    (["put", "none", "--holder", NOBODY, *SCOPE, "--block-key", KEY, *WHO], 2, MISSING),
    (["put", "folder", "--holder", NOBODY, *SCOPE, "--block-key", KEY, *WHO], 2, FOLDER),
    (["put", "empty", "--holder", NOBODY, *SCOPE, "--block-key", KEY, *WHO], 1, "empty: expected a file"),
    (["put", "/dev/null", "--holder", NOBODY, *SCOPE, "--block-key", KEY, *WHO], 1, "expected a file"),
    (["put", "block", "--holder", NOBODY, *SCOPE, "--block-key", "xyz", *WHO], 2, "'--block-key'"),
    (["lease", "--holder", NOBODY, *WHO], 2, "Missing argument 'KEYS...'"),
    (["lease", "xyz", "--holder", NOBODY, *WHO], 2, "a block key is 64 lowercase"),
    (["lease", KEY, "--ttl-ms", "0", "--holder", NOBODY, *WHO], 2, "Invalid value for '--ttl-ms'"),
    (["reshard", "a/b", "--controller", NOBODY, *WHO], 2, "the name of a split is"),
    (["reshard", "map", "foo", "--controller", NOBODY, *WHO], 2, NO_URI),
    (["reshard", "map", NOBODY, "--controller", NOBODY, *WHO], 2, "give all three"),
    (["reshard", "map", NOBODY, "--end", "--controller", NOBODY, *WHO], 2, "--end goes without instances"),
    (["compat"], 2, "Give either a DESCRIPTOR file or --model-dir"),
    (["compat", "none"], 2, MISSING),
    (["compat", "folder"], 2, FOLDER),
    (["compat", "wrong"], 1, "wrong: not JSON at line 1, column 1"),
    (["compat", "--model-dir", "none"], 2, "does not exist"),
    (["compat", "--model-dir", "wrong"], 2, "is a file"),
    (["compat", "--model-dir", "folder"], 1, "folder has no config.json"),
    (["scope"], 2, "Missing option '--scope-key-file'"),
    (["scope", "--scope-key-file", "none"], 2, "File 'none' does not exist"),
    (["scope", "--scope-key-file", "folder"], 2, "File 'folder' is a directory"),
    (["scope", "--scope-key-file", "open.key"], 1, "run: chmod 600 open.key"),
    (["scope", "--scope-key-file", "short.key"], 1, "short.key"),
    (["keys", *SCOPE, "--tokens", "none"], 2, MISSING),
    (["keys", *SCOPE, "--tokens", "wrong"], 1, "wrong: this is no JSON array"),
    (["keys", *SCOPE, "--tokens", "mixed.json"], 1, "mixed.json: tokens[1]: expected an integer, found str"),
    (["keys", "--descriptor", "wrong", "--scope-key-file", "tenant.key", *TOKENS], 1, "wrong: not JSON"),
    (["inspect", "none"], 2, MISSING),
    (["inspect", "folder"], 2, FOLDER),
    (["inspect", "wrong"], 1, "wrong: no container"),
    (["inspect", "empty"], 1, "empty: the container ends"),
    (["backup", "none", "copy"], 2, "does not exist"),
    (["backup", "folder", "copy"], 2, "is a directory"),
    (["backup", "wrong", "copy"], 1, "wrong: file is not a database"),
    (["backup", "wrong", "block"], 1, "block exists; name a new file"),
    (["backup", "wrong", "no/copy"], 2, f"no/copy: {MISSING}"),
    (["purge", "none", *PURGE], 2, "does not exist"),
    (["purge", "wrong", *PURGE], 2, "is a file"),
    (["purge", "folder", *PURGE], 1, "folder: there are no blocks here"),
    (["purge", "folder", "--storage-key-file", "folder", "--scope", SCOPE_ID], 2, "is a directory"),
    (["purge", "folder", "--storage-key-file", "tenant.key", "--scope", "zz"], 2, "a Scope ID is 32"),
    (["pki"], 2, "Usage: kvsp pki"),
    (["pki", "init", "."], 1, "has a certificate authority already"),
    (["pki", "init", "wrong"], 2, "is a file"),
    (["pki", "issue", "folder", "--uri", NOBODY], 1, "make one with: kvsp pki init folder"),
    (["pki", "issue", "."], 2, "Missing option '--uri'"),
    (["pki", "issue", ".", "--uri", "foo"], 2, "expected an https base URI"),
    (["pki", "issue", ".", "--uri", "https://h1.example/kvsp"], 2, "a base URI ends in '/'"),
    *[
        (["pki", "issue", ".", "--uri", uri], 2, "expected an https base URI")
        for uri in ("https://[x", "spiffe://[x", "spiffe://h:abc/x", "spiffe://h/ü", "spiffe:///x")
    ],
    *[
        (["pki", "issue", ".", "--uri", NOBODY, "--host", host], 2, "expected a DNS name or an IP address")
        for host in ("a b", "ü", "[::1]", "")
    ],
    (["pki", "issue", ".", "--uri", NOBODY, "--name", "a/b"], 2, "give --name a plain word"),
    (["pki", "issue", ".", "--uri", NOBODY, "--days", "9999999"], 2, "Invalid value for '--days'"),
    (["serve", "none"], 2, "does not exist"),
    (["serve", "folder"], 2, "is a directory"),
    (["serve", "wrong.toml", "--check"], 1, "policy.toml: scopes: a scope is named by its Scope ID"),
    (["serve", "key.toml", "--check"], 1, "short.key: a storage key has at least 32 random octets, found 5"),
    (["serve", "learnt.toml", "--check"], 1, "/wrong: not JSON at line 1, column 1"),
    (["serve", "model.toml", "--check"], 1, "/folder has no config.json; name the directory of a model"),
    (["serve", "wrong"], 1, "wrong: not TOML: "),
    (["serve", "wrong", "--loop", "curio"], 2, "Invalid value for '--loop'"),
    (["model"], 2, "Usage: kvsp model"),
    (["model", "prepare", "wrong"], 2, "is a file"),
    (["model", "prepare", "full", "--tiny"], 1, "full is not empty; name a new directory"),
    (["model", "prepare", "new", "--dtype", "int4"], 2, "Invalid value for '--dtype'"),
    (["demo", "--model-dir", "none"], 2, "does not exist"),
    (["demo", "--model-dir", "folder"], 1, "folder has no config.json"),
    (["demo", "--report", "folder"], 2, "is a directory"),
    (["demo", "--report", "wrong/report.html"], 2, "wrong/report.html: it cannot be written"),
    (["simulate", "--seed", "x"], 2, "Invalid value for '--seed'"),
    (["simulate", "--seeds", "9-1"], 2, "such as 0-199"),
    (["simulate", "--stop"], 2, "--jobs and --stop go with --seeds"),
    (["simulate", "--jobs", "2"], 2, "--jobs and --stop go with --seeds"),
    (["explore"], 2, "Missing argument 'CONFIGURATION'"),
    (["explore", "nonsense"], 2, "'nonsense' is not one of"),
]


@pytest.mark.parametrize(("arguments", "status", "said"), CASES, ids=lambda value: None)
def test_a_mistake_is_one_line_and_a_status(
    arguments: list[str],
    status: int,
    said: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(directory)
    before = sorted(directory.rglob("*"))
    assert app.run(arguments) == status
    complained = capfd.readouterr().err
    assert said in complained
    assert len(complained.splitlines()) == 1 or complained.startswith("Usage: ")
    assert sorted(directory.rglob("*")) == before, "nothing was done"


def test_the_table_has_every_command() -> None:
    commands = {*app.COMMANDS, *(point.name for point in entry_points(group=app.ENTRY_POINTS))}
    tried = {
        arguments[0]: {case[1] for case in CASES if case[0][:1] == arguments[:1]}
        for arguments, *_ in CASES
        if arguments
    }
    assert commands <= set(tried)
    assert {name for name in commands if 2 not in tried[name]} == set()


def test_a_variable_that_is_wrong_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("KVSP_INDEX", f"{NOBODY} foo")
    assert app.run(["index", *WHO]) == 2
    assert f"'--index' (env var: 'KVSP_INDEX'): 'foo': {NO_URI}" in capfd.readouterr().err
    (port,) = free_ports(1)
    monkeypatch.setenv("KVSP_INDEX", f"{NOBODY} https://127.0.0.1:{port}/kvsp/")
    assert app.run(["index", *WHO]) == 1, "two parts of an index are two"
    capfd.readouterr()
    monkeypatch.setenv("KVSP_HOLDER", f"{NOBODY} https://127.0.0.1:{port}/kvsp/")
    assert app.run(["top", "--once", "--controller", NOBODY, *WHO]) == 1
    assert f"https://127.0.0.1:{port}/kvsp/: the service" in capfd.readouterr().out.split(NOBODY)[-1]


def test_a_command_of_another_package_is_listed_last(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(app.COMMANDS, "theirs", app.COMMANDS["scope"])
    assert app.run(["--help"]) == 0
    assert capfd.readouterr().out.rpartition("Other commands:")[2].split()[0] == "theirs"


def options_of(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from options_of(command.get_command(context, name) or command)
        return
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield str(command.name), parameter


def test_an_option_of_several_commands_has_one_variable_and_one_meaning() -> None:
    alike: dict[str, dict[str, click.Option]] = {}
    for command, option in options_of(app.kvsp):
        alike.setdefault(option.opts[0], {})[command] = option
    assert set(alike["--holder"]) == {"get", "lease", "leases", "put", "top"}
    for name, options in alike.items():
        assert len({(option.envvar, option.type.name) for option in options.values()}) == 1, name
    said = {str(option.envvar) for options in alike.values() for option in options.values() if option.envvar}
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert said == set(
        re.findall(r"KVSP_[A-Z_]+(?<!_)", page.partition("## Commands")[2].partition("## ")[0])
    )


def test_every_command_has_a_help_without_words_cut_off(capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--help"]) == 0
    listed = capfd.readouterr().out.partition("Options:")[2]
    assert "..." not in listed
    found = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert sorted(found[2:]) == sorted({*app.COMMANDS, "model", "explore", "simulate"}), "each once"
    for name in [*app.COMMANDS, "model", "explore", "simulate"]:
        assert app.run([name, "--help"]) == 0
        assert capfd.readouterr().out.startswith(f"Usage: kvsp {name}")


def test_what_is_missing_is_said_by_the_proofs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hostile.__main__ import main

    for name in [name for name in sys.modules if name.startswith("tests.hostile.") or name == "httpx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    for arguments, status in ((["--help"], 0), (["soak"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    assert "httpx is missing; in a checkout run: pip install '.[test]'" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys

class Extension:
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("it failed to import") from None

from kvsp_services.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Extension())
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("kvsp_services.cli.app", ["scope"]),
        ("kvsp_services.cli.values", ["scope"]),
        ("kvsp_services.engine_port", ["serve"]),
        ("kvsp_services.process", ["serve", "wrong.toml"]),
        ("kvsp_services.demo.story", ["demo", "--fast"]),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_no_traceback(
    directory: Path, module: str, arguments: list[str]
) -> None:
    """Those in C turn it into other errors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.replace("MODULE", module), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupt_waits_for_nothing_in_another_thread() -> None:
    with ThreadPoolExecutor() as threads:
        assert threads.submit(app.run, ["scope", "--help"]).result() == 0


def test_what_changes_on_a_screen_is_shown_once_elsewhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys.modules["time"], "sleep", None)
    assert app.run(["top", "--controller", NOBODY, *WHO]) == 1
    assert capfd.readouterr().out == f"{NOBODY}: the service cannot be reached\n"


def test_standard_input_that_is_closed_is_empty(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "stdin", None)
    assert app.run(["keys", *SCOPE, "--tokens", "-"]) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("most_bytes", "file"), [(10_000, "/model.safetensors: "), (1_000, ": ")])
def test_a_model_that_does_not_fit_on_the_disk_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    most_bytes: int,
    file: str,
) -> None:
    call = ["model", "prepare", str(tmp_path / "new"), "--tiny"]
    if most_bytes == 1_000:  # which is room for config.json
        monkeypatch.setattr("kvsp_engines.prepare._save", lambda *_: None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        assert app.run(call) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"kvsp: {tmp_path}/new{file}")
    assert "File too large" in said
    monkeypatch.undo()
    assert app.run(call) == 0, "it was not finished, and is begun anew"


def test_what_is_written_to_a_full_disk_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["simulate", "--steps", "20", "--trace", "/dev/full"]) == 1
    assert capfd.readouterr() == ("", "kvsp: /dev/full: No space left on device\n")
    command = [sys.executable, "-m", "kvsp_services.cli", "--help"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, b"kvsp: standard output: No space left on device\n")
