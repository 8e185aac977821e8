"""Copies share nothing that can change, and equal states have equal hashable values."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from functools import partial

import attrs
import pytest

from kvsp_sim.snapshot import copied, frozen


@attrs.frozen
class Value:
    number: int


class Box:
    __slots__ = ("content", "due_ms", "owner")

    def __init__(self, content: object, due_ms: int = 0) -> None:
        self.content = content
        self.due_ms = due_ms
        self.owner = self

    def call(self) -> object:
        return self.content


@pytest.mark.parametrize(
    "content",
    [
        {"a": [1]},
        [1, {2}],
        deque([1]),
        OrderedDict(b=1, a=2),
        array("I", [1, 2]),
        bytearray(b"x"),
        {(1, 2), (3, 4)},
        ([1], Value(3)),
        hashlib.sha256(b"x"),
    ],
)
def test_a_copy_is_equal_and_apart(content: object) -> None:
    box = Box(content)
    new = copied(box)
    assert frozen(new, 0) == frozen(box, 0)
    assert new is not box
    assert new.owner is new
    if not isinstance(content, tuple | set):
        assert new.content is not content


def test_immutable_values_are_shared() -> None:
    value = Value(3)
    assert copied([value])[0] is value


def test_a_copied_method_belongs_to_the_copy() -> None:
    box = Box([1])
    method, wrapped = copied((box.call, partial(box.call)))
    method().append(2)
    assert wrapped() == [1, 2]
    assert box.content == [1]


def test_a_copied_function_is_about_the_copy() -> None:
    box = Box([1])
    box.owner = lambda: box.content  # type: ignore[assignment,return-value]
    new = copied(box)
    new.content.append(2)
    assert new.owner() == [1, 2]
    assert box.owner() == [1]  # type: ignore[operator]


def test_a_function_made_again_is_the_same() -> None:
    def made(number: int) -> Box:
        box = Box(0)
        box.content = lambda: (number, box.content)
        return box

    assert frozen(made(1), 0) == frozen(made(1), 0)
    assert frozen(made(1), 0) != frozen(made(2), 0)


def test_a_change_changes_the_value() -> None:
    box = Box({"a": [1]})
    before = frozen(box, 0)
    hash(before)
    box.content["a"].append(2)  # type: ignore[index]
    assert frozen(box, 0) != before


def test_deadlines_are_what_remains() -> None:
    assert frozen(Box(1, due_ms=10), 4) == frozen(Box(1, due_ms=106), 100)
    assert frozen(Box(1, due_ms=10), 4) != frozen(Box(1, due_ms=10), 5)
    assert frozen(Box(7, due_ms=10), 4) != frozen(Box(1, due_ms=10), 4)


def test_what_freezes_itself_is_asked() -> None:
    class Own:
        def freeze(self, now_ms: int) -> object:
            return ("own", now_ms)

    assert ("own", 5) in frozen([Own()], 5)[0]  # type: ignore[index]


def test_settings_are_no_points_in_time() -> None:
    @attrs.frozen
    class PatienceSettings:
        deadline_ms: int

    assert frozen(PatienceSettings(5), 4) == frozen(PatienceSettings(5), 40)
