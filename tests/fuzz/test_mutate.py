"""The runner of planted faults tells a test that sees a fault from one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import mutate

CODE = "def double(n):\n    return n * 2\n"
TEST = """import sys
sys.path.insert(0, ".")
from code_under_test import double

def test_x():
    assert double({}) == 4
"""
PATCH = """# test: {test}
--- a/code_under_test.py
+++ b/code_under_test.py
@@ -1,2 +1,2 @@
 def double(n):
-    return n * {old}
+    return n * {new}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one function with one test, whose only test value is 2."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST.format(2))
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "MUTATIONS", tmp_path / "faults")
    monkeypatch.setattr(mutate, "COPIED", ("code_under_test.py", "test_code.py"))
    return tmp_path


def plant(project: Path, name: str, *, old: str = "2", new: str, test: str = "test_code.py::test_x") -> None:
    (project / "faults" / f"{name}.patch").write_text(PATCH.format(test=test, old=old, new=new))


def test_a_fault_that_the_test_sees(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(project, "AA-1", new="3")
    assert mutate.main(["--all", "--jobs", "1"]) == 0
    assert "seen    AA-1" in capsys.readouterr().out
    assert (project / "code_under_test.py").read_text() == CODE


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"new": "2 + 0"}, "passes all the same"),
        ({"new": "3", "old": "9"}, "does not apply"),
        ({"new": "3", "test": "test_code.py::test_y"}, "must pass before"),
    ],
)
def test_a_fault_that_is_not_seen(
    project: Path, capsys: pytest.CaptureFixture[str], fault: dict[str, str], said: str
) -> None:
    plant(project, "AA-1", **fault)  # type: ignore[arg-type]
    assert mutate.main(["AA-1", "--jobs", "1"]) == 1
    told = capsys.readouterr()
    assert said in told.out + told.err


def test_a_test_that_fails_by_itself_proves_nothing(project: Path) -> None:
    (project / "test_code.py").write_text(TEST.format(3))
    plant(project, "AA-1", new="3")
    assert mutate.main(["--all", "--jobs", "1"]) == 1


def test_each_fault_names_its_test() -> None:
    for fault in mutate.read_mutations():
        path = fault.test.partition("::")[0]
        assert (mutate.ROOT / path).is_file(), f"{fault.name}: {path} does not exist"
        assert len(fault.path.read_text().splitlines()) < 40, f"{fault.name}: keep patches small"


def test_a_patch_without_the_name_of_its_test_is_refused(project: Path) -> None:
    (project / "faults" / "AA-1.patch").write_text("--- a/x\n+++ b/x\n")
    with pytest.raises(SystemExit, match="# test: PATH::NAME"):
        mutate.main(["--all"])


def test_a_sample_is_drawn_by_its_seed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        plant(project, f"AA-{number}", new="3")
    drawn: list[list[str]] = []

    def remember(chosen: list[mutate.Mutation], *_: object) -> int:
        drawn.append([mutation.name for mutation in chosen])
        return 0

    monkeypatch.setattr(mutate, "_run", remember)
    for seed in ("1", "1", "2"):
        mutate.main(["--sample", "4", "--seed", seed, "--jobs", "1"])
    assert len(drawn[0]) == 4
    assert drawn[0] == drawn[1] != drawn[2]
