"""What an object shows of itself never shows what is confidential, whatever class it has."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import kvsp_core
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.prefix import PrefixKeys

CONFIDENTIAL = frozenset(
    {
        *("block_key", "block_keys", "key", "keys", "layer_digests", "map_id"),
        *("session", "prompt", "prompt_keys", "prompt_tail", "prompt_blocks", "generated", "token"),
        *("request_ref", "scope_id", "compat_id", "shared_keys", "shared_scopes", "queries"),
        *("lease", "leases", "unleased", "unasked", "loaded", "waiting", "claims"),
    }
)
SHOWN = (CompatibilityDescriptor, Scope, PrefixKeys)
"""They show who they are, which is not confidential by itself: a program has few of them."""


def classes() -> Iterator[type[Any]]:
    for module in pkgutil.walk_packages(kvsp_core.__path__, "kvsp_core."):
        for each in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(each) and each.__module__ == module.name and attrs.has(each):
                yield each


@pytest.mark.parametrize("kind", sorted(set(classes()), key=lambda kind: (kind.__module__, kind.__name__)))
def test_no_class_shows_what_is_confidential(kind: type[Any]) -> None:
    if kind in SHOWN or "__repr__" not in vars(kind):
        return
    shown = [
        field.name
        for field in attrs.fields(kind)
        if field.repr
        and field.name in CONFIDENTIAL
        # Counts and positions are not, nor is who a coordinator waits for.
        and ("str" in str(field.type) or "tuple[int, ..." in str(field.type))
        and "frozenset[str]" not in str(field.type)
    ]
    assert shown == []
