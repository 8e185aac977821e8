"""The core decides and nothing else: no clock, entropy, I/O, thread, logger or global mutable state.

The check reads the source as a syntax tree, so it holds for code that no test runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "kvsp_core"

# What the core may import, by the first part of the name; everything else is refused.
STANDARD_LIBRARY = {
    *("__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "contextlib", "copy"),
    *("dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "hmac", "http", "ipaddress"),
    *("itertools", "json", "math", "operator", "re", "string", "struct", "sys", "types", "typing"),
    *("urllib", "uuid"),
}
THIRD_PARTY = {"attrs", "msgspec", "numpy", "rfc8785"}
ONLY_IN = {"ml_dtypes": {"layout.py"}}
# Of modules that are pure in part, only these names.
ONLY_NAMES = {
    "http": {"HTTPStatus"},
    "sys": {"byteorder", "maxsize", "getsizeof"},
    "urllib": {"parse"},
    "urllib.parse": None,
    "uuid": {"UUID"},
}
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "globals", "id"}
FORBIDDEN_ATTRIBUTES = {"uuid1", "uuid4", "urandom", "getLogger", "random", "now", "utcnow", "today"}
CACHES = {"cache", "lru_cache", "cached_property"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "count",
}


def imports(tree: ast.AST, file: str) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"{node.lineno}: a relative import"
            names = [(node.module or "", alias.name) for alias in node.names]
        for module, name in names:
            root = module.split(".")[0]
            if root == "kvsp_core":
                continue
            if root not in STANDARD_LIBRARY | THIRD_PARTY and file not in ONLY_IN.get(root, ()):
                yield f"{node.lineno}: imports {module}"
            allowed = ONLY_NAMES.get(module)
            if allowed is not None and name not in allowed:
                yield f"{node.lineno}: takes {name or 'all'} from {module}"


def called_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def impure_use(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: a global statement"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{node.lineno}: calls {node.func.id}"
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            yield f"{node.lineno}: uses .{node.attr}"
        if isinstance(node, ast.FunctionDef):
            cached = [d for d in node.decorator_list if called_name(d) in CACHES]
            if cached:
                yield f"{node.lineno}: {node.name} keeps a cache between calls"


def shared_state(tree: ast.Module) -> Iterator[str]:
    """Values that could change and that a module or a class shares between all users."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            mutable = isinstance(node.value, MUTABLE) or (
                isinstance(node.value, ast.Call) and called_name(node.value) in MUTABLE_CALLS
            )
            if mutable and not names <= {"__all__", "__slots__", "__match_args__"}:
                yield f"{node.lineno}: {', '.join(sorted(names))} is mutable and shared"


def violations(source: str, file: str = "module.py") -> list[str]:
    tree = ast.parse(source)
    return [*imports(tree, file), *impure_use(tree), *shared_state(tree)]


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(CORE)))
def test_core_is_pure(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), path.name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import random",
        "import secrets",
        "import os",
        "import socket",
        "import threading",
        "import asyncio",
        "import logging",
        "import ml_dtypes",
        "from . import errors",
        "from uuid import uuid4",
        "import uuid",
        "from http import client",
        "print('x')",
        "def f(p):\n    return open(p)",
        "def f(np):\n    return np.random.default_rng()",
        "CACHE = {}",
        "CACHE: dict[str, int] = dict()",
        "SEEN = set()",
        "import collections\nQ = collections.deque()",
        "class A:\n    all_of_them = []",
        "def f():\n    global n",
        "import functools\n@functools.lru_cache(maxsize=9)\ndef f(x):\n    return x",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "from uuid import UUID",
        "from http import HTTPStatus",
        "from sys import byteorder",
        "__all__ = ['a']",
        "A = (1, 2)",
        "from types import MappingProxyType\nA = MappingProxyType({1: 2})",
        "def f():\n    seen = set()\n    return seen",
    ],
)
def test_the_check_allows(source: str) -> None:
    assert violations(source) == []
