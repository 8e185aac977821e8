"""``kvsp`` says yes, no or how it is called, in one line, and never a secret."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvsp_client.scopes import salted_scope
from kvsp_services.cli import app

DESCRIPTOR = {
    "block_tokens": 4,
    "head_dim": 128,
    "kv_dtype": "bf16",
    "kv_heads": 8,
    "layers": 32,
    "layout": "kvsp-layout-1",
    "model": "example-model",
    "model_digest": "sha-256:254e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda",
    "positional": "rope",
    "tokenizer_digest": "sha-256:9f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c",
}
COMPAT_ID = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
TOKENS = [128000, 791, 6460, 374, 264, 1296, 315, 279]
KEYS = [
    "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b",
    "653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1",
]
HEADER = bytes.fromhex("4b564231 01000001 00000000 00000002 00000004" + 4 * "0000000000002000")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one good and one bad file of each kind, in which commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "descriptor.json").write_text(json.dumps(DESCRIPTOR))
    (tmp_path / "wrong.json").write_text(json.dumps({**DESCRIPTOR, "layers": "32"}))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "block").write_bytes(HEADER + bytes(4 * 8192))
    (tmp_path / "cut").write_bytes(HEADER + bytes(4 * 8192 - 1))
    return tmp_path


def kvsp(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = app.run(list(arguments))
    said, complained = capfd.readouterr()
    return status, said, complained


KEY_OPTIONS = ("--descriptor", "descriptor.json", "--scope-key-file", "key")


@pytest.mark.requirement("TV-1", "CD-5")
def test_compat_prints_the_published_identifier(capfd: pytest.CaptureFixture[str]) -> None:
    assert kvsp(capfd, "compat", "descriptor.json") == (0, COMPAT_ID + "\n", "")


@pytest.mark.requirement("TV-1", "SK-1")
def test_scope_prints_the_published_identifier(capfd: pytest.CaptureFixture[str]) -> None:
    expected = "6d1c6481cd428737da312c089db3832a\n"
    assert kvsp(capfd, "scope", "--scope-key-file", "key") == (0, expected, "")


@pytest.mark.requirement("SK-1")
def test_scope_prints_that_of_a_salt(capfd: pytest.CaptureFixture[str]) -> None:
    expected = salted_scope(bytes(range(32)), "salt").scope_id + "\n"
    assert kvsp(capfd, "scope", "--scope-key-file", "key", "--salt", "salt") == (0, expected, "")


@pytest.mark.requirement("TV-1", "SK-2")
def test_keys_prints_the_published_keys(capfd: pytest.CaptureFixture[str]) -> None:
    found = kvsp(capfd, "keys", *KEY_OPTIONS, "--tokens", "tokens.json")
    assert found == (0, "".join(key + "\n" for key in KEYS), "")


@pytest.mark.requirement("SK-3")
def test_a_tail_has_no_key(capfd: pytest.CaptureFixture[str], directory: Path) -> None:
    (directory / "tokens.json").write_text("[1, 2, 3]")
    assert kvsp(capfd, "keys", *KEY_OPTIONS, "--tokens", "tokens.json") == (0, "", "")


def test_inspect_shows_every_layer(capfd: pytest.CaptureFixture[str]) -> None:
    status, said, _ = kvsp(capfd, "inspect", "block")
    assert status == 0
    assert "codec name        raw" in said
    assert len([line for line in said.splitlines() if "8192" in line]) == 2


@pytest.mark.requirement("KC-5")
def test_inspect_for_programs(capfd: pytest.CaptureFixture[str]) -> None:
    status, said, _ = kvsp(capfd, "inspect", "--json", "block")
    shown = json.loads(said)
    assert status == 0
    assert shown["layer_count"] == len(shown["layers"]) == 2
    assert shown["size_bytes"] == 52 + 4 * 8192
    assert shown["layers"][0]["digest"] == "4fe7b59af6de3b665b67788cc2f99892ab827efae3a467342b3bb4e3bc8e5bfe"


def model_directory(directory: Path) -> Path:
    model = directory / "tiny-model"
    model.mkdir()
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 100000.0,
        "torch_dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "b.safetensors").write_bytes(b"second")
    (model / "a.safetensors").write_bytes(b"first")
    (model / "kvsp-fp32.safetensors").write_bytes(b"derived")
    (model / "tokenizer.json").write_bytes(b"words")
    return model


@pytest.mark.requirement("CD-3", "CD-7")
def test_compat_derives_the_descriptor_of_a_model(capfd: pytest.CaptureFixture[str], directory: Path) -> None:
    model_directory(directory)
    status, said, _ = kvsp(capfd, "compat", "--model-dir", "tiny-model")
    derived = json.loads(said)
    assert status == 0
    assert derived["model"] == "tiny-model"
    assert derived["model_digest"] == "sha-256:" + hashlib.sha256(b"firstsecond").hexdigest()
    assert derived["tokenizer_digest"] == "sha-256:" + hashlib.sha256(b"words").hexdigest()
    assert (derived["positional"], derived["kv_dtype"]) == ("rope;theta=100000", "bf16")
    assert derived["block_tokens"] == 16
    (directory / "derived.json").write_text(said)
    assert kvsp(capfd, "compat", "derived.json")[0] == 0


def test_what_a_model_is_used_with_is_part_of_its_descriptor(
    capfd: pytest.CaptureFixture[str], directory: Path
) -> None:
    model_directory(directory)
    options = ("--model", "org/tiny", "--block-tokens", "32", "--kv-dtype", "fp16")
    derived = json.loads(kvsp(capfd, "compat", "--model-dir", "tiny-model", *options)[1])
    assert (derived["model"], derived["block_tokens"], derived["kv_dtype"]) == ("org/tiny", 32, "fp16")


@pytest.mark.requirement("CD-3")
def test_an_index_says_which_files_are_weights(capfd: pytest.CaptureFixture[str], directory: Path) -> None:
    model = model_directory(directory)
    index = {"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    derived = json.loads(kvsp(capfd, "compat", "--model-dir", "tiny-model")[1])
    assert derived["model_digest"] == "sha-256:" + hashlib.sha256(b"second").hexdigest()


def test_weights_that_an_index_names_have_to_be_there(
    capfd: pytest.CaptureFixture[str], directory: Path
) -> None:
    model = model_directory(directory)
    index = {"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    status, _, complained = kvsp(capfd, "compat", "--model-dir", "tiny-model")
    assert status == 1
    assert "model.safetensors.index.json names c.safetensors, which is not there" in complained


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "*.safetensors"])
def test_an_incomplete_model_is_named(
    capfd: pytest.CaptureFixture[str], directory: Path, missing: str
) -> None:
    for path in model_directory(directory).glob(missing):
        path.unlink()
    status, _, complained = kvsp(capfd, "compat", "--model-dir", "tiny-model")
    assert status == 1
    assert missing in complained


REFUSALS = {
    "a descriptor that is wrong": (("compat", "wrong.json"), "layers"),
    "a descriptor that is no JSON": (("compat", "block"), "block"),
    "tokens that are none": (("keys", *KEY_OPTIONS, "--tokens", "descriptor.json"), "JSON array"),
    "a container cut short": (("inspect", "cut"), "cut"),
    "a container that is none": (("inspect", "key"), "key"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_no_is_1_and_one_line(capfd: pytest.CaptureFixture[str], name: str) -> None:
    arguments, reason = REFUSALS[name]
    status, said, complained = kvsp(capfd, *arguments)
    assert (status, said) == (1, "")
    assert complained.startswith("kvsp: ")
    assert complained.count("\n") == 1
    assert reason in complained


WRONG_CALLS = {
    "an unknown command": ("frobnicate",),
    "a missing option": ("keys", "--descriptor", "descriptor.json"),
    "a missing argument": ("compat",),
    "a file that is not there": ("compat", "nowhere.json"),
    "an unknown option": ("scope", "--loud"),
    "an option without what it goes with": ("compat", "descriptor.json", "--block-tokens", "8"),
    "two ways at once": ("compat", "descriptor.json", "--model-dir", "."),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_2_and_one_line(capfd: pytest.CaptureFixture[str], name: str) -> None:
    status, said, complained = kvsp(capfd, *WRONG_CALLS[name])
    assert (status, said) == (2, "")
    assert complained.count("\n") == 1
    assert "--help" in complained


def test_every_command_explains_itself(capfd: pytest.CaptureFixture[str]) -> None:
    for command in app.COMMANDS:
        status, said, _ = kvsp(capfd, command, "--help")
        assert status == 0
        assert said.startswith(f"Usage: kvsp {command}")


@pytest.mark.requirement("SK-5")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_key_is_never_said(capfd: pytest.CaptureFixture[str], directory: Path, mode: int) -> None:
    secret = b"a secret of thirty-two octets...a secret"
    (directory / "key").write_bytes(secret)
    (directory / "key").chmod(mode)
    for arguments in (("scope", "--scope-key-file", "key"), ("keys", *KEY_OPTIONS, "--tokens", "wrong.json")):
        _, said, complained = kvsp(capfd, *arguments)
        assert "secret" not in said + complained
        assert secret.hex() not in said + complained


def test_a_reader_that_goes_away_is_no_error(directory: Path) -> None:
    (directory / "tokens.json").write_text(json.dumps([7] * 400_000))
    command = [sys.executable, "-m", "kvsp_services.cli", "keys", *KEY_OPTIONS, "--tokens", "tokens.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=directory
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_other_packages_add_commands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        name = "greet"

        def load(self) -> click.Command:
            return click.Command("greet", callback=lambda: click.echo("hello"))

    def points(group: str, name: str = "greet") -> list[Point]:
        assert group == "kvsp.commands"
        return [Point()] if name == "greet" else []

    monkeypatch.setattr(app, "entry_points", points)
    assert kvsp(capfd, "greet") == (0, "hello\n", "")
    assert "greet" in kvsp(capfd, "--help")[1]
