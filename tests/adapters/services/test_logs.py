"""Logs are for operators: they show what happens, and nothing of tenants."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from kvsp_core.errors import RemoteProtocolError
from kvsp_services.logs import Hider, configure_logs, said_of

SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
BLOCK_KEY = "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b"
SCOPE_ID = "6d1c6481cd428737da312c089db3832a"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers.clear()


def logged(output: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


@pytest.mark.requirement("SE-5")
def test_of_an_error_nobody_meant_its_kind_and_place_are_said_and_not_its_text() -> None:
    assert said_of(OSError(errno.EROFS, "Read-only file system", "/blocks/secret")) == "Read-only file system"
    assert said_of(RemoteProtocolError("the answer has no body")) == "the answer has no body"
    with pytest.raises(KeyError) as raised:
        {}["tokens 4 8 15"]
    assert re.fullmatch(r"KeyError in test_logs\.py, line \d+", said_of(raised.value))
    assert said_of(KeyError("tokens 4 8 15")) == "KeyError"


def test_a_log_that_cannot_be_written_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Its disk is full, or who read it has gone."""
    with open("/dev/full", "w", buffering=1) as full:
        log = configure_logs(output=full)
        for _ in range(3):
            log.info("role started")
            logging.getLogger("library").warning("odd")
        structlog.get_logger().error("call", failure="timed out")
        with suppress(OSError):
            full.close()
    log.info("it is closed")
    assert capfd.readouterr() == ("", "")


def test_an_event_is_a_line_of_json() -> None:
    output = io.StringIO()
    configure_logs(output=output).info("role started", role="index", port=8441)
    (event,) = logged(output)
    assert event["event"] == "role started"
    assert (event["role"], event["port"], event["level"]) == ("index", 8441, "info")
    assert "timestamp" in event


@pytest.mark.requirement("SE-5")
@pytest.mark.parametrize("secret", [SESSION, BLOCK_KEY, SCOPE_ID, BLOCK_KEY.upper(), "A" * 43])
@pytest.mark.parametrize("form", ["json", "text"])
def test_identifiers_are_hidden_wherever_they_get_in(secret: str, form: str) -> None:
    output = io.StringIO()
    logger = configure_logs(form=form, output=output)  # type: ignore[arg-type]
    logger.info(f"GET blocks/{secret}", path=f"/kvsp/blocks/{secret}", key=secret)
    try:
        raise ValueError(f"no such thing as {secret}")
    except ValueError:
        logger.exception("failed")
    logging.getLogger("somebody.else").warning("dropped %s", secret)
    assert len(output.getvalue().splitlines()) >= 3
    assert secret not in output.getvalue()
    assert "somebody" in output.getvalue() or "dropped" in output.getvalue()


@pytest.mark.requirement("SE-5")
def test_octets_and_token_lists_are_counted_not_shown() -> None:
    output = io.StringIO()
    logger = configure_logs(output=output)
    logger.info("decoded", tokens=[1296, 315, 279], data=b"\x01\x02\x03", members={"p": 0.9})
    (event,) = logged(output)
    assert (event["tokens"], event["data"]) == ("<3 entries>", "<3 octets>")
    assert "1296" not in output.getvalue()


def test_marks_tell_equal_from_different_within_a_process_only() -> None:
    hider = Hider()
    assert hider.hidden(BLOCK_KEY) == hider.hidden(f"{BLOCK_KEY}")
    assert hider.hidden(BLOCK_KEY) != hider.hidden(SCOPE_ID)
    assert hider.hidden(BLOCK_KEY) != Hider().hidden(BLOCK_KEY)


def test_plain_words_stay() -> None:
    hider = Hider()
    for plain in ("https://h1.example:8443/kvsp/", "lease quota exceeded", 12, 0.5, None, True):
        assert hider.hidden(plain) == plain


def test_the_command_of_the_docs_brings_the_lines_of_many_roles_into_order(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^\$ (grep -h .*)$", page, re.MULTILINE)
    request = command.split()[2]
    steps = [("instance", 2), ("controller", 1), ("index", 1), ("instance", 3), ("controller", 2)]
    for step, (role, status) in enumerate(steps):
        output = io.StringIO()
        log = configure_logs(output=output).bind(role=role)
        log.warning("call", operation="Lookup", status=status, step=step, request_id=request)
        log.warning("call", operation="Lookup", request_id="0" * 32)
        with (tmp_path / f"{role}.log").open("a") as file:
            file.write(output.getvalue())
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [0, 1, 2, 3, 4]


def test_lines_of_other_libraries_begin_with_their_time_too() -> None:
    output = io.StringIO()
    configure_logs(output=output).info("ours")
    logging.getLogger("somebody.else").warning("theirs")
    assert [next(iter(event)) for event in logged(output)] == ["timestamp", "timestamp"]


def test_the_level_is_a_threshold() -> None:
    output = io.StringIO()
    logger = configure_logs(level="warning", output=output)
    logger.info("quiet")
    logger.warning("loud")
    assert [event["event"] for event in logged(output)] == ["loud"]


def test_the_id_of_a_request_is_shown_and_nothing_else_in_its_place() -> None:
    output = io.StringIO()
    logger = configure_logs(output=output)
    logger.info("request", request_id=SCOPE_ID, other=SCOPE_ID)
    logger.info("request", request_id=SESSION)
    logger.info("request", request_id=BLOCK_KEY)
    first, *others = logged(output)
    assert first["request_id"] == SCOPE_ID
    assert first["other"] != SCOPE_ID
    assert all(str(event["request_id"]).startswith("<hidden") for event in others)
