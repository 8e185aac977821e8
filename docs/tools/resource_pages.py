"""Write the page of resources, their bodies and who may use them: docs/resources.md.

    python docs/tools/resource_pages.py           writes the page
    python docs/tools/resource_pages.py --check   exit 1 where the page is not current

Made from the tables that servers and clients read: `kvsp_core.resources.RESOURCES` and
`kvsp_core.roles.authorization.RULES`, and from the message classes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import attrs

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from whole_page import write_or_check  # noqa: E402

from kvsp_core import ext_messages, messages, records  # noqa: E402
from kvsp_core.problems import PROBLEM_TYPES  # noqa: E402
from kvsp_core.registries import JSON_MEDIA_TYPE  # noqa: E402
from kvsp_core.resources import RESOURCES, Resource  # noqa: E402
from kvsp_core.roles.authorization import RULES, Relation, Rule  # noqa: E402

PAGE = ROOT / "docs" / "resources.md"
INTRODUCTION = """# Resources, messages and permissions

What each role serves, with which bodies, and who may ask for it. This page is made by `make docs` from the
tables that servers and clients read (`kvsp_core.resources`, `kvsp_core.roles.authorization`).

Paths are relative to the base URI of the role, whatever its path. Bodies are `application/kvsp+json` where
nothing else is said, and errors `application/problem+json`; whatever is not block data is answered with
`Cache-Control: no-store`. A path that is not here is 404, another method 405 with `Allow`, a malformed
identifier, query or body 400 with the path of the member at fault, a body above its limit 413, one of another
media type, or compressed, 415. Resources under `ext/`, and members marked so, are ours: nobody else needs
them to interoperate ([W30 to W33](decisions.md#our-own-resources-and-members)).

```python
from kvsp_core.answers import json_response, read_answer
from kvsp_core.messages import LeaseGranted, LeaseRequest
from kvsp_core.resources import CreateLease, RoleName, Router, request_for

request, octets = request_for(CreateLease(), LeaseRequest(block_keys=("ab" * 32,), ttl_ms=2000))
assert (request.method, request.path, request.content_length) == ("POST", "leases", len(octets))
assert Router([RoleName.HOLDER]).route(request) == CreateLease()  # what a server makes of it

response, octets = json_response(LeaseGranted(lease="x7Kq", ttl_ms=2000), 201, location="leases/x7Kq")
assert read_answer(LeaseGranted, response, octets) == LeaseGranted(lease="x7Kq", ttl_ms=2000)  # a client
```
"""


def _size(octets: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if octets >= factor:
            return f"{octets // factor} {unit}"
    return str(octets)


def _name(kind: object) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(_name(member) for member in get_args(kind))
    name = getattr(kind, "__name__", str(kind))
    return f"[{name}](#{name.lower()})" if name in _shown() else name


def _shown() -> dict[str, type]:
    found = {}
    for module in (records, messages, ext_messages):
        for name in module.__all__:
            if attrs.has(kind := getattr(module, name)):
                found[name] = kind
    return found


def _body(row: Resource) -> str:
    if not row.limit_bytes:
        return ""
    what = _name(row.body) if row.body is not None else f"`{row.body_type}`"
    optional = "" if row.body_required else ", or none"
    return f"{what}{optional}; at most {_size(row.limit_bytes)}"


def _answer(row: Resource) -> str:
    if row.answer is not None:
        return _name(row.answer)
    return "" if row.answer_type == JSON_MEDIA_TYPE else f"`{row.answer_type}`"


def _who(rule: Rule) -> str:
    roles = ", ".join(sorted(role.value for role in rule.roles))
    relation = {
        Relation.ANYBODY: "",
        Relation.ITSELF: ", for itself",
        Relation.OWNER: ", for its own",
        Relation.DELEGATE: ", as a delegate",
    }
    permission = f", with *{rule.permission.value}* in the scope" if rule.permission else ""
    return f"{roles}{relation[rule.relation]}{permission}"


def _resources() -> Iterator[str]:
    yield "## Resources\n"
    yield "| role | method and path | body | answer | who may |"
    yield "|---|---|---|---|---|"
    for row in RESOURCES:
        roles = ", ".join(role.value for role in row.roles)
        query = "?" + "&".join(row.query) if row.query else ""
        who = "; ".join(_who(rule) for rule in RULES[row.operation])
        yield f"| {roles} | `{row.method} {row.path}{query}` | {_body(row)} | {_answer(row)} | {who} |"
    yield ""
    yield "What needs a permission in a scope that only the role knows, such as that of a session, is"
    yield "answered for everybody else as if it were not there. A lease belongs to who took it, a checkpoint"
    yield "to who owns the session."


def _problems() -> Iterator[str]:
    yield "## Problem types\n"
    yield "| type | status | meaning |"
    yield "|---|---|---|"
    for kind in PROBLEM_TYPES.values():
        yield f"| `{kind.suffix}` | {kind.status} | {kind.title} |"


def _type(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _type(get_args(kind)[0])
    if isinstance(kind, types.UnionType):
        return " or ".join(_type(member) for member in get_args(kind))
    if get_origin(kind) is tuple:
        inner = [member for member in get_args(kind) if member is not Ellipsis]
        return f"array of {_type(inner[0])}" if len(inner) == 1 else f"[{', '.join(map(_type, inner))}]"
    plain = {str: "string", int: "integer", float: "number", bool: "boolean", bytes: "base64"}
    plain[types.NoneType] = "null"
    if get_origin(kind) is not None:
        return "object"
    return plain.get(kind) or _name(kind)


def _messages() -> Iterator[str]:
    yield "## Records and messages\n"
    yield "A member with a default may be left out; null stands for one that is left out."
    for name, kind in sorted(_shown().items()):
        hints = get_type_hints(kind, include_extras=True)
        yield f"\n### {name}\n"
        yield " ".join((kind.__doc__ or "").split())
        yield "\n| member | type | |"
        yield "|---|---|---|"
        for field in attrs.fields(kind):
            optional = "" if field.default is attrs.NOTHING else "optional"
            yield f"| `{field.name.rstrip('_')}` | {_type(hints[field.name])} | {optional} |"


def page() -> str:
    """Return the text of the page."""
    parts = (_resources(), _problems(), _messages())
    return "\n\n".join([INTRODUCTION.rstrip(), *("\n".join(part) for part in parts)]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is current."""
    return write_or_check(PAGE, page, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
