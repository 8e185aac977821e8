"""Arguments and options that several commands have. A wrong value is said with the name of its option, and is
a wrong call (exit status 2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri
from kvsp_core.validation import check_hex, check_identifier

__all__ = [
    "BASE_URI",
    "BLOCK_KEY",
    "FILE",
    "MAP_NAME",
    "SCOPE_ID",
    "Checked",
    "controller_option",
    "counted",
    "descriptor_option",
    "holder_option",
    "holders_option",
    "index_option",
    "scope_key_option",
    "tokens_option",
]


F = TypeVar("F", bound=Callable[..., Any])


class Checked(click.ParamType):  # type: ignore[type-arg]
    """A text of a form that `check` checks, which raises `KVSPError`. `what` says what it has to be."""

    what = ""

    def check(self, value: str) -> None:
        """Raise where this is none."""
        raise NotImplementedError

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, or fail with the name of the option."""
        try:
            self.check(str(value))
        except KVSPError as error:
            self.fail(f"{str(value)!r}: {self.what or error}", param, ctx)
        return str(value)


class _BaseUri(Checked):
    name = "URI"

    def check(self, value: str) -> None:
        parse_base_uri(value)


class _BlockKey(Checked):
    name = "KEY"
    what = "a block key is 64 lowercase hex digits; kvsp keys prints it"

    def check(self, value: str) -> None:
        check_hex(value, "")


class _ScopeId(Checked):
    name = "SCOPE"
    what = "a Scope ID is 32 lowercase hex digits; kvsp scope prints it"

    def check(self, value: str) -> None:
        check_hex(value, "", 32)


class _MapName(Checked):
    name = "MAP"
    what = "the name of a split is 1 to 128 letters, digits, '-', '.', '_' and '~'"

    def check(self, value: str) -> None:
        check_identifier(value, "")


BASE_URI: Final = _BaseUri()
BLOCK_KEY: Final = _BlockKey()
SCOPE_ID: Final = _ScopeId()
MAP_NAME: Final = _MapName()
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


def _once_each(_context: click.Context, parameter: click.Parameter, uris: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(uris)) < len(uris):
        raise click.BadParameter("names one base URI twice", param=parameter)
    return uris


controller_option = click.option(
    "--controller",
    type=BASE_URI,
    envvar="KVSP_CONTROLLER",
    show_envvar=True,
    required=True,
    help="Base URI of the controller.",
)
holder_option = click.option(
    "--holder",
    type=BASE_URI,
    envvar="KVSP_HOLDER",
    show_envvar=True,
    required=True,
    help="Base URI of the holder.",
)
holders_option = click.option(
    "--holder",
    "holders",
    type=BASE_URI,
    envvar="KVSP_HOLDER",
    show_envvar=True,
    multiple=True,
    callback=_once_each,
    help="Base URI of a holder; may be given several times.",
)


def descriptor_option(*, required: bool = True) -> Callable[[F], F]:
    """Return the option that names a descriptor; the command gets `descriptor`."""
    return click.option(
        "--descriptor",
        type=click.File("rb"),
        metavar="FILE",
        envvar="KVSP_DESCRIPTOR",
        show_envvar=True,
        required=required,
        help="The Compatibility Descriptor, a JSON file; kvsp compat --model-dir derives it.",
    )


def scope_key_option(*, required: bool = True) -> Callable[[F], F]:
    """Return the option that names the file of a Scope Key; the command gets `scope_key_file`."""
    return click.option(
        "--scope-key-file",
        type=FILE,
        envvar="KVSP_SCOPE_KEY_FILE",
        show_envvar=True,
        required=required,
        help="The tenant's Scope Key: a file of at least 32 octets, or 64 hex digits.",
    )


def tokens_option(*, required: bool = True) -> Callable[[F], F]:
    """Return the option that names a file of tokens; the command gets `tokens`."""
    return click.option(
        "--tokens",
        type=click.File("rb"),
        metavar="FILE",
        required=required,
        help="The tokens: a JSON array of integers; - for standard input.",
    )


def index_option(*, required: bool) -> Callable[[F], F]:
    """Return the option that names the index, or each of its parts; the command gets `index_uris`."""
    return click.option(
        "--index",
        "index_uris",
        type=BASE_URI,
        envvar="KVSP_INDEX",
        show_envvar=True,
        multiple=True,
        required=required,
        callback=_once_each,
        help="Base URI of the index; give it once for each of its parts.",
    )


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: ``1 block``, ``2 blocks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
