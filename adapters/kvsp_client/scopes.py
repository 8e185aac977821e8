"""Scopes within a tenant: engines keep requests with different cache salts apart, and so does KVSP."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from kvsp_core.identity import Scope

__all__ = ["salted_scope"]

_LABEL: Final = b"KVSP-CACHE-SALT-1\0"


def salted_scope(scope_key: bytes, salt: str) -> Scope:
    """Return the scope of requests with a cache salt: one of its own, which only holders of the key can name.

    Its key is HMAC-SHA-256 under the tenant's Scope Key, of a label and the salt in UTF-8. The policy has to
    list its Scope ID like any other; ``kvsp scope --salt`` prints it.
    """
    key = hmac.new(scope_key, _LABEL + salt.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()
    return Scope(key)
