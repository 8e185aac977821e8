"""Copies of objects, and hashable values for their states: what it takes to go on from a state twice.

Both walk an object's attributes. Immutable values are shared by copies. In the hashable value deadlines are
time remaining: equal values mean that the objects do the same from here on.
"""

from __future__ import annotations

import re
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Final

import attrs

from kvsp_core.roles.work import Numbers

__all__ = ["copied", "frozen"]

_PLAIN: Final = frozenset({int, str, bytes, bool, float, type(None), type, range})
_OPAQUE: Final = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, re.Pattern, Enum, type)
_POINT_IN_TIME: Final = re.compile(
    r"(?:^|_)(?:at|deadline|due|until|expiry|expires|since|next|last|started)_ms$"
)


def copied(value: Any, *, owner: object = None, new_owner: object = None) -> Any:
    """Return a copy that shares nothing that can change with the original.

    Where `owner` is referred to within, the copy refers to `new_owner`.
    """
    return _copy(value, {} if owner is None else {id(owner): (new_owner, owner)})


def frozen(value: Any, now_ms: int, *, owner: object = None) -> Hashable:
    """Return a hashable value for the state of an object.

    What has a `freeze` of its own is asked; of other objects all attributes count. An integer attribute whose
    name says that it is a point in time (``..._at_ms``, ``..._deadline_ms``) counts as its distance from
    `now_ms`. Functions stand for themselves, and so does `owner`, where it is referred to within.
    """
    return _freeze(value, "", now_ms, [] if owner is None else [id(owner)])


@lru_cache(maxsize=1024)
def _is_immutable(kind: Hashable) -> bool:
    """Return whether instances of a class never change: frozen attrs classes, as the core writes them."""
    return (
        isinstance(kind, type) and attrs.has(kind) and "frozen" in getattr(kind.__setattr__, "__name__", "")
    )


# Values of these modules hold no point in time, so they stand for themselves.
_TIMELESS: Final = frozenset(
    f"kvsp_core.{name}"
    for name in (
        "heads",
        "records",
        "messages",
        "ext_messages",
        "identity",
        "problems",
        "roles.role",
        "roles.engine",
    )
) | {"kvsp_sim.messages"}


@lru_cache(maxsize=1024)
def _is_timeless(kind: Hashable) -> bool:
    return isinstance(kind, type) and kind.__module__ in _TIMELESS and _is_immutable(kind)


@lru_cache(maxsize=1024)
def _slots(kind: Hashable) -> tuple[str, ...]:
    names: list[str] = []
    for base in getattr(kind, "__mro__", ()):
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__weakref__", "__dict__"))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            yield name, getattr(value, name)


def _copy(value: Any, done: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _OPAQUE) or _is_immutable(kind):  # type: ignore[arg-type]
        return value
    if id(value) in done:
        return done[id(value)][0]
    new: Any
    if kind is dict or kind is OrderedDict:
        new = kind()
        done[id(value)] = (new, value)
        for key, item in value.items():
            new[_copy(key, done)] = _copy(item, done)
        return new
    if kind is list or kind is deque:
        new = kind() if kind is list else deque(maxlen=value.maxlen)
        done[id(value)] = (new, value)
        new.extend(_copy(item, done) for item in value)
        return new
    new = _copy_other(value, kind, done)
    done[id(value)] = (new, value)
    return new


def _copy_other(value: Any, kind: type, done: dict[int, Any]) -> Any:
    if kind is tuple:
        return tuple(_copy(item, done) for item in value)
    if kind is set or kind is frozenset:
        return kind(_copy(item, done) for item in value)
    if kind is bytearray or kind is array:
        return value[:]
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _copy(value.__self__, done))
    if kind is partial:
        return partial(_copy(value.func, done), *_copy(value.args, done), **_copy(value.keywords, done))
    if hasattr(value, "hexdigest") or isinstance(value, types.MappingProxyType) or kind.__module__ == "numpy":
        return value.copy() if not isinstance(value, types.MappingProxyType) else value
    new: Any = object.__new__(kind)
    done[id(value)] = (new, value)
    for name, item in _attributes(value):
        object.__setattr__(new, name, _copy(item, done))
    return new


def _freeze(value: Any, name: str, now_ms: int, inside: list[int]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        if kind is int and name and _POINT_IN_TIME.search(name):
            return ("in", value - now_ms)
        plain: Hashable = value
        return plain
    if kind is Numbers:
        return ()  # counters: what is numbered by them and still open is in the state by its number
    if isinstance(value, _OPAQUE) or _is_timeless(kind):  # type: ignore[arg-type]
        itself: Hashable = value
        return itself
    if id(value) in inside:
        return ("within", len(inside) - inside.index(id(value)))
    inside.append(id(value))
    try:
        return _freeze_structure(value, name, now_ms, inside)
    finally:
        inside.pop()


def _freeze_structure(value: Any, name: str, now_ms: int, inside: list[int]) -> Hashable:
    if isinstance(value, list | tuple | deque):
        return tuple(_freeze(item, name, now_ms, inside) for item in value)
    if isinstance(value, Mapping):
        items = (
            (_freeze(key, "", now_ms, inside), _freeze(item, name, now_ms, inside))
            for key, item in value.items()
        )
        return tuple(items) if isinstance(value, OrderedDict) else frozenset(items)
    if isinstance(value, AbstractSet):
        return frozenset(_freeze(item, name, now_ms, inside) for item in value)
    if isinstance(value, bytearray | memoryview | array):
        return bytes(value)
    if isinstance(value, types.MethodType):
        return value.__func__.__qualname__, _freeze(value.__self__, "", now_ms, inside)
    if isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
        return tuple(_freeze(part, "", now_ms, inside) for part in parts)
    if hasattr(value, "hexdigest"):
        return bytes(value.digest())
    if hasattr(value, "freeze"):
        own: Hashable = value.freeze(now_ms)
        return type(value), own
    return type(value), tuple(
        (field, _freeze(item, field, now_ms, inside)) for field, item in _attributes(value)
    )
