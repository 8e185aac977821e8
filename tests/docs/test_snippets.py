"""What the README and the documentation show works as shown.

The blocks of a page run in the order of the page, in one empty directory. ``python`` blocks share their
names. Of a ``console`` block each line after ``$ `` is a command, which lines after ``> `` or a trailing
backslash continue; what stands under it is its output, compared where there is any, with ``...`` for what
varies. A ``sh`` block is one script, to be copied whole, that ends at the first failure; a ``text`` block
right under it is its output. A block under the comment ``<!-- not run: REASON -->`` is left alone, one under
``<!-- needs: PROGRAM -->`` where that is not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.adapters.services.cluster import free_ports

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<why>not run|needs): (?P<what>[^\n]+) -->\n\n?)?"
    r"```(?P<language>python|console|sh)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    line: int
    text: str
    output: str = ""


class Command(NamedTuple):
    text: str
    output: str


def blocks_of(page: str) -> Iterator[Block]:
    for match in BLOCK.finditer(page):
        left_out = match["why"] == "not run" or (match["why"] == "needs" and not shutil.which(match["what"]))
        if not left_out:
            line = page.count("\n", 0, match.start("text"))
            yield Block(match["language"], line, match["text"], match["output"] or "")


def on_free_ports(blocks: list[Block]) -> list[Block]:
    """Put free ports in place of those that a page uses, so that several runs on a machine do not meet."""
    shown = {port for block in blocks for port in re.findall(r"127\.0\.0\.1:(\d{4,5})\b", block.text)}
    shown |= {port for block in blocks for port in re.findall(r"\bport = (\d{4,5})\b", block.text)}
    ports = dict(zip(sorted(shown), map(str, free_ports(len(shown))), strict=True))

    def moved(text: str) -> str:
        return re.sub(r"\b\d{4,5}\b", lambda found: ports.get(found[0], found[0]), text)

    return [block._replace(text=moved(block.text), output=moved(block.output)) for block in blocks]


def commands_of(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        first, *rest = part.split("\n")
        command = [first]
        while rest and (rest[0].startswith(">") or command[-1].endswith("\\")):
            command.append(re.sub(r"^> ?", "", rest.pop(0)))
        yield Command("\n".join(command), "\n".join(rest).strip())


def output_matches(shown: str, real: str) -> bool:
    pattern = ".*?".join(re.escape(part) for part in shown.split("..."))
    return re.fullmatch(pattern, real.strip(), re.DOTALL) is not None


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    source = "\n" * block.line + block.text
    exec(compile(source, str(page), "exec"), names)


def run_console(
    block: Block, page: Path, directory: Path, environment: dict[str, str], limit_s: float = 120
) -> None:
    script = block.language == "sh"
    commands = [Command(block.text, block.output.strip())] if script else commands_of(block.text)
    for command in commands:
        with subprocess.Popen(
            ["bash", *(["-e"] if script else []), "-c", command.text],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        ) as process:
            GROUPS.append(process.pid)
            output = process.communicate(timeout=limit_s)[0]
        where = f"{page.name}:{block.line + 1}: $ {command.text}"
        if command.output:
            assert output_matches(command.output, output), f"{where}\nprinted\n{output}"
        if script or not command.output:
            assert process.returncode == 0, f"{where}\nfailed with {process.returncode}\n{output}"


GROUPS: list[int] = []
"""Process groups of the commands that were run: what they left in the background is ended with the page."""


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    while GROUPS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(GROUPS.pop(), signal.SIGKILL)


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``kvsp`` and ``python`` are those of this checkout."""
    programs = tmp_path_factory.mktemp("bin")
    for name, arguments in (("kvsp", "-m kvsp_services.cli "), ("python", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "adapters"))),
        "COLUMNS": "100",
    }


@pytest.mark.parametrize(
    "page", [p for p in PAGES if list(blocks_of(p.read_text()))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_page_works_as_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet"}
    for block in on_free_ports(list(blocks_of(page.read_text(encoding="utf-8")))):
        if block.language == "python":
            run_python(block, page, names)
        else:
            run_console(block, page, tmp_path, environment)


def test_a_wrong_output_is_seen() -> None:
    assert output_matches("a ... c", "a b c\n")
    assert not output_matches("a ... c", "a b d")
    assert not output_matches("a", "a\nb")


def test_commands_and_outputs_are_told_apart() -> None:
    text = "$ one\n1\n$ two \\\n    more\n$ here <<END\n> a\n>  b\n> END\n$ three\n3\n33\n"
    assert list(commands_of(text)) == [
        Command("one", "1"),
        Command("two \\\n    more", ""),
        Command("here <<END\na\n b\nEND", ""),
        Command("three", "3\n33"),
    ]


def test_a_script_has_its_output_under_it(tmp_path: Path) -> None:
    page = "```sh\necho 1\n```\n\n```text\n1\n```\n\n```sh\nfalse\ntrue\n```\n\nand\n\n```text\n2\n```\n"
    first, second = blocks_of(page)
    assert (first, second.output) == (Block("sh", 1, "echo 1\n", "1\n"), "")
    run_console(first, ROOT / "page.md", tmp_path, dict(os.environ))
    with pytest.raises(AssertionError, match="failed with 1"):
        run_console(second, ROOT / "page.md", tmp_path, dict(os.environ))


def test_ports_are_replaced_everywhere_alike_and_other_numbers_are_not() -> None:
    shell = Block(
        "console", 0, "$ serve index:18501; curl http://127.0.0.1:18501/\nport = 19501\n12345 tokens\n"
    )
    code = Block("python", 9, 'uri = "https://127.0.0.1:18501/kvsp/"\n')
    moved, other = on_free_ports([shell, code])
    (port,) = re.findall(r"1:(\d+)/kvsp", other.text)
    assert f"index:{port}; curl http://127.0.0.1:{port}/" in moved.text
    assert "18501" not in moved.text
    assert "19501" not in moved.text
    assert "12345 tokens" in moved.text


def test_blocks_marked_as_not_run_are_left_alone() -> None:
    page = "<!-- not run: needs a GPU -->\n```python\n1/0\n```\n\n```python\nx = 1\n```\n"
    assert [block.text for block in blocks_of(page)] == ["x = 1\n"]
