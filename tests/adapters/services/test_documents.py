"""A mistake in a TOML file is one line with the file, the key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_services.documents import DocumentError, read_toml


class Tier(msgspec.Struct):
    name: Literal["host", "local-storage"]
    capacity_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Example(msgspec.Struct):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tiers: list[Tier] = msgspec.field(default_factory=list)
    main: Tier | None = None
    scopes: dict[str, Tier] = msgspec.field(default_factory=dict)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(text)
    return path


def test_a_good_document_is_typed(tmp_path: Path) -> None:
    text = 'port = 1\n[[tiers]]\nname = "host"\n[main]\nname = "host"\ncapacity_bytes = 5\n'
    assert read_toml(write(tmp_path, text), Example) == Example(1, [Tier("host")], Tier("host", 5))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1\nport", "at end of document"),
        ("port 1\nx = 2", "line 1"),
        ("", "missing: port"),
        ('port = "x"', "port: expected an integer, found text"),
        ("port = 0", "port: expected an integer >= 1"),
        ("prot = 1", "prot: unknown; did you mean port?"),
        ("port = 1\nzebra = 2", "zebra: unknown; known are main, port, scopes, tiers"),
        (
            'port = 1\n[[tiers]]\nname = "attic"',
            "tiers[0].name: 'attic' is unknown; known are host, local-storage",
        ),
        (
            'port = 1\n[[tiers]]\nname = "host"\ncapacity = 1',
            "tiers[0].capacity: unknown; did you mean capacity_b",
        ),
        ("port = 1\n[main]\n", "main: missing: name"),
        ('port = 1\n[scopes.a]\nnane = "host"', "scopes.a.nane: unknown; did you mean name?"),
        ('"a\\nb" = 1', "a b: unknown"),
        ("port = 1\ntiers = 3", "tiers: expected a list, found an integer"),
        ("port = 1\nmain = 1.5", "main: expected a section, found a number"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read_toml(write(tmp_path, text), Example)
    message = str(caught.value)
    assert "example.toml: " in message
    assert said in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere\.toml: No such file"):
        read_toml(tmp_path / "nowhere.toml", Example)


@given(octets=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_octets_are_a_document_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, octets: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(octets)
    with pytest.raises(DocumentError):
        read_toml(path, Example)
