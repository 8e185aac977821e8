"""Every fuzz target on its seeds, and on the inputs that once showed a fault."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"


def load(name: str) -> ModuleType:
    return importlib.import_module(f"fuzz.targets.{name}")


NAMES = sorted(path.stem for path in (FUZZ / "targets").glob("*.py") if not path.stem.startswith("_"))
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


@pytest.mark.parametrize("call", [["container", "--input", "none"], ["--input", __file__], ["nonsense"]])
def test_a_wrong_call_is_one_line(
    call: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["run.py", *call])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("fuzz.run").main()
    assert ended.value.code == 2
    assert call[-1] in capsys.readouterr().err.splitlines()[-1]
