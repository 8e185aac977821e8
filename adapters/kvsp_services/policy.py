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

    [delegates]
    "https://ii1.example/kvsp/" = ["https://h1.example/kvsp/"]

What stands under a class or a key is what docs/configuration.md says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_services.documents import DocumentError, read_toml

__all__ = ["PolicyFile", "PolicyScope", "read_policy"]

_SCOPE_ID: Final = re.compile(r"[0-9a-f]{32}")
_SPIFFE: Final = re.compile(r"spiffe://[a-z0-9._-]{1,255}(?:/[A-Za-z0-9._-]+)*")


class PolicyScope(msgspec.Struct, frozen=True):
    """Who may do what in a scope, which is named by its Scope ID: lists of principals."""

    read: tuple[str, ...] = ()
    """Look up, fetch and lease its blocks, run sessions in it. Whoever reads can find out whether somebody
    else had the same prefix."""
    write: tuple[str, ...] = ()
    """Store blocks at a holder."""
    publish: tuple[str, ...] = ()
    """Publish records, and be trusted to serve what they say."""
    withdraw: tuple[str, ...] = ()
    """Withdraw records of others whose blocks are bad."""
    producers: tuple[str, ...] = ()
    """Where any are named, only their digests count."""
    shared: bool = False
    """For what is public among its readers, who may learn which of it others used (SK-6)."""
    purged: bool = False
    """Roles delete all that they have of it, and nobody may do anything in it any more."""


class PolicyFile(msgspec.Struct, frozen=True):
    """Who is what. What the file does not allow is refused."""

    principals: dict[str, tuple[RoleName, ...]]
    """For the URI of a certificate, a base URI or a SPIFFE ID, what it is."""
    scopes: dict[str, PolicyScope] = {}
    """For a Scope ID, which `kvsp scope` prints, who may do what."""
    delegates: dict[str, tuple[str, ...]] = {}
    """For a principal the holders whose records it may publish and withdraw beside its own."""


def read_policy(path: Path) -> Policy:
    """Return the policy in a file; raises `DocumentError` with the key of the first mistake."""
    file = read_toml(path, PolicyFile)
    for principal, roles in file.principals.items():
        key = f"principals.{principal!r}"
        if not _is_principal(principal):
            raise DocumentError(f"{path}: {key}: expected a base URI, https and ending in /, or a SPIFFE ID")
        if not roles:
            raise DocumentError(f"{path}: {key}: names no role; remove it, or give it one")
    for scope_id, scope in file.scopes.items():
        if not _SCOPE_ID.fullmatch(scope_id):
            raise DocumentError(
                f"{path}: scopes: a scope is named by its Scope ID, 32 lowercase hex digits;"
                " kvsp scope --scope-key-file prints it"
            )
        for field in ("read", "write", "publish", "withdraw", "producers"):
            if scope.purged and getattr(scope, field):
                raise DocumentError(
                    f"{path}: scopes.{scope_id}.{field}: nobody may do anything in a purged scope; remove it"
                )
            _check_known(path, f"scopes.{scope_id}.{field}", getattr(scope, field), file)
    _check_known(path, "delegates", file.delegates, file)
    for principal, holders in file.delegates.items():
        for number, holder in enumerate(holders):
            if not _is_base_uri(holder):
                raise DocumentError(f"{path}: delegates.{principal!r}[{number}]: expected a base URI")
    rules = {scope_id: ScopeRules(**msgspec.structs.asdict(scope)) for scope_id, scope in file.scopes.items()}
    return Policy(file.principals, rules, file.delegates)


def _check_known(path: Path, key: str, principals: Iterable[str], file: PolicyFile) -> None:
    for number, principal in enumerate(principals):
        if principal not in file.principals:
            raise DocumentError(
                f"{path}: {key}[{number}]: {principal} is not among the principals;"
                " add it there with its roles"
            )


def _is_principal(principal: str) -> bool:
    return _SPIFFE.fullmatch(principal) is not None or _is_base_uri(principal)


def _is_base_uri(uri: str) -> bool:
    try:
        parse_base_uri(uri)
    except KVSPError:
        return False
    return True
