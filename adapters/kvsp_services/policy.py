"""The policy file: who is what, and who may do what in which scope (decision W22).

    [principals]
    "https://index.example/kvsp/" = ["index"]
    "https://h1.example/kvsp/" = ["holder"]
    "https://ii1.example/kvsp/" = ["instance", "holder"]
    "https://pc.example/kvsp/" = ["controller"]
    "spiffe://example/operators" = ["operator"]

    [scopes.6d1c6481cd428737da312c089db3832a]
    read = ["https://ii1.example/kvsp/"]
    write = ["https://ii1.example/kvsp/"]
    publish = ["https://h1.example/kvsp/", "https://ii1.example/kvsp/"]
    withdraw = ["https://ii1.example/kvsp/"]

What the file does not allow is refused. A scope with ``shared = true`` is for content that is public among
its readers, who may then learn which of it others used (SK-6); ``producers`` names those whose digests
alone count.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri
from kvsp_services.documents import DocumentError, read_toml

__all__ = ["PolicyFile", "RoleName", "ScopeRules", "read_policy_file"]

RoleName: TypeAlias = Literal["index", "holder", "instance", "controller", "front-end", "operator"]

_SCOPE_ID: Final = re.compile(r"[0-9a-f]{32}")
_SPIFFE: Final = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/[A-Za-z0-9._-]+)*")


class ScopeRules(msgspec.Struct, frozen=True):
    """Who may do what in a scope; principals by their URI."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    withdraw: tuple[str, ...] = ()
    producers: tuple[str, ...] = ()
    shared: bool = False


class PolicyFile(msgspec.Struct, frozen=True):
    """A policy as its file says it."""

    principals: dict[str, tuple[RoleName, ...]]
    scopes: dict[str, ScopeRules] = {}


def read_policy_file(path: Path) -> PolicyFile:
    """Return the policy in a file; raises `DocumentError` with the key of the first mistake."""
    policy = read_toml(path, PolicyFile)
    for principal, roles in policy.principals.items():
        _check_principal(path, f"principals.{principal!r}", principal)
        if not roles:
            raise DocumentError(f"{path}: principals.{principal!r}: names no role; remove it, or give it one")
    for scope_id, rules in policy.scopes.items():
        if not _SCOPE_ID.fullmatch(scope_id):
            raise DocumentError(
                f"{path}: scopes: a scope is named by its Scope ID, 32 lowercase hex digits;"
                " kvsp scope --scope-key-file prints it"
            )
        _check_scope(path, scope_id, rules, policy)
    return policy


def _check_scope(path: Path, scope_id: str, rules: ScopeRules, policy: PolicyFile) -> None:
    for field in ("read", "write", "publish", "withdraw", "producers"):
        for number, principal in enumerate(getattr(rules, field)):
            if principal not in policy.principals:
                raise DocumentError(
                    f"{path}: scopes.{scope_id}.{field}[{number}]: {principal} is not among the principals;"
                    " add it there with its roles"
                )


def _check_principal(path: Path, key: str, principal: str) -> None:
    if _SPIFFE.fullmatch(principal):
        return
    try:
        parse_base_uri(principal)
    except KVSPError as error:
        raise DocumentError(f"{path}: {key}: not a base URI ({error}) and not a SPIFFE ID") from None
