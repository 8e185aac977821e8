"""Write the reference of settings: docs/configuration.md.

    python docs/tools/configuration_page.py           writes the page
    python docs/tools/configuration_page.py --check   exit 1 where the page is not current

Made from the classes that files and engines' settings are read into, and from what stands under each class
and key there.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import inspect as types

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "adapters")]

from kvsp_client.backend_settings import BackendSettings, ChunkSettings, Deployment  # noqa: E402
from kvsp_client.vllm.settings import Settings  # noqa: E402
from kvsp_core.validation import MAX_INTEGER  # noqa: E402
from kvsp_services.config import LIMITS, Config, ModelSection, RoleSection  # noqa: E402
from kvsp_services.policy import PolicyFile, PolicyScope  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
INTRODUCTION = f"""# Configuration

Every key of the files that `kvsp serve` reads and of the settings of engines, with type, default and meaning.
This page is made by `make docs` from the classes that they are read into. Whole files to begin with are in
[Running it](operations.md#configuration).

- A key that is unknown is refused with the one that was meant, and one of another type with what is allowed.
  `kvsp serve CONFIG.toml --check` reads the file and those that it names, and starts nothing.
- Sizes are octets and durations milliseconds. Integers go up to 2^{MAX_INTEGER.bit_length()} - 1 where no
  other bound is given.
- Paths are relative to the directory of the file, those of engines to where the engine was started.
- **SIGHUP** stands at keys that the process reads again at this signal; every other one takes a restart.
"""
_UNITS = {
    "_ms": "ms",
    "_us": "µs",
    "_bytes": "octets",
    "mbit_per_s": "Mbit/s",
    "tokens_per_s": "tokens/s",
    "_tokens": "tokens",
}


def _words(kind: type) -> dict[str, str]:
    """Return what stands under each key of a class in its source; every key has to say something."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field, under in zip(made.body, made.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(under.value, ast.Constant)
            found[field.target.id] = " ".join(str(under.value.value).split())
    return found


def _type(key: str, kind: types.Type) -> str:
    match kind:
        case types.UnionType(types=members):
            return " or ".join(_type(key, m) for m in members if not isinstance(m, types.NoneType))
        case types.IntType(ge=least, le=most):
            unit = next((f", {unit}" for suffix, unit in _UNITS.items() if key.endswith(suffix)), "")
            return f"integer{unit}, {least}" + (f" to {most}" if most != MAX_INTEGER else " or more")
        case types.LiteralType(values=words):
            return " or ".join(f"`{word}`" for word in words)
        case types.EnumType(cls=words):
            return " or ".join(f"`{word.value}`" for word in words)
        case types.ListType(item_type=inner) | types.VarTupleType(item_type=inner):
            return f"list of {_type(key, inner)}"
        case types.DictType(value_type=inner):
            return f"table of {_type(key, inner)}"
        case types.StructType():
            return "table"
        case types.BoolType():
            return "true or false"
        case types.StrType():
            endings = {"_file": "file", "_files": "files", "_dir": "directory", "directory": "directory"}
            return next((what for ending, what in endings.items() if key.endswith(ending)), "text")
        case _:
            raise AssertionError(f"{key}: the page has no words for {kind}")


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    match value:
        case None | "":
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case int():
            return f"`{value:_}`" if value > 9999 else f"`{value}`"
        case str():
            return f'`"{value}"`'
        case _:
            return "none"


def _table(title: str, kind: type[msgspec.Struct], *, at_sighup: tuple[str, ...] = ()) -> Iterator[str]:
    """Go through the lines about the keys that a class has of its own, but for those that are sections."""
    info, words = types.type_info(kind), _words(kind)
    assert isinstance(info, types.StructType)
    yield f"### {title}\n"
    yield " ".join((kind.__doc__ or "").split()) + "\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for field in info.fields:
        if field.name in kind.__annotations__ and _section(field.type) is None:
            said = " ".join([*(["**SIGHUP**."] if field.name in at_sighup else ()), words[field.name]])
            yield f"| `{field.name}` | {_type(field.name, field.type)} | {_default(field)} | {said.strip()} |"
    yield ""


def _section(kind: types.Type) -> type[msgspec.Struct] | None:
    """Return the class of a section that a key of this type is."""
    match kind:
        case types.UnionType(types=members):
            return next((found for member in members if (found := _section(member))), None)
        case types.ListType(item_type=types.StructType(cls=found)) | types.StructType(cls=found):
            return found
        case _:
            return None


def _sections(kind: type[msgspec.Struct], within: str = "") -> Iterator[tuple[type[msgspec.Struct], str]]:
    """Go through the sections below a class, each with how it is written in a file."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    for field in info.fields:
        if found := _section(field.type):
            name = within + field.name
            yield found, f"[[{name}]]" if isinstance(field.type, types.ListType) else f"[{name}]"
            yield from _sections(found, f"{name}.")


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "## A process: `kvsp serve CONFIG.toml`\n"
    yield from _table("The process", Config)
    yield from _table("Every role", RoleSection)
    yield from _table("`[instance]` and `[front_end]`, in common", ModelSection)
    titles: dict[type[msgspec.Struct], list[str]] = {}
    for kind, title in _sections(Config):
        titles.setdefault(kind, []).append(title)
    for kind, written in titles.items():
        limits = LIMITS.get(written[0].strip("[]"), ())
        yield from _table(", ".join(f"`{title}`" for title in written), kind, at_sighup=limits)
    yield "## The policy: `policy_file`\n"
    yield from _table("The tables", PolicyFile)
    yield from _table("`[scopes.SCOPE_ID]`", PolicyScope)
    yield "## Engines\n"
    yield from _table("Every engine", Deployment)
    yield from _table("vLLM, in `kv_connector_extra_config`", Settings)
    yield from _table("SGLang, in `kvsp`, and LMCache, in `adapter_params`", BackendSettings)
    yield from _table("LMCache", ChunkSettings)


def page() -> str:
    """Return the text of the page."""
    return "\n".join(_lines()).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is current."""
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the classes say now; run make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
