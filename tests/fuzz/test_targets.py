"""Every fuzz target on its seeds, and on the inputs that once showed a fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fuzz_target_{name}", FUZZ / "targets" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = sorted(path.stem for path in (FUZZ / "targets").glob("*.py") if path.stem != "__init__")
FINDS = sorted((FUZZ / "finds").glob("*/*.bin"))


@pytest.mark.parametrize("name", NAMES)
def test_the_seeds_of_a_target_show_nothing(name: str) -> None:
    target = load(name)
    assert target.SEEDS
    for seed in target.SEEDS:
        target.one_input(seed)


@pytest.mark.parametrize("find", FINDS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_was_found_once_shows_nothing_any_more(find: Path) -> None:
    load(find.parent.name).one_input(find.read_bytes())
