"""Copies of objects, and hashable values for their states: what it takes to go on from a state twice.

Both walk an object's attributes. Immutable values are shared by copies. In the hashable value deadlines are
time remaining: equal values mean that the objects do the same from here on.
"""

from __future__ import annotations

import re
import struct
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Final

import attrs

from kvsp_core.resources import Router
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.work import Numbers

__all__ = ["CallNumber", "copied", "frozen"]


class CallNumber(int):
    """The number of a call, told from other numbers, so that it can count in a state as what it stands for.

    The numbers that follow it are such numbers too.
    """

    __slots__ = ()

    def __add__(self, more: int) -> CallNumber:
        """Return the number that follows after so many."""
        return CallNumber(int(self) + more)


_PLAIN: Final = frozenset({int, str, bytes, bool, float, type(None), type, range})
_OPAQUE: Final = (
    *(types.BuiltinFunctionType, types.ModuleType, re.Pattern, Enum, type),
    *(struct.Struct, Policy, Router),
)
_POINT_IN_TIME: Final = re.compile(
    r"(?:^|_)(?:at|asked|began|deadline|due|expires|expiry|joined|last|next|since|started|until)_ms$"
)


def copied(
    value: Any,
    *,
    owner: object = None,
    new_owner: object = None,
    renew: Mapping[type, Callable[[Any], Any]] = types.MappingProxyType({}),
) -> Any:
    """Return a copy that shares nothing that can change with the original.

    Where `owner` is referred to within, the copy refers to `new_owner`. Of the types in `renew` the copy is
    what the function makes of the original.
    """
    return _copy(value, {} if owner is None else {id(owner): (new_owner, owner)}, renew)


def frozen(
    value: Any,
    now_ms: int,
    *,
    owner: object = None,
    calls: Mapping[int, Hashable] = types.MappingProxyType({}),
) -> Hashable:
    """Return a hashable value for the state of an object.

    What has a `freeze` of its own is asked; of other objects all attributes count. An integer attribute whose
    name says that it is a point in time (``..._at_ms``, ``..._deadline_ms``) counts as its distance from
    `now_ms`, but in settings. `owner` stands for itself, where it is referred to within. Of a method only the
    name counts, and of a function its code and the plain values around it: what they are bound to is a part
    of the state by itself. A `CallNumber` counts as what `calls` has for it: which numbers calls were given
    makes no difference where each stands for the same wherever it is found.
    """
    return _Freezing(now_ms, owner, calls).freeze(value)


@lru_cache(maxsize=1024)
def _is_immutable(kind: Hashable) -> bool:
    """Return whether instances of a class never change: frozen attrs classes, as the core writes them."""
    return (
        isinstance(kind, type) and attrs.has(kind) and "frozen" in getattr(kind.__setattr__, "__name__", "")
    )


@lru_cache(maxsize=1024)
def _is_shared(kind: Hashable) -> bool:
    """Return whether copies share the instances of a class."""
    if not isinstance(kind, type):
        return False
    plain = kind in _PLAIN or kind is CallNumber
    return plain or issubclass(kind, _OPAQUE) or _is_immutable(kind)  # type: ignore[arg-type]


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
        "resources",
        "machines.reshard_plan",
        "roles.role",
        "roles.engine",
    )
) | {"kvsp_sim.messages"}


@lru_cache(maxsize=1024)
def _is_timeless(kind: Hashable) -> bool:
    return isinstance(kind, type) and kind.__module__ in _TIMELESS and _is_immutable(kind)


@lru_cache(maxsize=1024)
def _is_itself(kind: Hashable) -> bool:
    """Return whether the instances of a class stand for themselves."""
    if not isinstance(kind, type):
        return False
    return issubclass(kind, _OPAQUE) or _is_timeless(kind)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _is_point_in_time(name: str) -> bool:
    return _POINT_IN_TIME.search(name) is not None


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


def _copy(value: Any, done: dict[int, Any], renew: Mapping[type, Callable[[Any], Any]]) -> Any:
    kind = type(value)
    if _is_shared(kind):  # type: ignore[arg-type]
        return value
    if id(value) in done:
        return done[id(value)][0]
    new: Any
    if kind is dict or kind is OrderedDict:
        new = kind()
        done[id(value)] = (new, value)
        for key, item in value.items():
            new[_copy(key, done, renew)] = _copy(item, done, renew)
        return new
    if kind is list or kind is deque:
        new = kind() if kind is list else deque(maxlen=value.maxlen)
        done[id(value)] = (new, value)
        new.extend(_copy(item, done, renew) for item in value)
        return new
    new = renew[kind](value) if kind in renew else _copy_other(value, kind, done, renew)
    done[id(value)] = (new, value)
    return new


def _copy_other(
    value: Any, kind: type, done: dict[int, Any], renew: Mapping[type, Callable[[Any], Any]]
) -> Any:
    if kind is tuple:
        return tuple(_copy(item, done, renew) for item in value)
    if kind is set or kind is frozenset:
        return kind(_copy(item, done, renew) for item in value)
    if kind is bytearray or kind is array:
        return value[:]
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _copy(value.__self__, done, renew))
    if kind is types.FunctionType:
        return _copy_closure(value, done, renew)
    if kind is partial:
        parts = (value.func, value.args, value.keywords)
        function, arguments, named = (_copy(part, done, renew) for part in parts)
        return partial(function, *arguments, **named)
    if hasattr(value, "hexdigest") or isinstance(value, types.MappingProxyType) or kind.__module__ == "numpy":
        return value.copy() if not isinstance(value, types.MappingProxyType) else value
    new: Any = object.__new__(kind)
    done[id(value)] = (new, value)
    for name, item in _attributes(value):
        object.__setattr__(new, name, _copy(item, done, renew))
    return new


def _copy_closure(
    value: types.FunctionType, done: dict[int, Any], renew: Mapping[type, Callable[[Any], Any]]
) -> types.FunctionType:
    """Return a function over copies of what it refers to around it."""
    if not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    done[id(value)] = (new, value)
    for cell, around in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = _copy(around.cell_contents, done, renew)
    return new


class _Freezing:
    """One call of `frozen`: what is being frozen just now, and what was, so that it is done once."""

    def __init__(self, now_ms: int, owner: object, calls: Mapping[int, Hashable]) -> None:
        self.now_ms = now_ms
        self._calls = calls
        self._inside = [] if owner is None else [id(owner)]
        self._references = 0  # to what is being frozen
        self._done: dict[tuple[int, str], Hashable] = {}

    def freeze(self, value: Any, name: str = "") -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            if kind is int and name and _is_point_in_time(name):
                return ("in", value - self.now_ms)
            plain: Hashable = value
            return plain
        if kind is CallNumber:
            return ("call", self._calls.get(value, int(value)))
        if kind is Numbers:
            return ()  # counters: what is numbered by them and still open is in the state by its number
        if kind is Router or kind is Policy:
            return kind.__name__  # in one exploration those of a role are all alike
        if kind is struct.Struct:
            return kind, value.format
        if _is_itself(kind):  # type: ignore[arg-type]
            itself: Hashable = value
            return itself
        if kind is types.MethodType:
            return ("method", value.__func__.__qualname__)
        known = (id(value), name)
        if known in self._done:
            return self._done[known]
        inside = self._inside
        if known[0] in inside:
            self._references += 1
            return ("within", len(inside) - inside.index(known[0]))
        before = self._references
        inside.append(known[0])
        try:
            result = self._structure(value, name)
        finally:
            inside.pop()
        if self._references == before:
            self._done[known] = result
        return result

    def _structure(self, value: Any, name: str) -> Hashable:
        freeze = self.freeze
        if type(value) is dict:
            return frozenset([(freeze(key), freeze(item, name)) for key, item in value.items()])
        if isinstance(value, (list, tuple, deque)):  # a union is slower
            return tuple([freeze(item, name) for item in value])
        if isinstance(value, Mapping):
            items = [(freeze(key), freeze(item, name)) for key, item in value.items()]
            return tuple(items) if isinstance(value, OrderedDict) else frozenset(items)
        if isinstance(value, AbstractSet):
            return frozenset([freeze(item, name) for item in value])
        if isinstance(value, bytearray | memoryview | array):
            return bytes(value)
        if isinstance(value, types.FunctionType):
            around = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, tuple([each for each in around if type(each) in _PLAIN])
        if isinstance(value, partial):
            return tuple([freeze(part) for part in (value.func, value.args, value.keywords)])
        if hasattr(value, "hexdigest"):
            return bytes(value.digest())
        if hasattr(value, "freeze"):
            own: Hashable = value.freeze(self.now_ms)
            return type(value), own
        lasts = type(value).__name__.endswith("Settings")  # what they say of time is how long it is
        return type(value), tuple(
            [(field, freeze(item, "" if lasts else field)) for field, item in _attributes(value)]
        )
