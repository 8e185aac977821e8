"""Every module says what it offers, and everything it promises is there."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "kvsp_core", *sorted((ROOT / "adapters").glob("kvsp_*"))]


def module_names() -> list[str]:
    names = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("name", module_names())
def test_all_is_declared_and_true(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvsp_"):
            raise
        pytest.skip(f"{name} needs {error.name}, which is optional")
    promised = getattr(module, "__all__", None)
    if promised is None and not any(hasattr(v, "__module__") for k, v in vars(module).items() if k[0] != "_"):
        return  # a package of modules, which offers nothing itself
    assert promised is not None, f"{name} has no __all__"
    assert len(promised) == len(set(promised)), f"{name} names something twice"
    assert [n for n in promised if not hasattr(module, n)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_package_is_typed(package: Path) -> None:
    assert (package / "py.typed").is_file(), f"{package.name} has no py.typed; users' type checkers ignore it"
